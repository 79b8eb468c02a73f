"""Routed experts that work on a small vector of each token (``--moe-latent-size``; Nemotron 3).

One matrix, which all experts share, projects a token from its h channels to fewer, before it is
sent to the ranks of its experts; another one projects the sum of their outputs back. So fewer bytes
are sent, and each expert has smaller matrices. Router and shared expert see all h channels.

megatron-core has these layers, but needs Transformer Engine for their projections. Names of
parameters are the same.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_ext import core
from megatron_ext.layers.linear import WholeLinear


class _Experts:
    """Builds megatron-core's experts with the config that says the width of the small vectors.

    The config that is given lacks it, see `LatentMoELayer`.
    """

    def __new__(
        cls, num_local_experts: int, config: Any, submodules: MLPSubmodules, **kwargs: Any
    ) -> SequentialMLP:
        return SequentialMLP(num_local_experts, config.with_latent_size, submodules, **kwargs)


class LatentMoELayer(MoELayer):  # type: ignore[misc]
    """megatron-core's layer of experts, whose two projections are our linear layers."""

    def __init__(
        self, config: TransformerConfig, submodules: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        # With the size, megatron-core would build its own projections, which need a GPU.
        without: Any = copy.copy(config)
        without.moe_latent_size = None
        without.with_latent_size = config
        experts = core.with_module(submodules.experts, _Experts)
        own = dataclasses.replace(submodules, experts=experts)
        super().__init__(without, own, *args, **kwargs)
        for module in self.modules():
            if getattr(module, "config", None) is without:
                module.config = config
        self.token_dispatcher.config = config
        hidden = config.hidden_size
        width = config.moe_latent_size
        assert width is not None
        options = {"config": config, "tp_group": self.attn_tp_group}
        self.fc1_latent_proj = WholeLinear(hidden, width, init_method=config.init_method, **options)
        self.fc2_latent_proj = WholeLinear(
            width, hidden, init_method=config.output_layer_init_method, **options
        )
