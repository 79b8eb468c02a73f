"""Exponential moving average of the weights, in fp32 and sharded like the optimizer's state.

After each applied update ``average <- average + (1 - decay) * (weight - average)``, where
``weight`` is the fp32 weight that the optimizer updates. Each operation rounds once, so the average
is bitwise the same in every layout.

With a warm-up, the decay after n updates is at most (1 + n) / (10 + n). Without it, an average of
decay D would mostly consist of its start value for about 1 / (1 - D) updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ext.optim.shards import Shard, shards_of
from megatron_ext.optim.update import parts_of

_BATCH = 2**26  # elements per batch; bounds the memory for differences


@dataclass(frozen=True)
class Part(Shard):
    """The elements of one parameter that this rank averages.

    Attributes:
        average: fp32, in the shape of ``main``.
    """

    average: Tensor = field(kw_only=True)

    def whole(self) -> Tensor:
        """Return the average in the parameter's shape; all ranks in `group` call this together."""
        if self.group is None:
            return self.average.view(self.parameter.shape)
        bits = torch.zeros(self.parameter.numel(), dtype=torch.int32, device=self.parameter.device)
        bits[self.piece] = self.average.view(torch.int32)
        # Adding the other ranks' zeros as integers keeps the sign of -0.0 as well.
        torch.distributed.all_reduce(bits, group=self.group)
        return bits.view(torch.float32).view(self.parameter.shape)

    @property
    def piece(self) -> slice:
        """Return the slice of the flattened parameter that this rank averages."""
        return slice(self.start, self.start + self.average.numel())


class ShardedEMA:
    """The moving averages of the trained parameters of a rank's model chunks.

    All ranks call `gathered` and `swapped_in` together, since these communicate.

    Args:
        optimizer: any optimizer of megatron-core; a rank averages the elements that it updates.
            With None, every rank holds the average of all that it holds of each trained parameter,
            into which a checkpoint can be loaded.
        decay: weight of the old average in the new one; with ``warmup`` its upper limit.
        warmup: whether the first updates use a smaller decay.
        start: first training step that is averaged, counted from 1. Before it, the average equals
            the weights.
    """

    def __init__(
        self,
        chunks: Sequence[Module],
        optimizer: MegatronOptimizer | None,
        *,
        decay: float = 0.0,
        start: int = 1,
        warmup: bool = False,
    ) -> None:
        self.decay = decay
        self.start = start
        self._warmup = warmup
        if optimizer is None:
            parameters = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
            self._parts = [_part(_kept(parameter)) for parameter in parameters]
        else:
            self._parts = [_part(x) for part in parts_of(optimizer) for x in shards_of(part)]
        self._batches = _in_batches(self._parts)
        self._swapped = False
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Set the averages to the current weights."""
        for part in self._parts:
            part.average.copy_(part.main)

    def decay_after(self, earlier: int) -> float:
        """Return the decay for the next update of the averages, after ``earlier`` updates."""
        return min(self.decay, (1 + earlier) / (10 + earlier)) if self._warmup else self.decay

    @torch.no_grad()
    def update(self, step: int, applied: Tensor | None = None, *, earlier: int = 0) -> None:
        """Update the averages with the weights after a training step.

        Before the step `start`, set the averages to the weights instead.

        Args:
            step: number of training steps done, including this one and skipped ones.
            applied: whether the step updated the weights, bool ``[]`` on the device of the weights.
                If False, the averages do not change. None means True.
            earlier: number of updates since the averages equalled the weights, for `decay_after`.
        """
        if self._swapped:
            raise RuntimeError("The averaged weights are in the model; put the others back first.")
        if step < self.start:
            self.restart()
            return
        new = 1.0 - self.decay_after(earlier)
        share: Tensor | float = new
        if applied is not None:
            share = applied * torch.full((), new, device=applied.device)
        for mains, averages in self._batches:
            change = torch._foreach_sub(mains, averages)
            # Weights that the host updates lie there, and so do their averages.
            own = share.to(averages[0].device) if isinstance(share, Tensor) else share
            torch._foreach_mul_(change, own)
            torch._foreach_add_(averages, change)

    @torch.no_grad()
    def gathered(self) -> Iterator[tuple[Parameter, Tensor]]:
        """Yield each trained parameter with its whole average on this rank, fp32.

        Averages are gathered one at a time, so all data-parallel ranks must consume the iterator.
        """
        for part in self._parts:
            yield part.parameter, part.whole()

    @torch.no_grad()
    def load(self, averages: Sequence[Tensor | Sequence[Tensor]]) -> None:
        """Replace the averages by ``averages``, one for each of `parameters`.

        It is a whole tensor, or the pieces of this rank's part in the order of their elements.
        """
        for part, average in zip(self._parts, averages, strict=True):
            if not isinstance(average, Tensor):
                pieces = [piece.reshape(-1) for piece in average]
                if pieces:
                    part.average.copy_(torch.cat(pieces).view(part.average.shape))
                continue
            part.average.copy_(average.reshape(-1)[part.piece].view(part.average.shape))

    @property
    def parts(self) -> Sequence[Part]:
        """Return the parts of the averages that this rank holds, in the order of `parameters`."""
        return self._parts

    @property
    def parameters(self) -> list[Parameter]:
        """Return the trained parameters, in the order of `gathered`."""
        return [part.parameter for part in self._parts]

    @contextmanager
    def swapped_in(self, chunks: Iterable[Module]) -> Iterator[None]:
        """Put the averages into the chunks inside the block, then restore the trained weights.

        Exact copies of the trained weights are kept in host memory, so that each rank can restore
        them without communication, even after an error.

        Raises:
            RuntimeError: the averages are already swapped in, or the hooks that gather parameters
                are on (see `optim.update.ParameterGather.paused`).
        """
        chunks = list(chunks)
        if self._swapped or any(getattr(x, "remove_forward_pre_hook_handles", ()) for x in chunks):
            raise RuntimeError(
                "The weights cannot be exchanged twice, nor while hooks gather them."
            )
        parameters = {parameter for chunk in chunks for parameter in chunk.parameters()}
        originals: list[tuple[Tensor, Tensor]] = []
        self._swapped = True
        try:
            for part in self._parts:
                shard = getattr(part.parameter, "weight_shard", None)
                average = part.whole() if shard is None else part.average
                if part.parameter in parameters:
                    own = part.parameter.data if shard is None else shard.values
                    originals.append((own, own.to("cpu", copy=True)))
                    own.copy_(average)
            yield
        finally:
            for own, original in originals:
                own.copy_(original)
            self._swapped = False


def _kept(parameter: Parameter) -> Shard:
    """Return the elements of a parameter that this rank holds: all, unless weights are sharded."""
    shard = getattr(parameter, "weight_shard", None)
    if shard is None:
        return Shard(parameter, parameter)
    return Shard(parameter, shard.values, shard.start, shard.group)


def _part(shard: Shard) -> Part:
    average = torch.empty_like(shard.main, dtype=torch.float32, requires_grad=False)
    return Part(shard.parameter, shard.main, shard.start, shard.group, average=average)


def _in_batches(parts: Sequence[Part]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Divide the parts into batches of limited size, so that an update needs little extra memory.

    Each batch is (weights, their averages), two lists of equal length, all on one device.
    """
    batches = list[tuple[list[Tensor], list[Tensor]]]()
    size = _BATCH
    for part in (part for part in parts if part.main.numel()):
        size += part.main.numel()
        if size > _BATCH or part.main.device != batches[-1][0][0].device:
            batches.append(([], []))
            size = part.main.numel()
        batches[-1][0].append(part.main)
        batches[-1][1].append(part.average)
    return batches
