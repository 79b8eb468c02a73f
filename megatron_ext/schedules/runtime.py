"""Runs one rank's list of actions: forward and backward passes, and messages between the ranks.

With ``--cuda-graph-impl local``, the first step runs without CUDA graphs and notes the arguments of
the layers. The graphs are recorded before the second step, while all gradients are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel.schedules import (
    deallocate_output_tensor,
    forward_step_calc_loss,
    set_current_microbatch,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, unwrap_model
from torch import Tensor

from megatron_ext.config.precision import CudaGraphConfig
from megatron_ext.core import backward_step
from megatron_ext.errors import ConfigError
from megatron_ext.layers.transformer_layer import TransformerLayer
from megatron_ext.layers.weight_gradients import zero_untouched
from megatron_ext.losses.contract import LossFunction, StepCounts, checked
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Placement
from megatron_ext.schedules.orders import build_plan
from megatron_ext.schedules.plan import (
    Action,
    Kind,
    Plan,
    Shape,
    passes_of,
    recomputed_whole,
)

if TYPE_CHECKING:
    from megatron_ext.layers.graphs import ChunkGraphs
    from megatron_ext.parallel.turns import Turns
    from megatron_ext.schedules.communication import Channels, GradientSync


def records_graphs(flags: CudaGraphConfig, device: str) -> bool:
    """Return whether a run with these flags records its layers as CUDA graphs; never on a CPU."""
    return flags.cuda_graph_impl == "local" and device == "cuda"


def most_in_flight(actions: Sequence[Action], placement: Placement) -> list[int]:
    """Return, for each chunk of a rank, the peak number of micro-batches in flight.

    A micro-batch is in flight from its forward pass until its full backward pass
    (`Kind.BACKWARD`); in schedules that split backward passes, until the end of the step.
    """
    now = [0] * placement.num_chunks
    most = [0] * placement.num_chunks
    for action in passes_of(actions):
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
    """Return the CUDA graphs for each chunk of a rank; an empty list if the run uses none.

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


ForwardStep = Callable[[Any, torch.nn.Module, "StepCounts | None"], tuple[Tensor, LossFunction]]
"""A function that runs a chunk on a micro-batch.

It takes ``(batch, chunk, counts)``; ``counts`` has the step's numbers of targets, or is None. It
returns the chunk's output, and the loss function to apply to it on the last stage.
"""

Masks = Callable[[int], AbstractContextManager[None]]
"""A function that takes the index of a micro-batch, and returns a context for its forward pass.

Dropout masks drawn in this context depend on the samples, not on the layout of ranks.
"""


@cache
def places_of(placement: Placement) -> list[tuple[int, int]]:
    """Return ``(pipeline_rank, chunk)`` for each stage; ``chunk`` is its index on that rank."""
    stages = range(placement.num_stages)
    return [(placement.rank_of(stage), placement.chunk_of(stage)) for stage in stages]


class PipelineEngine:
    """Runs the steps of a pipeline schedule on this rank's model chunks.

    Args:
        schedule: one of `orders.SCHEDULES`.
        chunks: chunks of this rank in the order of their stages, wrapped for data parallelism.
        transformer_config: configuration with the hooks that megatron-core's schedules use.
        group_size: micro-batches that an interleaved chunk runs before the next, see `build_plan`.
        graphs: CUDA graphs of each chunk's layers; empty to run without graphs.
        shards_gradients: whether the chunks reduce their gradients after each backward pass, as
            `ShardedGradients` do.

    Attributes:
        num_targets: number of targets in the last step's losses on this rank, integer ``[]``.
    """

    num_targets: Tensor

    def __init__(
        self,
        schedule: str,
        chunks: Sequence[torch.nn.Module],
        transformer_config: TransformerConfig,
        context: ParallelContext,
        *,
        group_size: int | None = None,
        graphs: Sequence[ChunkGraphs] = (),
        shards_gradients: bool = False,
    ) -> None:
        self.schedule = schedule
        self.group_size = group_size
        self.chunks = list(chunks)
        self.graphs = graphs
        self.shards_gradients = shards_gradients
        self.transformer_config = transformer_config
        self.turns: Turns | None = getattr(transformer_config, "turns", None)
        self.context = context
        self.device = torch.cuda.current_device()

    def plan(self, num_microbatches: int, *, forward_only: bool) -> Plan:
        """Return the plan of one step, with the actions of all pipeline ranks."""
        return build_plan(
            self.schedule,
            pipeline_size=self.context.layout.pipeline_model_parallel_size,
            num_microbatches=num_microbatches,
            num_chunks=len(self.chunks),
            group_size=self.group_size,
            forward_only=forward_only,
            pairs=self.turns is not None and not forward_only,
        )

    def run(
        self,
        forward_step: ForwardStep,
        batches: Sequence[Any] | None,
        num_microbatches: int,
        shape: Shape,
        *,
        counts: StepCounts | None = None,
        masks: Masks | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        force_all_reduce: bool = False,
    ) -> list[Any]:
        """Run one step and, unless ``forward_only``, reduce the gradients over the replicas.

        The gradients are those of the loss summed over all targets. If the loss is a mean over the
        step's targets, the caller must divide the gradients by the sum of `num_targets` over ranks.

        Args:
            batches: the micro-batches; None or empty ones on stages that read no data.
            shape: shape ``[s, b, h]`` of all messages of this rank, or a list with one shape for
                each micro-batch; see `Channels`.
            counts: numbers of targets in the step, passed on to ``forward_step``.
            masks: see `Masks`; with None, dropout draws from the current random state.
            collect_non_loss_data: whether to call the loss function with ``non_loss_data=True``.
            force_all_reduce: whether each data-parallel rank gets the reduced gradients of all
                parameters, and not only of its shard.

        Returns:
            The loss function's report of each micro-batch; empty on ranks without the last stage.
        """
        plan = self.plan(num_microbatches, forward_only=forward_only)
        step = _Step(self, plan, shape, trains=not forward_only)
        step.forward_step = forward_step
        step.batches = batches
        step.counts = counts
        step.masks = masks
        step.collect_non_loss_data = collect_non_loss_data
        transformer_config = self.transformer_config
        finalizes = transformer_config.finalize_model_grads_func is not None and not forward_only
        if self.graphs and not forward_only:
            self._prepare_graphs(most_in_flight(step.actions, plan.placement))
        recorder = self.context.recorder
        if step.sync is not None:
            step.sync.start()
        for action in step.actions:
            peer = None if action.peer is None else self.context.pipeline_ranks[action.peer]
            with recorder.action(action, peer):
                if action.kind is Kind.FORWARD:
                    step.forward(action)
                elif action.kind is Kind.WEIGHT:
                    step.weight(action)
                elif action.kind is Kind.PAIR:
                    step.pair(action)
                elif action.kind in (Kind.BACKWARD, Kind.INPUT):
                    step.backward(action)
                else:
                    step.communicate(action)
        if step.channels is not None:
            step.channels.finish()
        if step.sync is not None:
            with recorder.phase("reduce"):
                step.sync.finish()
        self.num_targets = step.num_targets
        if finalizes:
            with recorder.phase("reduce"):
                for chunk in self.chunks:
                    zero_untouched(chunk)
                transformer_config.finalize_model_grads_func(
                    self.chunks,
                    None,
                    pg_collection=self.context.pgs,
                    force_all_reduce=force_all_reduce,
                )
        return step.reports

    def _prepare_graphs(self, in_flight: Sequence[int]) -> None:
        """Record the CUDA graphs that are missing.

        Chunk i needs graphs for ``in_flight[i]`` micro-batches, the peak number in flight. A chunk
        for which not all graphs can be recorded runs without graphs.
        """
        for chunk, needed in zip(self.graphs, in_flight, strict=True):
            if chunk.num_slots < needed:
                chunk.capture(needed)
            chunk.switch(chunk.num_slots >= needed)


class _Step:
    """One rank's work in one step: its micro-batches, and the tensors between its actions."""

    forward_step: ForwardStep
    batches: Sequence[Any] | None
    counts: StepCounts | None
    masks: Masks | None
    collect_non_loss_data: bool

    def __init__(self, engine: PipelineEngine, plan: Plan, shape: Shape, *, trains: bool) -> None:
        self.plan = plan
        self.trains = trains
        self.places = places_of(plan.placement)
        self.last_stage = len(self.places) - 1
        self.chunks = engine.chunks
        self.context = engine.context
        self.transformer_config = config = engine.transformer_config
        self.actions = plan.ranks[engine.context.pp_rank]
        self.channels: Channels | None = None
        if self.last_stage > 0:
            from megatron_ext.schedules.communication import Channels

            self.channels = Channels(config, engine.context, plan, shape)
        self.sync: GradientSync | None = None
        overlaps = config.no_sync_func or config.grad_sync_func or config.param_sync_func
        if trains and (overlaps or engine.shards_gradients):
            from megatron_ext.schedules.communication import GradientSync

            self.sync = GradientSync(engine.chunks, config, self.actions, plan.placement)
        self.recomputed_whole: frozenset[tuple[int, int]] = frozenset()
        partly = config.num_microbatches_with_partial_activation_checkpoints
        if trains and partly is not None:
            self.recomputed_whole = recomputed_whole(self.actions, partly)
        self.turns = engine.turns
        self.deferred: Any = getattr(config, "weight_gradients", None)
        self.inputs: dict[tuple[int, int], Tensor | None] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self.reports: list[Any] = []
        self.num_targets = torch.zeros([], dtype=torch.int, device=engine.device)

    def forward(self, action: Action) -> None:
        """Run one micro-batch through one chunk, and on the last stage through the loss."""
        key = action.microbatch, action.stage
        index = self.places[action.stage][1]
        chunk = self.chunks[index]
        entering = self._input(action)
        if self.sync is not None:
            self.sync.before_forward(index)
        # Transformer Engine's layers cast their weights to 8 bits only in the first micro-batch.
        if action.microbatch == 0 and hasattr(chunk, "set_is_first_microbatch"):
            chunk.set_is_first_microbatch()  # type: ignore[operator]
        set_current_microbatch(chunk, action.microbatch)
        get_attr_wrapped_model(chunk, "set_input_tensor")([entering])
        batch = None if self.batches is None else self.batches[action.microbatch]
        recomputing: AbstractContextManager[None] = nullcontext()
        if key in self.recomputed_whole:
            from megatron_ext.schedules.partial_recompute import recomputing_all

            recomputing = recomputing_all(chunk)
        with nullcontext() if self.masks is None else self.masks(action.microbatch), recomputing:
            output, loss = self.forward_step(batch, chunk, self.counts)
        # megatron-core divides the loss here (unless the step does), and scales auxiliary losses.
        output, num_targets = forward_step_calc_loss(
            chunk,
            output,
            checked(loss),
            self.transformer_config,
            index if len(self.chunks) > 1 else None,
            self.collect_non_loss_data,
            self.plan.num_microbatches,
            self.reports,
            self.context.pgs.cp.size(),
            action.stage == self.last_stage,
        )
        self.num_targets += num_targets
        if self.sync is not None:
            self.sync.after_forward(index)
        if self.trains:
            self.inputs[key] = entering
        if self.trains or action.stage < self.last_stage:
            self.outputs[key] = output

    def _input(self, action: Action) -> Tensor | None:
        """Return a chunk's input, the output of the previous stage; None on the first stage."""
        if action.stage == 0:
            return None
        before = action.microbatch, action.stage - 1
        if self.places[action.stage - 1][0] != self.context.pp_rank:
            assert self.channels is not None
            entering = self.channels.take(Kind.RECEIVE_INPUT, action)
        else:
            output = self.outputs[before] if self.trains else self.outputs.pop(before)
            # Chunks of one rank hand tensors over directly, but each has a backward pass of its
            # own.
            entering = output.detach()
            deallocate_output_tensor(output, self.transformer_config.deallocate_pipeline_outputs)
        return entering.requires_grad_(self.trains)

    def backward(self, action: Action) -> None:
        """Run a micro-batch's backward pass in a chunk.

        An action of `Kind.INPUT` leaves the weight gradients to a later `Kind.WEIGHT`. With
        ``--delay-wgrad-compute`` they are computed while experts exchange tokens, or at the end.
        """
        key = action.microbatch, action.stage
        gradient = None
        if action.stage < self.last_stage:
            if self.places[action.stage + 1][0] != self.context.pp_rank:
                assert self.channels is not None
                gradient = self.channels.take(Kind.RECEIVE_GRADIENT, action)
            else:
                gradient = self.gradients.pop((action.microbatch, action.stage + 1))
        if self.sync is not None:
            self.sync.before_backward(action)
        with nullcontext() if self.deferred is None else self.deferred.collect(key):
            given = backward_step(
                self.inputs.pop(key),
                self.outputs.pop(key),
                gradient,
                self.transformer_config,
            )
        if self.deferred is not None and action.kind is Kind.BACKWARD:
            self.deferred.compute(key)
        if action.stage > 0:
            self.gradients[key] = given
        if self.sync is not None:
            self.sync.computed(action)

    def pair(self, action: Action) -> None:
        """Run a micro-batch's forward pass and another one's backward pass in turns."""
        assert self.turns is not None
        forward, backward = action.passes
        recorder = self.context.recorder
        self.turns.run(
            lambda: self.backward(backward),
            lambda: self.forward(forward),
            took_turn=lambda own: recorder.charge_to("forward" if own else "backward"),
        )

    def weight(self, action: Action) -> None:
        """Compute the weight gradients that a `Kind.INPUT` pass has deferred."""
        self.deferred.compute((action.microbatch, action.stage))
        if self.sync is not None:
            self.sync.computed(action)

    def communicate(self, action: Action) -> None:
        """Start the send or the receive that ``action`` describes."""
        key = action.microbatch, action.stage
        assert action.peer is not None and self.channels is not None
        if action.kind is Kind.SEND_OUTPUT:
            output = self.outputs[key] if self.trains else self.outputs.pop(key)
            self.channels.send(action, output)
            deallocate_output_tensor(output, self.transformer_config.deallocate_pipeline_outputs)
        elif action.kind is Kind.SEND_GRADIENT:
            self.channels.send(action, self.gradients.pop(key))
        else:
            self.channels.receive(action)
