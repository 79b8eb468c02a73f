"""What is reported, as plain values; and the protocol of what reports it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class IterationRecord:
    """The steps since the last report.

    Attributes:
        iteration: training steps done.
        num_iterations: steps of the whole run.
        consumed_samples: samples used by all ranks.
        seconds: mean duration of a step.
        learning_rate: after the last step.
        global_batch_size: samples of the last step.
        losses: mean over the reported steps that had an update, by name.
        loss_scale: of fp16; 1 otherwise.
        grad_norm: of the last step before clipping; not finite when it was skipped.
        samples: of one step, the mean of the steps that are reported.
        tokens: positions of one step, the mean of the steps that are reported.
        flops: floating-point operations of one step on all ranks.
        world_size: ranks.
        skipped: steps without an update since the last report.
        nans: those whose loss was not finite.
        total_skipped: steps without an update in the whole run.
        num_zeros: zeros in the gradient, where counted.
        params_norm: norm of the parameters, where asked for.
        peak_flops: of one GPU, None where it is not known.
        sample_name: what the samples are called, where their rate is to be shown.
        memory: of this rank's GPU by name, in bytes; empty on a CPU.
        epoch: passes through the training data so far; None where it has no epochs.
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
        """What fine-tuning tools show, under their names; the loss is the first that is reported.

        ``train/skipped_iterations`` counts from the start of the run, ``train/time(s)`` is the
        mean duration of a step, ``train/throughput`` is in samples per second.
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
        """Of all ranks together."""
        return self.samples / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.tokens / self.seconds

    @property
    def tflops_per_device(self) -> float:
        """10^12 floating-point operations per second and device."""
        return self.flops / self.seconds / self.world_size / 1e12

    @property
    def mfu(self) -> float | None:
        """Share of the peak of the GPUs that the model uses; None where the peak is unknown."""
        if self.peak_flops is None:
            return None
        return self.tflops_per_device * 1e12 / self.peak_flops

    @property
    def seconds_left(self) -> float:
        """Until the last step, at the present speed."""
        return (self.num_iterations - self.iteration) * self.seconds


AVERAGED = " ema"
"""Ends the name of a split that was evaluated with the averaged weights."""
LANGUAGE_LOSS = "lm loss"
"""The loss of language models; others, and further values beside it, have no perplexity."""


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation.

    Attributes:
        split: ``validation`` or ``test`` (with a number where there are several), and `AVERAGED`.
        iteration: training steps done.
        losses: by name.
        consumed_samples: training samples used so far.
        final: after the last step.
        perplexity: `LANGUAGE_LOSS` is a cross-entropy, whose exponential is a perplexity.
    """

    split: str
    iteration: int
    losses: dict[str, float] = field(default_factory=dict)
    consumed_samples: int = 0
    final: bool = False
    perplexity: bool = True

    def perplexity_of(self, name: str) -> float | None:
        """The perplexity of a loss, None where the word means nothing; as Megatron-LM caps it."""
        if not self.perplexity or name != LANGUAGE_LOSS:
            return None
        return math.exp(min(20, self.losses[name]))

    @property
    def common(self) -> dict[str, float]:
        """The first loss of a validation split, under the name that fine-tuning tools show.

        It is ``val/loss``, with the number of the set or `AVERAGED` behind it.
        """
        which = self.split.removeprefix("validation")
        if which == self.split or not self.losses:
            return {}
        return {f"val/loss{which}": next(iter(self.losses.values()))}


class Reporter(Protocol):
    """Something that reports."""

    def on_iteration(self, record: IterationRecord) -> None:
        """Report training steps."""

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Report an evaluation."""

    def close(self) -> None:
        """Finish; nothing follows."""
