"""What changes of the inputs that linear layers keep: in 8 bits, and beside adapters.

A linear layer keeps its input for the gradient of its weight. In 8 bits it keeps one byte for each
number (`models.fp8`); with a frozen weight nothing, but its adapter (`models.lora`) does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.planning.contents import Sizes
from megatron_ext.planning.parameters import LINEAR, Weight

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig

KEPT_LAYOUTS = 2
"""In which a step keeps a weight in 8 bits: as it is and transposed."""


def copies(config: RunConfig, weights: Iterable[Weight]) -> int:
    """Bytes of the 8-bit matrices that a step keeps beside weights of 8-bit layers.

    With ``--fp8-param-gather`` the weight itself is one of the layouts.
    """
    numbers = sum(weight.numel for weight in weights if LINEAR.search(weight.name))
    return (KEPT_LAYOUTS - config.fp8.fp8_param_gather) * numbers


@dataclass(frozen=True)
class Inputs:
    """Numbers that go into the linear layers of one transformer layer, on one rank.

    Attributes:
        linear_qkv, linear_proj, linear_fc1, linear_fc2: into the layer of that name.
        attended: attention keeps its output, which is what goes into ``linear_proj``.
    """

    linear_qkv: int
    linear_proj: int
    linear_fc1: int
    linear_fc2: int
    attended: bool

    @classmethod
    def of(cls, config: RunConfig, sizes: Sizes, *, experts: bool, attended: bool) -> Inputs:
        """Of a layer, of experts or not."""
        moe, stream = config.moe, sizes.residual_tokens * sizes.h
        fc1, fc2 = stream, sizes.tokens * sizes.f // sizes.tp
        if experts:
            routed = sizes.residual_tokens * moe.moe_router_topk * sizes.etp
            fc1 = routed * sizes.h
            fc2 = routed * (moe.moe_ffn_hidden_size or sizes.f) // sizes.etp
        return cls(stream, sizes.tokens * sizes.n // sizes.tp * sizes.d, fc1, fc2, attended)

    def saved_in_8_bits(self, width: int) -> int:
        """Bytes less, where numbers took ``width`` bytes; negative where others keep them too."""
        fresh = self.linear_qkv + self.linear_fc1 + self.linear_fc2
        proj = -self.linear_proj if self.attended else self.linear_proj * (width - 1)
        return fresh * (width - 1) + proj

    def of_frozen(self, config: RunConfig, sizes: Sizes) -> int:
        """Bytes more beside adapters: their narrow tensors, without inputs that nothing keeps."""
        rank, targets = config.lora.lora_rank or 0, config.lora.lora_target_modules or []
        total = len(targets) * sizes.tokens * rank * sizes.width
        for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"):
            kept_anyway = name == "linear_proj" and self.attended
            numbers: int = getattr(self, name)
            if name in targets and config.lora.lora_dropout:
                # The adapter keeps the dropped input instead, and what was dropped.
                total += numbers * (1 if sizes.gpu else sizes.width)
            elif name not in targets and not kept_anyway:
                total -= numbers * sizes.width
        return total
