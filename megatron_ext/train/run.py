"""The state of a training run on one rank, and requests to stop the run."""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from megatron_ext.config.batch_size import BatchSize
from megatron_ext.config.run import RunConfig
from megatron_ext.config.training import TrainingConfig
from megatron_ext.data.loader import BatchSource
from megatron_ext.device.streams import HostCopy, to_device
from megatron_ext.disk.host_folder import is_asked_to_resize, is_under_torchrun
from megatron_ext.optim.update import ParameterGather
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.batch_size import Progress
from megatron_ext.train.exit_signal import ExitSignal
from megatron_ext.train.reporting.build import Reporters
from megatron_ext.train.step import StepRunner
from megatron_ext.train.task import Task

if TYPE_CHECKING:
    from megatron_ext.checkpoint.best import BestCheckpoint
    from megatron_ext.checkpoint.manager import CheckpointManager
    from megatron_ext.optim.ema import ShardedEMA
    from megatron_ext.train.saves import Saves


class StopRequests:
    """Watches for reasons to stop: the exit signal, the time limit, or a new number of ranks.

    Args:
        started: when the run began, in seconds since 1970.
        elastic: whether the run may be stopped to continue with another number of data-parallel
            replicas. torchrun asks for this by SIGTERM; a launcher that forks the ranks, by a file
            (`is_asked_to_resize`).
        exit_signal: the exit signal that the program already watches; None to start watching now.

    Attributes:
        watches: whether the flags set any reason to stop; if not, `check` costs nothing.
    """

    def __init__(
        self,
        training: TrainingConfig,
        started: float,
        elastic: bool = False,
        exit_signal: ExitSignal | None = None,
    ) -> None:
        minutes = training.exit_duration_in_mins
        self._end = None if minutes is None else started + 60.0 * minutes
        self._exit_signal = exit_signal or ExitSignal.of_run(training)
        self._ended_by_torchrun = False
        self._before: HostCopy | None = None
        self._elastic = elastic
        self.watches = training.exit_signal_handler or elastic or self._end is not None
        if elastic and is_under_torchrun() and self._exit_signal.number != signal.SIGTERM:
            signal.signal(signal.SIGTERM, self._on_end_by_torchrun)

    def _on_end_by_torchrun(self, _number: int, _frame: FrameType | None) -> None:
        self._ended_by_torchrun = True

    def check(self, device: torch.device, *, late: bool | None = None) -> str | None:
        """Return why all ranks should stop now: "signal", "resize" or "duration"; None to go on.

        All ranks call this together. It costs one small all-reduce, or nothing if `watches` is
        false. If ``late`` is true, return the result of the previous call's all-reduce, so as not
        to wait for this one. None means true on a GPU, false on a CPU.
        """
        if not self.watches:
            return None
        resize = self._elastic and (self._ended_by_torchrun or is_asked_to_resize())
        over = self._end is not None and time.time() > self._end
        reasons_here = [self._exit_signal.came, resize, over]
        flags = to_device(torch.tensor(reasons_here, dtype=torch.int32), device)
        torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
        answer: HostCopy | None = HostCopy(flags)
        if device.type == "cuda" if late is None else late:
            answer, self._before = self._before, answer
        agreed = answer.read() if answer is not None else (False, False, False)
        reasons = zip(("signal", "resize", "duration"), agreed, strict=True)
        reason = next((reason for reason, is_asked in reasons if is_asked), None)
        if reason == "signal":
            self._exit_signal.obey()
        return reason


@dataclass
class Run:
    """The state of a training run on one rank: model, optimizer, data, progress and so on.

    Attributes:
        stores: where the run keeps snapshots of its state (`supervision.Supervision.stores`).
        restored_from: origin of the state at the start: "start" (a new run), "checkpoint", "memory"
            (snapshots) or "peer" (at least one rank took its neighbour's copy of a snapshot).
        rewinds: pairs of iterations, one for each time that the run went back to an earlier state:
            the iteration that it had reached, and the iteration of the restored state.
        checkpoints: saves and loads checkpoints; None if the run does neither.
        saves: tells how saves end; None without ``--save``.
        saved_at: iteration of the newest save, or of the checkpoint that the run has loaded.
        seq_length: tokens of a sample in the next training step; None if the task has no such
            length.
        flops_of_samples: cache of the FLOPs of a training step on one sample, by sample length.
        best_before: the list of best checkpoints as it was before the next checkpoint was added,
            to restore if the save fails; None if the next checkpoint is not one of the best.
    """

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
    checkpoints: CheckpointManager | None
    progress: Progress
    stop_requests: StopRequests
    train_source: BatchSource = field(default_factory=lambda: BatchSource(None, None))
    valid_sources: list[BatchSource] = field(default_factory=list)
    test_sources: list[BatchSource] = field(default_factory=list)
    ema: ShardedEMA | None = None
    ema_sources: dict[str, list[BatchSource]] = field(default_factory=dict)
    reporters: Reporters = field(default_factory=lambda: Reporters([]))
    peak_flops: float | None = None
    saves: Saves | None = None
    stores: Sequence[Any] = field(default_factory=list)
    restored_from: str = "start"
    rewinds: list[tuple[int, int]] = field(default_factory=list)
    saved_at: int = 0
    seq_length: int | None = None
    flops_of_samples: dict[int | None, float] = field(default_factory=dict)
    best_before: list[BestCheckpoint] | None = None
    _best_if_failed: list[BestCheckpoint] | None = None

    @property
    def evaluation_batch_size(self) -> int:
        """Return the samples per evaluation step: the global batch size at the end of ramp-up."""
        return self.config.training.batch_sizes[1]

    def evaluation_samples(self, source: BatchSource) -> int:
        """Return how many samples an evaluation of a split reads; all ranks call this together."""
        if source.plan is not None:
            return source.plan.steps_per_epoch * self.evaluation_batch_size
        if source.whole_epochs:
            # Only the ranks that open the split know its length.
            count = torch.tensor(source.num_samples or 0, device=self.device)
            torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX)
            return int(count)
        return self.config.training.eval_iters * self.evaluation_batch_size

    def params_norm(self) -> float:
        """Return the global L2 norm of the parameters; all ranks call this together."""
        with self.parameter_gather.paused(), torch.no_grad():
            return float(summed(sum_of_squares, self.chunks, self.context).sqrt())

    def save(self, superseded: Collection[int] = (), *, is_last: bool = False) -> bool:
        """Save a checkpoint if ``--save`` is given; delete those of the iterations ``superseded``.

        Return True if the save worked, or if there is nothing to save. If it failed, return False
        in a run that tolerates failed saves, except for the last save of the run (``is_last``);
        otherwise raise a CheckpointError.
        """
        if self.saves is None or self.optimizer is None:
            return True
        self.settle_best()
        self._best_if_failed, self.best_before = self.best_before, None
        return self.saves.save(
            functools.partial(self.save_now, superseded), self.progress.iteration, is_last
        )

    def settle_best(self) -> None:
        """Restore the list of best checkpoints if the save of the newest one has failed.

        All ranks call this together before they use the list. It waits until that save has ended.
        """
        before, self._best_if_failed = self._best_if_failed, None
        if before is not None and self.saves is not None and self.saves.newest_has_failed():
            self.progress.best_checkpoints = before

    def save_now(self, superseded: Collection[int] = (), *, waits: bool) -> None:
        """Save a checkpoint or raise a CheckpointError; see `save` for ``superseded``.

        With ``waits``, return only when the files are written, even with ``--async-save``.
        """
        assert self.optimizer is not None and self.checkpoints is not None
        with self.context.recorder.phase("save"), self.parameter_gather.paused():
            self.checkpoints.save(
                self.progress.iteration,
                model=self.chunks,
                optimizer=self.optimizer,
                scheduler=self.scheduler,
                progress=self.progress.to_dict(),
                run_config=self.config_values,
                ema=self.ema,
                extra_state=self.runner.extra_state,
                best=self.progress.best_checkpoints,
                superseded=superseded,
                waits=waits,
            )

    @functools.cached_property
    def config_values(self) -> dict[str, Any]:
        """Return the configuration by section and field, as values to store in checkpoints."""
        return self.config.to_dict()

    def finish_saves(self) -> None:
        """Wait for all checkpoints that are being written; if the last one fails, save it again.

        All ranks call this together.
        """
        if self.saves is None:
            return
        with self.context.recorder.phase("save"):
            self.saves.finish(functools.partial(self.save_now, ()), self.progress.iteration)


def count_parameters(
    chunks: Sequence[DistributedDataParallel], context: ParallelContext
) -> tuple[int, int, int]:
    """Return three numbers: all parameters, trained ones, and the most on one rank.

    All ranks call this together.
    """

    def measured(parameter: torch.nn.Parameter) -> Tensor:
        sizes = [parameter.numel(), parameter.numel() * parameter.requires_grad]
        return torch.tensor(sizes, dtype=torch.float64, device=parameter.device)

    model, trained = summed(measured, chunks, context).tolist()
    here = [p for chunk in chunks for p in chunk.parameters()]
    largest = torch.tensor(sum(p.numel() for p in here), device=here[0].device)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return int(model), int(trained), int(largest)


def sum_of_squares(parameter: torch.nn.Parameter) -> Tensor:
    """Return the sum of a parameter's squares, float64 ``[]``.

    If weights are sharded, all ranks that hold a shard of the parameter call this together.
    """
    shard = getattr(parameter, "weight_shard", None)
    squares = (parameter if shard is None else shard.values).double().square().sum()
    if shard is not None:
        torch.distributed.all_reduce(squares, group=shard.group)
    return squares


def summed(
    measured: Callable[[torch.nn.Parameter], Tensor],
    chunks: Sequence[DistributedDataParallel],
    context: ParallelContext,
) -> Tensor:
    """Return the sum of ``measured(p)`` over all parameters p on all ranks, each counted once."""
    zero = torch.zeros_like(measured(next(chunks[0].parameters())))
    dense = zero
    experts = zero
    for chunk in chunks:
        for parameter in chunk.parameters():
            first = param_is_not_tensor_parallel_duplicate(parameter)
            if not (first and param_is_not_shared(parameter)):
                continue
            if getattr(parameter, "allreduce", True):
                dense = dense + measured(parameter)
            else:
                experts = experts + measured(parameter)
    dense = dense.clone()
    experts = experts.clone()
    torch.distributed.all_reduce(dense, group=context.pgs.mp)
    torch.distributed.all_reduce(experts, group=context.pgs.tp_ep_pp)
    return dense + experts
