"""The parts of one training run on one rank, under one name each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.config.run import RunConfig
from megatron_ext.data.loader import BatchSource
from megatron_ext.optim.ema import ShardedEMA
from megatron_ext.optim.update import ParameterGather
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.batch_size import BatchSize, Progress
from megatron_ext.train.reporting.build import Reporters
from megatron_ext.train.step import StepRunner
from megatron_ext.train.stop_requests import StopRequests
from megatron_ext.train.task import Task
from megatron_ext.train.totals import params_norm


@dataclass
class Run:
    """The parts of one training run on one rank."""

    config: RunConfig
    context: ParallelContext
    device: torch.device
    task: Task
    num_iterations: int
    batch_size: BatchSize
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer | None
    scheduler: OptimizerParamScheduler | None
    runner: StepRunner
    parameter_gather: ParameterGather
    checkpoints: CheckpointManager
    progress: Progress
    stop_requests: StopRequests
    train_source: BatchSource = field(default_factory=lambda: BatchSource(None, None))
    valid_sources: list[BatchSource] = field(default_factory=list)
    test_sources: list[BatchSource] = field(default_factory=list)
    ema: ShardedEMA | None = None
    ema_sources: dict[str, list[BatchSource]] = field(default_factory=dict)
    reporters: Reporters = field(default_factory=lambda: Reporters([]))
    peak_flops: float | None = None

    @property
    def evaluates(self) -> bool:
        """Return whether validation is asked for."""
        return self.config.training.evaluates

    @property
    def evaluation_batch_size(self) -> int:
        """Return the samples of one evaluation step: the global batch at the end of a ramp-up."""
        return self.config.training.batch_sizes[1]

    @property
    def evaluation_microbatches(self) -> int:
        """Return the micro-batches of one evaluation step on each data-parallel rank."""
        micro_batch_size, _ = self.config.training.batch_sizes
        share = micro_batch_size * self.context.layout.data_parallel_size
        return self.evaluation_batch_size // share

    def rows_of(self, num_microbatches: int) -> int:
        """Return the number of sequences in a step on all ranks."""
        replicas = self.context.layout.data_parallel_size
        return num_microbatches * self.config.training.batch_sizes[0] * replicas

    def evaluation_samples(self, source: BatchSource) -> int:
        """Return the samples of one evaluation of a split; all ranks call this together.

        A source with a plan of its own is evaluated in whole steps.
        """
        if source.plan is not None:
            return source.plan.steps_per_epoch * self.evaluation_batch_size
        if source.whole_epochs:
            # Only some of the ranks open the split and know its length.
            count = torch.tensor(source.num_samples or 0, device=self.device)
            torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX)
            return int(count)
        return self.config.training.eval_iters * self.evaluation_batch_size

    def params_norm(self) -> float:
        """Return the global L2 norm of the parameters; all ranks call this together."""
        with self.parameter_gather.paused():
            return params_norm(self.chunks, self.context)

    def save(self, superseded: Collection[int] = ()) -> None:
        """Save a checkpoint, where a folder is given.

        Args:
            superseded: iterations of checkpoints that may go, see `CheckpointManager.save`.
        """
        if self.config.checkpoint.save is None or self.optimizer is None:
            return
        with self.parameter_gather.paused():
            self.checkpoints.save(
                self.progress.iteration,
                model=self.chunks,
                optimizer=self.optimizer,
                scheduler=self.scheduler,
                progress=self.progress.to_dict(),
                run_config=self.config.to_dict(),
                ema=self.ema,
                extra_state=self.runner.extra_state,
                best=self.progress.best_checkpoints,
                superseded=superseded,
            )
