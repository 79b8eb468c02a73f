"""Lines as Megatron-LM prints them, so that what reads its logs reads ours."""

from __future__ import annotations

from datetime import datetime, timedelta

from megatron_ext.training.reporting.records import (
    AVERAGED,
    EvaluationRecord,
    IterationRecord,
)


def iteration_line(record: IterationRecord, now: datetime, *, on_gpu: bool) -> str:
    """The line of one report; our own fields stand between Megatron-LM's and the counts."""
    parts = [
        f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {record.iteration:8d}/{record.num_iterations:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {record.seconds * 1000.0:.1f}",
    ]
    if on_gpu:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {record.tflops_per_device:.1f}")
    parts += [
        f"learning rate: {record.learning_rate:.6E}",
        f"global batch size: {record.global_batch_size:5d}",
        *(f"{name}: {value:.6E}" for name, value in record.losses.items()),
        f"loss scale: {record.loss_scale:.1f}",
        f"grad norm: {record.grad_norm:.3f}",
    ]
    if record.num_zeros is not None:
        parts.append(f"num zeros: {record.num_zeros:.0f}")
    if record.params_norm is not None:
        parts.append(f"params norm: {record.params_norm:.3f}")
    if record.epoch is not None:
        parts.append(f"epoch: {record.epoch:.3f}")
    if record.sample_name is not None:
        parts.append(f"{record.sample_name}/s: {record.samples_per_second:.1f}")
    parts += [
        f"tokens/s: {record.tokens_per_second:.0f}",
        f"MFU: {'n/a' if record.mfu is None else f'{record.mfu:.1%}'}",
        f"ETA: {timedelta(seconds=round(record.seconds_left))}",
        f"number of skipped iterations: {record.skipped:3d}",
        f"number of nan iterations: {record.nans:3d}",
    ]
    return " | ".join(parts) + " |"


def evaluation_lines(record: EvaluationRecord) -> list[str]:
    """The framed line of one evaluation."""
    where = f"iteration {record.iteration}"
    if record.final:
        where += f" on {record.split} set"
    elif record.split.endswith(AVERAGED):
        where += " with averaged weights"
    text = f" validation loss at {where} | "
    for name, value in record.losses.items():
        text += f"{name} value: {value:.6E} | "
        perplexity = record.perplexity_of(name)
        if perplexity is not None:
            text += f"{name} PPL: {perplexity:.6E} | "
    frame = "-" * (len(text) + 1)
    return [frame, text, frame]


class LinePrinter:
    """Prints the lines; on a terminal a progress bar stays below them."""

    def __init__(self, *, on_gpu: bool, num_iterations: int, iteration: int, bar: bool) -> None:
        self._on_gpu = on_gpu
        self._bar = None
        if bar:
            from tqdm import tqdm

            self._bar = tqdm(total=num_iterations, initial=iteration, unit="step", leave=False)

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def on_iteration(self, record: IterationRecord) -> None:
        self._print(iteration_line(record, datetime.now(), on_gpu=self._on_gpu))
        if self._bar is not None:
            self._bar.update(record.iteration - self._bar.n)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        for text in evaluation_lines(record):
            self._print(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
