"""Compares training in parallel layouts with training in a reference layout.

Each layout trains a few steps on forked ranks and keeps its losses, gradients and their norms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from rich.table import Table
from torch import Tensor

from megatron_ext.config.parser import parse_args
from megatron_ext.device import Device
from megatron_ext.disk.writing import open_new
from megatron_ext.errors import ConfigError, MegatronExtError
from megatron_ext.inspect.layouts import NamedLayout, flags_of_run
from megatron_ext.layers.initialization import shards_of
from megatron_ext.train.forking import fork_ranks
from megatron_ext.train.main import preflight
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.reporting.files import MetricsFile, read_metrics
from megatron_ext.train.reporting.records import LARGEST_LOGIT
from megatron_ext.train.run import Run
from megatron_ext.train.task import Task, TaskChoice


class GradientRecorder:
    """A callback that writes this rank's gradients of the current step to a file in ``folder``.

    The step calls it before the update. If several ranks hold the same gradient, only one of them
    writes it.
    """

    def __init__(self, folder: Path, run: Run) -> None:
        self.folder = folder
        self.run = run

    def __call__(self) -> None:
        parts = [
            (shard.name, shard.full_shape, shard.offset, shard.tensor.clone())
            for chunk in unwrap_model(self.run.chunks)
            for shard in shards_of(chunk, lambda parameter: getattr(parameter, "main_grad", None))
            if shard.is_main
        ]
        step = self.run.progress.iteration + 1
        torch.save(parts, self.folder / f"gradients_{step:04d}_{self.run.context.rank:04d}.pt")


def read_gradients(folder: Path, step: int) -> dict[str, Tensor]:
    """Return the full gradients of a step by parameter name, joined from all ranks' shards."""
    full: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"gradients_{step:04d}_*.pt")):
        for name, shape, offset, part in torch.load(path, weights_only=True):
            target = full.setdefault(name, torch.full(shape, float("nan")))
            sizes = zip(offset, part.shape, strict=True)
            target[tuple(slice(start, start + size) for start, size in sizes)] = part.float()
    return full


@dataclass(frozen=True)
class Recording:
    """The results of training in one layout.

    Attributes:
        folder: folder with the gradients of each step.
        rows: for each step, a dictionary of its metrics: ``grad_norm``, every loss by name, etc.
        padded_vocab_size: None if there is no vocabulary, or if the run failed before training.
        failure: why the run failed; None if it succeeded.
        core: the release of megatron-core if several are compared, else "".
    """

    layout: NamedLayout
    folder: Path
    rows: list[dict[str, Any]]
    padded_vocab_size: int | None = None
    failure: str | None = None
    core: str = ""

    @property
    def label(self) -> str:
        """Return the layout's name; if releases of megatron-core are compared, "RELEASE NAME"."""
        return f"{self.core} {self.layout.name}".strip()


def record(
    program: Task | TaskChoice,
    words: Sequence[str],
    layout: NamedLayout,
    steps: int,
    folder: Path,
    device: Device,
) -> Recording:
    """Train ``program`` for ``steps`` steps in a layout, and record them in a new folder.

    ``words`` are the flags of the run; the layout's own flags come after them and so prevail. An
    error is not raised, but returned as the recording's ``failure``.
    """
    folder.mkdir(parents=True)
    try:
        flags = flags_of_run(words, layout, steps)
        parsed = parse_args(flags, program, world_size=0, device=device.kind)
        if parsed.config.checkpoint.save is not None:
            raise ConfigError("`--save` is given, but a parity run keeps nothing; drop it.")
        with open_new(folder / "log") as log, redirect_stdout(log):
            config, assets = preflight(parsed.config, parsed.task.preflight)
    except MegatronExtError as error:
        return Recording(layout, folder, [], failure=" ".join(error.messages))

    def prepare(run: Run) -> None:
        run.runner.observer = GradientRecorder(folder, run)
        if run.context.is_reporting_rank:
            run.reporters.sinks[:] = [MetricsFile(folder, resumed_at=0)]

    main = partial(pretrain, parsed.task, config, device=device, assets=assets, prepare=prepare)
    code = fork_ranks(main, layout.ranks)
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    failure = None if code == 0 else f"a rank ended with exit code {code}"
    return Recording(layout, folder, rows, config.model.padded_vocab_size, failure)


NOT_COMPARED = frozenset(
    "kind iteration consumed_samples learning_rate loss_scale global_batch_size "
    "seconds_per_iteration tokens_per_second skipped_iterations nan_iterations "
    "total_skipped_iterations num_zeros params_norm grad_norm "
    "train/throughput train/time(s) memory/allocated memory/reserved".split()
)


@dataclass(frozen=True)
class Tolerances:
    """The largest relative differences that pass; ``loss`` is also the limit for gradient norms."""

    loss: float = 1e-6
    gradient: float = 1e-5


@dataclass(frozen=True)
class Difference:
    step: int
    name: str
    size: float


@dataclass(frozen=True)
class Parity:
    """The result of comparing one layout with the reference.

    Attributes:
        loss, grad_norm, gradient: the largest relative difference of each kind; None if the kind
            was not compared.
        first: the largest difference that exceeds its tolerance in the first step that has one;
            None if no step has one.
        problem: why the layout could not be compared; None if it was.
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
    """Return ``abs(mine - truth) / abs(truth)``, infinite where that is undefined.

    If both are zero or the same non-finite value, return 0.
    """
    if not math.isfinite(truth) or not math.isfinite(mine):
        return 0.0 if str(mine) == str(truth) else math.inf
    if truth == 0:
        return 0.0 if mine == 0 else math.inf
    return abs(mine - truth) / abs(truth)


def gradient_difference(mine: Tensor, truth: Tensor) -> float:
    """Return the L2 norm of ``mine - truth`` divided by the L2 norm of ``truth``.

    Return 0 if the two are equal. Return infinity if the shapes differ, ``truth`` is zero or the
    difference is not finite.
    """
    if mine.shape != truth.shape:
        return math.inf
    difference = float((mine.double() - truth.double()).norm())
    norm = float(truth.double().norm())
    if difference == 0:
        return 0.0
    return difference / norm if norm and math.isfinite(difference) else math.inf


def compare(mine: Recording, truth: Recording, tolerances: Tolerances) -> Parity:
    problem = mine.failure
    if problem is None and len(mine.rows) != len(truth.rows):
        problem = f"{len(mine.rows)} steps instead of {len(truth.rows)}"
    sizes = mine.padded_vocab_size, truth.padded_vocab_size
    if problem is None and sizes[0] != sizes[1]:
        problem = (
            f"the vocabulary is padded to {sizes[0]}, not {sizes[1]}, which changes the model; "
            f"give --padded-vocab-size {max(size or 0 for size in sizes)}"
        )
    if problem is not None:
        return Parity(mine, problem=problem)
    losses = list[Difference]()
    norms = list[Difference]()
    gradients = list[Difference]()
    for row, want in zip(mine.rows, truth.rows, strict=True):
        step = int(row["iteration"])
        # The largest logit of attention is one number, not as exact as a mean over all tokens.
        kept = {key for key in want if not key.startswith(LARGEST_LOGIT)}
        for key in sorted(kept - NOT_COMPARED):
            size = relative(row[key], want[key]) if key in row else math.inf
            losses.append(Difference(step, key, size))
        norms.append(Difference(step, "grad_norm", relative(row["grad_norm"], want["grad_norm"])))
        ours, theirs = (read_gradients(x.folder, step) for x in (mine, truth))
        for name in sorted(ours.keys() | theirs.keys()):
            both = name in ours and name in theirs
            size = gradient_difference(ours[name], theirs[name]) if both else math.inf
            gradients.append(Difference(step, name, size))
    out = [difference for difference in (*losses, *norms) if difference.size > tolerances.loss]
    out += [difference for difference in gradients if difference.size > tolerances.gradient]
    first_step = min((difference.step for difference in out), default=None)
    return Parity(
        mine,
        loss=_worst(losses),
        grad_norm=_worst(norms),
        gradient=_worst(gradients),
        first=_worst([difference for difference in out if difference.step == first_step]),
    )


def _worst(differences: Sequence[Difference]) -> Difference | None:
    return max(differences, key=lambda d: d.size, default=None)


def table(results: Sequence[Parity], truth: Recording, tolerances: Tolerances) -> Table:
    """Return a table with a row per layout: its largest differences from the reference ``truth``.

    If several releases of megatron-core are compared, the first column names each row's release.
    """
    columns = ("layout", "ranks", "loss", "grad norm", "gradient", "of", "", "first divergence")
    core = f" on megatron-core {truth.core}" if truth.core else ""
    title = (
        f"largest relative difference to {truth.layout.name}{core} over {len(truth.rows)} steps "
        f"(limits: {tolerances.loss:g}, gradients {tolerances.gradient:g})"
    )
    shown = Table(*(("core",) if core else ()), *columns, title=title)
    for result in results:
        differences = (result.loss, result.grad_norm, result.gradient)
        sizes = ["-" if worst is None else f"{worst.size:.1e}" for worst in differences]
        first = result.problem or ""
        if result.first is not None:
            first = f"step {result.first.step}: {result.first.name} ({result.first.size:.1e})"
        layout = result.recording.layout
        where = result.gradient.name if result.gradient else ""
        verdict = "[green]PASS" if result.passed else "[red]FAIL"
        cells = [layout.name, str(layout.ranks), *sizes, where, verdict, first]
        shown.add_row(*((result.recording.core,) if core else ()), *cells)
    return shown
