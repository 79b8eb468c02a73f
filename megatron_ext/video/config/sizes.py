"""The sizes that all video networks have, and the megatron-core settings that follow from them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_ext.config.model import ModelConfig

TIMESTEP_WIDTH = 256
"""The number of features of the sinusoidal timestep embedding, half cosines and half sines."""

EPSILON = 1e-6
"""The epsilon of every norm."""


class Sizes:
    """The sizes of every video network: hidden size h, heads, latent channels C, patch size p."""

    hidden_size: int
    num_heads: int
    channels: int
    patch_size: int

    def check_heads(self) -> None:
        """Raise ConfigError if h is not divisible by the number of heads."""
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"`hidden_size` ({self.hidden_size}) must be divisible by `num_heads` "
                f"({self.num_heads})."
            )

    @property
    def head_dim(self) -> int:
        """Return the number of features of a head, d."""
        return self.hidden_size // self.num_heads

    @property
    def token_width(self) -> int:
        """Return how many values an image token has: latent channels times patch area."""
        return self.channels * self.patch_size**2

    def fields_of(self, num_blocks: int, ffn_size: int) -> dict[str, Any]:
        """Return the fields of megatron-core's TransformerConfig that the sizes determine."""
        return {
            "num_layers": num_blocks,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_heads,
            "kv_channels": self.head_dim,
            "ffn_hidden_size": ffn_size,
            "layernorm_epsilon": EPSILON,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        }


class StreamedSizes(Sizes):
    """The sizes of a network that ``--task streaming`` can train."""

    num_blocks: int
    ffn_size: int
    text_width: int

    def transformer_fields(self) -> dict[str, Any]:
        """Return the fields of megatron-core's TransformerConfig that the sizes determine."""
        return self.fields_of(self.num_blocks, self.ffn_size)


def model_of(fields: Mapping[str, Any], model: ModelConfig) -> ModelConfig:
    """Return the model flags ``model``, changed to ``fields``, the values for a network's sizes.

    ``fields`` comes from ``transformer_fields``. The sequence length stays unset until the data is
    opened; the longest clip then sets it.
    """
    own: dict[str, Any] = {**fields, "norm_epsilon": fields["layernorm_epsilon"]}
    del own["layernorm_epsilon"]
    own |= {"untie_embeddings_and_output_weights": True, "blocks_dealt_by_cost": True}
    return dataclasses.replace(model, **own)
