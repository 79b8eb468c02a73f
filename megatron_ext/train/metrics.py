"""What happened since the last report, gathered without waiting for the device each step.

Global L2 norm of the parameters (--log-params-norm).

Which implementations a run uses, in one line: layers, attention, optimizer, 8-bit recipe.
"""

from __future__ import annotations

import importlib.metadata
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from megatron_ext.config.te_versions import found_version
from megatron_ext.config.transformer_engine import TE_IMPL
from megatron_ext.train.reporting.records import IterationRecord
from megatron_ext.train.step import StepResult

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.parallel.context import ParallelContext
    from megatron_ext.train.run import Run


@dataclass(frozen=True)
class StepStats:
    """What a training step amounts to on all ranks together.

    Attributes:
        samples: consumed.
        tokens: positions computed.
        flops: floating-point operations of the model, forward and backward.
    """

    samples: int
    tokens: int
    flops: float


class IntervalMetrics:
    """Sums the steps between two reports."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._unsettled: tuple[int, StepResult] | None = None
        self._reset()

    def _reset(self) -> None:
        self._losses: dict[str, Tensor] = {}
        self._steps = self._skipped = self._nans = self._samples = self._tokens = 0
        self._flops = self._pause = 0.0
        self._last: StepResult | None = None
        self._last_samples = 0
        self._start = time.perf_counter()

    def add(self, result: StepResult, size: StepStats) -> None:
        """One more step."""
        self._count_last()
        self._last, self._last_samples = result, size.samples
        self._steps += 1
        self._samples += size.samples
        self._tokens += size.tokens
        self._flops += size.flops
        for name, loss in result.losses.items():
            counted = torch.stack([loss, (result.counts[name] > 0).to(loss)])
            counted = torch.where(result.update.flag, counted, 0.0)
            self._losses[name] = self._losses.get(name, torch.zeros_like(counted)) + counted
        self._unsettled = self._run.progress.iteration, result
        if self._run.runner.settled:
            self._count_last()

    def settle(self) -> None:
        """Count the last step, and let the learning rate follow it.

        The host then waits for the last update. Before progress is saved or reported.
        """
        self._run.runner.settle()
        self._count_last()

    def _count_last(self) -> None:
        """Count and announce the last step if it was skipped; see whether its loss was finite."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is None or unsettled[1].update.applied:
            return
        iteration, result = unsettled
        nan = any(not math.isfinite(float(loss)) for loss in result.losses.values())
        self._skipped += 1
        self._nans += nan
        self._run.progress.skipped_iterations += 1
        self._run.progress.nan_iterations += nan
        self._run.reporters.say(
            f"iteration {iteration} was skipped: its gradient norm is {result.update.grad_norm} "
            f"({self._run.progress.skipped_iterations} skipped so far)"
        )

    def pause(self, seconds: float) -> None:
        """Time that went into something else than steps."""
        self._pause += seconds

    def report(self, *, keep: bool = False) -> None:
        """Report the steps since the last report.

        Args:
            keep: do not start anew. Megatron-LM reports the first step of a run at once and lets
                it count again in the first full interval; so that our lines are its lines, a run
                that starts at iteration 0 does the same.
        """
        self.settle()
        run, last = self._run, self._last
        assert last is not None and run.optimizer is not None
        params_norm = run.params_norm() if run.config.logging.log_params_norm else None
        losses = self._means()
        if self._skipped == self._steps:
            # Finite where only the gradients were not, as after an overflow of a loss scale.
            losses = {name: float(loss) for name, loss in last.losses.items()}
        elapsed = time.perf_counter() - self._start - self._pause
        record = IterationRecord(
            iteration=run.progress.iteration,
            num_iterations=run.num_iterations,
            consumed_samples=run.progress.consumed_train_samples,
            seconds=max(elapsed, 1e-9) / self._steps,
            learning_rate=_in_single_precision(
                get_canonical_lr_for_logging(run.optimizer.param_groups) or 0.0
            ),
            global_batch_size=self._last_samples,
            losses=losses,
            loss_scale=float(run.optimizer.get_loss_scale()),
            grad_norm=last.update.grad_norm,
            samples=self._samples / self._steps,
            sample_name=run.task.sample_name,
            tokens=self._tokens / self._steps,
            flops=self._flops / self._steps,
            world_size=run.context.layout.world_size,
            skipped=self._skipped,
            nans=self._nans,
            total_skipped=run.progress.skipped_iterations,
            num_zeros=last.update.num_zeros,
            params_norm=params_norm,
            peak_flops=run.peak_flops,
            memory=_gpu_memory(run.device),
            epoch=run.progress.epoch,
        )
        run.reporters.on_iteration(record)
        if not keep:
            self._reset()

    def _means(self) -> dict[str, float]:
        """Mean of each loss over the steps that had any of its targets.

        One of which no step had any is left out, such as the loss of a condition mode that was not
        drawn; but for the first, the loss of the run, which is then 0.
        """
        totals = {name: total.tolist() for name, total in self._losses.items()}
        first = next(iter(totals), None)
        return {
            name: total / max(count, 1.0)
            for name, (total, count) in totals.items()
            if count or name == first
        }


def _gpu_memory(device: torch.device) -> dict[str, float]:
    """Bytes that tensors hold and that the allocator keeps, where there is a GPU."""
    if device.type != "cuda":
        return {}
    return {
        "allocated": float(torch.cuda.memory_allocated(device)),
        "reserved": float(torch.cuda.memory_reserved(device)),
    }


def _in_single_precision(value: float) -> float:
    """As Megatron-LM prints it: its learning rate goes through a float32 tensor."""
    return float(np.float32(value))


@torch.no_grad()
def params_norm(chunks: list[DistributedDataParallel], context: ParallelContext) -> float:
    """Each parameter counted once, whatever the layout; all ranks call this together."""
    device = next(chunks[0].parameters()).device
    dense = torch.zeros((), dtype=torch.float64, device=device)
    experts = torch.zeros_like(dense)
    for chunk in chunks:
        for parameter in chunk.parameters():
            if not param_is_not_tensor_parallel_duplicate(parameter):
                continue
            square = parameter.double().square().sum()
            if not getattr(parameter, "allreduce", True):
                experts += square
            elif param_is_not_shared(parameter):
                dense += square
    torch.distributed.all_reduce(dense, group=context.pgs.mp)
    torch.distributed.all_reduce(experts, group=context.pgs.tp_ep_pp)
    return float((dense + experts).sqrt())


OURS = __name__.split(".")[0]


def implementation_line(config: RunConfig, optimizer: MegatronOptimizer | None) -> str:
    """For the start of a run; the optimizer is that which was really built."""
    return "; ".join(
        (
            f"layers: {_layers(config)}",
            f"attention: {_attention(config)}",
            f"optimizer: {_optimizer(optimizer)}",
            f"fp8: {_fp8(config)}",
        )
    )


def _layers(config: RunConfig) -> str:
    if config.model.transformer_impl == TE_IMPL:
        return f"Transformer Engine {found_version() or 'of an unknown version'}"
    return f"torch {importlib.metadata.version('torch')}"


def _attention(config: RunConfig) -> str:
    if config.model.transformer_impl == TE_IMPL:
        return f"Transformer Engine ({config.model.attention_backend})"
    return "torch SDPA"


def _optimizer(optimizer: MegatronOptimizer | None) -> str:
    """The class that computes, and its package; a subclass of ours adds no arithmetic."""
    if optimizer is None:
        return "none"
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = next((part.optimizer for part in parts if part.optimizer is not None), None)
    if inner is None:
        return "none on this rank"
    roots = {kind: kind.__module__.split(".")[0] for kind in type(inner).__mro__}
    kind, root = next((kind, root) for kind, root in roots.items() if root != OURS)
    fused = " fused" if any(group.get("fused") for group in inner.param_groups) else ""
    return f"{root} {kind.__name__}{fused}"


def _fp8(config: RunConfig) -> str:
    fp8 = config.fp8
    if fp8.fp8_format is None:
        return "none"
    weights = ", weights kept in 8 bits" if fp8.fp8_param_gather else ""
    return f"{fp8.fp8_format} by the {fp8.fp8_recipe} recipe{weights}"
