"""Everything that one run of tools/preprocess_video.py is told."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron_ext.config.encoding import CodecConfig, EncodeConfig, TextEncoderConfig
from megatron_ext.config.ranges import COUNT, PROCESSES
from megatron_ext.data.video.geometry import BucketPlan
from megatron_ext.data.video.shards import STORAGES
from megatron_ext.errors import ConfigError


@dataclass(frozen=True)
class VideoPreprocessOptions:
    """One run of tools/preprocess_video.py.

    Attributes:
        input: jsonl, csv or folder; see `clips.read_list`.
        output: folder of the dataset.
        plan: buckets.
        codec, text_encoder, encode: see there.
        storage: ``float32`` or ``bfloat16``.
        workers: processes.
        clips_per_shard: at most; also what a killed run can lose for each worker.
        device: ``cpu`` or ``cuda``; with cuda, workers take the GPUs in turn.

    Raises:
        ConfigError: a value out of range.
    """

    input: str
    output: str
    plan: BucketPlan
    codec: CodecConfig = field(default_factory=CodecConfig)
    text_encoder: TextEncoderConfig = field(default_factory=TextEncoderConfig)
    encode: EncodeConfig = field(default_factory=EncodeConfig)
    storage: str = "float32"
    workers: int = 1
    clips_per_shard: int = 1000
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, range_ in (("workers", PROCESSES), ("clips_per_shard", COUNT)):
            rule = range_.broken_rule(getattr(self, name))
            if rule is not None:
                flag = name.replace("_", "-")
                raise ConfigError(
                    f"`--{flag}` ({getattr(self, name)}) {rule}; leave it out for the default."
                )
        if self.storage not in STORAGES:
            raise ConfigError(f"`--storage` ({self.storage}) must be one of {', '.join(STORAGES)}.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("`--device` (cuda) needs a GPU that torch finds; use cpu.")
