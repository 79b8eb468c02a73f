"""Experts: megatron-core's, made to work without Transformer Engine, on a CPU and per token.

Three methods of the router are replaced. `gating` calls a name that does not exist where
Transformer Engine is missing. And under per-token normalization core multiplies the auxiliary
losses by the number of local tokens, which makes their weight depend on the layout, on the
micro-batch size and on the loss mask; here their coefficient is that of the mean over all
micro-batches, always.

The all-to-all dispatcher reads its split sizes from GPU tensors only; ours from CPU tensors too.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import (
    save_to_aux_losses_tracker,
    z_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer as CoreTransformerLayer
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.models.auto_scaler import attach_microbatch_loss
from megatron_ext.models.dropout import BiasDropoutAdd, HiddenDropout
from megatron_ext.models.fused_layer import FusedForward
from megatron_ext.models.graphs import LayerGraphs
from megatron_ext.models.mlp import use_own_mlps

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(TopKRouter):  # type: ignore[misc]
    """Top-k router; see the module."""

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
        aux_loss_name: str,
        reduce_group: ProcessGroup,
        reduce_group_has_dp: bool = False,
        valid_token_count: Tensor | int | None = None,
    ) -> Tensor:
        """Attach a load-balancing loss with its share of the step; log it without.

        Args:
            activation: what carries the loss through the graph.
            aux_loss_coeff: weight of the loss.
            aux_loss: this micro-batch's loss times its weight.
            aux_loss_name: what the log calls it.
            reduce_group: ranks whose parts make up the logged value.
            reduce_group_has_dp: the group spans data-parallel ranks too.
            valid_token_count: not used, a mean does not depend on it.
        """
        save_to_aux_losses_tracker(
            aux_loss_name,
            aux_loss / aux_loss_coeff,
            self.layer_number,
            _num_layers(self.config),
            reduce_group=reduce_group,
            reduce_group_has_dp=reduce_group_has_dp,
        )
        return attach_microbatch_loss(activation, aux_loss, self.config)

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
        save_to_aux_losses_tracker(
            "z_loss", z_loss / coefficient, self.layer_number, _num_layers(self.config)
        )
        return attach_microbatch_loss(logits, z_loss, self.config)


def _num_layers(config: TransformerConfig) -> int:
    return int(config.num_layers + (config.mtp_num_layers or 0))


class AlltoAllDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Sends each token to the ranks of its experts by one all-to-all."""

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Tensor | None:
        """Give the split sizes as numpy arrays, which the collective wants, on any device."""
        tokens_per_expert = super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits = getattr(self, name)
                if torch.is_tensor(splits):
                    setattr(self, name, splits.numpy())
        return tokens_per_expert


class TransformerLayer(FusedForward, CoreTransformerLayer):  # type: ignore[misc]
    """megatron-core's layer, with our `AlltoAllDispatcher` where it dispatches by all-to-all, with
    masks that no layout changes where ``--deterministic-dropout`` asks for them, and fused.

    Attributes:
        graphs: what replays the layer in training; None where it is always run kernel by kernel.
    """

    graphs: LayerGraphs | None = None

    def __init__(
        self, *args: Any, pg_collection: ProcessGroupCollection | None = None, **kwargs: Any
    ) -> None:
        # megatron-core's multi-token-prediction block hands none down.
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        super().__init__(*args, pg_collection=groups, **kwargs)
        use_own_mlps(self.mlp)
        if getattr(self.config, "deterministic_dropout", False):
            self.self_attn_bda = self._bias_dropout_add("attention", groups)
            self.mlp_bda = self._bias_dropout_add("mlp", groups)
        if self.is_moe_layer and type(self.mlp.token_dispatcher) is MoEAlltoAllTokenDispatcher:
            self.mlp.token_dispatcher = AlltoAllDispatcher(
                self.mlp.num_local_experts,
                self.mlp.local_expert_indices,
                config=self.config,
                pg_collection=groups,
            )
            if self.mlp.shared_expert_overlap:
                self.mlp.token_dispatcher.set_shared_experts(self.mlp.shared_experts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output and its context, by a graph where there is one for the call."""
        graphs = self.graphs
        if graphs is not None and self.training and torch.is_grad_enabled():
            if graphs.takes(kwargs):
                return graphs.replay(self, kwargs)
            graphs.note(kwargs)
        return super().__call__(*args, **kwargs)

    def _bias_dropout_add(self, name: str, groups: ProcessGroupCollection) -> BiasDropoutAdd:
        site = f"{name} {self.layer_number}"
        return BiasDropoutAdd(
            HiddenDropout(self.hidden_dropout, site, groups, self.config.sequence_parallel)
        )
