"""Training steps through the pipeline engine, with megatron-core's DDP, and in plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import Tensor

from megatron_ext.layers.initialization import shards_of
from megatron_ext.losses.contract import pair
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.schedules.runtime import PipelineEngine
from megatron_ext.video.model.wan.model import VideoDiT
from tests.video.model.wan.names import Tensors, to_parallel
from tests.video.model.wan.problem import (
    Problem,
    build,
    frames_of,
    new_cache,
    plain_model,
    stream,
)

NUM_MICROBATCHES = 2


@dataclass
class Step:
    """What a step gave on this rank: the loss of all ranks, its own chunks, and the flow."""

    loss: float
    chunks: Sequence[VideoDiT]
    flow: Tensor | None = None


def loss_of(flow: Tensor, target: Tensor) -> Any:
    """Sum of the squared errors, and the number of frames."""
    total = (flow - target).square().sum()
    count = torch.tensor(float(flow.size(0) * flow.size(1)))
    return total, count.int(), {"loss": pair(total, count)}


def forward_step(iterator: Iterator[dict[str, Any]] | None, model: Any) -> Any:
    assert iterator is not None
    given = dict(next(iterator))
    target = given.pop("target")
    return model(**given), lambda flow: loss_of(flow, target)


def run_engine(
    problem: Problem,
    context: ParallelContext,
    config: Any,
    chunks: Sequence[VideoDiT],
    given: Sequence[dict[str, Any]],
) -> float:
    """Loss of one step on these micro-batches; gradients are left in ``main_grad``."""
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
    shape = chunks[0].boundary_shape(*(given[0][name] for name in ("x", "timesteps", "text")))
    reports = engine.run(forward_step, [iter(given) for _ in ddp], len(given), shape)
    total = torch.zeros(2, dtype=torch.float64)
    for report in reports:
        total += report["loss"]
    torch.distributed.all_reduce(total, group=context.pgs.dp_cp)
    torch.distributed.broadcast(total, group=context.pgs.pp, group_src=context.last_stage_rank)
    return float(total[0] / total[1])


def dense_step(problem: Problem, context: ParallelContext) -> Step:
    """All frames at once, in micro-batches."""
    config, chunks = build(problem, context)
    replicas = context.pgs.dp.size()
    own = range(context.dp_rank, NUM_MICROBATCHES, replicas)
    given = [{**problem.inputs(i), "target": problem.target(i)} for i in own]
    return Step(run_engine(problem, context, config, chunks, given), chunks)


def streaming_step(problem: Problem, context: ParallelContext) -> Step:
    """Without gradient through the cache first; then each block again, as a micro-batch."""
    config, chunks = build(problem, context)
    inputs, target = problem.inputs(), problem.target()
    cache = new_cache(chunks[0], problem, chunk_frames=problem.frames)
    flow = stream(chunks[0], cache, inputs, 3)
    given = [
        {
            **frames_of(inputs, first, 3),
            "target": target[:, first : first + 3],
            "cache": cache,
            "update_cache": False,
        }
        for first in range(0, problem.frames, 3)
    ]
    return Step(run_engine(problem, context, config, chunks, given), chunks, flow)


@dataclass(frozen=True)
class Truth:
    """What plain torch gives in double precision for the weights that the names decide."""

    weights: Tensors
    loss: float
    gradients: Tensors
    flow: Tensor


def truth(problem: Problem, weights: Tensors, *, streaming: bool) -> Truth:
    model = plain_model(weights, problem.sizes)
    total: Any = 0.0
    count = 0.0
    flow = torch.zeros(0)
    for i in range(1 if streaming else NUM_MICROBATCHES):
        inputs = problem.inputs(i, torch.float64)
        flow = model(**inputs, rule=problem.rule, cut_blocks=streaming)
        part = loss_of(flow, problem.target(i).double())
        total = total + part[0]
        count += float(part[1])
    loss = total / count
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    wanted = to_parallel(gradients, problem.sizes)
    assert wanted.keys() == weights.keys()
    return Truth(weights, float(loss.detach()), wanted, flow.detach())


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
