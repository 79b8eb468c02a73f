"""Faults of workers, planted into every Python process that a test starts."""

import os
from pathlib import Path

import pytest

_SITE = """
import os, signal, subprocess, sys
if "{root}" in sys.path or "{root}" in os.environ.get("PYTHONPATH", ""):
    sys.path.append("{root}")
    from megatron_ext.text.preprocess import encode

    real = encode.TextEncoder.encode

    def encode_or_die(self, lines, *rest):
        if any(b"{word}" in line for line in lines):
            for number in range({times}):
                try:
                    os.close(os.open(f"{folder}/death{{number}}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                {before}
                for process in [os.getppid()] * {parent} + [os.getpid()]:
                    os.kill(process, signal.SIGKILL)
        return real(self, lines, *rest)

    encode.TextEncoder.encode = encode_or_die
"""


def plant_deaths(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    word: str,
    *,
    times: int,
    parent: bool,
    before: str = "pass",
) -> None:
    """Let SIGKILL end the first ``times`` processes that encode a line with ``word``, in mid-part.

    With ``parent`` their parents are killed too, as when a machine is lost. The statement
    ``before`` is executed first.
    """
    (folder / "site").mkdir()
    root = str(Path(__file__).resolve().parents[3])
    text = _SITE.format(
        root=root, word=word, times=times, folder=folder, parent=int(parent), before=before
    )
    (folder / "site" / "sitecustomize.py").write_text(text)
    for path in (root, str(folder / "site")):
        monkeypatch.setenv("PYTHONPATH", path, prepend=os.pathsep)


def deaths(folder: Path) -> int:
    """Return how many processes have died of the fault."""
    return len(list(folder.glob("death*")))
