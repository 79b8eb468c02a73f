"""The output head of a language model, for losses that make its logits themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.errors import ConfigError


@dataclass(frozen=True)
class OutputHead:
    """This rank's part of the head.

    Attributes:
        weight: ``[v/tp, h]``; part r starts at token ``r * v/tp``.
        tp_group: the ranks that hold the other parts.
        sequence_parallel: hidden states come cut along the sequence.
        config: megatron-core's configuration of the model.
        bias: ``[v/tp]``, in the weight's type; None where the head has none.
    """

    weight: Tensor
    tp_group: ProcessGroup
    sequence_parallel: bool
    config: Any
    bias: Tensor | None = None


class HasOutputHead(Protocol):
    """A model chunk that ends a language model."""

    def output_head(self) -> OutputHead: ...


def output_head(model: torch.nn.Module) -> OutputHead:
    """The head of a wrapped model chunk.

    Raises:
        ConfigError: a model without `output_head`.
    """
    bare: Any = unwrap_model(model)
    if not hasattr(bare, "output_head"):
        raise ConfigError(
            f"The model `{type(bare).__name__}` has no method `output_head`, which chunked losses "
            "need; add it (see models.head) or use `--cross-entropy-impl eager`."
        )
    head: OutputHead = bare.output_head()
    return head


def in_type_of(hidden: Tensor, head: OutputHead) -> Tensor:
    """Hidden states in the type of the head; wrappers for 16 bits return float32."""
    return hidden.to(head.weight.dtype)
