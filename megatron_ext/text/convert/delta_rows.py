"""Rows of gated DeltaNet's and Kimi Delta Attention's parameters in the tensors of transformers.

Our rows are those of each head of keys in turn (see `layers.mixers`). transformers has most of them
in tensors of one kind: all heads' queries, then all heads' keys, and so on.
"""

from __future__ import annotations

from megatron_ext.text.convert.table import Part, Parts
from megatron_ext.text.convert.weights import Sizes, Source


def _per_head(sizes: Sizes) -> tuple[int, int, int, int]:
    """Return the number of heads of keys, and their queries', keys' and values' channels."""
    mixer = sizes.mixer
    heads = mixer.linear_num_key_heads
    values = mixer.linear_num_value_heads * mixer.linear_value_head_dim
    return heads, mixer.linear_key_head_dim, mixer.linear_key_head_dim, values // heads


def _one_after_another(tensor: str, sizes: Sizes, ones: tuple[int, ...] = ()) -> list[list[Part]]:
    """Return, for each head, the parts of its query, key and values in a tensor of all of them."""
    heads, *counts = _per_head(sizes)
    starts = [heads * sum(counts[:index]) for index in range(3)]
    pairs = list(zip(starts, counts, strict=True))
    return [
        [Part(tensor, count, start + head * count, ones=ones) for start, count in pairs]
        for head in range(heads)
    ]


def _grouped_projection(tensors: tuple[str, ...], sizes: Sizes) -> Parts:
    heads, _, _, values = _per_head(sizes)
    group = sizes.mixer.linear_num_value_heads // heads
    wide = 2 * sizes.mixer.linear_key_head_dim + 2 * values
    main, rates = tensors
    return tuple(
        part
        for head in range(heads)
        for part in (Part(main, wide, head * wide), Part(rates, 2 * group, 2 * head * group))
    )


def _separate_projection(tensors: tuple[str, ...], sizes: Sizes) -> Parts:
    heads, _, _, values = _per_head(sizes)
    group = sizes.mixer.linear_num_value_heads // heads
    main, gate, beta, rise = tensors
    mixed = _one_after_another(main, sizes)
    return tuple(
        part
        for head in range(heads)
        for part in (
            *mixed[head],
            Part(gate, values, head * values),
            Part(beta, group, head * group),
            Part(rise, group, head * group),
        )
    )


def _heads_in_turn(tensors: tuple[str, ...], sizes: Sizes, ones: tuple[int, ...] = ()) -> Parts:
    heads, *counts = _per_head(sizes)
    rows = [*zip(tensors, (*counts, 1), strict=False)]
    return tuple(
        Part(tensor, count, head * count, ones=ones)
        for head in range(heads)
        for tensor, count in rows
    )


def grouped_projection(main: str, rates: str) -> Source:
    """Return the source of ``in_proj`` of gated DeltaNet in two tensors, head after head.

    ``main`` has the query, key, values and gates of each head, ``rates`` its b and a.
    """
    return Source((main, rates), _grouped_projection)


def separate_projection(main: str, gate: str, beta: str, rise: str) -> Source:
    """Return the source of ``in_proj`` of gated DeltaNet in tensors of one kind.

    ``main`` has all queries, then all keys, then all values; the others are z, b and a.
    """
    return Source((main, gate, beta, rise), _separate_projection)


def heads_in_turn(*tensors: str) -> Source:
    """Return the source of rows in tensors of queries, keys and values, and maybe of beta."""
    return Source(tensors, _heads_in_turn)


def convolution(tensor: str) -> Source:
    """Return the source of ``conv_weight`` in one ``[channels, 1, w]`` of all channels."""
    return Source(
        (tensor,),
        lambda tensors, sizes: tuple(
            part for parts in _one_after_another(tensors[0], sizes, (1,)) for part in parts
        ),
    )


def separate_convolution(query: str, key: str, value: str) -> Source:
    """Return the source of ``conv_weight`` in three ``[channels, 1, w]``."""
    return Source((query, key, value), lambda tensors, sizes: _heads_in_turn(tensors, sizes, (1,)))


def with_ones(tensor: str, *axes: int) -> Source:
    """Return the source of a parameter in a tensor that has further axes of size 1."""
    return Source((tensor,), lambda tensors, sizes: (Part(tensors[0], ones=axes),))
