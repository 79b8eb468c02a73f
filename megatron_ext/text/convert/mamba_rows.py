"""Rows of Mamba-2's parameters in the tensors of transformers.

Our rows are those of each group of heads in turn (see `layers.mixers.mamba`). transformers has
those of one kind together: z of all heads, then x of all heads, B of all groups, C of all groups,
and dt of all heads.
"""

from __future__ import annotations

from megatron_ext.text.convert.table import Part, Parts
from megatron_ext.text.convert.weights import Given, Sizes, Source


def _rows(tensor: str, sizes: Sizes, kinds: str, ones: tuple[int, ...] = ()) -> Parts:
    """Return the rows of a parameter, for the kinds of rows that the tensor has, in its order.

    ``kinds`` is some of ``zxBCt``, where t stands for dt.
    """
    mixer = sizes.mixer
    groups = mixer.mamba_num_groups
    heads = mixer.mamba_num_heads or 2 * (sizes.model.hidden_size or 0) // mixer.mamba_head_dim
    share = heads // groups
    inner = share * mixer.mamba_head_dim
    state = mixer.mamba_state_dim
    counts = {"z": inner, "x": inner, "B": state, "C": state, "t": share}
    starts = {}
    end = 0
    for kind in kinds:
        starts[kind] = end
        end += groups * counts[kind]
    return tuple(
        Part(tensor, counts[kind], starts[kind] + group * counts[kind], ones=ones)
        for group in range(groups)
        for kind in kinds
    )


def _projection(tensors: tuple[str, ...], sizes: Sizes) -> Parts:
    return _rows(tensors[0], sizes, "zxBCt")


def _taps(tensors: tuple[str, ...], sizes: Sizes) -> Parts:
    return _rows(tensors[0], sizes, "xBC", (1,))


def _biases(tensors: tuple[str, ...], sizes: Sizes) -> Parts:
    return _rows(tensors[0], sizes, "xBC")


def mamba(module: str) -> Given:
    """Return the sources of Mamba-2's parameters in transformers' module of this name."""
    return {
        "self_attention.in_proj.weight": Source((f"{module}.in_proj.weight",), _projection),
        "self_attention.conv_weight": Source((f"{module}.conv1d.weight",), _taps),
        "self_attention.conv_bias": Source((f"{module}.conv1d.bias",), _biases),
        "self_attention.dt_bias": f"{module}.dt_bias",
        "self_attention.A_log": f"{module}.A_log",
        "self_attention.D": f"{module}.D",
        "self_attention.out_norm.weight": f"{module}.norm.weight",
        "self_attention.out_proj.weight": f"{module}.out_proj.weight",
    }
