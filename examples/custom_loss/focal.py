"""Focal loss (Lin et al. 2017, arXiv:1708.02002): confident predictions get less weight.

l = -(1 - p)^gamma log p

python pretrain_gpt.py --loss examples/custom_loss/focal.py:FocalLossConfig --loss-args gamma=1.5
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_ext.losses.custom import TokenLoss, TokenLossConfig
from megatron_ext.losses.vocabulary import VocabularyHead


class FocalLoss(TokenLoss["FocalLossConfig"]):
    """Cross-entropy times (1 - p)^gamma."""

    name = "focal loss"

    def token_losses(
        self, hidden: Tensor, head: VocabularyHead, inputs: Mapping[str, Tensor]
    ) -> Tensor:
        """Return losses ``[C]``; see `TokenLoss.token_losses`."""
        log_p = head.log_prob(head.logits(hidden), inputs["labels"])
        return -((1 - log_p.exp()) ** self.config.gamma) * log_p


@dataclass(frozen=True)
class FocalLossConfig(TokenLossConfig):
    """Options: ``gamma``; 0 gives cross-entropy."""

    loss_class = FocalLoss
    gamma: float = 2.0
