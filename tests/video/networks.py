"""One harness for the networks of video models: problems, steps on any layout, and the truth."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import Tensor, nn

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
from megatron_ext.parallel.grid import Layout
from megatron_ext.schedules.runtime import PipelineEngine
from megatron_ext.video.model.chunk import VideoChunk
from tests.ranks import run_on_ranks

Tensors = dict[str, Tensor]
SEED = 7


@dataclass(frozen=True)
class Problem(ABC):
    """A network and the data of one step; each network has its own."""

    sizes: Any
    options: Any
    batch: int = 2
    num_microbatches: int = 2
    schedule: str | None = None
    sequence_parallel: bool = False

    network: ClassVar[type[VideoChunk]]

    @abstractmethod
    def inputs(self, number: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Return the whole inputs of a micro-batch."""

    @abstractmethod
    def microbatch(self, number: int) -> dict[str, Any]:
        """Return inputs, target and whatever else `forward` takes."""

    @abstractmethod
    def forward(self, model: Any, batch: dict[str, Any]) -> tuple[Tensor, Any]:
        """Return the output of a chunk and the loss function."""

    @abstractmethod
    def boundary_arguments(self, batch: dict[str, Any]) -> Sequence[Any]:
        """Return the arguments of the chunk's ``boundary_shape``."""

    @abstractmethod
    def plain_model(self, weights: Tensors) -> nn.Module:
        """Return the network in plain torch, in double precision."""

    @abstractmethod
    def plain_losses(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the sum of losses, the count and the output of each micro-batch."""

    @abstractmethod
    def to_parallel(self, plain: Tensors) -> Tensors:
        """Return weights or gradients of the plain model by the names of the parallel one."""

    def prepare(self, chunk: VideoChunk) -> None:  # noqa: B027
        """Change initial weights whose constants would hide a fault."""

    def on_one_rank(self) -> Problem:
        """Return the problem whose truth this one has."""
        plain = {
            field.name: 0
            for field in dataclasses.fields(self.options)
            if field.name.startswith("recompute")
        }
        options = dataclasses.replace(self.options, cp_comm_type="all_gather", **plain)
        return dataclasses.replace(self, options=options, schedule=None, sequence_parallel=False)


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


def build(problem: Problem, context: ParallelContext) -> tuple[Any, list[Any]]:
    """Return this rank's configuration and chunks, with weights drawn by name."""
    config = core_config(problem, context)
    mark_methods(config)
    num_chunks = context.placement.num_chunks
    chunks = []
    for index in range(num_chunks):
        stage = index if num_chunks > 1 else None
        chunk = problem.network.build(
            problem.sizes, problem.options, config, context, vp_stage=stage
        )
        chunk.vp_stage = stage
        chunks.append(chunk)
    initialize_by_name(chunks, config, SEED)
    unmark_methods(config)
    for chunk in chunks:
        problem.prepare(chunk)
    return config, chunks


def one(problem: Problem, context: ParallelContext, dtype: torch.dtype = torch.float32) -> Any:
    """Return the whole model on this rank."""
    (chunk,) = build(problem, context)[1]
    return chunk.to(dtype)


@dataclass
class Step:
    """Results of a step on this rank: the loss of all ranks, its own chunks, and the output."""

    loss: float
    chunks: Sequence[Any]
    output: Tensor | None = None


def run_engine(
    problem: Problem,
    context: ParallelContext,
    config: Any,
    chunks: Sequence[Any],
    given: Sequence[dict[str, Any]],
) -> float:
    """Return the loss of a step through the pipeline engine; ``main_grad`` holds the gradients."""
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
    shape = chunks[0].boundary_shape(*problem.boundary_arguments(given[0]))
    step = partial(_forward_step, problem)
    reports = engine.run(step, [iter(given) for _ in ddp], len(given), shape)
    total = torch.zeros(2, dtype=torch.float64)
    for report in reports:
        total += report["loss"]
    torch.distributed.all_reduce(total, group=context.pgs.dp_cp)
    torch.distributed.broadcast(total, group=context.pgs.pp, group_src=context.last_stage_rank)
    return float(total[0] / total[1])


def _forward_step(problem: Problem, batches: Iterator[dict[str, Any]] | None, model: Any) -> Any:
    assert batches is not None
    return problem.forward(model, dict(next(batches)))


def train_step(problem: Problem, context: ParallelContext) -> Step:
    """Run one step on micro-batches of the replicas, with megatron-core's DDP and finalize."""
    config, chunks = build(problem, context)
    own = range(context.dp_rank, problem.num_microbatches, context.pgs.dp.size())
    given = [problem.microbatch(i) for i in own]
    return Step(run_engine(problem, context, config, chunks, given), chunks)


def reported(total: Tensor, count: Tensor) -> Any:
    """Return a loss as the engine takes it."""
    return total, count.int(), {"loss": pair(total, count)}


def gathered_weights(chunks: Sequence[Any]) -> Tensors:
    """Return the full weights, from the parts of all ranks."""
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


def write_weights(context: ParallelContext, problem: Problem, path: Path) -> None:
    weights = gathered_weights(build(problem, context)[1])
    if context.rank == 0:
        torch.save(weights, path)


@dataclass(frozen=True)
class Truth:
    """The results of plain torch in double precision, for the weights that the names decide."""

    weights: Tensors
    loss: float
    gradients: Tensors
    output: Tensor


def truth(problem: Problem, weights: Tensors) -> Truth:
    model = problem.plain_model(weights)
    totals, counts, outputs = zip(*problem.plain_losses(model), strict=True)
    loss = sum(totals) / sum(map(float, counts))
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    wanted = problem.to_parallel(gradients)
    assert wanted.keys() == weights.keys()
    return Truth(weights, float(loss.detach()), wanted, outputs[-1].detach())


class Truths:
    """One truth for all layouts that train on the same data; their ranks inherit it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[Problem, Truth] = {}

    def of(self, problem: Problem) -> Truth:
        problem = problem.on_one_rank()
        if problem not in self.known:
            path = self.folder / "weights"
            run_on_ranks(write_weights, layout_of({}), {"problem": problem, "path": path})
            self.known[problem] = truth(problem, torch.load(path))
        return self.known[problem]


def gradient_errors(step: Step, wanted: Tensors) -> dict[str, float]:
    """Return the relative difference of each part that this rank holds, replicas included."""
    errors = {}
    for chunk in step.chunks:
        held = list(shards_of(chunk, lambda p: p.main_grad))
        assert len(held) == len(list(chunk.parameters()))
        for shard in held:
            want = shard.cut(wanted[shard.name])
            norm = float(want.norm())
            errors[shard.name] = float((shard.tensor.double() - want).norm()) / max(norm, 1e-12)
    return errors


def check_step(step: Step, want: Truth, tolerance: float) -> None:
    """Compare weights, loss, output and all gradients with the truth."""
    for chunk in step.chunks:
        for shard in shards_of(chunk):
            assert torch.equal(shard.tensor, shard.cut(want.weights[shard.name])), shard.name
    assert abs(step.loss - want.loss) <= tolerance * abs(want.loss)
    if step.output is not None:
        assert largest(step.output, want.output) < tolerance
    errors = gradient_errors(step, want.gradients)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= tolerance, f"{worst}: {errors[worst]:.2e}"


def layout_of(sizes: dict[str, int], schedule: str | None = None) -> Layout:
    tp, pp, cp, dp = (sizes.get(name, 1) for name in ("tp", "pp", "cp", "dp"))
    return Layout(
        world_size=tp * pp * cp * dp,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        virtual_pipeline_model_parallel_size=sizes.get("vpp"),
        v_shape=schedule == "zb-v",
    )


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).detach().norm() / want.double().norm())


def largest(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).detach().abs().max())
