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

from megatron_ext.config.flags import Flag, flags_of
from megatron_ext.config.run import RunConfig
from megatron_ext.config.spelling import ALWAYS_ON, NO_EFFECT, RENAMED
from megatron_ext.config.streaming import stored_streaming
from megatron_ext.config.unsupported import UNSUPPORTED
from megatron_ext.config.video_dit import stored_dit
from megatron_ext.errors import ConfigError

OWN_FLAGS = ("--help", "-h", "--config", "--print-config", "--no-position-embedding")


@dataclass(frozen=True)
class ParsedArgs:
    """A command line, understood.

    Attributes:
        config: the resolved configuration.
        notes: one line for each flag that has no effect or an old name.
        print_config: the user asked for the resolved configuration instead of a run.
    """

    config: RunConfig
    notes: list[str]
    print_config: bool = False


@dataclass
class _Reading:
    """What has been read so far."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    given: list[Flag] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    config_files: list[str] = field(default_factory=list)
    print_config: bool = False
    no_position_embedding: bool = False

    def put(self, flag: Flag, value: Any) -> None:
        self.values.setdefault(flag.section, {})[flag.field] = value
        self.given.append(flag)


def all_flags() -> list[Flag]:
    """Every supported flag, by section."""
    found: list[Flag] = []
    for section in dataclasses.fields(RunConfig):
        kind: Any = section.default_factory
        if dataclasses.is_dataclass(kind):
            found.extend(flags_of(section.name, kind))  # type: ignore[arg-type]
    return found


def spellings(flags: Sequence[Flag]) -> dict[str, tuple[Flag, bool]]:
    """Every spelling, canonical, to its flag and whether it sets True (or a value)."""
    table: dict[str, tuple[Flag, bool]] = {}
    for flag in flags:
        table.update({_canonical(name): (flag, False) for name in flag.negative})
        table.update({_canonical(name): (flag, True) for name in flag.positive})
    return table


def _canonical(name: str) -> str:
    return "--" + name.lstrip("-").replace("_", "-")


def parse_args(
    argv: Sequence[str],
    *,
    world_size: int,
    device: str,
    checkpoint_config: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> ParsedArgs:
    """Understand a command line.

    Args:
        argv: the words after the program's name.
        world_size: ranks that torchrun started; 0 lets ``--nproc-per-node`` decide.
        device: ``"cuda"`` or ``"cpu"``.
        checkpoint_config: the stored configuration whose model is to be used
            (``--use-checkpoint-args``); the command line wins over it.
        defaults: values of fields in the place of their own defaults.

    Raises:
        ConfigError: with one sentence for every error.
        SystemExit: after ``--help``.
    """
    if "--help" in argv or "-h" in argv:
        from megatron_ext.config.help import print_help

        print_help(all_flags())
        raise SystemExit(0)
    reading = read_words(argv)
    layers = [_by_section(defaults or {})]
    layers += [_read_yaml(path, reading) for path in reading.config_files]
    if checkpoint_config is not None:
        layers.append(_model_of(checkpoint_config))
    values: dict[str, dict[str, Any]] = {}
    for layer in [*layers, reading.values]:
        for section, entries in layer.items():
            values.setdefault(section, {}).update(entries)
    if reading.no_position_embedding:
        _no_position_embedding(values.get("model", {}), reading)
    try:
        config = RunConfig.from_dict(values).finalize(world_size, device)
    except ConfigError as error:
        raise ConfigError([*reading.errors, *error.messages]) from None
    if reading.errors:
        raise ConfigError(reading.errors)
    notes = [
        *reading.notes,
        *_inert(reading, config.device),
    ]
    return ParsedArgs(config, notes, reading.print_config)


def read_words(argv: Sequence[str]) -> _Reading:
    """Turn words into values of fields, collecting errors on the way."""
    reading, table = _Reading(), spellings(all_flags())
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
    """``--a=b`` as two words."""
    words: list[str] = []
    for word in argv:
        name, equals, value = word.partition("=")
        words.extend((name, value) if word.startswith("--") and equals else (word,))
    return words


def _expand_old_spellings(words: Sequence[str], reading: _Reading) -> list[str]:
    expanded: list[str] = []
    for word in words:
        now = RENAMED.get(word) or RENAMED.get(_canonical(word)) if word[:2] == "--" else None
        if now is None:
            expanded.append(word)
            continue
        reading.notes.append(f"`{word}` is spelled `{' '.join(now)}` now.")
        expanded.extend(now)
    return expanded


def _read_flag(
    word: str, values: list[str], table: dict[str, tuple[Flag, bool]], reading: _Reading
) -> None:
    name = _canonical(word)
    if name == "--print-config":
        reading.print_config = True
    elif name == "--config":
        reading.config_files.extend(values)
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
    else:
        near = difflib.get_close_matches(name, known_names(table), n=3, cutoff=0.6)
        advice = f"did you mean {' or '.join(f'`{x}`' for x in near)}?" if near else "see --help."
        reading.errors.append(f"`{word}` is not a flag of this program; {advice}")


def known_names(table: Mapping[str, Any]) -> list[str]:
    """Every name that gets an answer other than "unknown"."""
    return [*table, *(_canonical(x) for x in NO_EFFECT), *RENAMED, *UNSUPPORTED, *OWN_FLAGS]


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
    wanted = flag.nargs or 1
    if (wanted == "+" and not values) or (isinstance(wanted, int) and len(values) != wanted):
        number = "at least one value" if wanted == "+" else f"{wanted} value(s)"
        reading.errors.append(f"`{word}` takes {number}, but got {len(values)}.")
        return
    try:
        converted = [_convert(flag, value) for value in values]
    except ValueError:
        kind = {int: "an integer", float: "a number"}[flag.type]
        reading.errors.append(f"`{word}` ({' '.join(values)}) must be {kind}.")
        return
    wrong = [value for value in converted if flag.choices and value not in flag.choices]
    if wrong:
        allowed = ", ".join(str(choice) for choice in flag.choices or ())
        reading.errors.append(f"`{word}` ({wrong[0]}) must be one of {allowed}.")
        return
    reading.put(flag, converted if flag.nargs else converted[0])


def _convert(flag: Flag, text: str) -> Any:
    if flag.type is int:
        # Megatron-LM's scripts write "(-1,0)" for windows and "1_000" for counts.
        return int(text.strip("(),").replace("_", ""))
    return flag.type(text)


def _read_yaml(path: str, reading: _Reading) -> dict[str, dict[str, Any]]:
    """Sections of a file whose entries may be nested by section or flat."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        reading.errors.append(f"`--config` ({path}) cannot be read: {error}.")
        return {}
    if not isinstance(content, dict):
        reading.errors.append(f"`--config` ({path}) must hold names and values.")
        return {}
    fields = {flag.field: flag for flag in all_flags()}
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
            sections.setdefault(fields[name].section, {})[name] = value
        elif name not in _derived():
            near = difflib.get_close_matches(name, list(fields), n=2)
            advice = f"did you mean {' or '.join(near)}?" if near else "see --help."
            reading.errors.append(f"`{key}` in {path} is not a flag of this program; {advice}")
    return sections


def _by_section(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Values of fields, each in the section that has it."""
    found: dict[str, dict[str, Any]] = {}
    for section in dataclasses.fields(RunConfig):
        kind: Any = section.default_factory
        if dataclasses.is_dataclass(kind):
            names = {f.name for f in dataclasses.fields(kind)}
            found[section.name] = {k: v for k, v in values.items() if k in names}
    return found


def _derived() -> set[str]:
    """Fields that follow from others; a printed configuration holds them too."""
    names: set[str] = set()
    for section in dataclasses.fields(RunConfig):
        kind: Any = section.default_factory
        if dataclasses.is_dataclass(kind):
            names |= {f.name for f in dataclasses.fields(kind) if "help" not in f.metadata}
    return names


def _no_position_embedding(model: Mapping[str, Any], reading: _Reading) -> None:
    """The old way to say "no learned table": needless beside rope or none, a contradiction else."""
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


def _model_of(stored: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of a stored configuration that describe the weights."""
    of_dits = stored_streaming(stored) or stored_dit(stored)
    if of_dits is not None:
        return of_dits
    if stored.get("video", {}).get("video"):
        # What else its model's section holds follows from these.
        names = ("hidden_size", "num_attention_heads")
        model = {name: stored["model"][name] for name in names}
        return {"model": model, "mmdit": dict(stored["mmdit"])}
    return {"model": _shape(stored), "moe": stored["moe"], "lora": stored.get("lora", {})}


def _shape(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What of a stored model section describes the weights rather than how they are computed."""
    keep = (
        "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups "
        "group_query_attention max_position_embeddings position_embedding_type rotary_base "
        "rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling "
        "rope_scaling_factor normalization "
        "norm_epsilon apply_layernorm_1p swiglu squared_relu quick_geglu add_bias_linear "
        "add_qkv_bias qk_layernorm untie_embeddings_and_output_weights padded_vocab_size "
        "mtp_num_layers seq_length"
    ).split()
    return {name: value for name, value in stored["model"].items() if name in keep}


def _inert(reading: _Reading, device: str) -> list[str]:
    """Notes on flags that were given and do nothing, or only on a GPU."""
    reasons = [(flag.shown, ALWAYS_ON.get(flag.field), "") for flag in reading.given]
    if device == "cpu":
        reasons += [(flag.shown, flag.gpu_only, " on a CPU") for flag in reading.given]
    return [
        f"`{shown}` has no effect{where}: {reason}." for shown, reason, where in reasons if reason
    ]
