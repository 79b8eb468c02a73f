"""Rules of rotary positions; only runs with ``--position-embedding-type rope`` import this file."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.errors import FlagError, exclusive
from megatron_ext.text.config.positions import PositionConfig


def rotary_errors(positions: PositionConfig, size: int, *, windowed: bool) -> Iterator[FlagError]:
    """Yield an error for each wrong flag of rotary positions.

    Args:
        size: number of channels of a head.
        windowed: whether some layers have an attention window.
    """
    if positions.rotary_percent == 1 and size % 2:
        yield FlagError(
            "--kv-channels",
            size,
            "must be even with `--position-embedding-type rope`, which rotates channels in pairs",
            f"use {size + 1}",
        )
    elif int(size * positions.rotary_percent) < 1:
        yield FlagError(
            "--rotary-percent",
            positions.rotary_percent,
            f"leaves no channel of a head of {size} to rotate",
            f"use {2 / size:g} or more",
        )
    local_base = positions.rope_local_base_freq
    if local_base is not None and not windowed:
        yield FlagError(
            "--rope-local-base-freq",
            f"{local_base:g}",
            "is the base of layers with a window, which `--window-size` gives",
            "give both",
        )
    yield from _growth_errors(positions)
    others = ("use_rope_scaling", "rotary_seq_len_interpolation_factor")
    given = [f"--{x.replace('_', '-')}" for x in others if getattr(positions, x)]
    if positions.rope_scaling is None:
        return
    if given:
        yield exclusive("--rope-scaling", given[0])
    try:
        scaling = positions.scaling()
    except ValueError as error:
        yield FlagError("--rope-scaling", positions.rope_scaling, str(error))
        return
    pairs = -(-int(size * positions.rotary_percent) // 2)
    for name in ("short_factor", "long_factor"):
        count = len(getattr(scaling, name, ()))
        if count not in (0, pairs):
            yield FlagError(
                "--rope-scaling",
                None,
                f"has {count} numbers in {name}, but must have one for each of the {pairs} pairs "
                "of channels that are rotated",
                "mend it",
            )


def _growth_errors(positions: PositionConfig) -> Iterator[FlagError]:
    """Yield an error if ``--llama-4-scaling-beta`` lacks the original length, or some positions."""
    if positions.llama_4_scaling_beta is None:
        return
    name = "--llama-4-scaling-beta"
    value = f"{positions.llama_4_scaling_beta:g}"
    try:
        scaling = positions.scaling()
    except ValueError:
        return  # said by `rotary_errors`
    if scaling is None or not scaling.original_max_position_embeddings:
        yield FlagError(
            name,
            value,
            "needs `--rope-scaling` with original_max_position_embeddings",
            "give a scaling of rope_type yarn, llama3 or longrope",
        )
    if positions.no_rope_freq is not None:
        yield FlagError(
            name,
            value,
            "does not go with `--no-rope-freq`, whose layers do not know their positions",
            "leave one out",
        )
