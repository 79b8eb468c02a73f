"""A model, a loss and flags of your own, in one file, without registering anything.

The model is a GPT whose hidden states are bounded by ``--hidden-cap`` before the head. The loss is
cross-entropy with a ceiling, so that a few broken documents cannot dominate the gradient. The rest
is the code of pretrain_gpt.py, so all of its flags work: layouts, ``--mtp-num-layers``, ``--sft``,
checkpoints, and ``--loss``, which replaces the loss (``--loss cross-entropy`` restores
pretrain_gpt.py's).

    python examples/custom_model/train.py --nproc-per-node 4 ...   (the flags of pretrain_gpt.py)
    SMOKE=1 bash examples/custom_model/train.sh
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_ext.config.flags import flag
from megatron_ext.losses.custom import TokenLoss, TokenLossConfig
from megatron_ext.losses.vocabulary import VocabularyHead
from megatron_ext.text.model.gpt import GPTModel, build_gpt_chunk
from megatron_ext.text.task import TEXT
from megatron_ext.train.main import main

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_ext.config.run import RunConfig
    from megatron_ext.parallel.context import ParallelContext


@dataclass(frozen=True)
class CapFlags:
    """The additional flags of this program; --help, --print-config and checkpoints include them."""

    hidden_cap: float | None = flag(None, "bound of the hidden states before the head")

    def errors(self, config: RunConfig) -> list[str]:
        """Return a sentence on each wrong value."""
        cap = self.hidden_cap
        if cap is None or 0 < cap < float("inf"):
            return []
        return [f"`--hidden-cap` ({cap}) must be a finite number above 0; use 30."]


class CappedGPT(GPTModel):
    """A GPT whose hidden states before the head are bounded to (-cap, cap), element by element.

    Element-wise operations need no communication, so this works in any layout.
    """

    def __init__(self, *args: Any, cap: float | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cap = cap

    def before_head(self, hidden: Tensor) -> Tensor:
        """Bound hidden states ``[s, b, h]`` smoothly."""
        return hidden if self.cap is None else self.cap * torch.tanh(hidden / self.cap)


def build_chunk(
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    **stage: Any,
) -> GPTModel:
    """Build the layers of one pipeline chunk; the first holds the embedding, the last the head."""
    model = partial(CappedGPT, cap=config.section(CapFlags).hidden_cap)
    return build_gpt_chunk(config, transformer_config, context, model_class=model, **stage)


class CeilingLoss(TokenLoss["CeilingLossConfig"]):
    """Cross-entropy that stops growing at a ceiling."""

    name = "lm loss"

    def token_losses(
        self, hidden: Tensor, head: VocabularyHead, inputs: Mapping[str, Tensor]
    ) -> Tensor:
        """Return losses ``[C]`` of a block of C tokens; see `TokenLoss.token_losses`."""
        losses = -head.log_prob(head.logits(hidden), inputs["labels"])
        return losses.clamp(max=self.config.ceiling)


@dataclass(frozen=True)
class CeilingLossConfig(TokenLossConfig):
    """Options: ``ceiling`` in nats, such as ``--loss-args ceiling=8``."""

    loss_class = CeilingLoss
    ceiling: float = 12.0


TASK = TEXT.with_sections(CapFlags).replace(
    model_chunk=build_chunk,
    defaults={"loss": f"{Path(__file__).resolve()}:CeilingLossConfig"},
)
"""The tasks of pretrain_gpt.py, each with this model, its flag and its loss."""

if __name__ == "__main__":
    sys.exit(main(TASK, sys.argv[1:]))
