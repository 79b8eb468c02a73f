"""The values that a run reports, and the protocol of the objects that report them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

LARGEST_LOGIT = "max_attention_logit"
"""Megatron-LM's name for the largest logit of attention in the whole model."""


@dataclass(frozen=True)
class IterationRecord:
    """A report on the steps since the last report.

    Attributes:
        seconds: mean time of a step.
        samples, tokens, flops: means per step of the sums over all ranks.
        learning_rate, global_batch_size: values of the last step.
        losses: mean of each loss over the reported steps that updated the parameters, by name.
        loss_scale: scale of fp16; 1 otherwise.
        grad_norm: norm before clipping in the last step; not finite if the step was skipped.
        skipped, total_skipped: steps without an update since the last report, and in the run.
        nans: skipped steps whose loss was not finite.
        peak_flops: peak of one GPU in floating-point operations per second, None if unknown.
        sample_name: noun for samples in the log, such as "images"; None to log no sample rate.
        attention_logits: largest logit of attention in the last step of each layer, by the layer's
            name, such as "layer 1"; empty if they are not followed.
        memory: allocated and reserved bytes of this rank's GPU, by name; empty on a CPU.
        epoch: passes through the training data so far; None if the data has no epochs.
        failed_saves: number of failed saves of checkpoints after which the run continued.
        printed: in a run's second report, the record for the printed line, which includes the first
            step again, as in Megatron-LM; None to print this record.
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
    attention_logits: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    epoch: float | None = None
    failed_saves: int = 0
    printed: IterationRecord | None = None

    @property
    def common(self) -> dict[str, float]:
        """Return values under the names that common fine-tuning tools use, such as ``train/loss``.

        ``train/skipped_iterations`` counts from the start of the run; ``train/throughput`` is
        samples/s.
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
    def logits(self) -> dict[str, float]:
        """Return the largest logit of attention, and that of each layer, under Megatron-LM's name.

        A layer's name follows it. The result is empty if logits are not followed.
        """
        if not self.attention_logits:
            return {}
        layers = {f"{LARGEST_LOGIT}/{k}": x for k, x in self.attention_logits.items()}
        return {LARGEST_LOGIT: max(self.attention_logits.values()), **layers}

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tflops_per_device(self) -> float:
        """Return the mean TFLOP/s (10^12 floating-point operations per second) of a device."""
        return self.flops / self.seconds / self.world_size / 1e12

    @property
    def mfu(self) -> float | None:
        """Return the model FLOPs utilization, from 0 to 1; None if the GPU's peak is unknown."""
        return None if self.peak_flops is None else self.tflops_per_device * 1e12 / self.peak_flops


FINISHED = "finished"
"""The reason for the end of a run that has completed all its steps."""
AVERAGED = " ema"
"""Suffix of the name of a split that was evaluated with the averaged weights."""
LANGUAGE_LOSS = "lm loss"
"""Name of a language model's loss, the only loss that has a reported perplexity."""


@dataclass(frozen=True)
class EvaluationRecord:
    """A report on one evaluation.

    Attributes:
        split: ``validation`` or ``test``; followed by `` set`` and a number if there are several
            sets, and by `AVERAGED` for averaged weights. A task may use other names.
        consumed_samples: training samples used so far.
        final: whether the evaluation follows the last step.
        perplexity: whether to report ``exp(loss)`` for the loss named `LANGUAGE_LOSS`.
        title: first words of the log line, which say what the values are.
    """

    split: str
    iteration: int
    losses: dict[str, float] = field(default_factory=dict)
    consumed_samples: int = 0
    final: bool = False
    perplexity: bool = True
    title: str = "validation loss"

    def perplexity_of(self, name: str) -> float | None:
        """Return ``exp(min(20, loss))`` as in Megatron-LM; None for a loss without perplexity."""
        if not self.perplexity or name != LANGUAGE_LOSS:
            return None
        return math.exp(min(20, self.losses[name]))

    @property
    def common(self) -> dict[str, float]:
        """Return the first loss under the name that common fine-tuning tools use, ``val/loss``.

        Words after "validation" in `split`, such as " set 1", are appended to the name. Return {}
        for a test split.
        """
        which = self.split.removeprefix("validation")
        if which == self.split or not self.losses:
            return {}
        return {f"val/loss{which}": next(iter(self.losses.values()))}


class Reporter(Protocol):
    """A sink of reports, such as a file; `close` is the last method that is called."""

    def on_iteration(self, record: IterationRecord) -> None:
        """Report on the steps since the last report."""

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Report on an evaluation."""

    def close(self) -> None:
        """Finish what was begun, such as a file, when the run ends."""
