"""A training program that stays for a while in a named moment, so that a signal meets it there.

``python tests/train/signalled.py MOMENT FOLDER <flags of pretrain_gpt.py>``; each rank leaves its
process id in FOLDER, and the first that comes to the moment makes the file `REACHED`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ext.errors import end_on_interrupt, run_program

if __name__ == "__main__":
    end_on_interrupt()

from megatron_ext.checkpoint import publish
from megatron_ext.data import loader
from megatron_ext.text.task import TEXT
from megatron_ext.train import loop, main, pretrain
from megatron_ext.train.callbacks import evaluation

REACHED = "reached"
MOMENTS = {
    "start": "",
    "training": "",
    "evaluation": "--eval-interval 2 --eval-iters 1",
    "save": "--save-interval 2",
    "asynchronous save": "--save-interval 2 --async-save",
    "data": "",
}
"""Flags by moment of the run."""
SECONDS = 0.6
_FIRST_STEP = 2


def slowed(moment: str, folder: Path) -> Callable[[list[str]], int]:
    """Return a training program that is slow in ``moment``; changes this process's modules."""

    def stay() -> None:
        try:
            (folder / REACHED).touch(exist_ok=False)
        except FileExistsError:
            return
        time.sleep(SECONDS)

    def slow(module: Any, name: str, *, is_late: Callable[..., bool] = lambda *_: True) -> None:
        before = getattr(module, name)

        def slower(*args: Any, **options: Any) -> Any:
            if is_late(*args):
                stay()
            return before(*args, **options)

        setattr(module, name, slower)

    def leaving_its_id(*args: Any, **options: Any) -> int:
        unfinished = folder / f"unfinished_{os.environ['RANK']}"
        unfinished.write_text(str(os.getpid()), encoding="utf-8")
        unfinished.rename(folder / f"rank_{os.environ['RANK']}")
        if moment == "start":
            stay()
        return trained(*args, **options)

    trained = pretrain.pretrain
    pretrain.pretrain = leaving_its_id
    if moment == "training":
        slow(loop, "next_inputs", is_late=lambda run: run.progress.iteration >= _FIRST_STEP)
    elif moment == "evaluation":
        slow(evaluation, "evaluate")
    elif moment.endswith("save"):
        slow(publish, "publish")
    elif moment == "data":
        make = loader._loader
        loader._loader = lambda dataset, *rest: make(_Slow(dataset, stay), *rest)
    return lambda argv: main.main(TEXT, argv)


class _Slow:
    """A dataset that is slow to read the first sample of a later step."""

    def __init__(self, dataset: Any, stay: Callable[[], None]) -> None:
        self._dataset, self._stay, self._read = dataset, stay, 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        self._read += 1
        if self._read > 4 * _FIRST_STEP:
            self._stay()
        return self._dataset[index]


if __name__ == "__main__":
    run_program(lambda argv: slowed(argv[0], Path(argv[1]))(argv[2:]))
