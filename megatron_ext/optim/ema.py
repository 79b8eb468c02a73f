"""Exponential moving average of the weights, in fp32 and sharded like the optimizer's state.

After each applied update ``average <- average + (1 - decay) * (weight - average)``, where
``weight`` is the fp32 weight that the optimizer updates. Each operation rounds once, so that the
average is bitwise the same in every layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from megatron_ext.optim.update import parts_of

_BATCH = 2**26  # elements that are updated at a time, which bounds the memory for differences


@dataclass(frozen=True)
class _Part:
    """The elements of one parameter that this rank averages: all, or a shard.

    Attributes:
        main: the tensor that the optimizer updates on this rank. It is the whole parameter, or a
            (possibly empty) shard of the flattened parameter.
        average: fp32, in the shape of ``main``.
        start: index in the flattened parameter where the shard begins.
        group: ranks that hold the other shards; None if this rank holds the whole parameter.
    """

    parameter: Parameter
    main: Tensor
    average: Tensor
    start: int = 0
    group: ProcessGroup | None = None

    def whole(self) -> Tensor:
        """Return the average in the parameter's shape; all ranks of the group call this."""
        if self.group is None:
            return self.average.view(self.parameter.shape)
        bits = torch.zeros(self.parameter.numel(), dtype=torch.int32, device=self.parameter.device)
        bits[self.piece] = self.average.view(torch.int32)
        # A sum of integers with the zeros of other ranks keeps the sign of -0.0 too.
        torch.distributed.all_reduce(bits, group=self.group)
        return bits.view(torch.float32).view(self.parameter.shape)

    @property
    def piece(self) -> slice:
        """Return the slice of the flattened parameter that this rank averages."""
        return slice(self.start, self.start + self.average.numel())


class ShardedEMA:
    """The averages of the trained parameters of a rank's model chunks.

    All ranks call `gathered` and `swapped_in` together, since these communicate.

    Args:
        optimizer: any optimizer of megatron-core. With None, every rank holds the whole average of
            each trained parameter, into which a checkpoint can be loaded.
        decay: weight of the old average in the new one.
        start: first training step, counted from 1, that is averaged. Before that step the average
            equals the weights.
    """

    def __init__(
        self,
        chunks: Sequence[Module],
        optimizer: MegatronOptimizer | None,
        *,
        decay: float = 0.0,
        start: int = 1,
    ) -> None:
        self.decay, self.start = decay, start
        if optimizer is None:
            parameters = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
            self._parts = [_whole_part(parameter, parameter) for parameter in parameters]
        else:
            self._parts = [x for part in parts_of(optimizer) for x in _parts_of(part)]
        self._batches = _in_batches(self._parts)
        self._swapped = False
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Set the averages to the current weights."""
        for part in self._parts:
            part.average.copy_(part.main)

    @torch.no_grad()
    def update(self, step: int, applied: Tensor | None = None) -> None:
        """Update the averages with the weights after a training step.

        Args:
            step: number of training steps done, including this one and skipped ones.
            applied: whether the step updated the weights, bool ``[]`` on their device. If False,
                the averages do not change. None means True.
        """
        if self._swapped:
            raise RuntimeError("The averaged weights are in the model; put the others back first.")
        if step < self.start:
            self.restart()
            return
        share: Tensor | float = 1.0 - self.decay
        if applied is not None:
            share = applied * torch.full((), 1.0 - self.decay, device=applied.device)
        for mains, averages in self._batches:
            change = torch._foreach_sub(mains, averages)
            torch._foreach_mul_(change, share)
            torch._foreach_add_(averages, change)

    @torch.no_grad()
    def gathered(self) -> Iterator[tuple[Parameter, Tensor]]:
        """Yield each trained parameter with its whole average on this rank, fp32.

        Averages are gathered one at a time, so all data-parallel ranks must consume the iterator.
        """
        for part in self._parts:
            yield part.parameter, part.whole()

    @torch.no_grad()
    def load(self, averages: Sequence[Tensor]) -> None:
        """Replace the averages by ``averages``: one whole tensor for each of `parameters`."""
        for part, average in zip(self._parts, averages, strict=True):
            part.average.copy_(average.reshape(-1)[part.piece].view(part.average.shape))

    @property
    def parameters(self) -> list[Parameter]:
        """Return the trained parameters, in the order of `gathered`."""
        return [part.parameter for part in self._parts]

    @contextmanager
    def swapped_in(self, chunks: Iterable[Module]) -> Iterator[None]:
        """Put averaged weights in the chunks inside the block, then restore the trained ones.

        The trained weights are kept bit for bit in the host's memory, so that each rank restores
        them without communication, also after an error.

        Raises:
            RuntimeError: the averages are swapped in already, or the hooks that gather parameters
                are on (see `optim.update.ParameterGather.paused`).
        """
        chunks = list(chunks)
        if self._swapped or any(getattr(x, "remove_forward_pre_hook_handles", ()) for x in chunks):
            raise RuntimeError(
                "The weights cannot be exchanged twice, nor while hooks gather them."
            )
        wanted = {parameter for chunk in chunks for parameter in chunk.parameters()}
        originals: list[tuple[Parameter, Tensor]] = []
        self._swapped = True
        try:
            for parameter, average in self.gathered():
                if parameter in wanted:
                    originals.append((parameter, parameter.detach().to("cpu", copy=True)))
                    parameter.data.copy_(average)
            yield
        finally:
            for parameter, original in originals:
                parameter.data.copy_(original)
            self._swapped = False


def _whole_part(parameter: Parameter, main: Tensor) -> _Part:
    return _Part(parameter, main, torch.empty_like(main, dtype=torch.float32, requires_grad=False))


def _parts_of(optimizer: Any) -> Iterator[_Part]:
    """Yield this rank's `_Part` of each parameter, in an order that all ranks share."""
    if getattr(optimizer, "is_stub_optimizer", False):
        return
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        models = [*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups]
        mains = [*optimizer.fp32_from_float16_groups, *optimizer.fp32_from_fp32_groups]
        for parameter, main in _pairs(models, mains):
            yield _whole_part(parameter, main)
    elif not isinstance(optimizer, DistributedOptimizer):
        for parameter in optimizer.get_parameters():
            yield _whole_part(parameter, parameter)
    else:
        models = [*optimizer.model_float16_groups, *optimizer.model_fp32_groups]
        mains = [*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups]
        main_of = dict(_pairs(models, mains))
        # Parameters lie in the buffers in one order on all ranks, also those of other ranks.
        for parameter in (p for buffer in optimizer.buffers for p in buffer.param_index_map):
            main, start = torch.empty(0, dtype=torch.float32, device=parameter.device), 0
            if parameter in main_of:
                main = main_of[parameter]
                start = optimizer._get_model_param_range_map(parameter)["param"].start
            average = torch.empty_like(main, requires_grad=False)
            yield _Part(parameter, main, average, start, optimizer.data_parallel_group)


def _pairs(models: Any, mains: Any) -> Iterator[tuple[Parameter, Tensor]]:
    for model_group, main_group in zip(models, mains, strict=True):
        yield from zip(model_group, main_group, strict=True)


def _in_batches(parts: Sequence[_Part]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return weights and their averages in batches small enough to update in little memory."""
    batches, size = list[tuple[list[Tensor], list[Tensor]]](), _BATCH
    for part in (part for part in parts if part.main.numel()):
        size += part.main.numel()
        if size > _BATCH:
            batches.append(([], []))
            size = part.main.numel()
        batches[-1][0].append(part.main)
        batches[-1][1].append(part.average)
    return batches
