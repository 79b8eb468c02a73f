"""The scaling of rotary frequencies, in the format of Hugging Face's ``rope_parameters``.

``--rope-scaling`` takes a JSON object of this form. When a configuration is resolved, the flags of
``--position-embedding-type yarn`` are converted to such an object too, so that layers and
checkpoints need to know only this form.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any

from megatron_ext.disk.reading import UnreadableFile, parse_json

REQUIRED = {
    "linear": ("factor",),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
    "yarn": ("original_max_position_embeddings",),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "proportional": (),
}  # fmt: skip
"""The required entries of each kind of scaling; all names are those of Hugging Face."""

OPTIONAL = {
    "yarn": (
        "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("factor", "attention_factor"),
    "proportional": ("factor",),
}  # fmt: skip
"""The optional entries of each kind of scaling; a kind that is not listed has none."""


FACTOR_OF_LENGTHS = ("yarn", "longrope")
"""Kinds whose ``factor`` is, by default, the maximum sequence length / the original one."""
LISTS = ("short_factor", "long_factor")
"""Entries of a scaling that are lists, with one number for each pair of channels."""


@dataclass(frozen=True)
class RopeScaling:
    """The kind and the parameters of a scaling of rotary frequencies, defaults included.

    Fields that are not explained here mean the same as Hugging Face's entries of these names.

    Attributes:
        rope_type: kind of scaling, a key of `REQUIRED`.
        factor: ratio of the new context length to the original one.
        attention_factor: factor of cosines and sines; None lets `magnitude` compute it.
        truncate: whether YaRN's blend of frequencies begins and ends at whole pairs of channels.
        short_factor, long_factor: divisors of the frequencies, one for each pair of channels, for
            sequences up to the original length and for longer ones.
    """

    rope_type: str
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def magnitude(self) -> float:
        """Return the factor of cosines and sines: ``attention_factor``, or the kind's default.

        By default YaRN's is 0.1 ln(factor) + 1 (arXiv:2309.00071, eq. 22), or a ratio of two
        `yarn_magnitude` if ``mscale`` and ``mscale_all_dim`` are set. LongRoPE's is sqrt(1 +
        ln(factor) / ln(original length)) (arXiv:2402.13753, section 3). Other kinds have 1.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "yarn":
            if self.mscale and self.mscale_all_dim:
                whole = yarn_magnitude(self.factor, self.mscale_all_dim)
                return yarn_magnitude(self.factor, self.mscale) / whole
            return yarn_magnitude(self.factor)
        if self.rope_type == "longrope" and self.factor > 1:
            original = self.original_max_position_embeddings
            return math.sqrt(1 + math.log(self.factor) / math.log(original))
        return 1.0


@dataclass(frozen=True)
class RotarySettings:
    """The settings of the angles by which a model rotates queries and keys.

    Attributes:
        percent: fraction of a head's channels to rotate, 1 for all.
        base: base of the frequencies.
        local_base: base in layers with sliding-window attention; None uses ``base`` there too.
        interpolation_factor: divisor of the positions; None for none.
        llama_factor: factor of megatron-core's version of Llama 3.1's scaling; None for none.
        scaling: any other scaling of the frequencies; if set, ``interpolation_factor`` and
            ``llama_factor`` are ignored.
        query_growth: b of the factors ``1 + b ln(1 + floor(p / n))`` of queries at the positions p,
            for the original length n of ``scaling``; None for none.
    """

    percent: float
    base: float
    local_base: float | None
    interpolation_factor: int | None
    llama_factor: float | None
    scaling: RopeScaling | None
    query_growth: float | None = None


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor of cosines and sines, 0.1 ``mscale`` ln(``factor``) + 1.

    ``factor`` is the ratio of the new context length to the original one; if it is 1 or less, the
    result is 1.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_scaling(
    factor: float,
    original: int,
    *,
    mscale: float | None,
    mscale_all_dim: float | None,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> RopeScaling:
    """Return YaRN's scaling, with cosines and sines multiplied as in megatron-core.

    If neither ``mscale`` nor ``mscale_all_dim`` is None, the multiplier is `yarn_magnitude` of
    ``mscale`` divided by that of ``mscale_all_dim``; otherwise it is YaRN's default. Hugging Face
    takes the default also if one of them is 0, as `RopeScaling.magnitude` does. ``original`` is the
    context length before scaling; the other arguments are fields of `RopeScaling`.
    """
    magnitude = None
    if mscale is not None and mscale_all_dim is not None:
        magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return RopeScaling(
        "yarn",
        factor,
        original,
        attention_factor=magnitude,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=truncate,
    )


def read_scaling(text: str | None, max_position_embeddings: int) -> RopeScaling | None:
    """Return the scaling that the JSON object ``text`` describes.

    Return None if ``text`` is None, or if its ``rope_type`` is "default". Without a ``factor``,
    YaRN and LongRoPE take ``max_position_embeddings`` divided by the original length, as Hugging
    Face's code does.

    Raises:
        ValueError: the text does not describe a scaling; the message is the rule that it breaks.
    """
    if text is None:
        return None
    try:
        values = parse_json(text, "--rope-scaling")
    except UnreadableFile:
        values = None
    if not isinstance(values, dict):
        raise ValueError("""must be a JSON object; write '{"rope_type": "linear", "factor": 2}'""")
    values = {key: value for key, value in values.items() if value is not None}
    kind = values.pop("rope_type", values.pop("type", "default"))
    if kind == "default" and not values:
        return None
    if kind == "dynamic":
        raise ValueError(
            "is dynamic, which changes frequencies only beyond the positions that a model was "
            "trained with, so that it has no effect here; leave it out"
        )
    if kind not in REQUIRED:
        raise ValueError(f"has the rope_type {kind}, which must be one of {', '.join(REQUIRED)}")
    required = REQUIRED[kind]
    names = {*REQUIRED[kind], *OPTIONAL.get(kind, ())}
    missing = [name for name in required if name not in values]
    unknown = [name for name in values if name not in names]
    if missing or unknown:
        wrong = f"lacks {missing[0]}" if missing else f"has {unknown[0]}"
        raise ValueError(f"{wrong}, but {kind} takes {', '.join(sorted(names))}; mend it")
    _check_values(values)
    original = values.get("original_max_position_embeddings")
    if original and kind in FACTOR_OF_LENGTHS:
        values.setdefault("factor", max_position_embeddings / original)
    lists = {name: tuple(values[name]) for name in LISTS if name in values}
    return RopeScaling(kind, **{**values, **lists})


def _check_values(values: dict[str, Any]) -> None:
    """Raise a ValueError for an entry of a wrong type or out of its range."""
    for name, value in values.items():
        if name == "truncate":
            if not isinstance(value, bool):
                raise ValueError(f"has {name} {value!r}, which must be true or false; mend it")
            continue
        numbers = value if name in LISTS else [value]
        if not isinstance(numbers, list) or not numbers:
            raise ValueError(f"has {name} {value!r}, which must be a list of numbers; mend it")
        for number in numbers:
            plain = isinstance(number, (int, float)) and not isinstance(number, bool)
            # A weight of 0 is DeepSeek's way to leave a term of the magnitude out.
            least = 0.0 if name.startswith("mscale") else 1e-9
            if not plain or number < least:
                raise ValueError(f"has {name} {number!r}, which must be a positive number; mend it")
    if "low_freq_factor" in values and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise ValueError(
            "has a high_freq_factor that is not above its low_freq_factor; make it larger"
        )


def written(scaling: RopeScaling) -> str:
    """Return a scaling as a JSON text, from which `read_scaling` restores it.

    Optional entries with their default values are left out. But the ``factor`` of YaRN and LongRoPE
    is always written, since `read_scaling` would otherwise derive it from the maximum length, which
    may be another one by then.
    """
    kind = scaling.rope_type
    usual = RopeScaling(kind)
    always = {"rope_type", *REQUIRED[kind], *(("factor",) if kind in FACTOR_OF_LENGTHS else ())}
    values = {f.name: getattr(scaling, f.name) for f in fields(scaling)}
    kept = {k: v for k, v in values.items() if k in always or v != getattr(usual, k)}
    return json.dumps(kept)
