"""Computes steps again, to tell machine faults from properties of the data and model.

``--rerun-mode`` follows Megatron-LM's rerun state machine. A step whose update is refused, such as
one with a gradient norm that is not finite, is computed again from the same state. If the second
result is good, the fault was transient, and the run continues with the same bits as an undisturbed
run. With ``--rerun-interval``, good steps are checked too. A machine that computes the same wrong
bits twice is not found. Kernels that add in no fixed order make good results differ as well, and so
hide faults; ``--deterministic-mode`` excludes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_ext.config.fault_tolerance import VALIDATE
from megatron_ext.extras.resilience.replay import Outcome, StepStart, digest_of_reports, digests
from megatron_ext.layers.chunks import named_parameters
from megatron_ext.optim.update import UpdateResult
from megatron_ext.train.callbacks.callback import Callback, due
from megatron_ext.train.callbacks.diagnosis import (
    announce,
    describe,
    everyones,
    not_finite_here,
    places,
)
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepInputs, StepLosses

_SAME_NORM = 1e-6
"""Largest relative difference of the ranks' gradient norms that counts as agreement."""

Differences = dict[int, list[str]]
"""By rank, the names of the losses and gradients that differ between two computations."""


class Rerun(Callback):
    """Computes steps again to detect faults, as ``--rerun-mode`` and ``--rerun-interval`` say."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        flags = run.config.fault_tolerance
        runner = run.runner
        self._validates = flags.rerun_mode == VALIDATE
        self._interval = flags.rerun_interval
        self._own = torch.zeros(0, dtype=torch.int64)
        self._least_norm = torch.zeros(())
        self._named = named_parameters(runner.trained_chunks)
        self._names = [name for name, _ in self._named]
        runner.step_guard = self._step
        if self._validates:
            runner.approvals.append(self._replicas_agree)
        optimizer = run.config.optimizer
        if not optimizer.overlap_grad_reduce and not optimizer.shards_gradients:
            self._watch_reduction()

    @property
    def _gradients(self) -> list[Tensor]:
        return [parameter.main_grad for _, parameter in self._named]  # type: ignore[attr-defined]

    def _watch_reduction(self) -> None:
        """Have every step store digests of this rank's gradients just before their reduction."""
        transformer_config: Any = self.run.runner.transformer_config
        finalize = transformer_config.finalize_model_grads_func

        def noted(*arguments: Any, **options: Any) -> Any:
            self._own = digests(self._gradients)
            return finalize(*arguments, **options)

        transformer_config.finalize_model_grads_func = noted

    def _outcome(self, step: StepLosses) -> Outcome:
        return Outcome(self._own, digests(self._gradients), digest_of_reports(step.reports))

    def _replicas_agree(self, _totals: Mapping[str, Tensor], norm: Tensor) -> Tensor:
        """Approve an update if the gradient norm is finite and the same on all ranks.

        This is one of `StepRunner.approvals`; the result is bool ``[]``.
        """
        comparable = torch.where(norm.isfinite(), norm, math.inf)
        extremes = torch.stack([comparable, -comparable])
        torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX)
        largest = extremes[0]
        least = -extremes[1]
        self._least_norm = least
        return largest.isfinite() & (largest - least <= _SAME_NORM * largest)

    def _compute(self, inputs: StepInputs) -> StepLosses:
        self.run.runner.zero_gradients()
        return self.run.runner.compute_gradients(inputs)

    def _step(self, inputs: StepInputs) -> tuple[StepLosses, UpdateResult]:
        """Run one step; compute it again if it is due for a comparison or if its update is refused.

        `StepRunner` calls this instead of running the step itself (`step_guard`). Under
        ``--rerun-mode validate_results`` it waits, on a GPU, for the result of the update.
        """
        run = self.run
        runner = run.runner
        iteration = self.run.progress.iteration + 1
        compares = due(iteration, self._interval)
        if not self._validates and not compares:
            step = self._compute(inputs)
            return step, runner.update(step)
        assert run.optimizer is not None
        start = StepStart(run.chunks, run.optimizer, runner.amax_histories, run.context)
        step = self._compute(inputs)
        if compares:
            step = self._compare(inputs, step, start, iteration)
        # fp16's loss scaler changes the gradients in the update.
        scaled = self._outcome(step) if self._validates and run.config.precision.fp16 else None
        result = runner.update(step)
        if not self._validates or result.applied or self._overflowed():
            return step, result
        here = not_finite_here(run, [x[name] for x in step.reports for name in x])
        facts = describe(everyones(here, run.device), result.grad_norm, run.context)
        first = scaled or self._outcome(step)
        start.restore()
        step = self._compute(inputs)
        second = self._outcome(step)
        again = runner.update(step)
        self._judge(self._differing(first, second), result, again, facts, iteration)
        return step, again

    def _overflowed(self) -> bool:
        """Return whether the gradients have overflowed under fp16, which is normal and no fault."""
        return self.run.config.precision.fp16 and math.isinf(float(self._least_norm))

    def _judge(
        self,
        differing: Differences,
        refused: UpdateResult,
        again: UpdateResult,
        facts: dict[str, Any],
        iteration: int,
    ) -> None:
        """Report what the second computation of a step shows about the first, refused one.

        Args:
            differing: how the two computations differ.
            refused, again: results of the updates after the first and the second computation.
            facts: where the first computation's values are not finite, a result of
                `non_finite.describe`.
        """
        run = self.run
        finite = math.isfinite(refused.grad_norm) and facts["cause"] == "norm"
        sentence = facts.pop("sentence")
        if finite:
            sentence = f"its gradient norm is {refused.grad_norm:.6g}"
            facts = {"ranks": [], "parameter": None, "cause": "refused"}
        if differing:
            facts["ranks"] = suspects = sorted(differing)
            facts["parameter"] = differing[suspects[0]][0]
            where = f"on {places(suspects, run.context)}, first `{facts['parameter']}`"
            good = "the second result is good and is used: the fault was transient"
            verdict = "transient" if again.applied else "unstable"
            finding = f"computed again, it differs {where}; "
            finding += good if again.applied else "the second result is refused as well"
        else:
            verdict = "reproduced"
            finding = "computed again, it is the same: a property of the data or of the model"
            if again.applied:
                verdict, finding = "transient", "computed again, it is the same but is not refused"
        if finite and verdict == "reproduced":
            return  # a spike, which `Spikes` announces
        kind = "mismatch" if finite else "non_finite"
        state = "was refused" if finite else "is not finite"
        sentence = f"iteration {iteration} {state}: {sentence}; {finding}"
        announce(run, kind, sentence, iteration=iteration, verdict=verdict, **facts)

    def _compare(
        self, inputs: StepInputs, step: StepLosses, start: StepStart, iteration: int
    ) -> StepLosses:
        """Compute a step again, and report if the bits differ; return the losses to continue with.

        If the bits differ under ``--rerun-mode validate_results``, the step is computed a third
        time to decide which of the two was wrong, and the run continues with the third result.
        ``step`` is the first result, and ``start`` the state from which it was computed.
        """
        first = self._outcome(step)
        start.restore()
        step = self._compute(inputs)
        second = self._outcome(step)
        differing = self._differing(first, second)
        total = len(self._names)
        begin = f"iteration {iteration} was computed twice"
        if not differing:
            if not self._validates:
                self.run.reporters.say(f"{begin}: all gradients are the same")
            return step
        suspects = sorted(differing)
        parameter = differing[suspects[0]][0]
        worst = max(len(names) for names in differing.values())
        where = f"on {places(suspects, self.run.context)}, first `{parameter}`"
        sentence = f"{begin} with different results: up to {worst} of {total} gradients {where}"
        verdict = "different"
        if self._validates:
            start.restore()
            step = self._compute(inputs)
            verdict, finding = self._decided(first, second, self._outcome(step))
            sentence = f"{sentence}; {finding}"
        facts = {"ranks": suspects, "parameter": parameter, "verdict": verdict}
        announce(self.run, "mismatch", sentence, iteration=iteration, **facts)
        return step

    def _decided(self, first: Outcome, second: Outcome, third: Outcome) -> tuple[str, str]:
        """Return which of two different computations of a step was wrong, judged by a third one.

        The result is a keyword ("first", "second" or "nondeterministic") and a clause for a
        message.
        """
        if not self._differing(second, third):
            return "first", "a third computation equals the second, so the first was wrong"
        if not self._differing(first, third):
            return "second", "a third computation equals the first, so the second was wrong"
        return "nondeterministic", (
            "a third computation differs from both: kernels that are not deterministic (give "
            "`--deterministic-mode`), or a faulty device"
        )

    def _differing(self, one: Outcome, other: Outcome) -> Differences:
        """Return the differences between two outcomes, by rank; all ranks call this together.

        Ranks whose gradients differ only after the reduction have received the difference from
        another rank. They are left out, unless there are no others.
        """
        here = one.differing(other, self._names)
        any_rank = torch.tensor(int(any(here)), device=self.run.device)
        torch.distributed.all_reduce(any_rank, op=torch.distributed.ReduceOp.MAX)
        if not bool(any_rank):
            return {}
        own, reduced = (dict(enumerate(lists)) for lists in zip(*self._gathered(here), strict=True))
        return _filled(own) or _filled(reduced)

    def _gathered(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, by rank; all ranks call this together."""
        values = [None] * self.run.context.layout.world_size
        torch.distributed.all_gather_object(values, value)
        return values


def _filled(differing: Differences) -> Differences:
    return {rank: names for rank, names in differing.items() if names}
