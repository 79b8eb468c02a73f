"""The kinds of entries of a config.json: each reads an entry into our fields, and writes it back.

An `Entry` is one declaration for both directions. A family is a list of them
(`megatron_ext.text.convert.family`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.disk.reading import parse_json
from megatron_ext.errors import CheckpointError
from megatron_ext.layers.rope_scaling import read_scaling, written
from megatron_ext.text.convert.family import Entry, Fields, Gpt, Settings

LLAMA3_CONSTANTS = {
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}
"""Entries of Llama 3's rope_scaling, with the values that ``--use-rope-scaling`` always uses."""


class _Unlimited:
    """The base of entries that refuse no value."""

    def limits(self) -> tuple[str, ...]:
        """Return what is refused, in words, for the documentation."""
        return ()


@dataclass(frozen=True)
class Copy(_Unlimited):
    """An entry with the same value as one of our fields.

    Attributes:
        default: the value of the field if the entry is None or missing.
    """

    field: str
    key: str
    default: Any = None

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field,)

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, settings: Settings) -> Fields:
        value = settings[self.key]
        return {self.field: self.default if value is None else value}

    def write(self, gpt: Gpt) -> dict[str, Any]:
        return {self.key: gpt.value(self.field)}


@dataclass(frozen=True)
class Dropout(Copy):
    """A probability of dropout, which is read, but not written, since each run has its own."""

    def read(self, settings: Settings) -> Fields:
        return {self.field: float(settings[self.key] or 0.0)}

    def write(self, gpt: Gpt) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Converted(Copy):
    """An entry whose value is that of one of our fields by a formula, such as ``1 / x``.

    Attributes:
        ours: returns the field's value, given the entry's; None stays None.
        theirs: the inverse of ``ours``.
    """

    ours: Callable[[Any], Any] = float
    theirs: Callable[[Any], Any] = float

    def read(self, settings: Settings) -> Fields:
        value = settings[self.key]
        return {self.field: self.default if value is None else self.ours(value)}

    def write(self, gpt: Gpt) -> dict[str, Any]:
        value = gpt.value(self.field)
        return {self.key: None if value is None else self.theirs(value)}


@dataclass(frozen=True)
class Switch(_Unlimited):
    """An entry that is true or false, as are one or several of our fields.

    Attributes:
        negated: whether the fields are true where the entry is false.
    """

    key: str
    fields: tuple[str, ...]
    negated: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, settings: Settings) -> Fields:
        return dict.fromkeys(self.fields, bool(settings[self.key]) != self.negated)

    def write(self, gpt: Gpt) -> dict[str, Any]:
        return {self.key: bool(gpt.value(self.fields[-1])) != self.negated}


TIED = Switch("tie_word_embeddings", ("untie_embeddings_and_output_weights",), negated=True)


@dataclass(frozen=True)
class Choice(_Unlimited):
    """An entry with a few possible values, each of which stands for values of our fields.

    Attributes:
        choices: the fields of each value; the first value that fits is written. Values that are
            not among them are refused.
        advice: the end of the refusal, which tells the user what to do.
    """

    key: str
    choices: Mapping[Any, Fields]
    advice: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for each in self.choices.values() for name in each))

    def read(self, settings: Settings) -> Fields:
        value = settings[self.key]
        if value not in self.choices:
            names = " or ".join(str(choice) for choice in self.choices)
            settings.refuse(self.key, advice=self.advice or f"use a model with {names}")
        return dict(self.choices[value])

    def write(self, gpt: Gpt) -> dict[str, Any]:
        fitting = (value for value in self.choices if self.fits(value, gpt))
        return {self.key: next(fitting, next(iter(self.choices)))}

    def fits(self, value: Any, gpt: Gpt) -> bool:
        """Return whether ``value`` is the entry of a model with the fields of ``gpt``."""
        if value not in self.choices:
            return False
        return all(gpt.value(name) == own for name, own in self.choices[value].items())

    def limits(self) -> tuple[str, ...]:
        return (f"`{self.key}` other than {', '.join(map(str, self.choices))}",)


@dataclass(frozen=True)
class Requires(_Unlimited):
    """An entry that must have a certain value, or be missing; it is not written.

    A family's ``only`` says the same of entries that are written.
    """

    key: str
    value: Any
    fields: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, settings: Settings) -> Fields:
        settings.require(self.key, self.value)
        return {}

    def write(self, gpt: Gpt) -> dict[str, Any]:
        return {}

    def limits(self) -> tuple[str, ...]:
        return (f"`{self.key}` other than {self.value}",)


@dataclass(frozen=True)
class Writes(_Unlimited):
    """An entry that is written with a certain value, and has no effect when it is read."""

    key: str
    value: Any
    fields: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, settings: Settings) -> Fields:
        return {}

    def write(self, gpt: Gpt) -> dict[str, Any]:
        return {self.key: self.value}


@dataclass(frozen=True)
class Translated(_Unlimited):
    """Entries that only functions can translate.

    Attributes:
        fields: the names of our fields that ``reader`` may return.
        keys: the names of the entries that ``reader`` reads and ``writer`` returns.
        refuses: what ``reader`` refuses, in words, for the documentation.
    """

    fields: tuple[str, ...]
    keys: tuple[str, ...]
    reader: Callable[[Settings], Fields]
    writer: Callable[[Gpt], dict[str, Any]]
    refuses: tuple[str, ...] = ()

    def read(self, settings: Settings) -> Fields:
        return self.reader(settings)

    def write(self, gpt: Gpt) -> dict[str, Any]:
        return self.writer(gpt)

    def limits(self) -> tuple[str, ...]:
        return self.refuses


@dataclass(frozen=True)
class Heads(_Unlimited):
    """The numbers of heads and of query groups, and the size of a head.

    Attributes:
        heads: name of the entry with the number of heads.
        groups: name of the entry with the number of heads of keys; None if there is none, so that
            each head has a key.
        size: name of the entry with the size of a head; None if there is none, so that the size is
            the hidden size over the number of heads.
    """

    heads: str = "num_attention_heads"
    groups: str | None = "num_key_value_heads"
    size: str | None = "head_dim"
    hidden: str = "hidden_size"
    fields: tuple[str, ...] = (
        "num_attention_heads",
        "group_query_attention",
        "num_query_groups",
        "kv_channels",
    )

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for key in (self.heads, self.groups, self.size) if key is not None)

    def read(self, settings: Settings) -> Fields:
        given = settings[self.heads]
        heads = int(given)
        groups = int((settings[self.groups] if self.groups else None) or heads)
        size = settings[self.size] if self.size else None
        return {
            "num_attention_heads": given,
            "group_query_attention": groups != heads,
            "num_query_groups": groups if groups != heads else None,
            "kv_channels": int(size or settings[self.hidden] // heads),
        }

    def write(self, gpt: Gpt) -> dict[str, Any]:
        heads = gpt.model.num_attention_heads
        entries = {self.heads: heads}
        if self.groups:
            entries[self.groups] = gpt.model.num_query_groups or heads
        if self.size:
            entries[self.size] = gpt.model.kv_channels
        return entries


@dataclass(frozen=True)
class Rotary(_Unlimited):
    """Rotary positions: the base, the share of a head that turns, and the scaling of frequencies.

    transformers 4 stores them in several entries, transformers 5 all in ``rope_parameters``.

    Attributes:
        share: name of the entry with the share of a head that turns.
        base: name of the entry with the base.
        share_always: whether the share is written even where it is 1.
        default_share: the share where the entry is missing.
    """

    share: str = "partial_rotary_factor"
    base: str = "rope_theta"
    share_always: bool = False
    default_share: float = 1.0
    fields: tuple[str, ...] = (
        "rotary_base",
        "rotary_percent",
        "use_rope_scaling",
        "rope_scaling_factor",
        "rotary_seq_len_interpolation_factor",
        "rope_scaling",
    )

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.base, "rope_scaling", "rope_parameters", self.share)

    def read(self, settings: Settings) -> Fields:
        """Raise a CheckpointError for an unknown kind of frequency scaling."""
        # transformers 4 stores the base beside the scaling, transformers 5 within it.
        given = dict(settings["rope_parameters"] or settings["rope_scaling"] or {})
        base = given.pop("rope_theta", settings[self.base])
        share = given.pop("partial_rotary_factor", settings[self.share]) or self.default_share
        # A class of transformers may have a share of its own.
        if settings.given.get(self.share) not in (None, share):
            settings.ignored.append(self.share)
        fields = {"rotary_base": float(base), "rotary_percent": float(share)}
        return fields | read_scaling_of(settings, given)

    def write(self, gpt: Gpt) -> dict[str, Any]:
        entries: dict[str, Any] = {
            self.base: gpt.positions.rotary_base,
            "rope_scaling": write_scaling(gpt),
        }
        if self.share_always or gpt.positions.rotary_percent != self.default_share:
            entries[self.share] = gpt.positions.rotary_percent
        return entries

    def limits(self) -> tuple[str, ...]:
        return ("`rope_scaling` of type dynamic",)


def read_scaling_of(settings: Settings, given: dict[str, Any]) -> Fields:
    """Return the configuration fields for a scaling of rotary frequencies; {} without scaling.

    ``given`` holds the entries of config.json that describe the scaling. Return the fields of
    megatron-core's flags if these can express the scaling, otherwise the field ``rope_scaling``.
    """
    kind = given.get("rope_type") or given.get("type") or "default"
    entries = {key for key, value in given.items() if value is not None} - {"rope_type", "type"}
    if kind == "default":
        settings.ignored.extend(f"rope_scaling.{key}" for key in sorted(entries))
        return {}
    factor = float(given.get("factor") or 1.0)
    # These flags can express only these entries; `read_scaling` handles or refuses all others.
    if (
        kind == "llama3"
        and entries <= {"factor", *LLAMA3_CONSTANTS}
        and all(given.get(x) == value for x, value in LLAMA3_CONSTANTS.items())
    ):
        return {"use_rope_scaling": True, "rope_scaling_factor": factor}
    if kind == "linear" and entries <= {"factor"} and factor.is_integer():
        return {"rotary_seq_len_interpolation_factor": int(factor)}
    original = settings["original_max_position_embeddings"]
    if original and kind in ("longrope", "yarn"):
        given.setdefault("original_max_position_embeddings", original)
    try:
        scaling = read_scaling(json.dumps(given), settings["max_position_embeddings"])
    except ValueError as error:
        raise CheckpointError(f"{settings.path} says a `rope_scaling` that {error}.") from error
    return {} if scaling is None else {"rope_scaling": written(scaling)}


def write_scaling(gpt: Gpt) -> dict[str, Any] | None:
    """Return the scaling of rotary frequencies in transformers' form; None if there is none."""
    positions = gpt.positions
    if positions.use_rope_scaling:
        factor = positions.rope_scaling_factor
        return {"rope_type": "llama3", "factor": factor, **LLAMA3_CONSTANTS}
    divisor = positions.rotary_seq_len_interpolation_factor
    if divisor:
        return {"rope_type": "linear", "factor": float(divisor)}
    if positions.rope_scaling is None:
        return None
    scaling = parse_json(positions.rope_scaling, "--rope-scaling")
    # Anything but a mapping is refused by the check of the flag itself.
    return dict(scaling) if isinstance(scaling, dict) else None


_EXACT: Fields = {"openai_gelu": False, "squared_relu": False}
_TANH: Fields = {"openai_gelu": True, "squared_relu": False}
ACTIVATIONS: Mapping[str, Fields] = {
    "gelu": _EXACT,
    "gelu_new": _TANH,
    "gelu_pytorch_tanh": _TANH,
    "gelu_fast": _TANH,
    "relu2": {"openai_gelu": False, "squared_relu": True},
}
"""transformers' names of the activations of an MLP without a gate; three of them are one function.
"""
WINDOWED = "sliding_attention"
"""The value in ``layer_types`` of a layer with a sliding window."""


@dataclass(frozen=True)
class Window(_Unlimited):
    """The sliding window of attention, and the layers that have it.

    If the entry ``layer_types`` is given, only the layers that it names have the window.
    transformers counts the query's own token as part of the window; our field counts only the
    tokens before it.

    Attributes:
        key: name of the entry with the number of tokens in the window.
        switch: name of the entry that turns the window on; None if there is none.
        types: whether ``layer_types`` is written "always", only with a "window", or "never".
        also: names of entries from which transformers derives ``layer_types``.
        keeps: whether a window is kept that no sequence exceeds, since its layers have positions of
            their own.
    """

    key: str = "sliding_window"
    switch: str | None = None
    types: str = "never"
    also: tuple[str, ...] = ()
    keeps: bool = False
    fields: tuple[str, ...] = ("window_size", "window_attn_skip_freq")

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key, "layer_types", *((self.switch,) if self.switch else ()), *self.also)

    def read(self, settings: Settings) -> Fields:
        settings.read.update(self.also)
        if self.switch and not settings[self.switch]:
            return {}
        return window_fields(settings, settings[self.key], keeps=self.keeps)

    def write(self, gpt: Gpt) -> dict[str, Any]:
        window = gpt.attention.window_size
        entries: dict[str, Any] = {self.switch: window is not None} if self.switch else {}
        # Some of transformers' classes need a number for the window even if no layer has one; the
        # entry is then left out, for the default.
        if window is not None or (self.switch is None and self.types == "never"):
            entries[self.key] = None if window is None else window[0] + 1
        if self.types == "always" or (self.types == "window" and window is not None):
            entries["layer_types"] = layer_types(gpt)
        return entries


@dataclass(frozen=True)
class RotaryInWindows(Window):
    """A window that some layers have, of which only these rotate queries and keys.

    Attributes:
        rotates_without: whether all layers rotate where the entry of the window is None.
    """

    rotates_without: bool = True
    fields: tuple[str, ...] = ("window_size", "window_attn_skip_freq", "no_rope_freq")

    def read(self, settings: Settings) -> Fields:
        settings.read.update(self.also)
        window = settings[self.key]
        if not window and self.rotates_without:
            return {}
        has = [int(kind == WINDOWED) for kind in settings["layer_types"]]
        fields: Fields = {"no_rope_freq": None if all(has) else list_flag(1 - x for x in has)}
        if not any(has):
            return fields
        if not window:
            settings.refuse(self.key, advice=f"give the tokens of the {WINDOWED} layers' window")
        fields["window_size"] = (int(window) - 1, 0)
        return fields if all(has) else fields | {"window_attn_skip_freq": list_flag(has)}

    def write(self, gpt: Gpt) -> dict[str, Any]:
        entries: dict[str, Any] = {"layer_types": layer_types(gpt)}
        window = gpt.attention.window_size
        if window is not None:
            entries[self.key] = window[0] + 1
        elif self.rotates_without and gpt.positions.no_rope_freq is None:
            entries[self.key] = None
        return entries


def window_fields(settings: Settings, window: int | None, *, keeps: bool = False) -> Fields:
    """Return the configuration fields for a window of ``window`` tokens; {} if none has it.

    A window that no sequence exceeds counts as none, unless ``keeps``.
    """
    kinds = settings["layer_types"]
    has = [int(kind == WINDOWED) for kind in kinds or [WINDOWED]]
    if not window or not any(has):
        return {}
    if window >= settings["max_position_embeddings"] and not keeps:
        return {}
    fields: Fields = {"window_size": (int(window) - 1, 0)}
    return fields if all(has) else fields | {"window_attn_skip_freq": list_flag(has)}


def layer_types(gpt: Gpt) -> list[str]:
    """Return the entry ``layer_types``, which tells for each layer whether it has a window."""
    names = {False: "full_attention", True: WINDOWED}
    return [names[has] for has in gpt.attention.windowed_layers(gpt.model)]


def list_flag(layers: Iterable[int]) -> str:
    """Format numbers, one for each layer, as the value of a flag, such as ``[1,0]``."""
    return f"[{','.join(map(str, layers))}]"


def copies(pairs: Mapping[str, str]) -> Sequence[Entry]:
    """Return a `Copy` for each of our fields, given with the name of its entry."""
    return tuple(Copy(field, key) for field, key in pairs.items())
