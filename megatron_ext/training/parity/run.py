"""Trains a few steps on forked ranks and keeps losses, norms and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.config import parse_args
from megatron_ext.device import Device
from megatron_ext.errors import ConfigError, MegatronExtError
from megatron_ext.models.shards import shards_of
from megatron_ext.training.launch import fork_ranks
from megatron_ext.training.parity.layouts import NamedLayout
from megatron_ext.training.preflight import preflight
from megatron_ext.training.pretrain import pretrain
from megatron_ext.training.reporting.metrics_file import MetricsFile, read_metrics
from megatron_ext.training.task import TaskOrChoice, choose, sections_of

if TYPE_CHECKING:
    from megatron_ext.training.setup import Run


class GradientRecorder:
    """Writes the gradients of each step that this rank is the one to keep.

    Args:
        folder: of the run.
        run: the parts of this rank's run.
    """

    def __init__(self, folder: Path, run: Run) -> None:
        self.folder = folder
        self.run = run

    def __call__(self) -> None:
        """Write the gradients of the step that has just been computed."""
        parts = [
            (shard.name, shard.full_shape, shard.offset, shard.tensor.clone())
            for chunk in unwrap_model(self.run.chunks)
            for shard in shards_of(chunk, lambda parameter: getattr(parameter, "main_grad", None))
            if shard.is_main
        ]
        step = self.run.progress.iteration + 1
        torch.save(parts, self.folder / f"gradients_{step:04d}_{self.run.context.rank:04d}.pt")


def read_gradients(folder: Path, step: int) -> dict[str, Tensor]:
    """Full gradients of one step by name, put together from all ranks' parts."""
    full: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"gradients_{step:04d}_*.pt")):
        for name, shape, offset, part in torch.load(path, weights_only=True):
            target = full.setdefault(name, torch.full(shape, float("nan")))
            sizes = zip(offset, part.shape, strict=True)
            target[tuple(slice(start, start + size) for start, size in sizes)] = part.float()
    return full


@dataclass(frozen=True)
class Recording:
    """What a layout's run left behind.

    Attributes:
        layout: that was run.
        folder: with the gradients of each step.
        rows: of each step, with ``grad_norm`` and every loss by name.
        padded_vocab_size: of the run.
        failure: what went wrong, None when all went well.
    """

    layout: NamedLayout
    folder: Path
    rows: list[dict[str, Any]]
    padded_vocab_size: int | None = None
    failure: str | None = None


def record(
    task: TaskOrChoice,
    words: Sequence[str],
    layout: NamedLayout,
    steps: int,
    folder: Path,
    device: Device,
) -> Recording:
    """Train ``steps`` steps in a layout.

    Args:
        task: what to train, or a function that chooses it by the configuration.
        words: the flags of the run, without its layout.
        layout: adds its own flags.
        steps: training steps.
        folder: for what is kept.
        device: that the ranks run on.
    """
    folder.mkdir(parents=True)
    fixed = f"--train-iters {steps} --log-interval 1 --eval-iters 0 --nproc-per-node {layout.ranks}"
    try:
        parsed = parse_args(
            [*words, *layout.flags, *fixed.split()],
            world_size=0,
            device=device.kind,
            sections=sections_of(task),
        )
        if parsed.config.checkpoint.save is not None:
            raise ConfigError("`--save` is given, but a parity run keeps nothing; drop it.")
        with (folder / "log").open("w") as log, redirect_stdout(log):
            chosen = choose(task, parsed.config)
            config, tokenizer = preflight(parsed.config, chosen.preflight)
    except MegatronExtError as error:
        return Recording(layout, folder, [], failure=" ".join(error.messages))

    def prepare(run: Run) -> None:
        run.runner.observer = GradientRecorder(folder, run)
        if run.context.is_reporting_rank:
            run.reporters.sinks[:] = [MetricsFile(folder, resumed_at=0)]

    main = partial(pretrain, chosen, config, device=device, tokenizer=tokenizer, prepare=prepare)
    code = fork_ranks(main, layout.ranks)
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    failure = None if code == 0 else f"a rank ended with exit code {code}"
    return Recording(layout, folder, rows, config.model.padded_vocab_size, failure)
