"""Small networks and inputs, on any layout and in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_ext.layers.initialization import (
    initialize_by_name,
    mark_methods,
    shards_of,
    unmark_methods,
)
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.layers.weight_gradients import DeferredWeightGradients
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.config.wan import SIZES, VideoDiTSizes
from megatron_ext.video.model.wan.attention import FrameWindow
from megatron_ext.video.model.wan.cache import KVCache
from megatron_ext.video.model.wan.model import VideoDiT
from megatron_ext.video.model.wan.options import VideoDiTOptions
from tests.video.model.wan.names import Tensors, to_plain
from tests.video.model.wan.plain import PlainVideoDiT, Rule

SEED = 7
WINDOW = FrameWindow(block=3, window=12, sink=3)
CAUSAL = VideoDiTOptions(window=WINDOW, zero_head=False)
BIDIRECTIONAL = VideoDiTOptions(zero_head=False)


@dataclass(frozen=True)
class Problem:
    """A network and the shapes of its inputs; a frame has 2 x 4 tokens."""

    sizes: VideoDiTSizes = SIZES["tiny"]
    options: VideoDiTOptions = field(default_factory=lambda: CAUSAL)
    frames: int = 9
    batch: int = 2
    num_text: int = 5
    height: int = 4
    width: int = 8
    sequence_parallel: bool = False
    schedule: str | None = None
    timestep_per_frame: bool = True

    @property
    def rule(self) -> Rule | None:
        window = self.options.window
        return None if window is None else (window.block, window.window, window.sink)

    def inputs(self, number: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Whole inputs, drawn in float32 so that they are the same numbers in any dtype."""
        generator = torch.Generator().manual_seed(100 + number)
        z, b, t = self.sizes, self.batch, self.frames
        latents = torch.randn(b, t, z.channels, self.height, self.width, generator=generator)
        text = torch.randn(b, self.num_text, z.text_width, generator=generator)
        timesteps = 1000 * torch.rand(b, t, generator=generator)
        if not self.timestep_per_frame:
            timesteps = timesteps[:, 0]
        return {"x": latents.to(dtype), "timesteps": timesteps, "text": text.to(dtype)}

    def target(self, number: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(900 + number)
        shape = self.inputs(number)["x"].shape
        return torch.randn(shape, generator=generator)


def core_config(problem: Problem, context: ParallelContext) -> StepTransformerConfig:
    layout = context.layout
    deferred = (problem.schedule or "").startswith("zb-")
    return StepTransformerConfig(
        **problem.sizes.transformer_fields(),
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        sequence_parallel=problem.sequence_parallel,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        weight_gradients=DeferredWeightGradients() if deferred else None,
    )


def build(problem: Problem, context: ParallelContext) -> tuple[Any, list[VideoDiT]]:
    """This rank's configuration and chunks, with weights drawn by name.

    Scales of norms and biases start as constants; they are moved, or a fault in them would not
    show.
    """
    config = core_config(problem, context)
    mark_methods(config)
    num_chunks = context.placement.num_chunks
    chunks = []
    for index in range(num_chunks):
        stage = index if num_chunks > 1 else None
        chunk = VideoDiT.build(problem.sizes, problem.options, config, context, vp_stage=stage)
        chunk.vp_stage = stage
        chunks.append(chunk)
    initialize_by_name(chunks, config, SEED)
    unmark_methods(config)
    for chunk in chunks:
        _move_constants(chunk)
    return config, chunks


@torch.no_grad()
def _move_constants(chunk: VideoDiT) -> None:
    for shard in shards_of(chunk):
        if len(shard.full_shape) == 1:
            full = torch.arange(shard.full_shape[0], dtype=torch.float32)
            shard.tensor.add_(0.3 * shard.cut(torch.sin(full + len(shard.name))))


def one(problem: Problem, context: ParallelContext, dtype: torch.dtype = torch.float32) -> VideoDiT:
    """The whole model on this rank."""
    return build(problem, context)[1][0].to(dtype)


def gathered_weights(chunks: Sequence[VideoDiT]) -> Tensors:
    """The full weights, from the parts of all ranks."""
    own = [
        (s.name, s.full_shape, s.offset, s.tensor.detach().clone())
        for chunk in chunks
        for s in shards_of(chunk)
    ]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    full: Tensors = {}
    for parts in everyone:
        for name, shape, offset, tensor in parts:
            target = full.setdefault(name, torch.full(shape, torch.nan, dtype=tensor.dtype))
            index = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))
            target[index] = tensor
    return full


def plain_model(weights: Tensors, sizes: VideoDiTSizes) -> PlainVideoDiT:
    model = PlainVideoDiT(sizes).double()
    model.load_state_dict({k: v.double() for k, v in to_plain(weights, sizes).items()})
    return model


def plain_of(chunk: VideoDiT) -> PlainVideoDiT:
    return plain_model(gathered_weights([chunk]), chunk.sizes)


def frames_of(inputs: dict[str, Tensor], first: int, count: int) -> dict[str, Any]:
    """Some of the frames, with their number."""
    cut = slice(first, first + count)
    return {
        "x": inputs["x"][:, cut],
        "timesteps": inputs["timesteps"][:, cut],
        "text": inputs["text"],
        "first_frame": first,
    }


def new_cache(chunk: VideoDiT, problem: Problem, **settings: Any) -> KVCache:
    """An empty cache, full of NaN, so that a slot that was never written shows."""
    cache = chunk.new_cache(problem.batch, problem.height, problem.width, **settings)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    return cache


@torch.no_grad()
def stream(
    chunk: VideoDiT, cache: KVCache, inputs: dict[str, Tensor], block: int, start: int = 0
) -> Tensor:
    """Flow of all frames from ``start`` on, block by block through the cache."""
    return torch.cat(
        [
            chunk(**frames_of(inputs, first, block), cache=cache)
            for first in range(start, inputs["x"].size(1), block)
        ],
        dim=1,
    )


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def largest(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).detach().abs().max())
