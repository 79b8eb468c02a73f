"""What a video model is given besides noise: reference frames and captions, and how often."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ext.config.flags import check_ranges, flag, range_errors
from megatron_ext.config.ranges import COUNT, SHARE, WEIGHT
from megatron_ext.errors import ConfigError

MODES = (
    "t2v",
    "i2v_head",
    "i2v_tail",
    "i2v_loop",
    "v2v_head",
    "v2v_tail",
    "v2v_head_easy",
    "v2v_tail_easy",
)
"""Names of the modes; tensors of modes hold their indices."""

REFERENCE_LOSSES = ("masked", "all", "trimmed")


@dataclass(frozen=True)
class ConditionConfig:
    """How often a condition mode is drawn, and whether reference frames count in the loss.

    The defaults of the lengths are 33 and 65 frames of a causal VAE of temporal stride 4.

    Raises:
        ConfigError: a weight that is not 0 or more, no weight at all, or an unknown
            ``reference_loss``.
    """

    t2v_weight: float = flag(1.0, "relative frequency of clips without references", bounds=WEIGHT)
    i2v_head_weight: float = flag(5.0, "of clips whose first latent frame is given", bounds=WEIGHT)
    i2v_tail_weight: float = flag(1.0, "of clips whose last latent frame is given", bounds=WEIGHT)
    i2v_loop_weight: float = flag(
        1.0, "of clips whose first and last latent frame are given", bounds=WEIGHT
    )
    v2v_head_weight: float = flag(0.0, "of clips whose first --v2v-frames are given", bounds=WEIGHT)
    v2v_tail_weight: float = flag(0.0, "of clips whose last --v2v-frames are given", bounds=WEIGHT)
    v2v_head_easy_weight: float = flag(
        0.0, "of clips whose first --v2v-easy-frames are given", bounds=WEIGHT
    )
    v2v_tail_easy_weight: float = flag(
        0.0, "of clips whose last --v2v-easy-frames are given", bounds=WEIGHT
    )
    v2v_frames: int = flag(9, "length of the references of v2v", unit="latent frames", bounds=COUNT)
    v2v_easy_frames: int = flag(17, "of the easy ones", unit="latent frames", bounds=COUNT)
    reference_loss: str = flag(
        "masked",
        "masked: no reference frame counts in the loss; all: they count as any other; trimmed: "
        "only a first and a last frame are left out, in clips without references in between",
        choices=REFERENCE_LOSSES,
    )

    def __post_init__(self) -> None:
        messages = list(range_errors(self).values())
        if not messages and not self.modes:
            messages.append(
                "The weights of all condition modes are 0, but one must be drawn; give "
                "`--t2v-weight 1` to train without references."
            )
        if self.reference_loss not in REFERENCE_LOSSES:
            messages.append(
                f"`--reference-loss` ({self.reference_loss}) must be one of "
                f"{', '.join(REFERENCE_LOSSES)}; choose masked to train on new frames only."
            )
        if messages:
            raise ConfigError(messages)

    def weight(self, mode: str) -> float:
        """Relative frequency of a mode."""
        return float(getattr(self, f"{mode}_weight"))

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes that are ever drawn for videos."""
        return tuple(mode for mode in MODES if self.weight(mode) > 0)


@dataclass(frozen=True)
class TextDropoutConfig:
    """Probabilities of training on the empty caption; by default both parts in a tenth of clips.

    Raises:
        ConfigError: a value outside [0, 1].
    """

    text_dropout: float = flag(
        math.sqrt(0.1),
        "how often the sequence of text embeddings is the empty caption's",
        bounds=SHARE,
    )
    pooled_dropout: float = flag(
        math.sqrt(0.1), "how often, independently, the pooled text embedding is", bounds=SHARE
    )

    def __post_init__(self) -> None:
        check_ranges(self)
