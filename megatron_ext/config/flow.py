"""Flow matching: the path between noise and data, and how often its times are trained."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.flags import check_ranges, flag
from megatron_ext.config.ranges import BELOW_ONE, COUNT, FACTOR, NATURAL, Range
from megatron_ext.errors import ConfigError

NORMALIZATIONS = ("per_token", "per_sample")


@dataclass(frozen=True)
class FlowConfig:
    """Rectified flow with logit-normal times, ``t = shift(sigmoid(mean + std * u))``.

    The shift of a clip is ``shift_base`` where a latent frame has ``shift_base_tokens`` tokens,
    ``shift_max`` where it has ``shift_max_tokens``, and linear in between and beyond.

    Raises:
        ConfigError: a value out of its range.
    """

    sigma_min: float = flag(1e-5, "noise that is left at t = 0", bounds=BELOW_ONE)
    timestep_mean: float = flag(
        0.0, "mean of the logit of a training time before the shift", bounds=Range(-100, 100)
    )
    timestep_std: float = flag(1.0, "its standard deviation", bounds=Range(0, 100, above=True))
    shift_base_tokens: int = flag(
        256, "tokens of a latent frame at which the shift is the base", bounds=NATURAL
    )
    shift_base: float = flag(1.0, "shift of times towards noise for small frames", bounds=FACTOR)
    shift_max_tokens: int = flag(
        4096, "tokens of a latent frame at which the shift is the maximum", bounds=COUNT
    )
    shift_max: float = flag(3.0, "shift of times towards noise for large frames", bounds=FACTOR)
    shift_by_length: bool = flag(
        True, "multiply the shift by the square root of the number of latent frames"
    )
    flow_shift: float | None = flag(None, "one shift for clips of any size instead", bounds=FACTOR)
    loss_normalization: str = flag(
        "per_token", "every token counts alike, or every clip", choices=NORMALIZATIONS
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        tokens = self.shift_max_tokens - self.shift_base_tokens
        rise = self.shift_max - self.shift_base
        # The shift of a frame without tokens; all others must be positive as well.
        rises = tokens > 0 and rise >= 0
        rises = rises and self.shift_base * tokens > self.shift_base_tokens * rise
        rules = (
            ("shift_max", "such that the shift rises and is above 0 for any tokens", rises),
            (
                "loss_normalization",
                f"one of {', '.join(NORMALIZATIONS)}",
                self.loss_normalization in NORMALIZATIONS,
            ),
        )
        messages = [
            f"`--{name.replace('_', '-')}` ({getattr(self, name)}) must be {rule}; leave it out "
            "to get the default."
            for name, rule, fits in rules
            if not fits
        ]
        if messages:
            raise ConfigError(messages)
