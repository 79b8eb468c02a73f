"""Shows the batches of a run: parses its flags, checks them, draws the batches and prints them.

The HTML page needs no script and no other file, and has a light and a dark style. Each token is a
``<span>`` with ``data-ids``, ``data-position`` and ``data-weight``; its tooltip (``title``) says
more.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from rich.console import Console

from megatron_ext import limits
from megatron_ext.config.parser import ParsedArgs, parse_args, read_words
from megatron_ext.config.run import RunConfig
from megatron_ext.data.samplers import Ints
from megatron_ext.device import select
from megatron_ext.errors import ConfigError
from megatron_ext.inspect.pages.page import style_sheet, write_page
from megatron_ext.inspect.preview.collect import collect
from megatron_ext.inspect.preview.rows import Document, Row, Step, documents_of
from megatron_ext.inspect.preview.summary import (
    COLUMNS,
    Share,
    Summary,
    cells,
    sentences,
    summarize,
    table,
    warnings_of,
)
from megatron_ext.inspect.preview.text import (
    NOTHING,
    SpanSplitter,
    Terminal,
    TokenSpan,
    describe,
    describe_row,
    grade,
    visible,
)
from megatron_ext.parallel.grid import Layout
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.run import separator_warnings
from megatron_ext.text.sft.dataset import report_conversations
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.main import preflight, silence_known_warnings, stored_config
from megatron_ext.train.task import Task, TaskChoice

EVERY = 64
"""A position id is printed at the beginning of each line, and again after this many tokens."""

_STYLE = """
:root { --one: light-dark(#f4f6f8, #1b1f24); --two: light-dark(#eaf0f7, #1a2430); }
th, td { text-align: right; } tr.all td { font-weight: 600; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; min-width: 14rem; }
.document { border-left: 4px solid var(--line); background: var(--one); margin: .3rem 0;
  padding: .4rem .8rem; } .document:nth-of-type(even) { background: var(--two); }
.document header { color: var(--faint); font-size: .87rem; overflow-wrap: anywhere; }
.tokens { font-family: ui-monospace, monospace; font-size: .92rem; white-space: pre-wrap;
  overflow-wrap: anywhere; line-height: 1.7; }
.t { color: var(--faint); border-radius: 3px; } .t:hover { outline: 1px solid var(--text); }
.t.given { text-decoration: underline dotted; } .special { font-weight: 700; }
.cut { border-left: 2px dashed var(--warn); }
.n { font-size: .65rem; color: var(--faint); user-select: none; vertical-align: super; }
""" + "\n".join(
    f".w{i} {{ color: var(--text); background: color-mix(in srgb, "
    f"light-dark(#2ea043, #3fc85f) {16 + 48 * i // 8}%, transparent); }}"
    for i in range(1, 9)
)


class Page:
    """Writes previewed steps as HTML; a token of weight ``heaviest`` gets the strongest green."""

    def __init__(self, splitter: SpanSplitter, eod: int, heaviest: float) -> None:
        self._splitter = splitter
        self._eod = eod
        self._heaviest = heaviest

    def render(
        self,
        title: str,
        steps: Sequence[tuple[Step, Sequence[Row]]],
        summary: Summary,
        *,
        notes: Sequence[str],
        warnings: Sequence[str],
    ) -> str:
        """Return the HTML page: totals, notes, warnings, and each step with the given rows."""
        body = [self._legend(), *(f'<p class="warning">⚠ {escape(w)}</p>' for w in warnings)]
        body.append(_table(summary))
        lines = [*sentences(summary, [step for step, _ in steps]), *notes]
        body.append("".join(f"<div>{escape(line)}</div>" for line in lines))
        for step, rows in steps:
            body.append(f"<h2>Step {step.iteration}</h2>")
            # The context-parallel rank of each column, if rows are sliced.
            kept = enumerate(step.cp_columns if len(step.cp_columns) > 1 else [])
            owners = {int(column): rank for rank, columns in kept for column in columns}
            body += [self._row(row, owners) for row in rows]
            body.append(f'<p class="faint">{len(rows)} of {len(step.rows)} rows are shown.</p>')
        return whole_page(title, _STYLE, body)

    def _legend(self) -> str:
        shades = "".join(f'<span class="t w{i}">&nbsp;&nbsp;</span>' for i in range(1, 9))
        return (
            '<p class="faint">Each token is coloured by the weight with which it is predicted: '
            f"{shades} up to {self._heaviest:.4g}; grey has none; dotted underline: only read. "
            "↵ is a newline; small numbers are position ids. Point at a token for more.</p>"
        )

    def _row(self, row: Row, owners: dict[int, int]) -> str:
        documents = [self._document(document, owners) for document in documents_of(row, self._eod)]
        head = f"<h3>{escape(describe_row(row))}</h3>"
        return "\n".join([f'<section class="row">{head}', *documents, "</section>"])

    def _document(self, document: Document, owners: dict[int, int]) -> str:
        spans = self._splitter.split(document.ids.tolist(), document.weights.tolist())
        mtp = [document.mtp_targets(k + 1) for k in range(len(document.row.mtp_labels))]
        shown = []
        next_number = 0
        for span in spans:
            position = int(document.positions[span.first])
            if position >= 0 and span.first >= next_number:
                shown.append(f'<span class="n">{position} </span>')
                next_number = span.first + EVERY
            if span.text.endswith("↵"):
                next_number = span.first + 1
            learns = []
            for depth, (ids, weights) in enumerate(mtp, 1):
                token = int(ids[span.first])
                weight = float(weights[span.first])
                what = NOTHING
                if token >= 0:
                    what = f"“{self._splitter.text_of(token)}” ({token}), weight {weight:.6g}"
                learns.append(f"MTP {depth}: {what}")
            shown.append(self._token(document, span, owners, learns))
        return (
            f'<div class="document"><header>{escape(describe(document))}</header>'
            f'<div class="tokens">{"".join(shown)}</div></div>'
        )

    def _token(
        self, document: Document, span: TokenSpan, owners: dict[int, int], learns: Sequence[str]
    ) -> str:
        members = slice(span.first, span.first + span.count)
        ids = ",".join(map(str, document.ids[members].tolist()))
        column = int(document.columns[span.first])
        position = int(document.positions[span.first])
        read = position >= 0
        given = math.isnan(span.weight)
        weight = "" if given else f"{span.weight:.9g}"
        facts = [
            f"id {ids}",
            f"column {column}, position {position}" if read else "only predicted, not read",
            "only read, not predicted" if given else f"weight {span.weight:.6g}",
            f"document {document.number}",
        ]
        provenance = document.provenance
        if provenance is not None:
            facts.append(visible(str(provenance)))
        if read and owners:
            facts.append(f"context-parallel rank {owners[column]}")
        facts += learns if read else []
        shade = grade(span.weight, self._heaviest)
        names = ["t", *(["given"] if given else []), *([f"w{shade}"] if shade else [])]
        names += ["special"] * span.is_special
        if read and owners and column and owners[column] != owners[column - 1]:
            names.append("cut")
        newline = "\n" if span.text.endswith("↵") else ""
        return (
            f'<span class="{" ".join(names)}" data-ids="{ids}" data-weight="{weight}" '
            f'data-position="{position if read else ""}" '
            f'title="{"&#10;".join(map(escape, facts))}">'
            f"{escape(span.text)}</span>{newline}"
        )


def _table(summary: Summary) -> str:
    def line(name: str, share: Share, kind: str = "") -> str:
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells(share))
        return f"<tr{kind}><td>{escape(name)}</td>{values}</tr>"

    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    lines = [line(name, share) for name, share in summary.by_source.items()]
    lines.append(line("all", summary.whole, ' class="all"'))
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


@dataclass(frozen=True)
class Options:
    """Which batches to show: ``steps`` steps from ``step`` on, counted from 1.

    At most ``max_rows`` rows of each step are shown, from data-parallel rank ``rank``. If
    ``world_size`` is 0, the number of ranks is that of the environment variable ``WORLD_SIZE`` or,
    without it, of ``--nproc-per-node``. If ``html`` is set, a page is written there too.
    ``codec`` is the folder of the VAE that decodes latents; None takes that of the run's flags.
    """

    step: int = 1
    steps: int = 1
    rank: int = 0
    max_rows: int = 4
    world_size: int = 0
    html: Path | None = None
    codec: str | None = None


def preview(
    program: Task | TaskChoice, words: Sequence[str], options: Options, console: Console
) -> list[str]:
    """Print the batches that a run with the flags ``words`` would train on.

    Return the printed warnings about the data.
    """
    kind = select().kind
    parsed = parse_run(program, words, options, kind)
    task = parsed.task
    config, tokenizer = preflight(parsed.config, task.preflight)
    silence_known_warnings(kind)
    steps = collect(config, task, tokenizer, first=options.step, count=options.steps)
    notes = _notes(config, steps[0].cp_columns)
    if config.section(SftConfig).sft:
        report = report_conversations(config, tokenizer)
        notes += report.notes
        warnings = report.warnings
    else:
        warnings = separator_warnings(config, tokenizer)
    return _show(steps, notes, warnings, options, tokenizer, console, config.loss.loss_reduction)


def parse_run(
    program: Task | TaskChoice, words: Sequence[str], options: Options, kind: str
) -> ParsedArgs:
    """Parse ``words``, the flags of the run to preview, for a device of kind "cuda" or "cpu".

    Raise a ConfigError if the layout has no data-parallel rank ``options.rank``.
    """
    parsed = parse_args(
        words,
        program,
        world_size=options.world_size or int(os.environ.get("WORLD_SIZE", "0")),
        device=kind,
        checkpoint_config=stored_config(read_words(words, program)),
    )
    replicas = Layout.from_config(parsed.config.parallel).data_parallel_size
    if not 0 <= options.rank < replicas:
        raise ConfigError(
            f"`--rank` ({options.rank}) must be one of the {replicas} data-parallel ranks of the "
            "layout, counted from 0; `--world-size` sets the number of all ranks."
        )
    return parsed


def whole_page(title: str, style: str, body: Sequence[str]) -> str:
    """Return an HTML page; ``body`` is its HTML lines, ``style`` CSS after that of `page.css`."""
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style_sheet()}{style}</style></head><body>"
        f"<h1>{escape(title)}</h1>"
    )
    return "\n".join([head, *body, "</body></html>\n"])


def save_page(path: Path, text: str) -> None:
    """Write HTML to ``path``, the value of ``--html``; raise a ConfigError if that fails."""
    try:
        write_page(path, text)
    except OSError as error:
        raise ConfigError(
            f"`--html` ({path}) cannot be written ({limits.cause(error, path)}); give another path."
        ) from None


def _show(
    steps: Sequence[Step],
    notes: Sequence[str],
    of_data: Sequence[str],
    options: Options,
    tokenizer: Tokenizer,
    console: Console,
    reduction: str,
) -> list[str]:
    splitter = SpanSplitter(tokenizer)
    eod = tokenizer.eod
    summary = summarize(steps, eod)
    warnings = [*of_data, *warnings_of(steps, splitter, eod)]
    # With plain token weights, a whole token weighs 1. Under other reductions only ratios mean
    # something.
    heaviest = max(summary.heaviest, 1.0) if reduction == "token" else summary.heaviest
    chosen = []
    for step in steps:
        own = [x for x in step.rows if x.dp_rank == options.rank and not x.is_padding.all()]
        chosen.append((step, own[: max(0, options.max_rows)]))
    terminal = Terminal(console, splitter, eod, heaviest)
    for step, rows in chosen:
        terminal.print(f"step {step.iteration}, after {step.consumed} samples", "bold")
        for row in rows:
            terminal.row(row)
        terminal.print(f"{len(rows)} of {len(step.rows)} rows are shown", "dim")
    console.print(table(summary))
    for line in sentences(summary, steps):
        terminal.print(line)
    for note in notes:
        terminal.print(note)
    for warning in warnings:
        terminal.print(f"warning: {warning}", "bold yellow")
    if options.html is not None:
        title = f"Batches of step {options.step}, data-parallel rank {options.rank}"
        page = Page(splitter, eod, heaviest)
        text = page.render(title, chosen, summary, notes=notes, warnings=warnings)
        save_page(options.html, text)
        terminal.print(f"wrote {options.html}")
    return warnings


def _notes(config: RunConfig, cp_columns: Sequence[Ints]) -> list[str]:
    notes = []
    training = config.training
    loss = config.loss
    if not (config.section(SftConfig).sft or config.section(DataConfig).reset_attention_mask):
        notes.append(
            "attention and multi-token targets run through the ends of documents; "
            "`--reset-attention-mask` keeps them within"
        )
    if not training.calculate_per_token_loss:
        notes.append("the loss is the mean of the micro-batches' own means, not a sum over N or D")
    if loss.loss is not None:
        notes.append(
            f"the weights are those of `--loss` ({loss.loss}); what it sums over replicas "
            "is summed over one data-parallel rank here"
        )
    if len(cp_columns) > 1:
        for rank, columns in enumerate(cp_columns):
            first, second = np.array_split(columns, 2)
            notes.append(
                f"context-parallel rank {rank} keeps columns {first[0]}–{first[-1]} and "
                f"{second[0]}–{second[-1]} of each row"
            )
    return notes
