"""Kernels of the router and of dispatch; not used by these tests, which leave fusion off."""

from typing import Any


def absent(*_args: Any, **_kwargs: Any) -> Any:
    raise NotImplementedError("the stand-in has no fused experts")


fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = absent
fused_topk_with_score_function = absent
