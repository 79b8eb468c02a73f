"""Sizes of an MMDiT, by name from ``tiny`` (tests on a CPU) to ``11b`` (Open-Sora 2.0).

Flags of the MMDiT: a named size, what differs from it, and how it is computed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_ext.config.flags import FACTOR, NATURAL, SIZE, WEIGHT, IfChanged, Range, derived, flag
from megatron_ext.errors import ConfigError

if TYPE_CHECKING:
    from megatron_ext.config.model import ModelConfig

TIMESTEP_WIDTH = 256
"""Width of the sinusoid of a timestep, half cosines and half sines."""

EPSILON = 1e-6
"""Epsilon of every norm."""


@dataclass(frozen=True)
class MMDiTSizes:
    """Everything that decides the shapes of an MMDiT's parameters.

    Attributes:
        hidden_size: h.
        num_heads: n; the size of a head d is h / n.
        axes_dim: parts of d that rotate with the latent frame, row and column of a token.
        num_double_blocks: blocks with weights of their own for text and image.
        num_single_blocks: blocks on the joint sequence.
        channels: C of the latents.
        patch_size: p; a token holds p x p pixels of a latent frame, C * p * p numbers.
        text_width: features of a text token (4096 for T5-XXL).
        pooled_width: features of the pooled text vector (768 for CLIP-L).
        mlp_ratio: width of the MLPs over h.
        rope_theta: base of the rotary frequencies.
        qkv_bias: the projections to queries, keys and values have biases.
        guidance_embed: the model takes a guidance strength, for distilled models.
        cond_embed: the model takes condition latents (image to video).

    Raises:
        ConfigError: sizes that do not fit together.
    """

    hidden_size: int
    num_heads: int
    axes_dim: tuple[int, int, int]
    num_double_blocks: int
    num_single_blocks: int
    channels: int = 16
    patch_size: int = 2
    text_width: int = 4096
    pooled_width: int = 768
    mlp_ratio: int = 4
    rope_theta: float = 10_000.0
    qkv_bias: bool = True
    guidance_embed: bool = False
    cond_embed: bool = False

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}` ({getattr(self, name)}) must be 1 or more.")
        for name in ("num_double_blocks", "num_single_blocks"):
            if getattr(self, name) < 0:
                raise ConfigError(f"`{name}` ({getattr(self, name)}) must be 0 or more.")
        if not self.num_blocks:
            raise ConfigError(
                "`num_double_blocks` + `num_single_blocks` (0) must be 1 or more; give blocks."
            )
        if self.rope_theta <= 1:
            raise ConfigError(f"`rope_theta` ({self.rope_theta}) must exceed 1; 10000 is usual.")
        self._check_heads()

    def _check_heads(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"`hidden_size` ({self.hidden_size}) must be divisible by `num_heads` "
                f"({self.num_heads})."
            )
        if any(width < 2 or width % 2 for width in self.axes_dim):
            raise ConfigError(
                f"`axes_dim` {self.axes_dim} must be even and positive, since each frequency "
                "rotates a pair of features."
            )
        if len(self.axes_dim) != 3 or sum(self.axes_dim) != self.head_dim:
            raise ConfigError(
                f"`axes_dim` {self.axes_dim} must be three widths whose sum is the size of a head, "
                f"hidden_size / num_heads ({self.head_dim})."
            )

    @property
    def head_dim(self) -> int:
        """Features of a head, d."""
        return self.hidden_size // self.num_heads

    @property
    def num_blocks(self) -> int:
        """Blocks of both kinds."""
        return self.num_double_blocks + self.num_single_blocks

    @property
    def mlp_size(self) -> int:
        """Width of the MLPs."""
        return self.mlp_ratio * self.hidden_size

    @property
    def token_width(self) -> int:
        """Features of an image token, C * p * p."""
        return self.channels * self.patch_size**2

    @property
    def cond_width(self) -> int:
        """Features of a condition token: the mask is one more channel, (C + 1) * p * p."""
        return (self.channels + 1) * self.patch_size**2

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        h, m = self.hidden_size, self.mlp_size
        qkv = 3 * h * (h + self.qkv_bias)
        norms = 2 * self.head_dim
        stream = _linear(h, 6 * h) + qkv + norms + _linear(h, h) + _linear(h, m) + _linear(m, h)
        single = _linear(h, 3 * h) + qkv + _linear(h, m) + norms + _linear(h + m, h)
        embedding = _linear(self.token_width, h) + _linear(self.text_width, h)
        embedding += _linear(TIMESTEP_WIDTH, h) + _linear(self.pooled_width, h) + 2 * _linear(h, h)
        if self.guidance_embed:
            embedding += _linear(TIMESTEP_WIDTH, h) + _linear(h, h)
        if self.cond_embed:
            embedding += _linear(self.cond_width, h)
        final = _linear(h, 2 * h) + _linear(h, self.token_width)
        blocks = 2 * stream * self.num_double_blocks + single * self.num_single_blocks
        return embedding + blocks + final

    def transformer_fields(self) -> dict[str, Any]:
        """Return the fields of megatron-core's TransformerConfig that follow from the sizes.

        With ``qk_layernorm`` core sums the gradients of parameters named ``q_layernorm`` and
        ``k_layernorm`` over the tensor-parallel ranks, which each see only their own heads.
        """
        return {
            "num_layers": self.num_blocks,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_heads,
            "kv_channels": self.head_dim,
            "ffn_hidden_size": self.mlp_size,
            "qk_layernorm": True,
            "layernorm_epsilon": EPSILON,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        }


def _linear(inputs: int, outputs: int) -> int:
    """Parameters of a linear layer with bias."""
    return (inputs + 1) * outputs


_POSITIVE = "hidden_size num_heads channels patch_size text_width pooled_width mlp_ratio".split()

SIZES = {
    "tiny": MMDiTSizes(64, 4, (4, 6, 6), 2, 2, channels=4, text_width=32, pooled_width=16),
    "small": MMDiTSizes(384, 6, (16, 24, 24), 4, 8, channels=16, text_width=512),
    "base": MMDiTSizes(768, 12, (16, 24, 24), 6, 12),
    "large": MMDiTSizes(1536, 16, (16, 40, 40), 8, 16),
    "3b": MMDiTSizes(2048, 16, (16, 56, 56), 12, 24),
    "11b": MMDiTSizes(3072, 24, (16, 56, 56), 19, 38),
}
"""Named sizes; ``11b`` is Open-Sora 2.0 (text to video; its image-to-video stages add
``cond_embed``)."""


_OF_SIZES = (
    "axes_dim num_double_blocks num_single_blocks patch_size mlp_ratio "
    "guidance_embed channels cond_embed"
)


@dataclass(frozen=True)
class MMDiTConfig:
    """The model of pretrain_video.py.

    Attributes:
        channels, caption_width, pooled_caption_width: of the data, which decides them.
        cond_embed: the model is given references, since some condition mode has them.
    """

    SECTION: ClassVar[str] = "mmdit"

    IF_CHANGED: ClassVar[IfChanged] = "allow"

    mmdit_size: str = flag(
        "tiny",
        "named size of the MMDiT; flags such as --hidden-size change it",
        choices=tuple(SIZES),
    )
    num_double_blocks: int | None = flag(
        None, "blocks with weights of their own for the text", bounds=Range(0, 10**6)
    )
    num_single_blocks: int | None = flag(
        None, "blocks on the joint sequence", bounds=Range(0, 10**6)
    )
    axes_dim: tuple[int, int, int] | None = flag(
        None,
        "parts of a head that rotate with frame, row and column",
        nargs=3,
        bounds=SIZE,
        if_changed="refuse",
    )
    patch_size: int | None = flag(
        None, "a token is a square of so many latent cells a side", bounds=SIZE
    )
    mlp_ratio: int | None = flag(None, "width of the MLPs over the hidden size", bounds=SIZE)
    guidance_embed: bool = flag(False, "the model is told the strength of --guidance")
    guidance: float = flag(
        4.0, "strength that a model with --guidance-embed is told", bounds=WEIGHT, if_changed="say"
    )
    adaln_zero: bool = flag(
        True, "modulations and the last layer start at zero; off as in Open-Sora's code"
    )
    recompute_double_blocks: int | None = flag(
        None,
        "first double blocks that keep only their inputs for the backward pass; default: all",
        bounds=NATURAL,
    )
    recompute_single_blocks: int | None = flag(
        None,
        "first single blocks that keep only their inputs for the backward pass; default: all",
        bounds=NATURAL,
    )
    double_block_cost: float = flag(
        1.0,
        "time of a double block over that of a single one, for the cut into stages",
        bounds=FACTOR,
    )
    channels: int | None = derived(None)
    caption_width: int | None = derived(None)
    pooled_caption_width: int | None = derived(None)
    cond_embed: bool = derived(False)

    def sizes(self, model: ModelConfig) -> MMDiTSizes:
        """The sizes with the changes of the flags and the widths of the data.

        Raises:
            ConfigError: sizes that do not fit together.
        """
        given = {name: getattr(self, name) for name in _OF_SIZES.split()}
        given |= {"text_width": self.caption_width, "pooled_width": self.pooled_caption_width}
        changes: dict[str, Any] = {k: value for k, value in given.items() if value is not None}
        if self.axes_dim is not None:
            changes["axes_dim"] = tuple(self.axes_dim)
        if model.hidden_size is not None:
            changes["hidden_size"] = model.hidden_size
        if model.num_attention_heads is not None:
            changes["num_heads"] = model.num_attention_heads
        return dataclasses.replace(SIZES[self.mmdit_size], **changes)

    def described(self, model: ModelConfig) -> ModelConfig:
        """The model's section as it follows from the sizes.

        The sequence has no length of its own: that of the longest clip is filled in once the data
        is known.

        Raises:
            ConfigError: see `sizes`.
        """
        sizes = self.sizes(model)
        return dataclasses.replace(
            model,
            num_layers=sizes.num_blocks,
            hidden_size=sizes.hidden_size,
            num_attention_heads=sizes.num_heads,
            kv_channels=sizes.head_dim,
            ffn_hidden_size=sizes.mlp_size,
            qk_layernorm=True,
            norm_epsilon=EPSILON,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            untie_embeddings_and_output_weights=True,
            blocks_dealt_by_cost=True,
        )
