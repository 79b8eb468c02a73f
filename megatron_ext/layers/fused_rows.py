"""The rows of weights that fuse several matrices, such as those of queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.nn import Module


def fused_rows(
    chunk: Module, *, split_qkv: bool, split_gates: bool = True
) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Yield each weight that fuses several matrices, with the numbers of rows of these.

    The rows of the matrices follow one another in these numbers, again and again: of a projection
    to queries, their gates if any, keys and values, once for each group of heads. A module whose
    weight fuses such matrices in another way has an attribute ``fused_parts``, the numbers. The
    projection of a recurrent mixer has them as ``matrix_rows``: to its queries, keys, values, gates
    and decays, for example.

    Without ``split_qkv``, what a projection of attention or of a mixer fuses counts as one matrix.
    Without ``split_gates``, queries and their gates do, and all of a mixer's.
    """
    for module in chunk.modules():
        config = getattr(module, "config", None)
        layers = dict(module.named_children())
        if split_qkv and "linear_qkv" in layers and config is not None:
            head = getattr(module, "hidden_size_per_attention_head", None)
            if head is not None:
                queries = config.num_attention_heads // config.num_query_groups * head
                gated = getattr(config, "attention_output_gate", False)
                rows = (queries,) * (1 + gated) if split_gates else (queries * (1 + gated),)
                yield layers["linear_qkv"].weight, (*rows, head, head)
        if "linear_fc1" in layers and getattr(config, "gated_linear_unit", False):
            # Each expert in a group of experts has its own weight.
            for weight in layers["linear_fc1"].parameters(recurse=False):
                if weight.dim() == 2:
                    yield weight, (weight.size(0) // 2,) * 2
        if split_qkv and hasattr(module, "fused_parts"):
            parts: Any = module.fused_parts
            yield module.weight, parts
        if split_qkv and split_gates and hasattr(module, "matrix_rows"):
            rows_of_mixer: Any = module.matrix_rows
            yield module.weight, rows_of_mixer
