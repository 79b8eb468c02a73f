"""Adapters of the video DiT under the names of diffusers' WanTransformer3DModel."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor

from megatron_ext.checkpoint.wan.names import BLOCK_LINEARS, Naming, wan_names

NAME = re.compile(
    r"(?:critic\.)?"
    rf"(?P<layer>blocks\.\d+\.(?:{'|'.join(map(re.escape, BLOCK_LINEARS))}))"
    r"\.lora\.(?P<matrix>[ab])$"
)


def wan_parts(name: str, matrix: Tensor, head_dim: int) -> Iterator[tuple[str, str, Tensor]]:
    """One of our matrices as those of Wan's layers.

    The rows of a fused layer go through its projections head by head, ``[n, p, d]``: the rows of B
    are dealt to Wan's layers, which all get the same A.

    Args:
        name: that `NAME` matches.
        matrix: whole, ``[r, in]`` or ``[out, r]``.
        head_dim: d.

    Returns:
        Path of the layer, ``A`` or ``B``, and its values.
    """
    match = NAME.match(name)
    assert match is not None
    weights = wan_names(f"{match['layer']}.weight", Naming.DIFFUSERS)
    layers = [weight.removesuffix(".weight") for weight in weights]
    kind = match["matrix"].upper()
    if kind == "B" and len(layers) > 1:
        heads = matrix.reshape(-1, len(layers), head_dim, matrix.size(1))
        values = [part.flatten(0, 1) for part in heads.unbind(1)]
    else:
        # safetensors refuses tensors that share memory.
        values = [matrix.clone() for _ in layers]
    for layer, part in zip(layers, values, strict=True):
        yield layer, kind, part


def wan_target(path: str) -> str:
    """What peft is to call a layer in all blocks, such as ``attn1.to_q``."""
    return path.split(".", 2)[2]
