"""Multi-token prediction: the targets and weights of its losses, and the output head that they
share.

Depth k of K predicts the token k+1 positions ahead (DeepSeek-V3, arXiv:2412.19437, section 2.2).
megatron-core's MTP block computes the hidden states; the losses join the graph through the loss
auto-scaler with the weights that the caller gives, so the same model serves per-token normalization
and the mean of micro-batch means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.errors import ConfigError


@dataclass
class MTPTargets:
    """The targets of a micro-batch's multi-token-prediction depths, and what came out.

    Attributes:
        labels: per depth, ids ``[b, s/c]``.
        masks: per depth, 0 or 1 ``[b, s/c]`` float32.
        weights: per depth, the gradient weight of each position's loss ``[b, s/c]`` float32.
        reports: per depth, filled by the forward pass: ``[sum, count]`` of the masked losses.
    """

    labels: Sequence[Tensor]
    masks: Sequence[Tensor]
    weights: Sequence[Tensor]
    reports: list[Tensor] = field(default_factory=list)

    def record(self, depth: int, losses: Tensor) -> None:
        """Keep the sum and the count of one depth's losses ``[b, s/c]`` for the log; depths start
        at 0.
        """
        mask = self.masks[depth]
        with torch.no_grad():
            self.reports.append(torch.stack([(losses.float() * mask).sum(), mask.sum()]))


def per_token_weights(
    masks: Sequence[Tensor], scaling_factor: float, main_count: Tensor, depth_counts: Tensor
) -> list[Tensor]:
    """Return the weights of the depths' losses under per-token normalization.

    The gradients of a step are divided by the number N of its main targets, so depth k, with D_k
    targets in the step, is weighted by N / D_k: its share of the loss is then exactly
    ``scaling_factor / K`` times its own mean over the global batch. A depth without any target
    contributes nothing.

    Args:
        masks: per depth, ``[b, s/c]``.
        main_count: N over the step, all micro-batches, data- and context-parallel ranks.
        depth_counts: D_k likewise, ``[K]``.
    """
    coefficient = scaling_factor / len(masks)
    ratios = main_count / depth_counts.clamp(min=1)
    return [mask * (coefficient * ratio) for mask, ratio in zip(masks, ratios, strict=True)]


def mean_of_means_weights(masks: Sequence[Tensor], scaling_factor: float) -> list[Tensor]:
    """Return the weights where each micro-batch is averaged by itself, Megatron-LM's default.

    Args:
        masks: per depth, ``[b, s/c]``.
        scaling_factor: ``--mtp-loss-scaling-factor`` over the number of micro-batches.
    """
    coefficient = scaling_factor / len(masks)
    return [mask * (coefficient / mask.sum().clamp(min=1)) for mask in masks]


@dataclass(frozen=True)
class OutputHead:
    """This rank's part of the output head of a language model.

    Attributes:
        weight: ``[v/tp, h]``; part r starts at token ``r * v/tp``.
        sequence_parallel: hidden states come cut along the sequence.
        bias: ``[v/tp]``, in the weight's type; None where the head has none.
    """

    weight: Tensor
    tp_group: ProcessGroup
    sequence_parallel: bool
    config: Any
    bias: Tensor | None = None


def output_head(model: torch.nn.Module) -> OutputHead:
    """Return the head of a model chunk, which may be wrapped.

    Raises:
        ConfigError: a model without a method `output_head`.
    """
    bare: Any = unwrap_model(model)
    if not hasattr(bare, "output_head"):
        raise ConfigError(
            f"The model `{type(bare).__name__}` has no method `output_head`, which chunked losses "
            "need; add it (see layers.mtp) or use `--cross-entropy-impl eager`."
        )
    head: OutputHead = bare.output_head()
    return head
