"""From hidden states to the velocity of each token."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.config.mmdit_sizes import MMDiTSizes
from megatron_ext.models.mmdit.linear import mark_replicated
from megatron_ext.models.mmdit.modulation import Modulation, modulated_alone, start_at_zero
from megatron_ext.models.mmdit.options import MMDiTOptions


class FinalLayer(MegatronModule):  # type: ignore[misc]
    """A modulated norm and a linear layer, ``[s, b, h]`` to ``[s, b, C * p * p]``."""

    def __init__(
        self,
        config: TransformerConfig,
        sizes: MMDiTSizes,
        options: MMDiTOptions,
        tp_group: ProcessGroup,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        self.modulation = Modulation(config, 2, zero=options.adaln_zero)
        self.linear = torch.nn.Linear(sizes.hidden_size, sizes.token_width)
        if options.adaln_zero:
            start_at_zero(self.linear)
        mark_replicated(self, config)

    def forward(self, hidden: Tensor, vec: Tensor) -> Tensor:
        """``[s, b, h]`` and ``[b, h]`` to ``[s, b, C * p * p]``."""
        shift, scale = self.modulation.parts(vec)
        return self.linear(modulated_alone(hidden, shift, scale))  # type: ignore[no-any-return]
