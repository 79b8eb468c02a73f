"""Reads the micro-batches of one step on the first tensor-parallel rank, for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Sampler

from megatron_ext.data.video.dataset import VideoBatch, VideoClips, collate
from megatron_ext.data.video.plan import VideoPlan
from megatron_ext.data.video.text_dropout import Text
from megatron_ext.device.processes import loader_ends_with_parent
from megatron_ext.device.transfer import sent

if TYPE_CHECKING:
    from megatron_ext.layout import ParallelContext


class _ClipsOfSteps(Sampler[list[int]]):
    """Clip numbers of the micro-batches of a data-parallel rank, from a step on; never ends."""

    def __init__(self, plan: VideoPlan, dp_rank: int, first_step: int) -> None:
        self._plan, self._dp_rank, self._step = plan, dp_rank, first_step

    def __iter__(self) -> Iterator[list[int]]:
        step = self._step
        while True:
            for planned in self._plan.microbatches(step, self._dp_rank, 0):
                yield planned.clips
            step += 1


class VideoLoader:
    """Gives the micro-batches of a data-parallel rank in order.

    Args:
        clips: the data.
        plan: of the run.
        context: the parallel layout of this rank.
        device: where the batches go.
        patch: latent cells of a token on each side.
        multiple: what the length of a sequence must be a multiple of.
        num_workers: processes that read.
        first_step: of the plan.
    """

    def __init__(
        self,
        clips: VideoClips,
        plan: VideoPlan,
        context: ParallelContext,
        device: torch.device,
        *,
        patch: int,
        multiple: int,
        num_workers: int,
        first_step: int,
    ) -> None:
        self._context, self._device = context, device
        self._batches: Iterator[VideoBatch] | None = None
        text, pooled = clips.null_text
        self.null = Text(text[None].to(device), pooled[None].to(device))
        if context.tp_rank == 0:
            loader: Any = DataLoader(
                clips,  # type: ignore[arg-type]
                batch_sampler=_ClipsOfSteps(plan, context.dp_rank, first_step),
                num_workers=num_workers,
                collate_fn=partial(collate, patch=patch, multiple=multiple),
                pin_memory=device.type == "cuda",
                # The loader would draw its seed from the generator that ranks share.
                generator=torch.Generator().manual_seed(0),
                multiprocessing_context="fork" if num_workers else None,
                worker_init_fn=loader_ends_with_parent(),
            )
            self._batches = iter(loader)

    def next(self) -> VideoBatch:
        """The next micro-batch, on the device of every tensor-parallel rank."""
        batch = None if self._batches is None else next(self._batches)
        group = self._context.pgs.tp
        if group.size() == 1:
            assert batch is not None
            own = {name: sent(tensor, self._device) for name, tensor in batch.tensors().items()}
            return VideoBatch.from_tensors(own)
        return _received(batch, self._device, group)


def _received(batch: VideoBatch | None, device: torch.device, group: Any) -> VideoBatch:
    """A batch as the first rank of the group has it."""
    about: list[Any] = [None]
    tensors = {} if batch is None else batch.tensors()
    if batch is not None:
        about = [{name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}]
    # Ahead of the tensors, since clips differ in size, and short ones have fewer references.
    torch.distributed.broadcast_object_list(about, group=group, group_src=0)
    got = {}
    for name, (shape, dtype) in about[0].items():
        if batch is not None:
            got[name] = sent(tensors[name], device).contiguous()
        else:
            got[name] = torch.empty(shape, dtype=dtype, device=device)
        torch.distributed.broadcast(got[name], group=group, group_src=0)
    return VideoBatch.from_tensors(got)
