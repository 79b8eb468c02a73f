"""The only argument parser: dataclass fields to flags with Megatron-LM's names.

Every flag gets one of four answers: it does what it does in Megatron-LM; it has no effect here and
is listed with the reason; it is known and refused with what to use instead; or it is unknown and
gets the nearest names. All errors of a command line are reported together.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.config.finalize import finalize
from megatron_ext.config.flags import Flag, flags_of
from megatron_ext.config.megatron_flags import (
    ALWAYS_ON,
    NEEDS,
    NO_EFFECT,
    OF_ENGINE,
    RENAMED,
    UNSUPPORTED,
    Need,
)
from megatron_ext.config.program_flags import (
    all_flags,
    canonical,
    is_left_out,
    known_names,
    left_out_flags,
    reason_left_out,
    sections_of,
    spellings,
    value_of_entry,
    value_of_words,
)
from megatron_ext.config.run import Program, RunConfig, engine_sections
from megatron_ext.config.sections import check_sections, print_help
from megatron_ext.errors import ConfigError


@dataclass(frozen=True)
class ParsedArgs:
    """A command line, understood.

    Attributes:
        config: the resolved configuration.
        task: what the flags choose of the program's tasks.
        notes: one line for each flag that has no effect or an old name.
        print_config: the user asked for the resolved configuration instead of a run.
    """

    config: RunConfig
    notes: list[str]
    task: Any
    print_config: bool = False


@dataclass
class _Reading:
    """The words of a command line that have been read so far."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    given: list[Flag] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    config_files: list[str] = field(default_factory=list)
    print_config: bool = False
    no_position_embedding: bool = False
    elsewhere: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    settled: list[tuple[str, str, Flag, Any]] = field(default_factory=list)

    def put(self, flag: Flag, value: Any) -> None:
        self.values.setdefault(flag.section, {})[flag.field] = value
        self.given.append(flag)


def parse_args(
    argv: Sequence[str],
    program: Program,
    *,
    world_size: int,
    device: str,
    checkpoint_config: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    elsewhere: Mapping[str, Sequence[type]] | None = None,
) -> ParsedArgs:
    """Parse and check a command line.

    Args:
        argv: the words after the program's name.
        program: the task, or the tasks of which the flags choose one.
        world_size: ranks that torchrun started; 0 lets ``--nproc-per-node`` decide.
        device: ``"cuda"`` or ``"cpu"``.
        checkpoint_config: the stored configuration whose model, and whose values of the user's
            own flags, are to be used (``--use-checkpoint-args``); the command line wins over it.
        defaults: values of fields in the place of the task's defaults and of their own.
        elsewhere: sections of other programs by the programs' names, for users who mistake them.

    Raises:
        ConfigError: with one sentence for every error.
        SystemExit: after ``--help``.
    """
    check_sections(program.sections, engine_sections())
    if "--help" in argv or "-h" in argv:
        print_help(all_flags(program))
        raise SystemExit(0)
    reading = read_words(argv, program, elsewhere)
    given = [_read_yaml(path, reading, program) for path in reading.config_files]
    given.append(reading.values)
    try:
        # The flags choose the task, whose defaults stand below them.
        asked = _joined(given)
        task = program.choose(RunConfig.from_dict(asked, program.sections))
        layers = [_by_section(task.defaults, program), _by_section(defaults or {}, program)]
        if checkpoint_config is not None:
            bare = RunConfig.from_dict(_joined([*layers, asked]), program.sections)
            layers.append(dict(task.stored_model(checkpoint_config, bare)))
        values = _joined([*layers, *given])
        _settle_old_spellings(values, reading)
        bare = RunConfig.from_dict(values, program.sections)
        config = finalize(bare, task, world_size, device)
    except ConfigError as error:
        raise ConfigError([*reading.errors, *error.messages]) from None
    reading.errors += _left_out_errors(reading, config)
    reading.errors += [
        f"`{flag.shown}` has no effect {reason_left_out(task.left_out, flag)}; leave it out."
        for flag in all_flags(program)
        if is_left_out(task, flag.section, flag.field)
        and asked.get(flag.section, {}).get(flag.field, flag.default)
        not in (flag.default, task.defaults.get(flag.field, flag.default))
    ]
    if reading.errors:
        raise ConfigError(reading.errors)
    notes = [
        *reading.notes,
        *_inert(reading, config, getattr(task, "needs", ())),
        *(() if "lr_warmup_iters" in values["optimizer"] else config.optimizer.warmup_notes()),
    ]
    return ParsedArgs(config, notes, task, reading.print_config)


def _joined(layers: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return values by section, of which later layers win."""
    values: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for section, entries in layer.items():
            values.setdefault(section, {}).update(entries)
    return values


def _settle_old_spellings(values: dict[str, dict[str, Any]], reading: _Reading) -> None:
    """Let flags that speak of another flag have their effect."""
    precision = values.get("precision", {})
    if "bf16" in precision or precision.get("fp16"):
        precision["bf16_on_gpu"] = False
    if reading.no_position_embedding:
        _no_position_embedding(values.get("model", {}), reading)


def read_words(
    argv: Sequence[str], program: Program, elsewhere: Mapping[str, Sequence[type]] | None = None
) -> _Reading:
    """Turn words into values of fields, collecting errors on the way."""
    reading, table = _Reading(), spellings(all_flags(program))
    reading.elsewhere = {
        name: program_name
        for program_name, kinds in (elsewhere or {}).items()
        for name in spellings([flag for kind in kinds for flag in flags_of("", kind)])
    }
    reading.left_out = {
        name: reason_left_out(program.left_out, flag)
        for flag in left_out_flags(program).values()
        for name in spellings([flag])
    }
    words = _expand_old_spellings(_split_equals(argv), reading)
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("--"):
            reading.errors.append(
                f"`{word}` is no flag; flags start with two dashes, and a value follows its flag."
            )
            continue
        values: list[str] = []
        while position < len(words) and not words[position].startswith("--"):
            values.append(words[position])
            position += 1
        _read_flag(word, values, table, reading)
    return reading


def _split_equals(argv: Sequence[str]) -> list[str]:
    """Split ``--a=b`` into two words."""
    words: list[str] = []
    for word in argv:
        name, equals, value = word.partition("=")
        words.extend((name, value) if word.startswith("--") and equals else (word,))
    return words


def _expand_old_spellings(words: Sequence[str], reading: _Reading) -> list[str]:
    expanded: list[str] = []
    for word in words:
        now = RENAMED.get(word) or RENAMED.get(canonical(word)) if word[:2] == "--" else None
        if now is None:
            expanded.append(word)
            continue
        reading.notes.append(f"`{word}` is spelled `{' '.join(now)}` now.")
        expanded.extend(now)
    return expanded


def _read_flag(
    word: str, values: list[str], table: dict[str, tuple[Flag, bool]], reading: _Reading
) -> None:
    name = canonical(word)
    if name == "--print-config":
        reading.print_config = True
    elif name == "--config":
        reading.config_files.extend(values)
        if not values:
            reading.errors.append(f"`{word}` takes a file, but got none.")
    elif name == "--no-position-embedding":
        reading.no_position_embedding = True
    elif name in table:
        flag, positive = table[name]
        _read_value(flag, word, values, positive, reading)
    elif word in NO_EFFECT or name in NO_EFFECT:
        _, reason = NO_EFFECT.get(name) or NO_EFFECT[word]
        reading.notes.append(f"`{word}` has no effect: {reason}.")
    elif name in UNSUPPORTED or name.replace("--no-", "--", 1) in UNSUPPORTED:
        reason = UNSUPPORTED.get(name) or UNSUPPORTED[name.replace("--no-", "--", 1)]
        reading.errors.append(f"`{word}` is known from Megatron-LM but refused here: {reason}.")
    elif name in reading.elsewhere:
        reading.errors.append(
            f"`{word}` is a flag of {reading.elsewhere[name]}, not of this program; leave it out."
        )
    elif name in reading.left_out:
        reading.errors.append(f"`{word}` has no effect {reading.left_out[name]}; leave it out.")
    else:
        near = difflib.get_close_matches(name, known_names(table), n=3, cutoff=0.6)
        advice = f"did you mean {' or '.join(f'`{x}`' for x in near)}?" if near else "see --help."
        reading.errors.append(f"`{word}` is not a flag of this program; {advice}")


def _read_value(
    flag: Flag, word: str, values: list[str], positive: bool, reading: _Reading
) -> None:
    if flag.type is bool:
        if values:
            reading.errors.append(
                f"`{word}` takes no value, but got {' '.join(values)}; leave it out."
            )
        reading.put(flag, positive)
        return
    try:
        reading.put(flag, value_of_words(flag, word, values))
    except ConfigError as error:
        reading.errors += error.messages


def _read_yaml(path: str, reading: _Reading, program: Program) -> dict[str, dict[str, Any]]:
    """Return the sections of a file whose entries may be nested by section or flat."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reading.errors.append(f"`--config` ({path}) cannot be read: {error}.")
        return {}
    if not isinstance(content, dict):
        reading.errors.append(f"`--config` ({path}) must hold names and values.")
        return {}
    fields = {flag.field: flag for flag in all_flags(program)}
    left_out = left_out_flags(program)
    sections: dict[str, dict[str, Any]] = {}
    flat = {}
    for key, value in content.items():
        if isinstance(value, dict):
            flat.update(value)
        elif key != "device":
            flat[key] = value
    for key, value in flat.items():
        name = str(key).lstrip("-").replace("-", "_")
        if name in fields:
            try:
                read = value_of_entry(fields[name], f"{key}` in `{path}", value)
            except ConfigError as error:
                reading.errors += error.messages
                continue
            sections.setdefault(fields[name].section, {})[name] = read
        elif name in left_out:
            reading.settled.append((path, str(key), left_out[name], value))
        elif name not in _derived(program):
            near = difflib.get_close_matches(name, list(fields), n=2)
            advice = f"did you mean {' or '.join(near)}?" if near else "see --help."
            reading.errors.append(f"`{key}` in {path} is not a flag of this program; {advice}")
    return sections


def _left_out_errors(reading: _Reading, config: RunConfig) -> list[str]:
    """Return a sentence for entries of files that contradict what the task has settled.

    A stored configuration holds fields that the task decides; they may stand there as it does.
    """
    found = []
    for path, key, flag, value in reading.settled:
        has = getattr(getattr(config, flag.section), flag.field)
        held = list(has) if isinstance(has, tuple) else has
        if value not in (held, flag.default):
            found.append(
                f"`{key}` in {path} ({value}) has no effect here: "
                f"{reading.left_out[flag.positive[0]]}; leave it out."
            )
    return found


def _by_section(values: Mapping[str, Any], program: Program) -> dict[str, dict[str, Any]]:
    """Return values of fields, each in the section that has it."""
    found: dict[str, dict[str, Any]] = {}
    for name, kind in sections_of(program).items():
        fields = {field.name for field in dataclasses.fields(kind)}
        found[name] = {k: v for k, v in values.items() if k in fields}
    return found


def _derived(program: Program) -> set[str]:
    """Return fields that follow from others; a printed configuration holds them too."""
    return {
        field.name
        for kind in sections_of(program).values()
        for field in dataclasses.fields(kind)
        if "help" not in field.metadata
    }


def _no_position_embedding(model: Mapping[str, Any], reading: _Reading) -> None:
    """Answer the old way to say "no learned table": needless beside rope or none, else refused."""
    kind = model.get("position_embedding_type", "learned_absolute")
    if kind in ("rope", "none"):
        reading.notes.append(
            f"`--no-position-embedding` has no effect: `--position-embedding-type {kind}` has no "
            "learned table."
        )
    else:
        reading.errors.append(
            f"`--no-position-embedding` contradicts `--position-embedding-type` ({kind}); use "
            "`--position-embedding-type none`."
        )


def _inert(reading: _Reading, config: RunConfig, needs: Sequence[Need]) -> list[str]:
    """Return notes on flags that were given and do nothing, at all, on this device or here."""
    given = reading.given
    reasons = [(flag, ALWAYS_ON.get(flag.field), "") for flag in given]
    if config.device == "cpu":
        reasons += [(flag, flag.gpu_only, " on a CPU") for flag in given]
    if not config.model.group_query_attention:
        alone = " without `--group-query-attention`"
        each = "each head has keys and values of its own"
        reasons += [(flag, each, alone) for flag in given if flag.field == "num_query_groups"]
    if config.model.transformer_impl != "transformer_engine":
        without = " without Transformer Engine"
        told = [flag for flag in given if config.device != "cpu" or flag.gpu_only is None]
        reasons += [(flag, OF_ENGINE.get(flag.field), without) for flag in told]
    notes = [
        f"`{flag.shown}` has no effect{where}: {reason}."
        for flag, reason, where in reasons
        if reason
    ]
    for names, needed, has in (*NEEDS, *needs):
        idle = [flag for flag in given if flag.field in names.split()]
        if idle and not has(config):
            notes += [f"`{flag.shown}` has no effect without `{needed}`." for flag in idle]
    return notes
