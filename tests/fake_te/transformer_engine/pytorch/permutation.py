"""Kernels of expert dispatch; not used by these tests, which leave their fusion off."""

from __future__ import annotations

from typing import Any


def _absent(*_args: Any, **_kwargs: Any) -> Any:
    raise NotImplementedError("the stand-in has no fused permutation")


moe_permute = moe_permute_with_probs = moe_unpermute = _absent
moe_sort_chunks_by_index = moe_sort_chunks_by_index_with_probs = _absent
