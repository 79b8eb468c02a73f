"""Silent faults planted in runs, and the state with which runs end."""

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_ext.disk.events import read_events
from megatron_ext.layers.chunks import own_elements
from megatron_ext.optim.update import parts_of
from megatron_ext.text.task import GPT
from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepInputs, StepLosses
from tests.training_runs import SAME_WEIGHTS, Rows, mock_data, split, train_steps

FLAGS = [
    *SAME_WEIGHTS,
    *mock_data(),
    *"--vocab-size 200 --hidden-size 32 --ffn-hidden-size 64 --seq-length 16".split(),
    *"--hidden-dropout 0.1 --attention-dropout 0.1 --train-iters 5".split(),
]

NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"


class FinalState(Callback):
    """Writes the bits of weights, optimizer and averages to ``state_<rank>.json`` at the end."""

    def on_train_end(self) -> None:
        tensors = [own_elements(p) for chunk in self.run.chunks for p in chunk.parameters()]
        for part in parts_of(self.run.optimizer):
            if not getattr(part, "is_stub_optimizer", False):
                states = part.optimizer.state.values()
                tensors += [x for s in states for x in s.values() if isinstance(x, torch.Tensor)]
        if self.run.ema is not None:
            tensors += [average for _, average in self.run.ema.gathered()]
        found = [hashlib.sha256(_bytes(tensor)).hexdigest() for tensor in tensors]
        folder = Path(self.run.config.checkpoint.save or "")
        (folder / f"state_{self.run.context.rank}.json").write_text(json.dumps(found))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@dataclass
class Ended:
    """The traces of a run: reports of its steps, events, and final bits by rank."""

    rows: Rows
    events: list[dict[str, Any]]
    state: list[Any]

    @property
    def curve(self) -> list[tuple[float, float]]:
        return [(row["lm loss"], row["grad_norm"]) for row in self.rows]


def run_with(
    words: str, folder: Path, ranks: int, prepare: Callable[[Run], None] | None = None
) -> Ended:
    task = replace(GPT, callbacks=(FinalState,))
    rows = train_steps([*FLAGS, *split(words)], folder, ranks, task=task, prepare=prepare)
    return Ended(rows, read_events(folder), state_of(folder, ranks))


def state_of(folder: Path, ranks: int) -> list[Any]:
    """Return the digests that `FinalState` has left, by rank."""
    return [json.loads((folder / f"state_{rank}.json").read_text()) for rank in range(ranks)]


@dataclass
class Spoiler:
    """Changes the gradient of one parameter on one rank, in chosen computations of one step.

    Attributes:
        name: part of the parameter's name.
        factor: what the gradient is multiplied by.
        attempts: the computations of the step in which that happens, from 0.
    """

    name: str
    rank: int
    iteration: int = 3
    factor: float = float("nan")
    attempts: Collection[int] = (0,)
    _attempt: dict[int, int] = field(default_factory=dict)

    def __call__(self, run: Run) -> None:
        if run.context.rank != self.rank:
            return
        named = [entry for chunk in run.chunks for entry in chunk.named_parameters()]
        parameter = next(p for key, p in named if self.name in key)
        parameter.register_hook(partial(self._spoiled, run))
        compute = run.runner.compute_gradients

        def counted(inputs: StepInputs) -> StepLosses:
            iteration = run.progress.iteration + 1
            self._attempt[iteration] = self._attempt.get(iteration, -1) + 1
            return compute(inputs)

        run.runner.compute_gradients = counted  # type: ignore[method-assign]

    def _spoiled(self, run: Run, gradient: torch.Tensor) -> torch.Tensor:
        iteration = run.progress.iteration + 1
        hit = iteration == self.iteration and self._attempt[iteration] in self.attempts
        return gradient * self.factor if hit else gradient
