"""Kernels of the router; not used by these tests, which leave their fusion off."""

from __future__ import annotations

from typing import Any


def _absent(*_args: Any, **_kwargs: Any) -> Any:
    raise NotImplementedError("the stand-in has no fused router")


fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = _absent
fused_topk_with_score_function = _absent
