"""One training or evaluation step, from batches to losses and a parameter update.

`StepRunner.train` is a step from end to end; `StepRunner.compute_gradients` and `StepRunner.update`
are its two halves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext import core
from megatron_ext.config.run import RunConfig
from megatron_ext.data.batch import Batch
from megatron_ext.layers.weight_gradients import StepGradients
from megatron_ext.losses.contract import Report, StepCounts
from megatron_ext.optim.schedule import Schedule
from megatron_ext.optim.update import UpdateResult, all_decide_on_device, update_parameters
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.schedules.plan import Shape
from megatron_ext.schedules.runtime import Masks, PipelineEngine, step_graphs
from megatron_ext.train.task import Task

if TYPE_CHECKING:
    from megatron_ext.checkpoint.state import ExtraState
    from megatron_ext.layers.auxiliary_loss import AuxiliaryScale
    from megatron_ext.layers.fp8.linear import AmaxHistories
    from megatron_ext.optim.qk_clip import AttentionLogits
    from megatron_ext.train.core_schedule import CoreSchedule


@dataclass(frozen=True)
class StepResult:
    """The losses of a training step, and its update.

    Attributes:
        losses: mean of each reported loss over the step's targets; before the last stage only
            those of MoE routers.
        counts: for each loss, the sum of its targets' weights; 1 for a router's loss.
        model_update: update of the run's model; None if the step trained only other networks.
        flops: floating-point operations on all ranks, if the step counts them; if None,
            `Task.step_stats` gives the number.
    """

    losses: dict[str, Tensor]
    counts: dict[str, Tensor]
    update: UpdateResult
    model_update: UpdateResult | None
    flops: float | None = None


@dataclass(frozen=True)
class StepInputs:
    """The micro-batches of a training step.

    Attributes:
        batches: this rank's micro-batches; None on stages that read no data.
        num_microbatches: number of micro-batches of each data-parallel rank.
        consumed_samples: number of samples in all earlier steps, for ``--deterministic-dropout``.
        seq_length: tokens of a sample; None for ``--seq-length``.
    """

    batches: Sequence[Any] | None
    num_microbatches: int
    consumed_samples: int = 0
    seq_length: int | None = None


@dataclass(frozen=True)
class StepLosses:
    """The losses of a training step, after its gradients have been computed.

    Attributes:
        reports: ``[sum, count]`` of each loss for each micro-batch of this rank; empty before the
            last stage.
        totals: ``[sum, count]`` of each loss over all micro-batches, data- and context-parallel
            ranks.
        gradient_scale: factor by which the gradients must still be multiplied, float32 ``[]``;
            None for 1.
    """

    reports: list[Report]
    totals: dict[str, Tensor]
    gradient_scale: Tensor | None = None


Approval = Callable[[Mapping[str, Tensor], Tensor], Tensor]
Guard = Callable[[StepInputs], tuple[StepLosses, UpdateResult]]


class StepRunner:
    """Runs the pipeline schedule over this rank's chunks, and updates the parameters.

    Attributes:
        pipeline: runs the pipeline: ``engine``, or megatron-core's own schedule.
        engine: our runtime of schedules; None with megatron-core's own.
        observer: called before the update, once every data-parallel rank has the reduced gradients
            of all its parameters; None if nothing looks at the gradients.
        check_zeroed: called with the chunks after their gradients have been set to zero.
        scales_in_update: whether the update may divide the gradients by the step's number of
            targets. With an observer, they are divided before it is called.
        approvals: called before an update, by all ranks together, with `StepLosses.totals` and the
            gradient norm ``[]``; each returns whether the update may be applied, bool ``[]``.
        step_guard: replaces, in `train`, the calls of `zero_gradients`, `compute_gradients` and
            `update`, for example to repeat them. It takes `StepInputs`, and returns the results of
            the last two. None to call each of the three once.
        extra_state: checkpointed state besides the run's model; None if there is none.
        attention_logits: follows the largest logits of attention; None if nothing asks for them.
    """

    extra_state: ExtraState | None = None
    attention_logits: AttentionLogits | None = None
    scales_in_update = False

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        context: ParallelContext,
        transformer_config: TransformerConfig,
        chunks: list[DistributedDataParallel],
        optimizer: MegatronOptimizer | None,
        scheduler: Schedule | None,
    ) -> None:
        self.config = config
        self.task = task
        self.context = context
        self.chunks = chunks
        self.transformer_config = transformer_config
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.device = next(p for chunk in chunks for p in chunk.parameters()).device
        self._forward_step: Any = None
        if task.forward_step is not None:
            self._forward_step = partial(task.forward_step, config)
        self._auxiliary: AuxiliaryScale = transformer_config.auxiliary_scale
        self._has_layer_losses = transformer_config.num_moe_experts is not None or bool(
            transformer_config.dsa_indexer_loss_coeff
        )
        self._has_auxiliary_losses = self._has_layer_losses or task.auxiliary_losses
        self.amax_histories: AmaxHistories | None = None
        self._weights_kept: Callable[[], AbstractContextManager[None]] = nullcontext
        if config.fp8.fp8_format is not None:
            from megatron_ext.layers.fp8.linear import AmaxHistories, KeptWeights

            self.amax_histories = AmaxHistories(chunks)
            self._weights_kept = KeptWeights(chunks).kept
        schedule = config.parallel.pipeline_schedule or ""
        self.engine: PipelineEngine | None = None
        self.pipeline: PipelineEngine | CoreSchedule
        if schedule.startswith("core-"):
            from megatron_ext.train.core_schedule import CoreSchedule

            self.pipeline = CoreSchedule(chunks, transformer_config, context)
        else:
            self.pipeline = self.engine = PipelineEngine(
                schedule,
                chunks,
                transformer_config,
                context,
                group_size=config.parallel.microbatch_group_size_per_vp_stage,
                graphs=step_graphs(config.cuda_graphs, config.device, chunks),
                shards_gradients=config.optimizer.shards_gradients,
            )
        self._gradients = StepGradients(chunks)
        self._shards_gradients = config.optimizer.shards_gradients
        self._micro_batch_size = config.training.batch_sizes[0]
        self._unsettled: list[tuple[UpdateResult, OptimizerParamScheduler, int]] = []
        self.observer: Callable[[], None] | None = None
        self.approvals: list[Approval] = []
        self.step_guard: Guard | None = None
        self.check_zeroed: Callable[[list[DistributedDataParallel]], None] | None = None
        if optimizer is not None:
            self._connect(optimizer)

    @property
    def trained_chunks(self) -> list[DistributedDataParallel]:
        """Return the trained model chunks, whose replicas must stay equal."""
        return self.chunks

    @property
    def schedules(self) -> list[Schedule]:
        """Return the learning-rate schedules of the trained networks, the model's first."""
        return [] if self.scheduler is None else [self.scheduler]

    def model_steps(self, steps: int) -> int:
        """Return how many of a run's first ``steps`` steps update its model: here all.

        A subclass may have steps that update only other networks.
        """
        return steps

    def _connect(self, optimizer: MegatronOptimizer) -> None:
        """Set megatron-core's hooks that scale, overlap and finalize gradients."""
        hooks = self.transformer_config
        flags = self.config.optimizer
        hooks.grad_scale_func = optimizer.scale_loss
        hooks.finalize_model_grads_func = finalize_model_grads
        self.scales_in_update = self.engine is not None and all_decide_on_device(optimizer)
        if flags.overlap_grad_reduce and not flags.shards_gradients:
            hooks.no_sync_func = core.one_or_list([chunk.no_sync for chunk in self.chunks])
            if flags.align_grad_reduce:
                hooks.grad_sync_func = core.one_or_list([c.start_grad_sync for c in self.chunks])
        if flags.gathers_in_forward and flags.align_param_gather:
            hooks.param_sync_func = core.one_or_list([c.start_param_sync for c in self.chunks])
        if hooks.qk_clip or hooks.log_max_attention_logit:
            from megatron_ext.optim.qk_clip import AttentionLogits

            logits = AttentionLogits(self.chunks, optimizer, hooks, self.context.pgs)
            self.attention_logits = logits
            self.approvals.append(logits.before_update)

    def train(self, inputs: StepInputs, num_samples: int) -> StepResult:
        """Compute the gradients over a global batch, and update the parameters once.

        The learning-rate schedule advances by ``num_samples``, the samples of this step.
        """
        assert self.scheduler is not None
        if self.step_guard is None:
            self.zero_gradients()
            step = self.compute_gradients(inputs)
            update = self.update(step)
        else:
            step, update = self.step_guard(inputs)
        self._follow(update, self.scheduler, num_samples)
        losses = {name: mean_of(total) for name, total in step.totals.items()}
        counts = {name: total[1] for name, total in step.totals.items()}
        if self._has_layer_losses:
            from megatron_ext.train.auxiliary_losses import take_auxiliary_losses

            of_layers = take_auxiliary_losses(
                self.transformer_config, self.context, inputs.num_microbatches
            )
            losses |= of_layers
            # A layer's loss is a mean already, so it counts as one target.
            counts |= {name: torch.ones_like(loss) for name, loss in of_layers.items()}
        return StepResult(losses, counts, update, update)

    def zero_gradients(self) -> None:
        """Set all gradients to zero before a step.

        A weight's gradient is left as it is if the first backward pass of the step overwrites it
        instead of adding to it.
        """
        assert self.optimizer is not None
        # CUDA graphs always add to the gradients, and so do products with sharded gradients.
        adds = self.engine is None or self.engine.graphs or self._shards_gradients
        self._gradients.start(overwrite=not adds and self.check_zeroed is None)
        self.optimizer.zero_grad()
        if self.check_zeroed is not None:
            self.check_zeroed(self.chunks)

    def compute_gradients(self, inputs: StepInputs) -> StepLosses:
        """Run all forward and backward passes of a step; reduce its gradients and losses."""
        num_microbatches = inputs.num_microbatches
        batches = self.prepared(inputs)
        counts = self._count(batches, num_microbatches)
        masks = self._masks(inputs.consumed_samples)
        observed = self.observer is not None
        # 8-bit layers cast their weights once for all micro-batches of the step.
        with self._weights_kept():
            reports = self.pipeline.run(
                self._forward_step,
                batches or [_NO_BATCH] * num_microbatches,
                num_microbatches,
                self.shape_of(batches, inputs.seq_length),
                counts=counts,
                masks=masks,
                force_all_reduce=observed,
            )
        # megatron-core's own schedules have already divided the gradients.
        divides = self.engine is not None and self.transformer_config.calculate_per_token_loss
        num_targets = self.engine.num_targets if self.engine is not None and divides else None
        with self.context.recorder.phase("reduce"):
            totals, scale = reduce_step(reports, num_targets, self.context)
            # An observer must see divided gradients, and some optimizers cannot divide in the
            # update.
            if scale is not None and (observed or not self.scales_in_update):
                for chunk in self.chunks:
                    chunk.scale_gradients(scale)
                scale = None
        if self.observer is not None:
            from megatron_ext.layers.gradient_shards import whole_gradients

            with whole_gradients(self.chunks):
                self.observer()
        if self.amax_histories is not None:
            self.amax_histories.advance()
        return StepLosses(reports, totals, scale)

    def update(self, step: StepLosses) -> UpdateResult:
        """Apply the gradients, unless they are not finite or one of `approvals` returns False."""
        assert self.optimizer is not None
        self._give_memory_back(2)
        # The previous update is done by now, while the device still works on this step: no wait.
        self.settle()

        def approve(norm: Tensor) -> Tensor:
            return torch.stack([approval(step.totals, norm) for approval in self.approvals]).all()

        with self.context.recorder.phase("update"):
            update = update_parameters(
                self.optimizer,
                self.config.optimizer.clip_grad,
                step.gradient_scale,
                approve if self.approvals else None,
            )
        self._give_memory_back(1)
        return update

    def evaluate(
        self,
        batches: Sequence[Batch] | None,
        num_microbatches: int,
        *,
        collect_non_loss_data: bool = False,
    ) -> list[Any]:
        """Run the forward passes of a step, and return the report of each micro-batch.

        On the last stage a report is ``[sum, count]`` of each loss; with ``collect_non_loss_data``
        it is the data for `Task.process_non_loss_data`. Before the last stage the list is empty.
        """
        batches = self.prepared(StepInputs(batches, num_microbatches))
        masks = self._masks(0)
        return self.pipeline.run(
            self._forward_step,
            batches or [_NO_BATCH] * num_microbatches,
            num_microbatches,
            self.shape_of(batches, None),
            masks=masks,
            forward_only=True,
            collect_non_loss_data=collect_non_loss_data,
        )

    def prepared(self, inputs: StepInputs) -> Sequence[Batch] | None:
        """Return a step's micro-batches, changed by `Task.prepare_batches` on the last stage.

        All ranks call this together before a step's first forward pass, so that a subclass may run
        another network on the micro-batches. The result is None on stages that read no data.
        """
        batches = inputs.batches
        prepare = self.task.prepare_batches
        if prepare is None or batches is None or not self.context.is_last_stage:
            return batches
        return prepare(self.config, batches, self.context)

    def _masks(self, consumed_samples: int) -> Masks | None:
        """Return a function from a micro-batch's index to a context that seeds its dropout.

        Return None without ``--deterministic-dropout``.
        """
        if not self.config.model.deterministic_dropout:
            return None
        from megatron_ext.layers.dropout import microbatch_masks

        size = self._micro_batch_size
        replicas = self.context.pgs.dp.size()

        def masks(microbatch: int) -> AbstractContextManager[None]:
            number = microbatch * replicas + self.context.dp_rank
            return microbatch_masks(self.config.training.seed, consumed_samples + number * size)

        return masks

    def shape_of(self, batches: Sequence[Any] | None, seq_length: int | None) -> Shape:
        """Return the shape ``[s, b, h]`` of the tensors that this rank sends to the next stage.

        If the task has a `Task.boundary_shape`, return a list with the shape of each micro-batch.
        """
        if self.task.boundary_shape is not None:
            assert batches is not None
            shape_of = self.task.boundary_shape
            return [shape_of(batch, self.chunks[0]) for batch in batches]
        length = seq_length or self.config.model.seq_length
        assert length is not None
        length //= self.context.pgs.cp.size()
        if self.transformer_config.sequence_parallel:
            length //= self.context.pgs.tp.size()
        return length, self._micro_batch_size, self.transformer_config.hidden_size

    def _count(self, batches: Sequence[Batch] | None, num_microbatches: int) -> StepCounts | None:
        """Set the scale of the auxiliary losses, and return the counts of the step's targets.

        All ranks call this together; on ranks without the last stage, the result is None.
        """
        counts = None
        if batches is not None and self.context.is_last_stage:
            counts = count_targets(batches, self.context)
        if not self._has_auxiliary_losses:
            return counts
        if not self.config.training.calculate_per_token_loss:
            self._auxiliary.value = self.context.pgs.cp.size() / num_microbatches
            return counts
        main = counts.main if counts is not None else torch.zeros((), device=self.device)
        last = self.context.last_stage_pp_rank
        torch.distributed.broadcast(main, group=self.context.pgs.pp, group_src=last)
        replicas = self.context.layout.data_parallel_size
        self._auxiliary.value = main / (num_microbatches * replicas)
        return counts

    def _follow(
        self, update: UpdateResult, scheduler: OptimizerParamScheduler, num_samples: int
    ) -> None:
        """Advance ``scheduler`` by ``num_samples`` if ``update`` was applied, and not skipped.

        While only the GPU knows whether it was, this is left to a later call of `settle`.
        """
        self._unsettled.append((update, scheduler, num_samples))
        if update.is_read:
            self.settle()

    @property
    def settled(self) -> bool:
        """Return whether the learning-rate schedules have advanced for all updates so far."""
        return not self._unsettled

    def settle(self) -> None:
        """Wait for pending updates; advance the learning-rate schedule for each applied one."""
        while self._unsettled:
            update, scheduler, num_samples = self._unsettled.pop(0)
            with self.context.recorder.phase("update"):
                if update.applied:
                    scheduler.step(increment=num_samples)

    def _give_memory_back(self, level: int) -> None:
        """Free cached GPU memory if ``--empty-unused-memory-level`` is at least ``level``."""
        if self.config.training.empty_unused_memory_level >= level:
            torch.cuda.empty_cache()


_NO_BATCH = Batch(*(None,) * 4)  # type: ignore[arg-type]


def count_targets(batches: Sequence[Batch], context: ParallelContext) -> StepCounts:
    """Count the targets of a step, summed over all micro-batches, data- and context-parallel ranks.

    All data- and context-parallel ranks of the last stage call this together.
    """

    def counted(batch: Batch) -> Tensor:
        weights = (batch.loss_weights, *batch.mtp_loss_weights)
        targets = torch.count_nonzero(batch.loss_weights).float()
        return torch.stack([targets, *(weight.sum() for weight in weights)])

    sums = torch.stack([counted(batch) for batch in batches]).sum(dim=0)
    with context.recorder.phase("reduce"):
        torch.distributed.all_reduce(sums, group=context.pgs.dp_cp)
    return StepCounts(main=sums[0], weight=sums[1], mtp=sums[2:], num_microbatches=len(batches))


def reduce_reports(reports: Sequence[Report], context: ParallelContext) -> dict[str, Tensor]:
    """Sum each loss's ``[sum, count]`` over micro-batches, data- and context-parallel ranks."""
    with context.recorder.phase("reduce"):
        return reduce_step(reports, None, context)[0]


def reduce_step(
    reports: Sequence[Report], num_targets: Tensor | None, context: ParallelContext
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return the sums of `reduce_reports`, and 1 / number of targets as float32 ``[]``.

    All ranks call this together; a single reduction sums losses and targets. ``num_targets``,
    integer ``[]``, is the number of targets in this rank's losses; only the last stage's value is
    used. If it is None, so is the second result. If there are no targets, the second result is 1.
    Unlike megatron-core's ``finalize_model_grads``, this does not wait for the device.
    """
    keys = list(reports[0]) if reports else []
    # In double precision, because single precision cannot represent counts beyond 2^24 exactly.
    entries = [torch.stack([report[key].view(2).double() for report in reports]) for key in keys]
    numbers = [number for entry in entries for number in entry.sum(dim=0).unbind(0)]
    if num_targets is not None:
        numbers.append(num_targets.double())
    if not numbers:
        return {}, None
    summed = torch.stack(numbers)
    if reports:
        torch.distributed.all_reduce(summed, group=context.pgs.dp_cp)
    totals = dict(zip(keys, summed[: 2 * len(keys)].view(-1, 2).unbind(0), strict=True))
    if num_targets is None:
        return totals, None
    targets = summed[-1]
    if context.pgs.pp.size() > 1:
        last = context.last_stage_pp_rank
        torch.distributed.broadcast(targets, group=context.pgs.pp, group_src=last)
    return totals, torch.where(targets > 0, 1.0 / targets.float(), 1.0)


def mean_of(entry: Tensor) -> Tensor:
    """Return sum / count of ``entry``, a tensor ``[sum, count]``; 0 if the count is 0."""
    return torch.where(entry[1] > 0, entry[0] / entry[1].clamp(min=1e-30), 0.0)


def means_of(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the mean of each loss from its ``[sum, count]``.

    A loss whose count is 0 is left out, except the first one, the run's main loss; its mean is then
    0.
    """
    first = next(iter(totals), None)
    # In double precision: sums of a single step may still be in single precision.
    return {
        name: float(mean_of(total.double()))
        for name, total in totals.items()
        if name == first or total[1] > 0
    }
