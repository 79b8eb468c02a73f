"""The tables of a run's report: faults, checkpoints, other events, settings and environment."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.flags import changed_fields, default_of, flags_of
from megatron_ext.config.run import RunConfig, engine_sections
from megatron_ext.extras.report.goodput import show_seconds
from megatron_ext.extras.report.run_folder import PostMortem, Row, RunFolder, time_of
from megatron_ext.inspect.pages.table import NOTHING, Table, integer_of, moment, text_of
from megatron_ext.train.reporting.files import (
    LAUNCHED,
    METRICS_FILE,
    TIME,
    is_launch,
    launch_time,
    number,
)

MAX_DATA_LINES = 100
"""Largest number of sentences on the data of a run."""
NOT_GIVEN = ", not on the command line"
"""Ends the name of a section for the settings that the command line does not give."""
FAULT, RESTART, SAVED = "fault", "restart", "saved"
_NOT_ENVIRONMENT = {
    "kind",
    "iteration",
    "launched_at",
    "time",
    "num_iterations",
    "settings",
    "data",
    "command",
    "folder",
}
"""Keys in the row about a start of the ranks that other parts of the page show."""
NOTICED = {
    "spike": "spike",
    "non_finite": "not finite",
    "mismatch": "mismatch",
    "slow_rank": "slow rank",
    "save_failed": "failed save",
    "checkpoint_refused": "refused checkpoint",
}
"""Names in the report of the kinds of events other than faults, restarts and saves."""


def seconds_of(value: object) -> str:
    """Return a number of seconds in words; a dash if the value is not a number."""
    try:
        return show_seconds(number(value))
    except ValueError:
        return NOTHING


@dataclass(frozen=True)
class FaultStory:
    """A fault, the restart that followed, and the report written at the fault, if there are any."""

    number: int
    fault: Row
    restart: Row | None
    post_mortem: PostMortem | None

    @property
    def target(self) -> str:
        """Return the HTML id of the fault's row in the table of faults."""
        return f"fault-{self.number}"

    @property
    def headline(self) -> str:
        """Return what happened in short, such as "rank 2: SIGKILL at iteration 31"."""
        rank, iteration = (integer_of(self.fault, name) for name in ("rank", "iteration"))
        who = "a rank" if rank is None else f"rank {rank}"
        where = "" if iteration is None else f" at iteration {iteration}"
        return f"{who}: {text_of(self.fault.get('cause') or 'fault', 60)}{where}"


def fault_stories(folder: RunFolder) -> list[FaultStory]:
    """Join each fault with the first restart after it, and with the report written at the fault."""
    faults = folder.events_of(FAULT)
    restarts = folder.events_of(RESTART)
    by_name = {p.name: p for p in folder.post_mortems}
    in_order = folder.post_mortems if len(folder.post_mortems) == len(faults) else []
    stories = []
    for index, fault in enumerate(faults):
        event = next((r for r in restarts if time_of(r) >= time_of(fault)), None)
        named_one = by_name.get(str(fault.get("postmortem")))
        post_mortem = named_one or (in_order[index] if in_order else None)
        restart = event or _restart_of_rows(folder, fault)
        stories.append(FaultStory(index + 1, fault, restart, post_mortem))
    return stories


def _restart_of_rows(folder: RunFolder, fault: Row) -> Row | None:
    """Return the restart after a fault from metrics.jsonl, if no event has it; None without one."""
    fault_time = time_of(fault)
    rows = folder.of_kind(LAUNCHED)
    started = next(
        (r for r in rows if time_of(r) >= fault_time and integer_of(r, "generation")), None
    )
    if started is None:
        return None
    restored = started["iteration"]
    iteration = integer_of(fault, "iteration")
    restart: Row = {"restored_iteration": restored}
    if iteration is not None:
        restart["steps_lost"] = max(0, iteration - restored)
    steps = (r for r in folder.of_kind(TIME) if r.get("generation") == started["generation"])
    first = next((r for r in steps if is_launch(r, launch_time(started))), {})
    with contextlib.suppress(KeyError, ValueError):
        restart["seconds"] = number(first["to"]) - fault_time
    return restart


def fault_table(stories: Sequence[FaultStory]) -> Table:
    """Return a table with a row for each fault: when, where and why it happened, and its cost."""
    columns = (
        "#", "time (UTC)", "iteration", "rank", "cause", "where", "seen after", "went on from",
        "steps lost", "first new step after",
    )  # fmt: skip
    numeric = frozenset({"#", "iteration", "rank", "seen after", "steps lost", columns[-1]})
    table = Table(columns, numeric=numeric)
    for story in stories:
        fault = story.fault
        restart = story.restart or {}
        source = restart.get("restored_from")
        restored = NOTHING
        if "restored_iteration" in restart:
            restored = f"iteration {text_of(restart['restored_iteration'])}"
            restored += "" if source is None else f" ({text_of(source)})"
        table.ids.append(story.target)
        table.rows.append(
            (
                str(story.number),
                moment(fault.get("time")),
                text_of(fault.get("iteration")),
                text_of(fault.get("rank")),
                text_of(fault.get("cause")),
                text_of(fault.get("where")),
                seconds_of(fault.get("seen_after")),
                restored,
                text_of(restart.get("steps_lost")),
                seconds_of(restart.get("seconds")),
            )
        )
    return table.shortened()


@dataclass(frozen=True)
class Picture:
    """The contents of the page about one fault, from the report (post-mortem) written at the fault.

    ``data`` is the ``data:`` URL of an SVG of the ranks' last events, or "" to show no picture.
    """

    title: str
    folder: str
    data: str
    text: str


def pictures(
    stories: Sequence[FaultStory], limit: int = 10, max_bytes: int = 1_000_000
) -> list[Picture]:
    """Return the reports on the newest faults, at most ``limit``.

    A report is shown without its picture if all pictures together would exceed ``max_bytes``.
    """
    chosen = list[Picture]()
    left = max_bytes
    for story in [s for s in stories if s.post_mortem is not None][-limit:]:
        entry = story.post_mortem
        assert entry is not None
        data = ""
        if entry.picture is not None and len(entry.picture) <= left:
            left -= len(entry.picture)
            data = f"data:image/svg+xml;base64,{base64.b64encode(entry.picture).decode()}"
        title = f"{story.number}. {story.headline}"
        chosen.append(Picture(title, entry.name, data, entry.text[:20_000]))
    return chosen


def checkpoint_table(folder: RunFolder) -> Table:
    """Return a table with a row for each checkpoint that exists or whose save was recorded."""
    columns = ("iteration", "saved (UTC)", "size", "written in", "steps waited", "how", "state")
    numeric = frozenset({"iteration", "size", "written in", "steps waited"})
    saves = {integer_of(e, "iteration"): e for e in folder.events_of(SAVED)}
    stored = {c.iteration: c for c in folder.checkpoints}
    newest = newest_whole(folder)
    table = Table(columns, numeric=numeric)
    for iteration in sorted({*stored, *(i for i in saves if i is not None)}):
        save = saves.get(iteration, {})
        checkpoint = stored.get(iteration)
        asynchronous = save.get("asynchronous")
        how = NOTHING if asynchronous is None else "synchronous"
        how = "asynchronous" if asynchronous is True else how
        state = "removed"
        if checkpoint is not None:
            state = f"damaged: {text_of(checkpoint.fault)}" if checkpoint.fault else "whole"
            state = "whole, the newest" if iteration == newest else state
        size = NOTHING if checkpoint is None else show_bytes(checkpoint.size)
        saved = save.get("time", None if checkpoint is None else checkpoint.saved)
        times = moment(saved), seconds_of(save.get("seconds"))
        stall = seconds_of(save.get("stall"))
        table.rows.append((str(iteration), times[0], size, times[1], stall, how, state))
    return table.shortened()


def newest_whole(folder: RunFolder) -> int | None:
    """Return the iteration of the newest checkpoint with complete files; None if there is none."""
    return max((c.iteration for c in folder.checkpoints if c.fault is None), default=None)


def show_bytes(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def noticed_table(folder: RunFolder) -> Table:
    """Return a table of events besides faults and saves: spikes, slow ranks and so on."""
    columns = ("time (UTC)", "iteration", "what", "facts")
    table = Table(columns, numeric=frozenset({"iteration"}))
    for event in folder.events_of(*NOTICED):
        facts = "; ".join(
            f"{text_of(name, 40).replace('_', ' ')}: {text_of(value, 300)}"
            for name, value in list(event.items())[:30]
            if name not in ("time", "kind", "iteration")
        )
        row = moment(event.get("time")), text_of(event.get("iteration")), NOTICED[event["kind"]]
        table.ids.append(f"noticed-{len(table.rows) + 1}")
        table.rows.append((*row, text_of(facts)))
    return table.shortened()


def changed_settings(config: RunConfig, given: Collection[str]) -> dict[str, list[list[str]]]:
    """Return, by section, a list [flag, value, default] for each setting not at its default.

    Settings that the command line gives come first, those that follow from others or come from a
    file after them, under the section's name with `NOT_GIVEN`. A run stores this in metrics.jsonl
    at its start, since a program that later writes the report may not define all sections of the
    run's configuration.

    Args:
        given: names of the fields that the command line sets.
    """
    on_command_line: dict[str, list[list[str]]] = {}
    elsewhere: dict[str, list[list[str]]] = {}
    for name, section in config.by_name().items():
        for field in changed_fields(section):
            pair = getattr(section, field), default_of(section, field)
            entry = [f"--{field.replace('_', '-')}", *map(_setting, pair)]
            if field in given:
                on_command_line.setdefault(name, []).append(entry)
            else:
                elsewhere.setdefault(f"{name}{NOT_GIVEN}", []).append(entry)
    return on_command_line | elsewhere


def settings_tables(folder: RunFolder) -> list[tuple[str, Table]]:
    """Return, by section, a table of the settings that differ from their defaults.

    They are what the run recorded when it last started. If that is missing, they come from its
    configuration file; sections that this package does not define are then shown without defaults.
    """
    settings = folder.start_facts.get("settings")
    if not isinstance(settings, Mapping):
        settings = {name: _from_file(name, values) for name, values in folder.settings.items()}
    tables = []
    for section, entries in settings.items():
        table = Table(("setting", "value", "default"))
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, (list, tuple)) and len(entry) == 3:
                table.rows.append([text_of(cell) for cell in entry])
        if table.rows:
            tables.append((text_of(section, 60), table))
    return tables


def _from_file(section: str, values: Mapping[str, Any]) -> list[Sequence[str]]:
    """Return rows (flag, value, default) for settings of a section that differ from their defaults.

    ``values`` come from a configuration file; the defaults are those of this version. If a default
    is not known, the row says so.
    """
    kind = engine_sections().get(section)
    if kind is None:
        return [(str(name), _setting(value), "not known here") for name, value in values.items()]
    flags = {flag.field: flag for flag in flags_of("", kind)}
    fields = {field.name for field in dataclasses.fields(kind)}
    rows = list[Sequence[str]]()
    for name, value in values.items():
        if name not in fields:
            rows.append((str(name), _setting(value), "not a setting of this version"))
        elif name in flags and value != _as_in_a_file(flags[name].default):
            rows.append((flags[name].positive[0], _setting(value), _setting(flags[name].default)))
    return rows


def _as_in_a_file(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _setting(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else text_of(value)


def data_lines(folder: RunFolder) -> list[str]:
    """Return the sentences that say which data the run reads and which it does not use.

    At most `MAX_DATA_LINES` are shown; a last line then gives the number of the others.
    """
    sentences = folder.start_facts.get("data")
    lines = [text_of(line, 1000) for line in sentences] if isinstance(sentences, list) else []
    more = len(lines) - MAX_DATA_LINES
    if more > 0:
        lines[MAX_DATA_LINES:] = [f"… and {more} more, in {METRICS_FILE}"]
    return lines


def environment_table(folder: RunFolder) -> Table:
    """Return a table of the machine and packages that the ranks reported at their start."""
    table = Table(("what", "value"))
    for name, fact in folder.start_facts.items():
        if name in _NOT_ENVIRONMENT:
            continue
        words = fact if isinstance(fact, Mapping) else {name: fact}
        table.rows += [
            (_fact_name(text_of(key, 60)), text_of(value, 4000)) for key, value in words.items()
        ]
    return table


def _fact_name(name: str) -> str:
    """Return a name in words; that of an environment variable stays as it is."""
    return name if name.isupper() else name.replace("_", " ")
