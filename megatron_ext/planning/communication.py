"""Bytes that a rank sends in a training step, by kind of communication.

Collectives are counted as rings (and as NCCL's bus bandwidth does): of n ranks each sends
``(n - 1) / n`` of the whole tensor in a gather or a reduce-scatter, twice that in an all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from megatron_ext.planning.buffers import State
from megatron_ext.planning.contents import FP32, Ranks, Sizes, Stage

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig


@dataclass(frozen=True)
class Volume:
    """Bytes that one rank sends.

    Attributes:
        tensor: all-reduces of tensor parallelism, or gathers and scatters of sequence parallelism.
        context: keys and values, or heads, of context parallelism.
        expert: tokens on their way to experts and back.
        pipeline: outputs and their gradients between stages.
        data: gradients and parameters between replicas.
        embedding: gradients of the copies of the word embedding.
    """

    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    embedding: float = 0.0

    @property
    def total(self) -> float:
        """Of all kinds."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    def __add__(self, other: Volume) -> Volume:
        return Volume(
            **{x.name: getattr(self, x.name) + getattr(other, x.name) for x in fields(self)}
        )

    def __mul__(self, times: float) -> Volume:
        return Volume(**{x.name: getattr(self, x.name) * times for x in fields(self)})


def ring(ranks: int) -> float:
    """Share of a tensor that a rank sends in a gather or a reduce-scatter."""
    return (ranks - 1) / ranks


@dataclass(frozen=True)
class Traffic:
    """Formulas of one run."""

    config: RunConfig
    sizes: Sizes

    def microbatch(self, stage: Stage) -> Volume:
        """Of one micro-batch through one stage, forward and backward."""
        x, total = self.sizes, Volume()
        layers = [x.experts[layer] for layer in stage.layers] + [x.experts[-1]] * stage.depths
        for experts in layers:
            total += self.layer(experts)
        total += Volume(pipeline=self.boundary(stage))
        if stage.head:
            total += Volume(tensor=2 * self._gather() * (1 + x.depths))
        if stage.embedding or stage.depths:
            total += Volume(tensor=2 * self._gather() * (stage.embedding + stage.depths))
        return total

    def layer(self, experts: bool) -> Volume:
        """One layer, forward and backward, and what recomputation repeats of it."""
        x = self.sizes
        forward = Volume(
            tensor=(2 if experts else 4) * self._gather(),
            context=self._context(),
            expert=self._experts() if experts else 0.0,
        )
        # Under sequence parallelism the inputs of two matrices are gathered once more.
        backward = forward + Volume(tensor=(1 if experts else 2) * self._gather())
        if not x.sequence_parallel:
            backward = forward
        model = self.config.model
        if model.recompute_granularity == "full":
            return forward * 2 + backward
        modules = model.recompute_modules or ["core_attn"]
        again = model.recompute_granularity == "selective" and "core_attn" in modules
        return forward + backward + Volume(context=forward.context if again else 0.0)

    def _gather(self) -> float:
        """One gather of ``[s, b, h]`` over the tensor-parallel ranks; an all-reduce is two."""
        x = self.sizes
        return ring(x.tp) * x.tokens * x.h * x.width

    def _context(self) -> float:
        """Of the attention of one layer, forward."""
        x = self.sizes
        tokens, size = x.tokens, x.d * x.width // x.tp
        if self.config.parallel.cp_comm_type[0] == "a2a":
            return ring(x.cp) * tokens * (2 * x.n + 2 * x.g) * size
        return (x.cp - 1) * tokens * 2 * x.g * size

    def _experts(self) -> float:
        """Of one layer with experts, forward: tokens there and back."""
        x, moe = self.sizes, self.config.moe
        ranks = x.ep * x.etp
        tokens = x.residual_tokens * x.h * x.width
        if moe.moe_token_dispatcher_type == "allgather":
            return 2 * (ranks - 1) * tokens
        return 2 * (ring(x.ep) + x.etp - 1) * tokens * moe.moe_router_topk

    def boundary(self, stage: Stage) -> float:
        """Output to the next stage and gradient to the one before, where they are elsewhere."""
        x = self.sizes
        stages = x.pp * (self.config.parallel.virtual_pipeline_model_parallel_size or 1)
        if x.pp == 1:
            return 0.0
        width = FP32 if self.config.model.fp32_residual_connection else x.width
        tensor = x.residual_tokens * x.h * width
        return float(tensor * ((stage.index < stages - 1) + (stage.index > 0)))


def step_volume(config: RunConfig, ranks: Ranks, state: State, expert_share: float) -> Volume:
    """Once in a step: gradients and parameters of a rank, from and to its replicas.

    Args:
        config: of the run.
        ranks: of it.
        state: of the rank.
        expert_share: of its parameters, those of experts.
    """
    dense, experts = ring(ranks.dp * ranks.cp), ring(ranks.expert_dp)
    shared = dense * (1 - expert_share) + experts * expert_share
    if config.optimizer.use_distributed_optimizer:
        return Volume(data=shared * (state.gradients + state.parameters - state.frozen))
    return Volume(data=2 * shared * state.gradients)


def copies_volume(config: RunConfig, ranks: Ranks, elements: int) -> Volume:
    """The all-reduce of a word embedding's gradient between the stages that hold it."""
    in_fp32 = config.precision.accumulate_allreduce_grads_in_fp32
    return Volume(embedding=float(elements * (FP32 if in_fp32 else ranks.width)))
