"""Sizes and flags of HunyuanVideo, from ``tiny`` (tests on a CPU) to the published ``13b``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from megatron_ext.config.flags import NATURAL, Changeable, flag
from megatron_ext.video.config.joint import JointConfig, JointSizes

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig


@dataclass(frozen=True)
class HunyuanSizes(JointSizes):
    """All sizes that decide the shapes of HunyuanVideo's parameters.

    Attributes:
        num_refiner_blocks: blocks of the token refiner, on the text alone.
    """

    rope_theta: float = 256.0
    num_refiner_blocks: int = 2

    @property
    def refiner_mlp_size(self) -> int:
        """Return the width of the refiner's MLPs, which does not follow ``mlp_ratio``."""
        return 4 * self.hidden_size


SIZES = {
    "tiny": HunyuanSizes(64, 4, (4, 6, 6), 2, 2, channels=4, text_width=32, pooled_width=16),
    "small": HunyuanSizes(384, 6, (16, 24, 24), 4, 8, text_width=512),
    "13b": HunyuanSizes(3072, 24, (16, 56, 56), 20, 40),
}
"""Sizes of HunyuanVideo by name; ``13b`` is the published network.

The published weights for text to video also have ``guidance_embed``."""


@dataclass(frozen=True)
class HunyuanConfig(Changeable):
    """The flags of HunyuanVideo beside those of `JointConfig`."""

    SECTION: ClassVar[str] = "hunyuan"

    hunyuan_size: str = flag(
        "tiny",
        "named size of HunyuanVideo; flags such as --hidden-size change it",
        choices=tuple(SIZES),
    )
    num_refiner_blocks: int | None = flag(None, "blocks of the token refiner", NATURAL)


def sizes_of(config: RunConfig) -> HunyuanSizes:
    """Return the sizes of a run's HunyuanVideo, as flags and dataset decide them."""
    flags = config.section(HunyuanConfig)
    named = config.section(JointConfig).sizes(SIZES[flags.hunyuan_size], config.model)
    blocks = flags.num_refiner_blocks
    return named if blocks is None else replace(named, num_refiner_blocks=blocks)
