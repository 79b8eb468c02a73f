"""Reads flags whose pattern selects decoder layers, such as those with a sliding window.

The kind of a layer is written with Megatron-LM's letters: one for its sequence mixer (`MIXERS`),
one for its MLP or experts (`MLPS`), or both in this order, such as ``*-``, ``GE`` or ``M``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_ext.config.flags import SIZE
from megatron_ext.errors import FlagError

ATTENTION = "*"
DENSE = "-"
EXPERTS = "E"
MIXERS = {
    ATTENTION: "attention",
    "M": "Mamba-2",
    "G": "gated DeltaNet",
    "K": "Kimi Delta Attention",
    "D": "DeepSeek's sparse attention",
}
"""Letters of the modules that mix the positions of a sequence, with their names."""
RECURRENT = "MGK"
"""Letters of the mixers that carry a state from position to position."""
MLPS = {DENSE: "an MLP", EXPERTS: "experts"}
"""Letters of the modules that transform each position by itself, with their names."""


def mixer_of(kind: str) -> str:
    """Return the letter of the sequence mixer of a layer of this kind; "" if it has none."""
    return kind[:1] if kind[:1] in MIXERS else ""


def mlp_of(kind: str) -> str:
    """Return the letter of the MLP or experts of a layer of this kind; "" if it has neither."""
    return kind[-1:] if kind[-1:] in MLPS else ""


def has_experts(kind: str) -> bool:
    """Return whether a layer of this kind has experts."""
    return kind.endswith(EXPERTS)


def read_pattern(text: str) -> int | list[int]:
    """Return the integer or the list of integers that ``text`` describes.

    ``[1,0]``, ``[1,0]*2`` and ``([0]*1+[1]*26)`` are lists, read without evaluating code.

    Raises:
        ValueError: the text describes neither.
    """
    if "[" not in text:
        return int(text)
    pattern: list[int] = []
    for term in text.strip("() ").split("+"):
        body, _, times = term.strip().partition("*")
        numbers = [int(part) for part in body.strip("[] ").split(",")]
        if not 0 < int(times or 1) <= SIZE.high:
            raise ValueError(text)
        pattern += numbers * int(times or 1)
    return pattern


def layers_with_experts(frequency: int | Sequence[int], num_layers: int) -> list[bool]:
    """Return for each layer whether it holds experts.

    Args:
        frequency: n for experts in layers 0, n, 2n and so on, or a truth value for each layer.
    """
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(num_layers)]
    return [bool(holds) for holds in frequency]


def windowed_layers(skip_frequency: str | None, num_layers: int) -> list[bool]:
    """Return for each layer whether its attention has the window of ``--window-size``.

    Args:
        skip_frequency: None for all; n for all but the layers n, 2 n and so on, counted from 1; or
            a list with a truth value for each layer.
    """
    pattern = None if skip_frequency is None else read_pattern(skip_frequency)
    if pattern is None:
        return [True] * num_layers
    if isinstance(pattern, int):
        return [number % pattern != 0 for number in range(1, num_layers + 1)]
    return [bool(has) for has in pattern]


def layers_without_rope(frequency: str | None, num_layers: int) -> list[bool]:
    """Return for each layer whether its attention has no rotary position embedding.

    Args:
        frequency: None for no layer; n for the layers n, 2 n and so on, counted from 1; or a list
            with a truth value for each layer.
    """
    pattern = None if frequency is None else read_pattern(frequency)
    if pattern is None:
        return [False] * num_layers
    if isinstance(pattern, int):
        return [number % pattern == 0 for number in range(1, num_layers + 1)]
    return [bool(has) for has in pattern]


def pattern_errors(flag: str, text: str | None, num_layers: int) -> Iterator[FlagError]:
    """Yield an error if a flag's pattern, ``text``, does not fit a model of ``num_layers`` layers.

    It fits if it is None, a number of at least 1, or a list with one entry for each layer.
    """
    if text is None:
        return
    try:
        pattern = read_pattern(str(text))
    except ValueError:
        yield FlagError(
            flag,
            text,
            "must be a number or a list of 0 and 1",
            f"write 2, or [1,0]*{max(1, num_layers // 2)}",
        )
        return
    if isinstance(pattern, int):
        if pattern < 1:
            yield FlagError(flag, text, "must be at least 1", "use 2")
    elif len(pattern) != num_layers:
        yield FlagError(
            flag,
            None,
            f"has {len(pattern)} entries, but must have one for each of the {num_layers} layers",
        )
