"""Flags are read, and mistakes in them told, without the packages that take seconds to import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext import device as devices

ROOT = Path(__file__).parent.parent.parent
SLOW = "torch megatron numpy transformers matplotlib rich av PIL triton".split()
"""Packages that no answer about flags needs."""
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--max-position-embeddings 32 --train-iters 2 --lr 1e-3 --tokenizer-type NullTokenizer "
    "--vocab-size 127"
)
SCRIPT = """
import contextlib, io, sys
import pretrain_gpt, pretrain_video
programs = {
    "gpt": pretrain_gpt.main,
    "video": pretrain_video.main,
}
for line in sys.stdin:
    name, *words = line.split()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = programs[name](words)
        except SystemExit as end:
            code = end.code or 0
    said = (out.getvalue() + err.getvalue()).strip().splitlines()
    loaded = sorted({x.partition(".")[0] for x in sys.modules} & set(sys.argv[1:]))
    print(code, loaded, said[-1] if code else len(said) > 20, sep="|")
"""
"""A program that answers each command line in turn: code, slow packages so far, last line."""
ANSWERS = {
    "gpt --help": "0|[]|True",
    "gpt --help optimizer": "0|[]|True",
    "video --help": "0|[]|True",
    f"gpt {MODEL} --mock-data --print-config": "0|[]|True",
    "video --video-data-path latents --micro-batch-size 1 --train-iters 1 --print-config": (
        "0|[]|True"
    ),
    "video --vidoe-model mmdit": "2|[]|error: `--micro-batch-size` is missing",
    f"gpt {MODEL} --mock-data --hiden-size 64": (
        "2|[]|error: `--hiden-size` is not a flag of this program; did you mean `--hidden-size`"
    ),
    f"gpt {MODEL} --mock-data --lr -1": "2|[]|error: `--lr` (-1.0) must be at least 0",
    f"gpt {MODEL} --mock-data --dry-run --tensor-model-parallel-size 3 --nproc-per-node 3": (
        "2|[]|error: "
    ),
    f"gpt {MODEL} --mock-data --load nowhere": "2|[]|error: `--load` (nowhere) holds no checkpoint",
    f"gpt {MODEL} --mock-data --load-hf nowhere": "2|[]|error: nowhere/config.json cannot be read",
    f"gpt {MODEL} --mock-data --save /proc/a": "2|[]|error: `--save` (/proc/a) cannot be written",
    f"gpt {MODEL} --mock-data --loss nowhere.py:A": (
        "2|[]|error: `--loss` (nowhere.py:A) cannot be imported"
    ),
    f"gpt {MODEL} --mock-data --optimizer custom --optimizer-class examples/custom_loss/focal.py:A "
    "--lr -1": "2|[]|error: `--lr` (-1.0) must be at least 0",
    # An index is read with numpy.
    f"gpt {MODEL} --data-path nowhere/a --lr -1": (
        "2|['numpy']|error: Dataset index nowhere/a.idx does not exist"
    ),
    f"gpt {MODEL} --data-path nowhere/b": (
        "2|['numpy']|error: Dataset index nowhere/b.idx does not exist"
    ),
    # The manifest of encoded clips is read by the module of their shards.
    "video --video-data-path nowhere --lr -1": "2|['numpy']|error: nowhere/manifest.json does not",
}
"""For each command line, the beginning of what `SCRIPT` prints."""


def test_answers_about_flags_need_no_slow_package() -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    # On a machine with a GPU, torch alone knows whether it can be used.
    env["CUDA_VISIBLE_DEVICES"] = ""
    answered = subprocess.run(
        [sys.executable, "-c", SCRIPT, *SLOW],
        input="\n".join(ANSWERS),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env,
        timeout=60,
    )
    lines = answered.stdout.splitlines()
    assert len(lines) == len(ANSWERS), answered.stderr
    for (words, expected), line in zip(ANSWERS.items(), lines, strict=True):
        assert line.startswith(expected), (words, line)


@pytest.mark.parametrize(
    ("build", "visible", "files", "library", "sure"),
    [
        ("cuda = None; hip = None", None, [], False, True),
        # The build decides, whatever the machine has.
        ("cuda = None; hip = None", None, ["nvidia0"], True, True),
        ("cuda = '13.0'; hip = None", None, [], False, True),
        ("cuda = '13.0'; hip = None", "", ["nvidia0"], True, True),
        ("cuda = '13.0'; hip = None", "0", ["nvidia0"], True, False),
        ("cuda = '13.0'; hip = None", None, ["nvidiactl"], False, False),
        ("cuda = '13.0'; hip = None", None, ["dxg"], False, False),
        ("cuda = '13.0'; hip = None", None, [], True, False),
        ("cuda = None; hip = '6.4'", "", [], False, False),
        # Another torch may say it in another way.
        ("", None, [], False, False),
        ("cuda = (", None, [], False, False),
    ],
)
def test_only_what_is_certain_is_said_without_torch(
    build: str,
    visible: str | None,
    files: list[str],
    library: bool,
    sure: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "version.py").write_text(build.replace("; ", "\n"), encoding="utf-8")
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / "dev" / name).touch()
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    def load(name: str) -> None:
        if not library:
            raise OSError(name)

    torch_at = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(devices, "find_spec", lambda name: torch_at)
    monkeypatch.setattr(devices, "DEVICE_FILES", tmp_path / "dev")
    monkeypatch.setattr(devices.ctypes, "CDLL", load)
    assert devices.surely_no_gpu() is sure


def test_a_device_that_only_torch_knows_changes_no_refusal() -> None:
    """Without the certain answer, flags are refused at once if they are wrong on both devices."""
    code = (
        "import sys\n"
        "from megatron_ext.train import main\n"
        "from megatron_ext.text.task import TEXT\n"
        "main.surely_no_gpu = lambda: False\n"
        "print(main.main(TEXT, ['--hiden-size', '4']), 'torch' in sys.modules)\n"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    assert done.stdout == "2 False\n"
    assert "`--hiden-size` is not a flag" in done.stderr
