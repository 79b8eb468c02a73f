"""Sizes and flags of networks that run double blocks, then single blocks, on [text; image].

A double block has weights of its own for text and image, a single block runs on the joint sequence,
as in FLUX and Open-Sora 2.0 (arXiv:2503.09642) and in HunyuanVideo (arXiv:2412.03603).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from megatron_ext.config.flags import (
    FACTOR,
    NATURAL,
    SIZE,
    Changeable,
    Range,
    default_of,
    derived,
    flag,
)
from megatron_ext.errors import ConfigError, FlagError
from megatron_ext.video.config.sizes import Sizes, model_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from megatron_ext.config.model import ModelConfig
    from megatron_ext.config.run import RunConfig


@dataclass(frozen=True)
class JointSizes(Sizes):
    """All sizes that decide the shapes of the parameters of a network of double and single blocks.

    Sizes that do not fit together raise ConfigError.

    Attributes:
        hidden_size, num_heads: h and n; the size of a head d is h / n.
        axes_dim: three numbers with sum d: how many of a head's features RoPE rotates by a token's
            latent frame, by its row and by its column.
        num_double_blocks: blocks with weights of their own for text and image.
        num_single_blocks: blocks on the joint sequence.
        channels: C of the latents.
        patch_size: p; a token holds p x p latent pixels of one frame, C * p * p numbers.
        text_width: features of a text token (4096 for T5-XXL).
        pooled_width: features of the pooled text vector (768 for CLIP-L).
        mlp_ratio: width of the MLPs divided by h.
        rope_theta: base of the rotary frequencies.
        qkv_bias: whether the projections to queries, keys and values have biases.
        guidance_embed: whether the model takes a guidance strength as input, as distilled models
            do.
        cond_embed: whether the model takes latents of reference frames (image to video).
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
        if not self.num_blocks:
            raise ConfigError(
                "`num_double_blocks` + `num_single_blocks` (0) must be 1 or more; give blocks."
            )
        self.check_heads()
        if any(width % 2 for width in self.axes_dim):
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
    def num_blocks(self) -> int:
        """Return the number of double and single blocks together."""
        return self.num_double_blocks + self.num_single_blocks

    @property
    def mlp_size(self) -> int:
        """Return the width of the MLPs."""
        return self.mlp_ratio * self.hidden_size

    @property
    def cond_width(self) -> int:
        """Return (C + 1) * p * p, the features of a condition token: latents and a mask channel."""
        return (self.channels + 1) * self.patch_size**2

    def transformer_fields(self) -> dict[str, Any]:
        """Return the fields of megatron-core's TransformerConfig that the sizes determine.

        ``qk_layernorm`` is True, so that megatron-core sums the gradients of ``q_layernorm`` and
        ``k_layernorm`` over the tensor-parallel ranks. This is needed because each rank computes
        these gradients from its own heads only.
        """
        return {**self.fields_of(self.num_blocks, self.mlp_size), "qk_layernorm": True}


_OF_SIZES = (
    "num_double_blocks num_single_blocks patch_size mlp_ratio rope_theta guidance_embed channels "
    "cond_embed"
).split()


SizesT = TypeVar("SizesT", bound=JointSizes)


@dataclass(frozen=True)
class JointConfig(Changeable):
    """The flags of double and single blocks: changes to a named size, and how they are computed.

    Attributes:
        channels: number of channels of the dataset's latents.
        caption_width, pooled_caption_width: number of features of the dataset's text tokens and
            pooled text vectors.
        cond_embed: whether the model takes reference frames, as any condition mode but t2v needs,
            and as the weights may do that the run starts from.
    """

    SECTION: ClassVar[str] = "joint"

    num_double_blocks: int | None = flag(
        None, "blocks with weights of their own for the text", Range(0, 10**6)
    )
    num_single_blocks: int | None = flag(None, "blocks on the joint sequence", Range(0, 10**6))
    axes_dim: tuple[int, int, int] | None = flag(
        None,
        "parts of a head that rotate with frame, row and column",
        SIZE,
        nargs=3,
        if_changed="refuse",
    )
    patch_size: int | None = flag(None, "a token is a square of so many latent cells a side", SIZE)
    mlp_ratio: int | None = flag(None, "width of the MLPs over the hidden size", SIZE)
    rope_theta: float | None = flag(
        None, "base of the rotary frequencies", FACTOR, if_changed="refuse"
    )
    guidance_embed: bool = flag(False, "the model is told the strength of --guidance")
    guidance: float = flag(
        4.0, "strength that a model with --guidance-embed is told", Range(0, 1e6), if_changed="say"
    )
    adaln_zero: bool = flag(
        True, "modulations and the last layer start at zero; off as in Open-Sora's code"
    )
    recompute_double_blocks: int | None = flag(
        None,
        "first double blocks that keep only their inputs for the backward pass; default: all",
        NATURAL,
    )
    recompute_single_blocks: int | None = flag(
        None,
        "first single blocks that keep only their inputs for the backward pass; default: all",
        NATURAL,
    )
    double_block_cost: float = flag(
        1.0, "time of a double block over that of a single one, for the cut into stages", FACTOR
    )
    channels: int | None = derived(None)
    caption_width: int | None = derived(None)
    pooled_caption_width: int | None = derived(None)
    cond_embed: bool = derived(False)

    def sizes(self, named: SizesT, model: ModelConfig) -> SizesT:
        """Return the sizes ``named``, changed by these flags and by the dataset.

        ``model`` holds the flags of hidden size and number of heads. The dataset decides the latent
        channels and the widths of text tokens and pooled text vectors.
        """
        given = {
            **{name: getattr(self, name) for name in _OF_SIZES},
            "text_width": self.caption_width,
            "pooled_width": self.pooled_caption_width,
            "axes_dim": self.axes_dim and tuple(self.axes_dim),
            "hidden_size": model.hidden_size,
            "num_heads": model.num_attention_heads,
        }
        changes: dict[str, Any] = {k: value for k, value in given.items() if value is not None}
        return dataclasses.replace(named, **changes)


def resolve_joint(config: RunConfig, *, sizes_of: Callable[[RunConfig], JointSizes]) -> RunConfig:
    """Return the configuration with the section ``model`` filled in from the network's flags.

    ``sizes_of`` returns the sizes that these flags give. Sizes that do not fit together raise
    ConfigError.
    """
    fields = sizes_of(config).transformer_fields()
    return dataclasses.replace(config, model=model_of(fields, config.model))


def guidance_errors(config: RunConfig, resolved: RunConfig) -> list[FlagError]:
    """Return an error if ``--guidance`` is given without ``--guidance-embed``; else []."""
    flags = config.section(JointConfig)
    if flags.guidance_embed or flags.guidance == default_of(flags, "guidance"):
        return []
    return [FlagError("--guidance", None, "needs `--guidance-embed`", "give both")]


def stored_joint(
    stored: Mapping[str, Any], name: str, *, section: str
) -> dict[str, Mapping[str, Any]]:
    """Return the flags that describe a checkpoint's network, as ``{section: {field: value}}``.

    ``stored`` is the configuration in the checkpoint; ``name`` is not used. ``section`` has the
    flag that names the network's size. An earlier version stored the flags of `JointConfig` in it
    too.
    """
    # What else its model's section holds follows from these.
    names = ("hidden_size", "num_attention_heads")
    model = {name: stored["model"][name] for name in names}
    sections = {name: dict(stored.get(name, {})) for name in ("joint", "lora")}
    return {"model": model, **sections, section: dict(stored[section])}
