"""One harness for the networks of video models: problems, steps on any layout, and the truth."""

import dataclasses
from collections.abc import Callable, Sequence
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
from megatron_ext.train.step import reduce_step
from megatron_ext.video.model.chunk import VideoChunk

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Problem:
    """A network and the data of one step; each network has a class of its own with more.

    These are ``inputs``, ``microbatch`` and ``forward`` of a chunk (its output and loss function),
    ``boundary_arguments``, ``plain_losses`` (sum, count and output of each) and ``to_plain``.
    """

    sizes: Any
    options: Any
    batch: int = 2
    num_microbatches: int = 2
    schedule: str | None = None
    sequence_parallel: bool = False
    network: ClassVar[type[VideoChunk]]
    plain: ClassVar[type[nn.Module]]

    def plain_model(self, weights: Tensors) -> Any:
        model = self.plain(self.sizes).double()
        model.load_state_dict({k: v.double() for k, v in self.to_plain(weights).items()})
        return model

    def to_parallel(self, plain: Tensors, like: Tensors) -> Tensors:
        """Return gradients of the plain network by the names of the parallel one, whose shapes
        ``like`` has. Since `to_plain` only moves numbers, its adjoint moves them back.
        """
        leaves = {n: torch.zeros_like(x).double().requires_grad_() for n, x in like.items()}
        moved = self.to_plain(leaves)
        given = [moved[n] for n in plain], [*leaves.values()], [*plain.values()]
        back = torch.autograd.grad(*given, allow_unused=True)
        return {n: x for n, x in zip(leaves, back, strict=True) if x is not None}

    def prepare(self, chunk: VideoChunk) -> None:
        """Change initial weights whose constants would hide a fault."""

    def on_one_rank(self) -> "Problem":
        """Return the problem whose truth this one has."""
        names = [field.name for field in dataclasses.fields(self.options)]
        plain = {name: 0 for name in names if name.startswith("recompute")}
        options = dataclasses.replace(self.options, cp_comm_type="all_gather", **plain)
        return dataclasses.replace(self, options=options, schedule=None, sequence_parallel=False)


def core_config(problem: Any, context: ParallelContext) -> StepTransformerConfig:
    deferred = (problem.schedule or "").startswith("zb-")
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return StepTransformerConfig(
        **problem.sizes.transformer_fields(),
        **{name: getattr(context.layout, name) for name in names},
        sequence_parallel=problem.sequence_parallel, pipeline_dtype=torch.float32,
        calculate_per_token_loss=True, deallocate_pipeline_outputs=True,
        weight_gradients=DeferredWeightGradients() if deferred else None,
    )  # fmt: skip


def build(problem: Problem, context: ParallelContext) -> tuple[Any, list[Any]]:
    config = core_config(problem, context)
    mark_methods(config)
    num_chunks, chunks = context.placement.num_chunks, []
    for stage in range(num_chunks) if num_chunks > 1 else [None]:
        sizes, options = problem.sizes, problem.options
        chunk = problem.network.build(sizes, options, config, context, vp_stage=stage)
        chunk.vp_stage = stage
        chunks.append(chunk)
    initialize_by_name(chunks, config, SEED)
    unmark_methods(config)
    for chunk in chunks:
        problem.prepare(chunk)
    return config, chunks


SEED = 7


def one(problem: Problem, context: ParallelContext, dtype: torch.dtype = torch.float32) -> Any:
    (chunk,) = build(problem, context)[1]
    return chunk.to(dtype)


@dataclass
class Step:
    """Results of a step on this rank: the loss of all ranks, its own chunks, and the output."""

    loss: float
    chunks: Sequence[Any]
    output: Tensor | None = None


def run_engine(
    problem: Any, context: ParallelContext, config: Any, chunks: Sequence[Any], given: list[Any]
) -> float:
    """Return the loss of a step through the pipeline engine; ``main_grad`` holds the gradients."""
    ddp = wrapped(chunks, config, context, use_distributed_optimizer=False)
    config.finalize_model_grads_func = finalize_model_grads
    schedule = problem.schedule or ("1f1b" if context.pgs.pp.size() > 1 else "no-pipelining")
    engine = PipelineEngine(schedule, ddp, config, context)
    shape = chunks[0].boundary_shape(*problem.boundary_arguments(given[0]))
    step = partial(_forward_step, problem)
    reports = engine.run(step, given, len(given), shape)
    _, scale = reduce_step(reports, engine.num_targets, context)
    for chunk in ddp if config.calculate_per_token_loss else ():
        chunk.scale_gradients(scale)
    zero = torch.zeros(2, dtype=torch.float64)
    total = sum((report["loss"] for report in reports), zero)
    torch.distributed.all_reduce(total, group=context.pgs.dp_cp)
    torch.distributed.broadcast(total, group=context.pgs.pp, group_src=context.last_stage_pp_rank)
    return float(total[0] / total[1])


def wrapped(
    chunks: Sequence[Any], config: Any, context: ParallelContext, **settings: bool
) -> list[DistributedDataParallel]:
    ddp_config = DistributedDataParallelConfig(**settings)
    wrap = partial(DistributedDataParallel, config, ddp_config, pg_collection=context.pgs)
    return [wrap(module=chunk) for chunk in chunks]


def _forward_step(problem: Any, batch: dict[str, Any], model: Any, _counts: None) -> Any:
    return problem.forward(model, dict(batch))


def train_step(problem: Any, context: ParallelContext) -> Step:
    config, chunks = build(problem, context)
    own = range(context.dp_rank, problem.num_microbatches, context.pgs.dp.size())
    given = [problem.microbatch(i) for i in own]
    return Step(run_engine(problem, context, config, chunks, given), chunks)


def reported(total: Tensor, count: Tensor) -> Any:
    return total, count.int(), {"loss": pair(total, count)}


def gathered_weights(chunks: Sequence[Any], part: Callable[[Any], Tensor] = lambda p: p) -> Tensors:
    shards = [shard for chunk in chunks for shard in shards_of(chunk, part)]
    own = [(s.name, s.full_shape, s.offset, s.tensor.detach().clone()) for s in shards]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    full: Tensors = {}
    for parts in everyone:
        for name, shape, offset, tensor in parts:
            target = full.setdefault(name, torch.full(shape, torch.nan, dtype=tensor.dtype))
            index = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))
            target[index] = tensor
    return full


def write_weights(context: ParallelContext, problem: Any, path: Path) -> None:
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


def truth(problem: Any, weights: Tensors) -> Truth:
    model = problem.plain_model(weights)
    totals, counts, outputs = zip(*problem.plain_losses(model), strict=True)
    loss = sum(totals) / sum(map(float, counts))
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    wanted = problem.to_parallel(gradients, weights)
    assert wanted.keys() == weights.keys()
    return Truth(weights, float(loss.detach()), wanted, outputs[-1].detach())


def gradient_errors(chunks: Sequence[Any], wanted: Tensors) -> dict[str, float]:
    """Return the relative difference of each part that this rank holds, replicas included."""
    errors = {}
    for chunk in chunks:
        held = list(shards_of(chunk, lambda p: p.main_grad))
        assert len(held) == len(list(chunk.parameters()))
        for shard in held:
            want = shard.cut(wanted[shard.name])
            norm = max(float(want.norm()), 1e-12)
            errors[shard.name] = float((shard.tensor.double() - want).norm()) / norm
    return errors


def check_gradients(chunks: Sequence[Any], wanted: Tensors, tolerance: float) -> None:
    errors = gradient_errors(chunks, wanted)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= tolerance, f"{worst}: {errors[worst]:.2e}"


def check_weights(chunks: Sequence[Any], wanted: Tensors) -> None:
    """Check that each part of the weights that this rank holds is the wanted one, bit for bit."""
    for chunk in chunks:
        for shard in shards_of(chunk):
            assert torch.equal(shard.tensor, shard.cut(wanted[shard.name])), shard.name


def check_step(step: Step, want: Truth, tolerance: float) -> None:
    check_weights(step.chunks, want.weights)
    assert abs(step.loss - want.loss) <= tolerance * abs(want.loss)
    if step.output is not None:
        assert largest(step.output, want.output) < tolerance
    check_gradients(step.chunks, want.gradients, tolerance)


def layout_of(sizes: dict[str, int], schedule: str | None = None) -> Layout:
    tp, pp, cp, dp = (sizes.get(name, 1) for name in ("tp", "pp", "cp", "dp"))
    return Layout(
        world_size=tp * pp * cp * dp, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp, context_parallel_size=cp,
        virtual_pipeline_model_parallel_size=sizes.get("vpp"), v_shape=schedule == "zb-v",
    )  # fmt: skip


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).detach().norm() / want.double().norm())


def largest(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).detach().abs().max())
