"""The options of preprocessing clips, which tools/preprocess_video.py and online encoding take."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ext.config.flags import COUNT, PROCESSES
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.encoding import (
    CodecConfig,
    EncodeConfig,
    ImageEncoderConfig,
    TextEncoderConfig,
)
from megatron_ext.video.data.geometry import BucketPlan

STORAGES = ("float32", "bfloat16")
"""The types of the numbers that a dataset may store."""


@dataclass(frozen=True)
class VideoPreprocessOptions:
    """The options of one run of tools/preprocess_video.py; its ``--help`` explains them.

    A value out of range raises ConfigError.
    """

    input: str
    output: str
    plan: BucketPlan
    codec: CodecConfig = field(default_factory=CodecConfig)
    text_encoder: TextEncoderConfig = field(default_factory=TextEncoderConfig)
    encode: EncodeConfig = field(default_factory=EncodeConfig)
    image_encoder: ImageEncoderConfig = field(default_factory=ImageEncoderConfig)
    storage: str = "float32"
    workers: int = 1
    clips_per_shard: int = 1000
    drop_missing: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        for flag, value, numbers in (
            ("workers", self.workers, PROCESSES),
            ("clips-per-shard", self.clips_per_shard, COUNT),
        ):
            if rule := numbers.broken_rule(value):
                raise ConfigError(f"`--{flag}` ({value}) {rule}; leave it out for the default.")
        if self.storage not in STORAGES:
            raise ConfigError(f"`--storage` ({self.storage}) must be one of {', '.join(STORAGES)}.")
        if self.device == "cuda":
            # A wrong value of another flag is told without torch.
            import torch

            if not torch.cuda.is_available():
                raise ConfigError("`--device` (cuda) needs a GPU that torch finds; use cpu.")
