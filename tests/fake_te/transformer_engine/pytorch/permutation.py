"""Kernels of expert dispatch."""

from transformer_engine.pytorch.router import absent

moe_permute = moe_permute_with_probs = moe_unpermute = absent
moe_sort_chunks_by_index = moe_sort_chunks_by_index_with_probs = absent
