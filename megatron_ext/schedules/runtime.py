"""Runs one rank's list of actions by megatron-core's ``forward_step`` and ``backward_step``.

With ``--cuda-graph-impl local``, the first step runs without CUDA graphs and notes the arguments of
the layers. The graphs are recorded before the second step, while all gradients are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel.schedules import (
    clear_embedding_activation_buffer,
    deallocate_output_tensor,
    finish_embedding_wgrad_compute,
    forward_step,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.config.precision import CudaGraphConfig
from megatron_ext.core import backward_step
from megatron_ext.errors import ConfigError
from megatron_ext.layers.transformer_layer import TransformerLayer
from megatron_ext.layers.weight_gradients import zero_untouched
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Placement
from megatron_ext.schedules.communication import Channels, GradientSync, Shape
from megatron_ext.schedules.orders import build_plan
from megatron_ext.schedules.plan import Action, Kind, Plan

if TYPE_CHECKING:
    from megatron_ext.layers.graphs import ChunkGraphs


def token_scale(num_tokens: Tensor, context: ParallelContext) -> Tensor:
    """Return 1 over the number of tokens on all data- and context-parallel ranks, float32 ``[]``.

    The summed gradients of a step are multiplied by it. Unlike in megatron-core's
    ``finalize_model_grads``, the host does not wait for the device to check that the number is
    positive. ``num_tokens``, int ``[]``, is this rank's number of tokens; only the last stage's
    value is used, and it is overwritten.
    """
    last = context.last_stage_rank
    torch.distributed.broadcast(num_tokens, group=context.pgs.pp, group_src=last)
    torch.distributed.all_reduce(num_tokens, group=context.pgs.dp_cp)
    return torch.where(num_tokens > 0, 1.0 / num_tokens, 1.0)


def records_graphs(flags: CudaGraphConfig, device: str) -> bool:
    """Return whether the layers of a run are recorded as CUDA graphs."""
    return flags.cuda_graph_impl == "local" and device == "cuda"


def most_in_flight(actions: Sequence[Action], placement: Placement) -> list[int]:
    """Return, for each chunk of a rank, the peak number of micro-batches in flight.

    A micro-batch is in flight from its forward pass to its `Kind.BACKWARD`.
    """
    now = [0] * placement.num_chunks
    most = [0] * placement.num_chunks
    for action in actions:
        chunk = placement.chunk_of(action.stage)
        if action.kind is Kind.FORWARD:
            now[chunk] += 1
            most[chunk] = max(most[chunk], now[chunk])
        elif action.kind is Kind.BACKWARD:
            now[chunk] -= 1
    return most


def step_graphs(
    flags: CudaGraphConfig, device: str, chunks: Sequence[torch.nn.Module]
) -> list[ChunkGraphs]:
    """Return the CUDA graphs of each chunk of a rank; an empty list if the run records none.

    Raises:
        ConfigError: a chunk has no ``decoder`` whose layers are all `TransformerLayer`.
    """
    graphs = []
    for chunk in chunks if records_graphs(flags, device) else ():
        layers = getattr(getattr(unwrap_model(chunk), "decoder", None), "layers", None)
        if layers is None or not all(isinstance(layer, TransformerLayer) for layer in layers):
            raise ConfigError(
                "`--cuda-graph-impl` (local) records the TransformerLayers of a model's `decoder`, "
                "which this model does not have; leave it out."
            )
        from megatron_ext.layers.graphs import ChunkGraphs

        graphs.append(ChunkGraphs(list(layers), flags.cuda_graph_warmup_steps))
    return graphs


ForwardStep = Callable[[Any, torch.nn.Module], tuple[Any, Any]]


class PipelineEngine:
    """Runs the steps of a pipeline schedule on this rank's model chunks.

    Args:
        schedule: one of `orders.SCHEDULES`.
        chunks: chunks of this rank in the order of their stages, wrapped for data parallelism.
        transformer_config: configuration with the hooks that megatron-core's schedules use.
        group_size: micro-batches that an interleaved chunk runs before the next, see `build_plan`.
        graphs: CUDA graphs of each chunk's layers; empty to run without graphs.

    Attributes:
        gradient_scale: what the gradients of the last step are still to be multiplied by, float32
            ``[]``; None if nothing.
    """

    gradient_scale: Tensor | None = None

    def __init__(
        self,
        schedule: str,
        chunks: Sequence[torch.nn.Module],
        transformer_config: TransformerConfig,
        context: ParallelContext,
        *,
        group_size: int | None = None,
        graphs: Sequence[ChunkGraphs] = (),
    ) -> None:
        self.schedule = schedule
        self.group_size = group_size
        self.chunks = list(chunks)
        self.graphs = graphs
        self.transformer_config = transformer_config
        self.context = context

    def plan(self, num_microbatches: int, *, forward_only: bool) -> Plan:
        """Return the plan of one step, which has the actions of all pipeline ranks."""
        return build_plan(
            self.schedule,
            pipeline_size=self.context.layout.pipeline_model_parallel_size,
            num_microbatches=num_microbatches,
            num_chunks=len(self.chunks),
            group_size=self.group_size,
            forward_only=forward_only,
        )

    def run(
        self,
        forward_step: ForwardStep,
        data_iterators: Sequence[Iterator[Any] | None],
        num_microbatches: int,
        shape: Shape,
        *,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        force_all_reduce: bool = False,
        scale_gradients: bool = True,
    ) -> list[Any]:
        """Run one step and, unless ``forward_only``, finalize the gradients.

        Args:
            forward_step: maps ``(data_iterator, model)`` to the output and the loss function, as
                megatron-core's schedules take it.
            data_iterators: one for each chunk.
            shape: shape of this rank's messages, ``[s, b, h]``, or of each micro-batch's; see
                `Channels`.
            collect_non_loss_data: call the loss function with ``non_loss_data=True``.
            force_all_reduce: give every data-parallel rank all reduced gradients.
            scale_gradients: divide the gradients by the number of tokens, if the loss is a mean
                over them. Otherwise the update is to apply `gradient_scale`.

        Returns:
            The loss function's report of each micro-batch; empty on ranks without the last stage.
        """
        plan = self.plan(num_microbatches, forward_only=forward_only)
        step = _Step(self, plan, forward_step, data_iterators, shape)
        step.trains = not forward_only
        step.collect_non_loss_data = collect_non_loss_data
        transformer_config = self.transformer_config
        on_last = self.context.is_last_stage
        finalizes = transformer_config.finalize_model_grads_func is not None and not forward_only
        if self.graphs and not forward_only:
            self._prepare_graphs(most_in_flight(step.actions, plan.placement))
        embedding = self.gradient_scale = None
        if finalizes:
            embedding = clear_embedding_activation_buffer(transformer_config, self.chunks, on_last)
        step.run()
        if finalizes:
            finish_embedding_wgrad_compute(
                transformer_config, embedding, on_last, self.context.pgs.tp
            )
            with self.context.recorder.phase("reduce"):
                self._finalize(step.num_tokens, force_all_reduce, scale_gradients)
        return step.reports

    def _finalize(self, num_tokens: Tensor, force_all_reduce: bool, scale_gradients: bool) -> None:
        """Reduce the gradients over all ranks that share parameters, and scale them."""
        for chunk in self.chunks:
            zero_untouched(chunk)
        self.transformer_config.finalize_model_grads_func(
            self.chunks, None, pg_collection=self.context.pgs, force_all_reduce=force_all_reduce
        )
        if self.transformer_config.calculate_per_token_loss:
            self._scale(token_scale(num_tokens, self.context), now=scale_gradients)

    def _scale(self, scale: Tensor, *, now: bool) -> None:
        """Multiply all gradients by a scalar, or leave that to the update."""
        if not now:
            self.gradient_scale = scale
            return
        for chunk in self.chunks:
            chunk.scale_gradients(scale)  # type: ignore[operator]

    def _prepare_graphs(self, in_flight: Sequence[int]) -> None:
        """Record the CUDA graphs that are missing; use a chunk's graphs only if they suffice.

        Chunk i needs graphs for ``in_flight[i]`` micro-batches, the most that are in flight.
        """
        for chunk, needed in zip(self.graphs, in_flight, strict=True):
            if chunk.num_slots < needed:
                chunk.capture(needed)
            chunk.switch(chunk.num_slots >= needed)


class _Step:
    """The execution of one rank's actions in one step."""

    trains: bool
    collect_non_loss_data: bool

    def __init__(
        self,
        engine: PipelineEngine,
        plan: Plan,
        forward_step_func: ForwardStep,
        data_iterators: Sequence[Iterator[Any] | None],
        shape: Shape,
    ) -> None:
        self.plan = plan
        self.placement = plan.placement
        self.chunks = engine.chunks
        self.context = engine.context
        self.transformer_config = config = engine.transformer_config
        self.forward_step_func = forward_step_func
        self.data_iterators = data_iterators
        self.actions = plan.ranks[engine.context.pp_rank]
        self.channels = Channels(config, engine.context, plan, shape)
        self.sync = GradientSync(engine.chunks, config, self.actions, plan.placement)
        self.deferred: Any = getattr(config, "weight_gradients", None)
        self.inputs: dict[tuple[int, int], Tensor | None] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self.reports: list[Any] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())

    def run(self) -> None:
        """Run all actions in order, then wait for the last messages."""
        if self.trains:
            self.sync.start()
        recorder = self.context.recorder
        ranks = self.context.pipeline_ranks
        for action in self.actions:
            with recorder.action(action, None if action.peer is None else ranks[action.peer]):
                self.perform(action)
        self.channels.finish()
        if self.trains:
            with recorder.phase("reduce"):
                self.sync.finish()

    def perform(self, action: Action) -> None:
        """Run one action: a computation, or the start of a send or a receive."""
        if action.kind is Kind.FORWARD:
            self.forward(action)
        elif action.kind is Kind.WEIGHT:
            self.deferred.compute((action.microbatch, action.stage))
            self.sync.computed(action)
        elif action.kind in (Kind.BACKWARD, Kind.INPUT):
            self.backward(action)
        else:
            self.communicate(action)

    def communicate(self, action: Action) -> None:
        """Start the send or the receive that ``action`` describes."""
        key = action.microbatch, action.stage
        assert action.peer is not None
        if action.kind is Kind.SEND_OUTPUT:
            output = self.outputs[key] if self.trains else self.outputs.pop(key)
            self.channels.send(action, output)
            deallocate_output_tensor(output, self.transformer_config.deallocate_pipeline_outputs)
        elif action.kind is Kind.SEND_GRADIENT:
            self.channels.send(action, self.gradients.pop(key))
        else:
            self.channels.receive(action)

    def forward(self, action: Action) -> None:
        """Run the forward pass of one micro-batch through one chunk."""
        key = action.microbatch, action.stage
        chunk_index = self.placement.chunk_of(action.stage)
        entering = self._input(action)
        if self.trains:
            self.sync.before_forward(chunk_index)
        output, num_tokens = forward_step(
            self.forward_step_func,
            self.data_iterators[chunk_index],
            self.chunks[chunk_index],
            self.plan.num_microbatches,
            entering,
            self.reports,
            self.transformer_config,
            cp_group_size=self.context.pgs.cp.size(),
            collect_non_loss_data=self.collect_non_loss_data,
            is_first_microbatch=action.microbatch == 0,
            current_microbatch=action.microbatch,
            vp_stage=chunk_index if len(self.chunks) > 1 else None,
            is_last_stage=action.stage == self.placement.num_stages - 1,
        )
        self.num_tokens += num_tokens
        if self.trains:
            self.inputs[key] = entering
        if self.trains or action.stage < self.placement.num_stages - 1:
            self.outputs[key] = output

    def _input(self, action: Action) -> Tensor | None:
        """Return the output of the previous stage, or None on the first stage."""
        if action.stage == 0:
            return None
        before = action.microbatch, action.stage - 1
        if self.placement.rank_of(action.stage - 1) != self.context.pp_rank:
            entering = self.channels.take(Kind.RECEIVE_INPUT, action)
        else:
            output = self.outputs[before] if self.trains else self.outputs.pop(before)
            entering = output.detach()
            deallocate_output_tensor(output, self.transformer_config.deallocate_pipeline_outputs)
        return entering.requires_grad_(self.trains)

    def backward(self, action: Action) -> None:
        """Run a micro-batch's backward pass in a chunk; `Kind.INPUT` defers weight gradients."""
        key = action.microbatch, action.stage
        gradient = None
        if action.stage < self.placement.num_stages - 1:
            if self.placement.rank_of(action.stage + 1) != self.context.pp_rank:
                gradient = self.channels.take(Kind.RECEIVE_GRADIENT, action)
            else:
                gradient = self.gradients.pop((action.microbatch, action.stage + 1))
        self.sync.before_backward(action)
        with self.deferred.collect(key) if action.kind is Kind.INPUT else nullcontext():
            given = backward_step(
                self.inputs.pop(key),
                self.outputs.pop(key),
                gradient,
                self.transformer_config,
            )
        if action.stage > 0:
            self.gradients[key] = given
        self.sync.computed(action)
