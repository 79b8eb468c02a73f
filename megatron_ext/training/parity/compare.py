"""Differences between a layout and the layout that is taken for the truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table
from torch import Tensor

from megatron_ext.training.parity.run import Recording, read_gradients

NOT_COMPARED = frozenset(
    "kind iteration consumed_samples learning_rate loss_scale global_batch_size "
    "seconds_per_iteration tokens_per_second skipped_iterations nan_iterations "
    "total_skipped_iterations num_zeros params_norm grad_norm "
    "train/throughput train/time(s) memory/allocated memory/reserved".split()
)


@dataclass(frozen=True)
class Tolerances:
    """Largest relative differences that pass.

    Attributes:
        loss: of each loss and of the gradient norm.
        gradient: of each parameter's gradient: L2 norm of the difference over that of the truth.
    """

    loss: float = 1e-6
    gradient: float = 1e-5


@dataclass(frozen=True)
class Difference:
    """One value that differs."""

    step: int
    name: str
    size: float


@dataclass(frozen=True)
class Parity:
    """What came out for one layout.

    Attributes:
        recording: of the layout.
        loss, grad_norm, gradient: the largest difference of each kind, None where none was seen.
        first: the first step, and in it the worst value, that is out of tolerance.
        problem: why the layout could not be compared.
    """

    recording: Recording
    loss: Difference | None = None
    grad_norm: Difference | None = None
    gradient: Difference | None = None
    first: Difference | None = None
    problem: str | None = None

    @property
    def passed(self) -> bool:
        return self.problem is None and self.first is None


def relative(mine: float, truth: float) -> float:
    """Relative difference; both not finite, or both zero, is none."""
    if not math.isfinite(truth) or not math.isfinite(mine):
        return 0.0 if str(mine) == str(truth) else math.inf
    if truth == 0:
        return 0.0 if mine == 0 else math.inf
    return abs(mine - truth) / abs(truth)


def gradient_difference(mine: Tensor, truth: Tensor) -> float:
    """L2 norm of the difference over the L2 norm of the truth."""
    if mine.shape != truth.shape:
        return math.inf
    difference = float((mine.double() - truth.double()).norm())
    norm = float(truth.double().norm())
    if not math.isfinite(difference):
        return math.inf
    return difference / norm if norm else (0.0 if difference == 0 else math.inf)


def compare(mine: Recording, truth: Recording, tolerances: Tolerances) -> Parity:
    """Compare all steps of a layout with those of the truth."""
    problem = mine.failure
    if problem is None and len(mine.rows) != len(truth.rows):
        problem = f"{len(mine.rows)} steps instead of {len(truth.rows)}"
    if problem is None and mine.padded_vocab_size != truth.padded_vocab_size:
        problem = (
            f"the vocabulary is padded to {mine.padded_vocab_size}, not {truth.padded_vocab_size}, "
            "which changes the model; choose another --make-vocab-size-divisible-by"
        )
    if problem is not None:
        return Parity(mine, problem=problem)
    losses: list[Difference] = []
    norms: list[Difference] = []
    gradients: list[Difference] = []
    for row, want in zip(mine.rows, truth.rows, strict=True):
        step = int(row["iteration"])
        for key in sorted(want.keys() - NOT_COMPARED):
            size = relative(row[key], want[key]) if key in row else math.inf
            losses.append(Difference(step, key, size))
        norms.append(Difference(step, "grad_norm", relative(row["grad_norm"], want["grad_norm"])))
        gradients += _gradients(mine, truth, step)

    def is_out(difference: Difference) -> bool:
        limit = tolerances.gradient if difference in gradients else tolerances.loss
        return difference.size > limit

    return Parity(
        mine,
        loss=_worst(losses),
        grad_norm=_worst(norms),
        gradient=_worst(gradients),
        first=_first([*losses, *norms, *gradients], is_out),
    )


def _gradients(mine: Recording, truth: Recording, step: int) -> Iterator[Difference]:
    ours, theirs = (read_gradients(x.folder, step) for x in (mine, truth))
    for name in sorted(ours.keys() | theirs.keys()):
        both = name in ours and name in theirs
        size = gradient_difference(ours[name], theirs[name]) if both else math.inf
        yield Difference(step, name, size)


def _worst(differences: Sequence[Difference]) -> Difference | None:
    return max(differences, key=lambda d: d.size, default=None)


def _first(
    differences: Sequence[Difference], is_out: Callable[[Difference], bool]
) -> Difference | None:
    out = [difference for difference in differences if is_out(difference)]
    if not out:
        return None
    step = min(difference.step for difference in out)
    return _worst([difference for difference in out if difference.step == step])


def table(results: Sequence[Parity], truth: Recording, tolerances: Tolerances) -> Table:
    """All layouts, one on a line."""
    shown = Table(
        "layout",
        "ranks",
        "loss",
        "grad norm",
        "gradient",
        "of",
        "",
        "first divergence",
        title=(
            f"largest relative difference to {truth.layout.name} over {len(truth.rows)} steps "
            f"(limits: {tolerances.loss:g}, gradients {tolerances.gradient:g})"
        ),
    )
    for result in results:
        sizes = [
            "-" if difference is None else f"{difference.size:.1e}"
            for difference in (result.loss, result.grad_norm, result.gradient)
        ]
        first = result.problem or ""
        if result.first is not None:
            first = f"step {result.first.step}: {result.first.name} ({result.first.size:.1e})"
        shown.add_row(
            result.recording.layout.name,
            str(result.recording.layout.ranks),
            *sizes,
            result.gradient.name if result.gradient is not None else "",
            "[green]PASS" if result.passed else "[red]FAIL",
            first,
        )
    return shown
