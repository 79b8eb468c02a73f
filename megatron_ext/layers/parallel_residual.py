"""A transformer layer whose attention and MLP both read the layer's input."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer as CoreTransformerLayer
from torch import Tensor

from megatron_ext.layers.transformer_layer import TransformerLayer


class ParallelLayer(TransformerLayer):
    """A layer that returns ``x + attention(norm(x)) + mlp(norm(x))`` for its input x.

    GPT-J and GPT-NeoX have such layers (arXiv:2204.06745, section 2.1), and PaLM (arXiv:2204.02311,
    section 2). The two norms have weights of their own; with ``shared_input_norm`` there is one,
    whose output both branches read.

    megatron-core's methods compute the branches one after the other. They add the output of
    attention to x first, and then ask for the input of the MLP, which this class answers.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._given: Tensor | None = None
        self._shares_norm = isinstance(self.pre_mlp_layernorm, IdentityOp)
        if self._shares_norm:
            self.input_layernorm.register_forward_hook(self._keep)

    def _keep(self, norm: Any, inputs: Any, output: Tensor) -> None:
        """Keep the output of the norm for the MLP; a forward hook of the norm."""
        self._given = output

    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return output ``[s, b, h]`` and context like megatron-core's layer."""
        if not self._shares_norm:
            self._given = hidden_states
        try:
            given: tuple[Tensor, Tensor | None] = CoreTransformerLayer.forward(
                self, hidden_states, *args, **kwargs
            )
        finally:
            self._given = None
        return given

    def _forward_pre_mlp_layernorm(self, hidden_states: Tensor) -> Tensor:
        """Return the MLP's input ``[s, b, h]``; ``hidden_states`` is the sum after attention."""
        given = self._given
        assert given is not None
        output: Tensor = super()._forward_pre_mlp_layernorm(given)
        return output
