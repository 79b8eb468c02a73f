"""The printed lines of a run in Megatron-LM's format, which programs that read its logs know."""

from __future__ import annotations

from datetime import datetime, timedelta

from megatron_ext.train.reporting.records import (
    AVERAGED,
    EvaluationRecord,
    IterationRecord,
)


def iteration_line(record: IterationRecord, now: datetime, *, on_gpu: bool) -> str:
    """Return the log line of a report in Megatron-LM's format.

    Fields that Megatron-LM does not have, such as tokens/s, are inserted before the last two
    fields.
    """
    parts = [
        f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {record.iteration:8d}/{record.num_iterations:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {record.seconds * 1000.0:.1f}",
    ]
    seconds_left = (record.num_iterations - record.iteration) * record.seconds
    if on_gpu:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {record.tflops_per_device:.1f}")
    parts += [
        f"learning rate: {record.learning_rate:.6E}",
        f"global batch size: {record.global_batch_size:5d}",
        *(f"{name}: {value:.6E}" for name, value in record.losses.items()),
        f"loss scale: {record.loss_scale:.1f}",
        f"grad norm: {record.grad_norm:.3f}",
    ]
    optional = {"num zeros": (record.num_zeros, 0), "params norm": (record.params_norm, 3)}
    optional["max attention logit"] = (max(record.attention_logits.values(), default=None), 3)
    optional["epoch"] = (record.epoch, 3)
    parts += [f"{name}: {x:.{digits}f}" for name, (x, digits) in optional.items() if x is not None]
    if record.sample_name is not None:
        parts.append(f"{record.sample_name}/s: {record.samples_per_second:.1f}")
    parts += [
        f"tokens/s: {record.tokens_per_second:.0f}",
        f"MFU: {'n/a' if record.mfu is None else f'{record.mfu:.1%}'}",
        f"ETA: {timedelta(seconds=round(seconds_left))}",
        f"number of skipped iterations: {record.skipped:3d}",
        f"number of nan iterations: {record.nans:3d}",
    ]
    return " | ".join(parts) + " |"


def evaluation_title(record: EvaluationRecord) -> str:
    """Return the first words of an evaluation's line, such as "validation loss at iteration 5"."""
    where = f"iteration {record.iteration}"
    if record.final or record.split.endswith(AVERAGED):
        where += f" on {record.split} set" if record.final else " with averaged weights"
    return f"{record.title} at {where}"


def evaluation_lines(record: EvaluationRecord) -> list[str]:
    """Return three lines: an evaluation's line between two rules of dashes."""
    text = f" {evaluation_title(record)} | "
    for name, value in record.losses.items():
        text += f"{name} value: {value:.6E} | "
        perplexity = record.perplexity_of(name)
        if perplexity is not None:
            text += f"{name} PPL: {perplexity:.6E} | "
    frame = "-" * (len(text) + 1)
    return [frame, text, frame]


class LinePrinter:
    """Prints the lines of a run for logs, in Megatron-LM's format."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu

    def print_lines(self, lines: list[str]) -> None:
        """Print lines at once."""
        print("\n".join(lines), flush=True)

    def on_iteration(self, record: IterationRecord) -> None:
        printed = record.printed or record
        self.print_lines([iteration_line(printed, datetime.now(), on_gpu=self._on_gpu)])

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self.print_lines(evaluation_lines(record))

    def close(self) -> None:
        """Do nothing: each line is printed at once."""
