"""The values that a run reports, and the protocol of the objects that report them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class IterationRecord:
    """A report on the steps since the last report.

    Attributes:
        seconds, samples, tokens, flops: means over the steps, on all ranks together.
        learning_rate, global_batch_size: those of the last step.
        losses: mean of each loss by name over the reported steps that had an update.
        loss_scale: scale of fp16; 1 otherwise.
        grad_norm: norm before clipping in the last step; not finite when the step was skipped.
        skipped, total_skipped: steps without an update since the last report, and in the run.
        nans: skipped steps whose loss was not finite.
        peak_flops: peak of one GPU in operations per second, None where it is not known.
        sample_name: name of the samples, where their rate is to be shown.
        memory: bytes of this rank's GPU by name; empty on a CPU.
        epoch: passes through the training data so far; None where the data has no epochs.
    """

    iteration: int
    num_iterations: int
    consumed_samples: int
    seconds: float
    learning_rate: float
    global_batch_size: int
    losses: dict[str, float]
    loss_scale: float
    grad_norm: float
    samples: float
    tokens: float
    flops: float
    world_size: int
    skipped: int = 0
    nans: int = 0
    total_skipped: int = 0
    num_zeros: float | None = None
    params_norm: float | None = None
    peak_flops: float | None = None
    sample_name: str | None = None
    memory: dict[str, float] = field(default_factory=dict)
    epoch: float | None = None

    @property
    def common(self) -> dict[str, float]:
        """Return the values that fine-tuning tools show, under the names of these tools.

        ``train/skipped_iterations`` counts from the start; ``train/throughput`` is samples/s.
        """
        return {
            "train/loss": next(iter(self.losses.values()), math.nan),
            "train/lr": self.learning_rate,
            "train/grad_norm": self.grad_norm,
            "train/time(s)": self.seconds,
            "train/skipped_iterations": float(self.total_skipped),
            "train/samples": float(self.consumed_samples),
            "train/throughput": self.samples_per_second,
            **({} if self.epoch is None else {"train/epoch": self.epoch}),
            **{f"memory/{name}": value for name, value in self.memory.items()},
        }

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tflops_per_device(self) -> float:
        """Return the floating-point operations per second and device, in 10^12."""
        return self.flops / self.seconds / self.world_size / 1e12

    @property
    def mfu(self) -> float | None:
        """Return the share of the peak of the GPUs that the model uses; None for unknown GPUs."""
        return None if self.peak_flops is None else self.tflops_per_device * 1e12 / self.peak_flops


AVERAGED = " ema"
"""Suffix of the name of a split that was evaluated with the averaged weights."""
LANGUAGE_LOSS = "lm loss"
"""The loss of language models; others, and further values beside it, have no perplexity."""


@dataclass(frozen=True)
class EvaluationRecord:
    """A report on one evaluation.

    Attributes:
        split: ``validation`` or ``test``, with a number where there are several sets, and with
            `AVERAGED` for averaged weights.
        consumed_samples: training samples used so far.
        final: the evaluation follows the last step.
        perplexity: `LANGUAGE_LOSS` is a cross-entropy.
    """

    split: str
    iteration: int
    losses: dict[str, float] = field(default_factory=dict)
    consumed_samples: int = 0
    final: bool = False
    perplexity: bool = True

    def perplexity_of(self, name: str) -> float | None:
        """Return the perplexity of a loss with Megatron-LM's cap; None where it means nothing."""
        if not self.perplexity or name != LANGUAGE_LOSS:
            return None
        return math.exp(min(20, self.losses[name]))

    @property
    def common(self) -> dict[str, float]:
        """Return a validation split's first loss as ``val/loss``, with the set's number behind."""
        which = self.split.removeprefix("validation")
        if which == self.split or not self.losses:
            return {}
        return {f"val/loss{which}": next(iter(self.losses.values()))}


class Reporter(Protocol):
    """A sink of reports, such as a file or a server; no report follows `close`."""

    def on_iteration(self, record: IterationRecord) -> None: ...
    def on_evaluation(self, record: EvaluationRecord) -> None: ...
    def close(self) -> None: ...
