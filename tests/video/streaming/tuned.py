"""A streaming run that trains adapters on the weights of another, and its results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.optim.update import parts_of
from megatron_ext.train.run import Run
from tests.video.streaming.runs import after_each_step, run, runner_of, weights

STEPS, SAVED = 6, 3
ADAPTERS = "--lora-rank 4 --lora-alpha 8"
FAST = "--lr 1e-2 --critic-lr 1e-2"
PREFIXES = {"generator": "", "critic": "critic."}
"""Beginnings of the names of a network's weights in a checkpoint."""
NETWORKS = tuple(PREFIXES)


@dataclass(frozen=True)
class Tuned:
    """Folders of two runs, and the log of the second.

    Attributes:
        root: of everything.
        words: flags of the second run but its number of steps.
        rows: of its steps.
        seen: of its networks, see `Recorder`.
    """

    root: Path
    words: str
    rows: list[dict[str, Any]]
    seen: dict[str, Any]

    @property
    def base(self) -> Path:
        """Return the folder of the weights that the second run starts from."""
        return self.root / "base"

    @property
    def saved(self) -> Path:
        """Return the folder of its checkpoints."""
        return self.root / "save"

    def checkpoint(self, step: int = STEPS) -> Path:
        """Return one of its checkpoints."""
        return self.saved / f"iter_{step:07d}"


def tune(root: Path) -> Tuned:
    """Run both."""
    run(root, "--train-iters 1 --seed 99", save="base")
    base = root / "base"
    words = f"--pretrained-checkpoint {base} --critic-checkpoint {base} {FAST}"
    recorder = Recorder(root / "seen.pt")
    steps = f"--train-iters {STEPS} --save-interval {SAVED}"
    rows = run(root, f"{words} {ADAPTERS} {steps}", prepare=recorder)
    return Tuned(root, words, rows, torch.load(root / "seen.pt"))


@dataclass(frozen=True)
class Recorder:
    """Writes weights and outputs before and after all steps to a file."""

    path: Path

    def __call__(self, run: Run) -> None:
        """Record a run."""
        runner = runner_of(run)
        before = {name: weights(getattr(runner, name).network) for name in NETWORKS}
        outputs = {name: output(getattr(runner, name).network) for name in NETWORKS}

        def save(_: Any) -> None:
            content = {
                "before": before,
                "after": {name: weights(getattr(runner, name).network) for name in NETWORKS},
                "outputs_before": outputs,
                "outputs": {name: output(getattr(runner, name).network) for name in NETWORKS},
                "optimized": {name: _optimized(getattr(runner, name)) for name in NETWORKS},
                "averaged": run.ema.parameters if run.ema is not None else [],
                "teacher": list(weights(runner.teacher)),
            }
            torch.save(content, self.path)

        after_each_step(run, save)


def inputs() -> dict[str, Tensor]:
    """Return some latents."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, 6, 4, 4, 4, generator=generator)
    text = torch.randn(1, 8, 32, generator=generator)
    return {"x": x, "timesteps": torch.full((1, 6), 500.0), "text": text}


def output(network: Any) -> Tensor:
    """Return the flow of these latents."""
    with torch.no_grad():
        flow: Tensor = network(**inputs())
    return flow


def _optimized(network: Any) -> int:
    parts = parts_of(network.optimizer)
    return sum(p.numel() for part in parts for p in part.get_parameters())
