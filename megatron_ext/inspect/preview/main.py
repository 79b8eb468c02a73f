"""Shows the batches of a run: parses its flags, checks them, draws the batches and prints them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from megatron_ext.config.parser import parse_args
from megatron_ext.device import select
from megatron_ext.errors import ConfigError
from megatron_ext.inspect.preview.collect import collect
from megatron_ext.inspect.preview.html import Page
from megatron_ext.inspect.preview.rows import Row, Step
from megatron_ext.inspect.preview.summary import sentences, summarize, table, warnings_of
from megatron_ext.inspect.preview.text import SpanSplitter, Terminal
from megatron_ext.parallel.grid import Layout
from megatron_ext.text.config import DataConfig, SftConfig
from megatron_ext.train.main import silence_known_warnings, stored_config
from megatron_ext.train.preflight import preflight
from megatron_ext.train.task import TaskChoice

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.data.samplers import Ints
    from megatron_ext.text.tokenizers.base import Tokenizer
    from megatron_ext.train.task import Task


@dataclass(frozen=True)
class Options:
    """The steps and rows to show.

    Attributes:
        step: the first step, counted from 1.
        steps: number of steps.
        rank: the data-parallel rank whose rows are shown.
        max_rows: rows to show of each step.
        world_size: ranks of the run; 0 takes ``WORLD_SIZE``, else ``--nproc-per-node``.
        html: the page to write.
    """

    step: int = 1
    steps: int = 1
    rank: int = 0
    max_rows: int = 4
    world_size: int = 0
    html: Path | None = None


def preview(
    program: Task | TaskChoice, words: Sequence[str], options: Options, console: Console
) -> list[str]:
    """Show the batches of a run.

    Args:
        program: the task of the run, or the tasks of which the flags choose one.
        words: the flags of the run.
        options: the steps and rows to show.
        console: the terminal to print to.

    Returns:
        What looks wrong, one sentence each.

    Raises:
        ConfigError, DataError: what the run itself would refuse; a rank or step that it lacks.
    """
    kind = select().kind
    parsed = parse_args(
        words,
        program,
        world_size=options.world_size or int(os.environ.get("WORLD_SIZE", "0")),
        device=kind,
        checkpoint_config=stored_config(words, program),
    )
    config, task = parsed.config, parsed.task
    replicas = Layout.from_config(config.parallel).data_parallel_size
    if not 0 <= options.rank < replicas:
        raise ConfigError(
            f"`--rank` ({options.rank}) must be one of the {replicas} data-parallel ranks of the "
            "layout, counted from 0; `--world-size` sets the number of all ranks."
        )
    config, tokenizer = preflight(config, task.preflight)
    silence_known_warnings(kind)
    steps = collect(config, task, tokenizer, first=options.step, count=options.steps)
    return _show(config, tokenizer, steps, options, console)


def _show(
    config: RunConfig,
    tokenizer: Tokenizer,
    steps: Sequence[Step],
    options: Options,
    console: Console,
) -> list[str]:
    splitter, eod = SpanSplitter(tokenizer), tokenizer.eod
    summary = summarize(steps, eod)
    warnings = warnings_of(steps, splitter, eod)
    # Whole tokens weigh 1; under the other reductions the weights only compare with each other.
    by_token = config.loss.loss_reduction == "token"
    heaviest = max(summary.heaviest, 1.0) if by_token else summary.heaviest
    chosen = [(step, _chosen(step, options)) for step in steps]
    terminal = Terminal(console, splitter, eod, heaviest)
    for step, rows in chosen:
        terminal.print(f"step {step.iteration}, after {step.consumed} samples", "bold")
        for row in rows:
            terminal.row(row)
        terminal.print(f"{len(rows)} of {len(step.rows)} rows are shown", "dim")
    console.print(table(summary))
    for line in sentences(summary, steps):
        terminal.print(line)
    notes = [*_notes(config), *_cuts(steps[0].cp_columns)]
    for note in notes:
        terminal.print(note)
    for warning in warnings:
        terminal.print(f"warning: {warning}", "bold yellow")
    if options.html is not None:
        title = f"Batches of step {options.step}, data-parallel rank {options.rank}"
        page = Page(splitter, eod, heaviest)
        _write(options.html, page.render(title, chosen, summary, notes=notes, warnings=warnings))
        terminal.print(f"wrote {options.html}")
    return warnings


def _chosen(step: Step, options: Options) -> list[Row]:
    """Return the first rows of the rank that hold more than padding."""
    rows = [row for row in step.rows if row.dp_rank == options.rank and not row.is_padding.all()]
    return rows[: max(0, options.max_rows)]


def _notes(config: RunConfig) -> list[str]:
    """Return what the rows themselves do not show."""
    notes = []
    if not config.section(SftConfig).sft and not config.section(DataConfig).reset_attention_mask:
        notes.append(
            "attention and multi-token targets run through the ends of documents; "
            "`--reset-attention-mask` keeps them within"
        )
    if not config.training.calculate_per_token_loss:
        notes.append("the loss is the mean of the micro-batches' own means, not a sum over N or D")
    if config.loss.loss is not None:
        notes.append(
            f"the weights are those of `--loss` ({config.loss.loss}); what it sums over replicas "
            "is summed over one data-parallel rank here"
        )
    return notes


def _cuts(cp_columns: Sequence[Ints]) -> list[str]:
    """Return the columns of each context-parallel rank, which keeps two slices of each row."""
    if len(cp_columns) == 1:
        return []
    lines = []
    for rank, columns in enumerate(cp_columns):
        first, second = np.array_split(columns, 2)
        lines.append(
            f"context-parallel rank {rank} keeps columns {first[0]}–{first[-1]} and "
            f"{second[0]}–{second[-1]} of each row"
        )
    return lines


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"`--html` ({path}) cannot be written ({error.strerror}); give another path."
        ) from None
