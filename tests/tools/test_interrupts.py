"""Ctrl-C ends every program with one word and the code 130, whatever it is doing."""

import ast
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from megatron_ext.data import indexed_writer
from megatron_ext.errors import SECONDS_OF_ONE_INTERRUPTION

ROOT = Path(__file__).parents[2]
PROGRAMS = [*sorted(ROOT.glob("pretrain_*.py")), ROOT / "megatron_ext/programs/__init__.py"]
"""The files that call `end_on_interrupt`; the tools leave it to the last one."""
RUN = """
import sys
from megatron_ext.errors import end_on_interrupt, run_program
end_on_interrupt()
def main(argv):
    import time
    try:
        print("running", flush=True)
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)
run_program(main)
"""


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_every_program_minds_interrupts_before_its_long_imports(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text), clean=False) or ""
    head = text[: text.index("    end_on_interrupt()\n")].replace(docstring, "")
    imported = re.findall(r"^(?:from|import) ([\w.]+)", head, re.MULTILINE)
    own = {name for name in imported if name.split(".")[0] not in sys.stdlib_module_names}
    assert own - {"megatron_ext"} == {"megatron_ext.errors"}


def _interrupt(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def _start(*words: str) -> subprocess.Popen[str]:
    # A parent that runs in the background may ignore SIGINT, which a child inherits.
    return subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def test_an_interrupted_program_cleans_up_and_says_so() -> None:
    process = _start("-c", RUN)
    assert process.stdout.readline() == "running\n"
    assert _interrupt(process) == (130, "cleaned up\n", "interrupted\n")


SLOW_END = "print('cleaning up', flush=True); time.sleep(SECONDS)\n        print("


@pytest.mark.parametrize(("seconds", "at_once"), [(0.5, True), (60, False)])
def test_a_second_interruption_lets_the_program_clean_up_for_a_second(
    seconds: float, at_once: bool
) -> None:
    ends = RUN.replace('print("cleaned', f'{SLOW_END}"cleaned').replace("SECONDS", str(seconds))
    process = _start("-c", ends)
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "cleaning up\n"
    if not at_once:
        time.sleep(SECONDS_OF_ONE_INTERRUPTION + 0.2)
    assert _interrupt(process) == (130, "cleaned up\n" if at_once else "", "interrupted\n")


def test_an_interruption_of_a_destructor_is_no_traceback() -> None:
    deep = "class Slow:\n        def __del__(self):\n            print('running', flush=True)\n"
    deep += "            time.sleep(60)\n    Slow()\n    try:"
    process = _start("-c", RUN.replace("    try:", f"    {deep}", 1))
    assert process.stdout.readline() == "running\n"
    assert _interrupt(process) == (130, "", "interrupted\n")


def test_an_interruption_of_the_imports_is_no_traceback() -> None:
    imports = "print('importing', flush=True)\nimport torch\ndef main"
    process = _start("-c", RUN.replace("def main", imports))
    assert process.stdout.readline() == "importing\n"
    code, _, err = _interrupt(process)
    assert (code, err) == (130, "interrupted\n")


def test_a_program_of_the_background_ignores_it_still() -> None:
    process = _start("-c", f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
                     f"{RUN.replace('time.sleep(60)', 'time.sleep(1)')}")  # fmt: skip
    assert process.stdout.readline() == "running\n"
    assert _interrupt(process) == (0, "cleaned up\n", "")


def test_interrupted_merges_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(out: BinaryIO, path: Path, **_: object) -> None:
        out.write(path.read_bytes())
        raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    with indexed_writer.IndexedWriter(tmp_path / "a", np.dtype(np.int32)) as writer:
        writer.add_document(np.arange(9), [9])
    monkeypatch.setattr(indexed_writer, "append_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        indexed_writer.merge_indexed([tmp_path / "a"], tmp_path / "out" / "all")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_leaves_ends_a_program_without_a_traceback(lines: int) -> None:
    code = (
        "from megatron_ext.errors import run_program\n"
        f"run_program(lambda argv: print('line\\n' * {lines}))\n"
    )
    command = f'{sys.executable} -c "$CODE" | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "CODE": code}, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.returncode in (0, 141)
