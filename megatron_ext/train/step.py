"""One training or evaluation step, from batches to losses and a parameter update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.data.batch import Batch
from megatron_ext.layers.auxiliary_loss import AuxiliaryScale
from megatron_ext.layers.dropout import microbatch_masks
from megatron_ext.layers.fp8.linear import AmaxHistories, KeptWeights
from megatron_ext.layers.gradient_shards import whole_gradients
from megatron_ext.layers.weight_gradients import StepGradients
from megatron_ext.losses.contract import LossFunction, Report, StepCounts, checked
from megatron_ext.optim.schedule import Schedule
from megatron_ext.optim.update import UpdateResult, all_decide_on_device, update_parameters
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.schedules.communication import Shape
from megatron_ext.schedules.runtime import PipelineEngine, step_graphs
from megatron_ext.train.step_losses import mean_of, reduce_reports, take_auxiliary_losses
from megatron_ext.train.task import Task

if TYPE_CHECKING:
    from megatron_ext.checkpoint.state import ExtraState


@dataclass(frozen=True)
class StepResult:
    """The losses of a training step, and the update that it made.

    Attributes:
        losses: mean of each reported loss over the step's targets; on the last stage only.
        counts: for each loss, the sum of its targets' weights.
        model_update: update of the run's model; None where the step trained other networks only.
        flops: floating-point operations on all ranks, if the step counts them; None to use those
            of `Task.step_stats`.
    """

    losses: dict[str, Tensor]
    counts: dict[str, Tensor]
    update: UpdateResult
    model_update: UpdateResult | None
    flops: float | None = None


Approval = Callable[[Sequence[Report], Tensor], Tensor]
Compute = Callable[[], list[Report]]
Update = Callable[[Sequence[Report]], UpdateResult]
Guard = Callable[[Compute, Update], tuple[list[Report], UpdateResult]]


class StepRunner:
    """Runs the pipeline schedule over this rank's chunks, and updates the parameters.

    Attributes:
        seq_length: tokens of a sample in the next step, None if the task has no such length.
        engine: runs the pipeline; None if megatron-core's own schedule does.
        observer: called before the update, when each data-parallel rank has all reduced gradients.
        check_zeroed: called with the chunks after their gradients have been set to zero.
        scales_in_update: whether the update divides the gradients by the step's targets, unless an
            observer is to see them divided.
        approvals: each called before an update, on all ranks together, with this rank's reports and
            the gradient norm ``[]``; returns whether the update may be applied, bool ``[]``.
        guard: called with two functions in place of the plain step: the first computes gradients
            and returns reports, the second updates; it returns the reports and the update.
        extra_state: state that a checkpoint holds besides the run's model; None for none.
    """

    extra_state: ExtraState | None = None
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
        self._auxiliary: AuxiliaryScale = transformer_config.auxiliary_scale
        self._has_auxiliary_losses = (
            transformer_config.num_moe_experts is not None or task.auxiliary_losses
        )
        in_8_bits = config.fp8.fp8_format is not None
        self.amax_histories = AmaxHistories(chunks) if in_8_bits else None
        self._weights_kept = KeptWeights(chunks).kept if in_8_bits else nullcontext
        schedule = config.parallel.pipeline_schedule or ""
        self.engine: PipelineEngine | None = None
        if not schedule.startswith("core-"):
            group_size = config.parallel.microbatch_group_size_per_vp_stage
            graphs = step_graphs(config.cuda_graphs, config.device, chunks)
            self.engine = PipelineEngine(
                schedule, chunks, transformer_config, context, group_size=group_size, graphs=graphs
            )
        self._gradients = StepGradients(chunks)
        self._micro_batch_size = config.training.batch_sizes[0]
        self.seq_length = config.model.seq_length
        self._unsettled: list[tuple[UpdateResult, OptimizerParamScheduler, int]] = []
        self.observer: Callable[[], None] | None = None
        self.approvals: list[Approval] = []
        self.guard: Guard | None = None
        self.check_zeroed: Callable[[list[DistributedDataParallel]], None] | None = None
        if optimizer is not None:
            self._connect(optimizer)

    @property
    def trained_chunks(self) -> list[DistributedDataParallel]:
        """Return the model chunks that train, whose replicas must stay equal."""
        return self.chunks

    @property
    def schedules(self) -> list[Schedule]:
        """Return the schedules of learning rates of the networks that train, the model's first."""
        return [] if self.scheduler is None else [self.scheduler]

    def model_steps(self, steps: int) -> int:
        """Return how many of a run's first ``steps`` steps train its model: all, in this class."""
        return steps

    def _connect(self, optimizer: MegatronOptimizer) -> None:
        """Set megatron-core's hooks that scale, overlap and finalize gradients."""
        told = self.transformer_config
        flags = self.config.optimizer
        told.grad_scale_func = optimizer.scale_loss
        told.finalize_model_grads_func = finalize_model_grads
        self.scales_in_update = self.engine is not None and all_decide_on_device(optimizer)
        if flags.overlap_grad_reduce and not flags.shards_gradients:
            told.no_sync_func = _one_or_list([chunk.no_sync for chunk in self.chunks])
            if flags.align_grad_reduce:
                told.grad_sync_func = _one_or_list([c.start_grad_sync for c in self.chunks])
        if flags.overlap_param_gather and flags.align_param_gather:
            told.param_sync_func = _one_or_list([c.start_param_sync for c in self.chunks])

    def forward_backward(
        self,
        batches: Sequence[Batch] | None,
        num_microbatches: int,
        *,
        forward_only: bool,
        consumed_samples: int = 0,
        collect_non_loss_data: bool = False,
        scale_gradients: bool = True,
    ) -> list[Any]:
        """Run the schedule over ``num_microbatches`` micro-batches on each data-parallel rank.

        Args:
            batches: micro-batches of this rank; None on stages that read no data.
            consumed_samples: samples of all earlier steps, for ``--deterministic-dropout``.
            collect_non_loss_data: return data for `Task.process_non_loss_data` instead of reports.
            scale_gradients: see `PipelineEngine.run`; without an engine it must be True.

        Returns one report, ``[sum, count]`` by loss, per micro-batch; none before the last stage.
        """
        prepare = self.task.prepare_batches
        run_chunk = self.task.forward_step
        assert run_chunk is not None
        if prepare is not None and batches is not None and self.context.is_last_stage:
            batches = prepare(self.config, batches, self.context)
        counts = None if forward_only else self._count(batches, num_microbatches)
        masks = self._masks(consumed_samples)

        def forward_step(
            iterator: Iterator[Batch] | None, chunk: torch.nn.Module
        ) -> tuple[Tensor, LossFunction]:
            batch = next(iterator) if iterator is not None else _NO_BATCH
            with masks(chunk):
                output, loss = run_chunk(self.config, batch, chunk, counts)
            return output, checked(loss)

        iterators = [None if batches is None else iter(batches) for _ in self.chunks]
        wishes = {"forward_only": forward_only, "collect_non_loss_data": collect_non_loss_data}
        wishes["force_all_reduce"] = self.observer is not None
        if self.engine is not None:
            shape = self._shape(batches)
            wishes["scale_gradients"] = scale_gradients
            return self.engine.run(forward_step, iterators, num_microbatches, shape, **wishes)
        with self.context.recorder.phase("forward"):
            reports: list[Any] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=_one_or_list(iterators),
                model=_one_or_list(self.chunks),
                num_microbatches=num_microbatches,
                seq_length=self.seq_length,
                micro_batch_size=self._micro_batch_size,
                decoder_seq_length=self.seq_length,
                **wishes,
            )
        return reports

    def _masks(
        self, consumed_samples: int
    ) -> Callable[[torch.nn.Module], AbstractContextManager[None]]:
        """Return a function that gives a chunk the dropout context of its next micro-batch."""
        if not self.config.model.deterministic_dropout:
            return lambda chunk: nullcontext()
        seen: Counter[torch.nn.Module] = Counter()
        size = self._micro_batch_size
        replicas = self.context.pgs.dp.size()

        def masks(chunk: torch.nn.Module) -> AbstractContextManager[None]:
            number = seen[chunk] * replicas + self.context.dp_rank
            seen[chunk] += 1
            return microbatch_masks(self.config.training.seed, consumed_samples + number * size)

        return masks

    def _shape(self, batches: Sequence[Any] | None) -> Shape:
        """Return the shape ``[s, b, h]`` of the tensors that this rank sends to the next stage.

        If the task says the shape, micro-batches may differ, and it is a list of one for each.
        """
        if self.task.boundary_shape is not None:
            assert batches is not None
            shape_of = self.task.boundary_shape
            return [shape_of(batch, self.chunks[0]) for batch in batches]
        length = self.seq_length
        assert length is not None
        length //= self.context.pgs.cp.size()
        if self.transformer_config.sequence_parallel:
            length //= self.context.pgs.tp.size()
        return length, self._micro_batch_size, self.transformer_config.hidden_size

    def _count(self, batches: Sequence[Batch] | None, num_microbatches: int) -> StepCounts | None:
        """Set the scale of auxiliary losses, and return the target counts of the step.

        The counts are None before the last stage. All ranks call this together.
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
        last = self.context.last_stage_rank
        torch.distributed.broadcast(main, group=self.context.pgs.pp, group_src=last)
        replicas = self.context.layout.data_parallel_size
        self._auxiliary.value = main / (num_microbatches * replicas)
        return counts

    def train(
        self,
        batches: Sequence[Batch] | None,
        num_microbatches: int,
        consumed_samples: int,
        num_samples: int,
    ) -> StepResult:
        """Compute the gradients over a global batch, and update the parameters once.

        ``num_samples``, the samples of this step, advances the learning-rate schedule. For the
        other arguments see `forward_backward`.
        """
        assert self.scheduler is not None
        compute = partial(self._compute, batches, num_microbatches, consumed_samples)
        if self.guard is None:
            reports = compute()
            update = self._update(reports)
        else:
            reports, update = self.guard(compute, self._update)
        self._follow(update, self.scheduler, num_samples)
        totals = reduce_reports(reports, self.context)
        losses = {name: mean_of(total) for name, total in totals.items()}
        counts = {name: total[1] for name, total in totals.items()}
        told = self.transformer_config
        if told.num_moe_experts is not None:
            auxiliary = take_auxiliary_losses(told, self.context, num_microbatches)
            losses |= auxiliary
            counts |= {name: torch.ones_like(loss) for name, loss in auxiliary.items()}
        return StepResult(losses, counts, update, update)

    def _compute(
        self, batches: Sequence[Batch] | None, num_microbatches: int, consumed_samples: int
    ) -> list[Report]:
        """Compute the reduced gradients of a step, and return the reports of its losses."""
        assert self.optimizer is not None
        # The kernels of CUDA graphs always add, and so do products to gradients that are sharded.
        adds = self.engine is None or self.engine.graphs or self.check_zeroed is not None
        adds = adds or self.config.optimizer.shards_gradients
        self._gradients.start(overwrite=not adds)
        self.optimizer.zero_grad()
        if self.check_zeroed is not None:
            self.check_zeroed(self.chunks)
        scales = self.observer is not None or not self.scales_in_update
        with self._weights_kept():
            reports = self.forward_backward(
                batches, num_microbatches, forward_only=False, consumed_samples=consumed_samples,
                scale_gradients=scales,
            )  # fmt: skip
        if self.observer is not None:
            with whole_gradients(self.chunks):
                self.observer()
        if self.amax_histories is not None:
            self.amax_histories.advance()
        return reports

    def _update(self, reports: Sequence[Report]) -> UpdateResult:
        """Apply the gradients, unless they are not finite or one of `approvals` is False."""
        assert self.optimizer is not None
        self._give_memory_back(2)
        # The previous update is over, while the passes of this step still wait for the device.
        self.settle()
        scale = self.engine.gradient_scale if self.engine is not None else None
        approve = partial(self._approve, reports) if self.approvals else None
        clip_grad = self.config.optimizer.clip_grad
        with self.context.recorder.phase("update"):
            update = update_parameters(self.optimizer, clip_grad, scale, approve)
        self._give_memory_back(1)
        return update

    def _approve(self, reports: Sequence[Report], norm: Tensor) -> Tensor:
        return torch.stack([approval(reports, norm) for approval in self.approvals]).all()

    def _follow(
        self, update: UpdateResult, scheduler: OptimizerParamScheduler, num_samples: int
    ) -> None:
        """Queue an update for ``scheduler``; settle the queue if the update's outcome is known."""
        self._unsettled.append((update, scheduler, num_samples))
        if update.known:
            self.settle()

    @property
    def settled(self) -> bool:
        """Return whether the learning-rate schedules include the last update."""
        return not self._unsettled

    def settle(self) -> None:
        """Wait for pending updates; advance the learning-rate schedule of each that was applied."""
        while self._unsettled:
            update, scheduler, num_samples = self._unsettled.pop(0)
            with self.context.recorder.phase("update"):
                if update.applied:
                    scheduler.step(increment=num_samples)

    def _give_memory_back(self, level: int) -> None:
        """Empty the GPU memory cache if ``--empty-unused-memory-level`` is at least ``level``."""
        if self.config.training.empty_unused_memory_level >= level:
            torch.cuda.empty_cache()


_NO_BATCH = Batch(*(None,) * 4)  # type: ignore[arg-type]


def _one_or_list(items: list[Any]) -> Any:
    """Return the only item of a list, or a longer list itself, as megatron-core expects."""
    return items[0] if len(items) == 1 else items


def count_targets(batches: Sequence[Batch], context: ParallelContext) -> StepCounts:
    """Count the targets of a step over all micro-batches, data- and context-parallel ranks."""

    def counted(batch: Batch) -> Tensor:
        weights = (batch.loss_weights, *batch.mtp_loss_weights)
        targets = torch.count_nonzero(batch.loss_weights).float()
        return torch.stack([targets, *(weight.sum() for weight in weights)])

    sums = torch.stack([counted(batch) for batch in batches]).sum(dim=0)
    with context.recorder.phase("reduce"):
        torch.distributed.all_reduce(sums, group=context.pgs.dp_cp)
    return StepCounts(main=sums[0], weight=sums[1], mtp=sums[2:], num_microbatches=len(batches))
