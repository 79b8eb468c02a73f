"""megatron-core's MLPs, whose activation is one kernel where it compiles.

megatron-core compiles SwiGLU and GELU with a bias, behind options that it refuses for other
activations and without biases. Here every activation is compiled, with its bias and the scale of an
expert's tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import mlp as core
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP as CoreSharedExpertMLP
from torch import Tensor

from megatron_ext.models.compiled import compiles
from megatron_ext.models.pointwise import ACTIVATIONS, activated, fusions_of

NAMES = {function: name for name, function in ACTIVATIONS.items()}


class MLP(core.MLP):  # type: ignore[misc]
    """Two matrices and an activation; see the module.

    Attributes:
        adds_bias: the second bias is added here instead of being left to the caller. Recomputation
            needs that: a parameter that it returned would become its result, and the backward pass
            of the parameter would recompute for ever.
    """

    adds_bias: bool = False

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """``[s, b, h]`` to the same, and the bias that is to be added.

        Args:
            hidden_states: ``[s, b, h]``, or an expert's tokens ``[tokens, h]``.
            per_token_scale: ``[tokens]``, what the router gives the tokens of an expert.
            kwargs: as megatron-core's.
        """
        if fusions_of(self.config).activation and compiles(hidden_states):
            output, bias = self._fused(hidden_states, per_token_scale)
        else:
            output, bias = super().forward(hidden_states, per_token_scale, **kwargs)
        if self.adds_bias and bias is not None:
            return output + bias, None
        return output, bias

    def _fused(
        self, hidden_states: Tensor, per_token_scale: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` with a compiled activation."""
        wide, bias = self.linear_fc1(hidden_states)
        scale = None if per_token_scale is None else per_token_scale.unsqueeze(-1)
        name = NAMES[self.config.activation_func]
        narrow = activated(wide, bias, scale, name, self.config.gated_linear_unit)
        output, output_bias = self.linear_fc2(narrow)
        if scale is not None and output_bias is not None:
            return output + output_bias * scale, None
        return output, output_bias


class SharedExpertMLP(CoreSharedExpertMLP, MLP):  # type: ignore[misc]
    """The expert of all tokens; overlapped with the dispatcher it stays megatron-core's."""


OWN = {core.MLP: MLP, CoreSharedExpertMLP: SharedExpertMLP}


def use_own_mlps(module: torch.nn.Module) -> None:
    """Make megatron-core's MLPs within a module ours, which hold nothing more.

    megatron-core names their class itself, for experts, or gives its process groups to no other.
    """
    for part in module.modules():
        if type(part) in OWN:
            part.__class__ = OWN[type(part)]
