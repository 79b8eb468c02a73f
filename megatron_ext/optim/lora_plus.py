"""A larger learning rate for the matrices B of adapters than for A (LoRA+, arXiv:2402.12354)."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from torch import Tensor

from megatron_ext.config.optimizer import OptimizerConfig


def lora_plus_override(optimizer: OptimizerConfig, ratio: float) -> dict[Any, Any]:
    """Return megatron-core's override that multiplies the rates of B, and of vectors, by ``ratio``.

    As in peft's ``create_loraplus_optimizer``, vectors such as DoRA's magnitudes get the larger
    rate. Weight decay stays as it is.
    """

    def is_faster(parameter: Tensor, name: str) -> bool:
        return name.endswith(".lora.b") or parameter.dim() == 1

    assert optimizer.lr is not None
    key = ParamKey(with_name_predicate=ParamWithNamePredicate(name="lora_plus", fn=is_faster))
    # megatron-core matches the groups of a checkpoint by the last mark.
    return {
        key: {
            "max_lr": optimizer.lr * ratio,
            "min_lr": optimizer.min_lr * ratio,
            "is_decoupled_lr": True,
        }
    }
