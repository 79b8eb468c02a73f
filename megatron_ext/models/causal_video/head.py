"""From hidden states to the flow of each token."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.config.video_dit_sizes import VideoDiTSizes
from megatron_ext.models.causal_video.modulation import ModulationTable, modulated_frames_alone
from megatron_ext.models.causal_video.options import VideoDiTOptions
from megatron_ext.models.mmdit.linear import mark_replicated
from megatron_ext.models.mmdit.modulation import start_at_zero


class Head(MegatronModule):  # type: ignore[misc]
    """A norm, modulated by table and timesteps, and a linear layer."""

    def __init__(
        self,
        config: TransformerConfig,
        sizes: VideoDiTSizes,
        options: VideoDiTOptions,
        tp_group: ProcessGroup,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        self.modulation = ModulationTable(config, 2)
        self.linear = torch.nn.Linear(sizes.hidden_size, sizes.token_width)
        if options.zero_head:
            start_at_zero(self.linear)
        mark_replicated(self.linear, config)

    def forward(self, hidden: Tensor, time: Tensor) -> Tensor:
        """``[s, b, h]`` and embedded timesteps ``[f, b, h]`` to ``[s, b, c * p * p]``."""
        shift, scale = self.modulation(time.unsqueeze(2))
        return self.linear(modulated_frames_alone(hidden, shift, scale))  # type: ignore[no-any-return]
