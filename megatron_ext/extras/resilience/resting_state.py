"""Detects changed bits in the part of a run's state that must not change between two updates.

The weights, the optimizer's copies of them, and its moments are constant from one update to the
next. Their digests are taken after an update and compared just before the next. So a bit that flips
in memory is detected before a wrong gradient is applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megatron_ext.errors import MachineFault
from megatron_ext.extras.resilience.replay import digests
from megatron_ext.layers.chunks import own_elements
from megatron_ext.optim.shards import shards_of
from megatron_ext.optim.update import parts_of
from megatron_ext.train.callbacks.callback import Callback, due
from megatron_ext.train.callbacks.diagnosis import announce, places
from megatron_ext.train.run import Run


class RestingState(Callback):
    """Checks in every ``--check-state-interval``-th step that the state has not changed by itself.

    A change is reported with its rank and tensor, and ends the run with an error on all ranks,
    before the next update and snapshot. A restart resumes from the newest good state.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._interval = run.config.fault_tolerance.check_state_interval
        self._before: Tensor | None = None
        run.runner.approvals.append(self._is_unchanged)

    def before_step(self) -> None:
        if self._before is None:
            self._take()

    def after_step(self) -> None:
        self._take()

    def _take(self) -> None:
        """Store digests of the `resting_tensors` if the coming step is to be checked."""
        self._before = None
        if due(self.run.progress.iteration + 1, self._interval):
            with self.run.parameter_gather.paused():
                self._before = digests([tensor for _, tensor in resting_tensors(self.run)])

    def _is_unchanged(self, _totals: Mapping[str, Tensor], norm: Tensor) -> Tensor:
        """Approve an update; instead raise a MachineFault on all ranks if a bit has changed.

        This is one of `StepRunner.approvals`; the result is always True, bool ``[]``.
        """
        unchanged = torch.ones((), dtype=torch.bool, device=norm.device)
        if self._before is None:
            return unchanged
        named = resting_tensors(self.run)
        differs = self._before != digests([tensor for _, tensor in named])
        anywhere = differs.any().int()
        torch.distributed.all_reduce(anywhere, op=torch.distributed.ReduceOp.MAX)
        if bool(anywhere):
            self._fail([named[index][0] for index in differs.nonzero().flatten().tolist()])
        return unchanged

    def _fail(self, names: list[str]) -> None:
        run = self.run
        iteration = self.run.progress.iteration + 1
        gathered: list[list[str]] = [[]] * run.context.layout.world_size
        torch.distributed.all_gather_object(gathered, names)
        ranks = [rank for rank, changed in enumerate(gathered) if changed]
        tensor = gathered[ranks[0]][0]
        what = f"{tensor} changed on {places(ranks, run.context)}"
        facts = {"ranks": ranks, "parameter": tensor, "verdict": "memory"}
        announce(
            run, "mismatch", f"iteration {iteration}: {what}, between two updates",
            iteration=iteration, **facts,
        )  # fmt: skip
        raise MachineFault(
            f"During iteration {iteration} {what}, although only updates may change it: a fault of "
            "the memory. Start the run again from its last checkpoint, and test this machine."
        )


def resting_tensors(run: Run) -> list[tuple[str, Tensor]]:
    """Return this rank's tensors that only an update may change, each with a description."""
    named = [
        (f"weight `{name}`" if len(run.chunks) == 1 else f"weight `chunk {index}: {name}`", weight)
        for index, chunk in enumerate(run.chunks)
        for name, weight in chunk.named_parameters()
    ]
    names = {id(weight): name for name, weight in named}
    kept = [(name, own_elements(weight)) for name, weight in named]
    tensors = {_place(weight): (name, weight) for name, weight in kept}
    for part in parts_of(run.optimizer):
        for shard in shards_of(part):
            owner = names.get(id(shard.parameter), "a weight")
            for kind, tensor in _kept(part, shard.main):
                tensors.setdefault(_place(tensor), (f"{kind} of {owner}", tensor))
    return list(tensors.values())


def _kept(part: object, main: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield, with names, the optimizer's copy ``main`` of a parameter shard, and its state.

    ``part`` is the one of megatron-core's chained optimizers that updates the shard.
    """
    yield "the optimizer's copy", main.detach()
    state = part.optimizer.state.get(main, {})  # type: ignore[attr-defined]
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            yield f"`{name}`", value


def _place(tensor: Tensor) -> tuple[int, int, int]:
    """Return a key for the memory of a tensor: its address, its size, and an id if it is empty.

    Tensors that share their memory have the same key, so that it is checked only once.
    """
    return tensor.data_ptr(), tensor.numel(), id(tensor) if tensor.numel() == 0 else 0
