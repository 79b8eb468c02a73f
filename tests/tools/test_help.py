"""Each tool answers --help and an unknown option before it imports what computes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = sorted(path.name for path in (ROOT / "tools").glob("*.py"))
SLOW = ("torch", "megatron", "transformers", "matplotlib", "pyarrow", "safetensors", "tokenizers")
"""Packages whose import takes a large part of a second or more."""
PROBE = f"""
import contextlib, io, runpy, sys
tool = sys.argv[1]
for words in (["--help"], ["--no-such-option", "--"]):
    sys.argv = [tool, *words]
    said = io.StringIO()
    code = None
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_path(tool, run_name="__main__")
        except SystemExit as end:
            code = end.code
    imported = [name for name in {SLOW} if name in sys.modules]
    print(repr((code, said.getvalue(), imported)))
"""


@pytest.mark.parametrize("tool", TOOLS)
def test_help_and_a_typo_are_answered_without_slow_imports(tool: str) -> None:
    command = [sys.executable, "-c", PROBE, f"tools/{tool}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    helped, mistaken = map(ast.literal_eval, done.stdout.splitlines())
    code, said, imported = helped
    assert (code, imported) == (0, []) and len(said) > 200
    code, said, imported = mistaken
    assert (code, imported) == (2, []), said
    assert "Traceback" not in said


def test_a_closed_pipe_ends_a_tool_quietly() -> None:
    command = f"{sys.executable} tools/generate_text.py --help all | head -1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1 and done.stderr == ""
