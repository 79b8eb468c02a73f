"""The MoE router: megatron-core's, made to work without Transformer Engine and per token.

Two of its methods are replaced. `gating` calls a name that does not exist where Transformer Engine
is missing. And under per-token normalization core multiplies the auxiliary losses by the number of
local tokens, which makes their weight depend on the layout, on the micro-batch size and on the
loss mask; here their coefficient is that of the mean over all micro-batches, always.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    save_to_aux_losses_tracker,
    z_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


@dataclass
class AuxiliaryScale:
    """The factor that turns a per-micro-batch auxiliary loss into its share of the step.

    The gradients of a step are divided by its number of targets N; an auxiliary loss that is to
    be averaged over M micro-batches on each of DP data-parallel ranks is therefore attached times
    N / (DP * M). The step sets the factor before its first forward pass.
    """

    value: Tensor | float = 1.0


@dataclass
class ScaledTransformerConfig(TransformerConfig):  # type: ignore[misc]
    """TransformerConfig that also carries the step's `AuxiliaryScale`; None without per-token."""

    auxiliary_scale: AuxiliaryScale | None = None


ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(TopKRouter):  # type: ignore[misc]
    """Top-k router; see the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The scale below is all that per-token normalization needs.
        self.calculate_per_token_loss = False

    def gating(self, input: Tensor) -> Tensor:
        """Logits of the experts.

        Args:
            input: ``[s, b, h]``.

        Returns:
            ``[s, b, e]`` in ``--moe-router-dtype``, or the dtype of the input.
        """
        dtype = ROUTER_DTYPES.get(self.config.moe_router_dtype, input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return torch.nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias)

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Attach a load-balancing loss with its share of the step; log it without."""
        scale = _scale(self.config)
        return super().attach_and_log_load_balancing_loss(  # type: ignore[no-any-return]
            activation, aux_loss_coeff * scale, aux_loss * scale, *args, **kwargs
        )

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attach the router z-loss (ST-MoE, arXiv:2202.08906, eq. 5) with its share of the step.

        Args:
            logits: ``[tokens, e]``.
            padding_mask: True at padding, ``[tokens]``.
        """
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not (self.training and torch.is_grad_enabled()):
            return logits
        coefficient /= self.tp_cp_group.size()
        z_loss = z_loss_func(logits, coefficient, padding_mask=padding_mask)
        num_layers = self.config.num_layers + (self.config.mtp_num_layers or 0)
        save_to_aux_losses_tracker("z_loss", z_loss / coefficient, self.layer_number, num_layers)
        return MoEAuxLossAutoScaler.apply(logits, z_loss * _scale(self.config))  # type: ignore[no-any-return]


def _scale(config: TransformerConfig) -> Tensor | float:
    holder = getattr(config, "auxiliary_scale", None)
    return 1.0 if holder is None else holder.value
