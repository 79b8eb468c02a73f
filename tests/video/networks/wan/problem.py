"""Small networks of Wan and their inputs, on any layout and in plain torch."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_ext.layers.initialization import shards_of
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.cache import KVCache
from megatron_ext.video.model.window import FrameWindow
from megatron_ext.video.networks.wan.attention import VideoDiTOptions
from megatron_ext.video.networks.wan.config import SIZES, VideoDiTSizes
from megatron_ext.video.networks.wan.model import VideoDiT
from tests.video.networks import harness
from tests.video.networks.harness import (
    Step,
    Tensors,
    build,
    gathered_weights,
    one,
    reported,
    run_engine,
)
from tests.video.networks.wan.plain import PlainVideoDiT, Rule, to_plain

WINDOW = FrameWindow(block=3, window=12, sink=3)
CAUSAL = VideoDiTOptions(window=WINDOW, zero_head=False)
ALONE = dataclasses.replace(CAUSAL, window=dataclasses.replace(WINDOW, first_alone=True))
BIDIRECTIONAL = VideoDiTOptions(zero_head=False)


@dataclass(frozen=True)
class Problem(harness.Problem):
    """A step of 2 x 4 tokens a frame; a ``streaming`` one cuts gradients between frame blocks."""

    sizes: VideoDiTSizes = SIZES["tiny"]
    options: VideoDiTOptions = field(default_factory=lambda: CAUSAL)
    frames: int = 9
    num_text: int = 5
    height: int = 4
    width: int = 8
    timestep_per_frame: bool = True
    streaming: bool = False

    network, plain = VideoDiT, PlainVideoDiT

    @property
    def rule(self) -> Rule | None:
        window = self.options.window
        if window is None:
            return None
        return window.block, window.window, window.sink, int(window.first_alone)

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Return first frame and length of each block of three, behind a first frame alone."""
        window = self.options.window
        alone = int(window is not None and window.first_alone)
        return [(0, 1)] * alone + [(first, 3) for first in range(alone, self.frames, 3)]

    def inputs(self, number: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Return whole inputs, drawn in float32 so that they are the same numbers in any type."""
        generator = torch.Generator().manual_seed(100 + number)
        z, b, t = self.sizes, self.batch, self.frames
        latents = torch.randn(b, t, z.channels, self.height, self.width, generator=generator)
        text = torch.randn(b, self.num_text, z.text_width, generator=generator)
        timesteps = 1000 * torch.rand(b, t, generator=generator)
        if not self.timestep_per_frame:
            timesteps = timesteps[:, 0]
        return {"x": latents.to(dtype), "timesteps": timesteps, "text": text.to(dtype)}

    def target(self, number: int = 0) -> Tensor:
        shape = self.inputs(number)["x"].shape
        return torch.randn(shape, generator=torch.Generator().manual_seed(900 + number))

    def microbatch(self, number: int) -> dict[str, Any]:
        return {**self.inputs(number), "target": self.target(number)}

    def forward(self, model: Any, batch: dict[str, Any]) -> tuple[Tensor, Any]:
        target = batch.pop("target")
        return model(**batch), lambda flow: loss_of(flow, target)

    def boundary_arguments(self, batch: dict[str, Any]) -> Sequence[Any]:
        return [batch[name] for name in ("x", "timesteps", "text")]

    def plain_losses(self, model: Any) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for i in range(1 if self.streaming else self.num_microbatches):
            inputs = self.inputs(i, torch.float64)
            flow = model(**inputs, rule=self.rule, cut_blocks=self.streaming)
            total, count, _ = loss_of(flow, self.target(i).double())
            yield total, count, flow

    def to_plain(self, weights: Tensors) -> Tensors:
        return to_plain(weights, self.sizes)

    @torch.no_grad()
    def prepare(self, chunk: Any) -> None:
        for shard in shards_of(chunk):
            if len(shard.full_shape) == 1:
                full = torch.arange(shard.full_shape[0], dtype=torch.float32)
                shard.tensor.add_(0.3 * shard.cut(torch.sin(full + len(shard.name))))


def loss_of(flow: Tensor, target: Tensor) -> Any:
    count = torch.tensor(float(flow.size(0) * flow.size(1)))
    return reported((flow - target).square().sum(), count)


def streaming_step(problem: Problem, context: ParallelContext) -> Step:
    """Fill a cache without gradient first; then run each block again, as a micro-batch."""
    config, chunks = build(problem, context)
    inputs, target = problem.inputs(), problem.target()
    cache = new_cache(chunks[0], problem, chunk_frames=problem.frames)
    with torch.no_grad():
        parts = [chunks[0](**frames_of(inputs, *piece), cache=cache) for piece in problem.pieces]
    flow = torch.cat(parts, dim=1)
    given = [
        frames_of(inputs, first, count)
        | {"target": target[:, first : first + count], "cache": cache, "update_cache": False}
        for first, count in problem.pieces
    ]
    return Step(run_engine(problem, context, config, chunks, given), chunks, flow)


def plain_of(chunk: VideoDiT) -> PlainVideoDiT:
    return Problem(sizes=chunk.sizes).plain_model(gathered_weights([chunk]))


def frames_of(inputs: dict[str, Tensor], first: int, count: int) -> dict[str, Any]:
    cut = slice(first, first + count)
    parts = {name: inputs[name][:, cut] for name in ("x", "timesteps")}
    return {**parts, "text": inputs["text"], "first_frame": first}


def new_cache(chunk: VideoDiT, problem: Problem, **settings: Any) -> KVCache:
    """Return an empty cache, full of NaN, so that a slot that was never written shows."""
    cache = chunk.new_cache(problem.batch, problem.height, problem.width, **settings)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    return cache


def cached(
    problem: Problem, context: ParallelContext, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[Any, dict[str, Tensor], KVCache]:
    chunk = one(problem, context, dtype)
    return chunk, problem.inputs(dtype=dtype), new_cache(chunk, problem, **settings)


@torch.no_grad()
def stream(chunk: VideoDiT, cache: KVCache, inputs: Tensors, block: int, start: int = 0) -> Tensor:
    """Return the flow of all frames from ``start`` on, block by block through the cache."""
    blocks = range(start, inputs["x"].size(1), block)
    return torch.cat([chunk(**frames_of(inputs, i, block), cache=cache) for i in blocks], dim=1)


def held(cache: KVCache) -> dict[int, Tensor]:
    kept = (*cache.keys, *cache.values)
    return {f: torch.stack([x[cache.slot_of(f)] for x in kept]).clone() for f in cache.frames}
