"""Named sizes of the MMDiT, from ``tiny`` (tests on a CPU) to ``11b`` (Open-Sora 2.0)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron_ext.config.flags import Changeable, flag
from megatron_ext.video.config.joint import JointConfig, JointSizes

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig

SIZES = {
    "tiny": JointSizes(64, 4, (4, 6, 6), 2, 2, channels=4, text_width=32, pooled_width=16),
    "small": JointSizes(384, 6, (16, 24, 24), 4, 8, channels=16, text_width=512),
    "base": JointSizes(768, 12, (16, 24, 24), 6, 12),
    "large": JointSizes(1536, 16, (16, 40, 40), 8, 16),
    "3b": JointSizes(2048, 16, (16, 56, 56), 12, 24),
    "11b": JointSizes(3072, 24, (16, 56, 56), 19, 38),
}
"""Sizes of the MMDiT by name; ``11b`` is Open-Sora 2.0 for text to video.

Open-Sora's models for image to video also have ``cond_embed``."""


@dataclass(frozen=True)
class MMDiTConfig(Changeable):
    """The flag that names a size of the MMDiT, which the flags of `JointConfig` change."""

    SECTION: ClassVar[str] = "mmdit"

    mmdit_size: str = flag(
        "tiny",
        "named size of the MMDiT; flags such as --hidden-size change it",
        choices=tuple(SIZES),
    )


def sizes_of(config: RunConfig) -> JointSizes:
    """Return the sizes of a run's MMDiT, as flags and dataset decide them."""
    named = SIZES[config.section(MMDiTConfig).mmdit_size]
    return config.section(JointConfig).sizes(named, config.model)
