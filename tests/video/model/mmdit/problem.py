"""A small training step of an MMDiT, on any layout and in plain torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import Tensor

from megatron_ext.layers.initialization import (
    initialize_by_name,
    mark_methods,
    shards_of,
    unmark_methods,
)
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.layers.weight_gradients import DeferredWeightGradients
from megatron_ext.losses.contract import pair
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.schedules.runtime import PipelineEngine
from megatron_ext.video.config.mmdit import SIZES, MMDiTSizes
from megatron_ext.video.model.mmdit.model import MMDiT
from megatron_ext.video.model.mmdit.options import MMDiTOptions
from tests.video.model.mmdit.names import Tensors, to_parallel, to_plain
from tests.video.model.mmdit.plain import PlainMMDiT

I2V = dataclasses.replace(SIZES["tiny"], cond_embed=True, guidance_embed=True)
SEED = 7


@dataclass(frozen=True)
class Problem:
    """What a step trains on.

    ``mask`` says which image tokens count: all, some at random, or the last latent frame alone.
    """

    sizes: MMDiTSizes = I2V
    options: MMDiTOptions = field(default_factory=MMDiTOptions)
    num_text: int = 8
    frames: int = 3
    batch: int = 2
    num_microbatches: int = 2
    mask: str = "random"
    schedule: str | None = None
    sequence_parallel: bool = False

    @property
    def num_image(self) -> int:
        return self.frames * 16

    def microbatch(self, number: int) -> dict[str, Tensor]:
        """Inputs, target and mask of a micro-batch, all of them whole."""
        generator = torch.Generator().manual_seed(100 + number)
        z, b, n, text = self.sizes, self.batch, self.num_image, self.num_text

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        grid = torch.cartesian_prod(torch.arange(self.frames), torch.arange(4), torch.arange(4))
        mask = (torch.rand(b, n, generator=generator) < 0.7).float()
        if self.mask == "last frame":
            mask = (torch.arange(n) >= n - 16).float().expand(b, n)
        out = {
            "img": randn(b, n, z.token_width),
            "img_ids": grid.expand(b, n, 3),
            "txt": randn(b, text, z.text_width),
            "txt_ids": torch.zeros(b, text, 3, dtype=torch.int64),
            "timesteps": torch.rand(b, generator=generator),
            "y_vec": randn(b, z.pooled_width),
            "target": randn(b, n, z.token_width),
            "mask": torch.ones(b, n) if self.mask == "all" else mask,
        }
        if z.cond_embed:
            out["cond"] = randn(b, n, z.cond_width)
        if z.guidance_embed:
            out["guidance"] = torch.rand(b, generator=generator)
        return out


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


def build(problem: Problem, context: ParallelContext) -> tuple[Any, list[MMDiT]]:
    """This rank's configuration and chunks, with weights drawn by name."""
    config = core_config(problem, context)
    mark_methods(config)
    num_chunks = context.placement.num_chunks
    chunks = []
    for index in range(num_chunks):
        stage = index if num_chunks > 1 else None
        chunk = MMDiT.build(problem.sizes, problem.options, config, context, vp_stage=stage)
        chunk.vp_stage = stage
        chunks.append(chunk)
    initialize_by_name(chunks, config, SEED)
    unmark_methods(config)
    return config, chunks


def loss_of(velocity: Tensor, target: Tensor, mask: Tensor) -> Any:
    """Sum over counted tokens of the mean squared error of their features, and their number."""
    total = ((velocity - target) ** 2).mean(-1).mul(mask).sum()
    count = mask.sum()
    return total, count.int(), {"loss": pair(total, count)}


def forward_step(iterator: Iterator[dict[str, Tensor]] | None, model: Any) -> Any:
    assert iterator is not None
    batch = dict(next(iterator))
    target, mask = batch.pop("target"), batch.pop("mask")
    own = model.module.image_tokens(batch["txt"].size(1), batch["img"].size(1))
    if not model.module.pre_process:
        batch = {name: tensor for name, tensor in batch.items() if name.endswith("_ids")}
    return model(**batch), lambda v: loss_of(v, target[:, own], mask[:, own])


@dataclass
class Step:
    """What a step gave on this rank: the loss of all ranks, and its own chunks."""

    loss: float
    chunks: Sequence[MMDiT]


def train_step(problem: Problem, context: ParallelContext) -> Step:
    """One step through the pipeline engine, with megatron-core's DDP and finalize."""
    config, chunks = build(problem, context)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=False)
    ddp = [
        DistributedDataParallel(
            config=config, ddp_config=ddp_config, module=c, pg_collection=context.pgs
        )
        for c in chunks
    ]
    config.finalize_model_grads_func = finalize_model_grads
    schedule = problem.schedule or ("1f1b" if context.pgs.pp.size() > 1 else "no-pipelining")
    engine = PipelineEngine(schedule, ddp, config, context)
    replicas, m = context.pgs.dp.size(), problem.num_microbatches // context.pgs.dp.size()
    own = [problem.microbatch(i * replicas + context.dp_rank) for i in range(m)]
    shape = chunks[0].boundary_shape(problem.num_text, problem.num_image, problem.batch)
    reports = engine.run(forward_step, [iter(own) for _ in ddp], m, shape)
    total = torch.zeros(2, dtype=torch.float64)
    for report in reports:
        total += report["loss"]
    torch.distributed.all_reduce(total, group=context.pgs.dp_cp)
    torch.distributed.broadcast(total, group=context.pgs.pp, group_src=context.last_stage_rank)
    return Step(float(total[0] / total[1]), chunks)


def gathered_weights(chunks: Sequence[MMDiT]) -> Tensors:
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
            target = full.setdefault(name, torch.full(shape, torch.nan))
            index = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))
            target[index] = tensor
    return full


def plain_model(weights: Tensors, sizes: MMDiTSizes) -> PlainMMDiT:
    model = PlainMMDiT(sizes).double()
    model.load_state_dict({k: v.double() for k, v in to_plain(weights, sizes).items()})
    return model


def truth(problem: Problem, weights: Tensors) -> tuple[float, Tensors]:
    """Loss and gradients by plain torch in double precision, over all micro-batches."""
    model = plain_model(weights, problem.sizes)
    total: Any = 0.0
    count = 0.0
    for i in range(problem.num_microbatches):
        batch = {k: v.double() for k, v in problem.microbatch(i).items()}
        target, mask = batch.pop("target"), batch.pop("mask")
        total = total + loss_of(model(**batch), target, mask)[0]
        count += float(mask.sum())
    loss = total / count
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), to_parallel(gradients, problem.sizes)


def gradient_errors(step: Step, wanted: Tensors) -> dict[str, float]:
    """Relative difference of each part that this rank holds, replicas included."""
    errors = {}
    for chunk in step.chunks:
        held = list(shards_of(chunk, lambda p: p.main_grad))
        assert len(held) == len(list(chunk.parameters()))
        for shard in held:
            want = shard.cut(wanted[shard.name])
            norm = float(want.norm())
            errors[shard.name] = float((shard.tensor.double() - want).norm()) / max(norm, 1e-12)
    return errors


__all__ = [
    "I2V",
    "Problem",
    "build",
    "gathered_weights",
    "gradient_errors",
    "plain_model",
    "train_step",
    "truth",
]
