"""The options of one run of tools/preprocess_video.py, and its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NoReturn, TypeVar

import torch

from megatron_ext.config.flags import COUNT, PROCESSES
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.encoding import (
    CodecConfig,
    EncodeConfig,
    TextEncoderConfig,
)
from megatron_ext.video.data.geometry import BucketPlan, parse_plan
from megatron_ext.video.data.shards import STORAGES


@dataclass(frozen=True)
class VideoPreprocessOptions:
    """The options of one run of tools/preprocess_video.py.

    Attributes:
        input: jsonl, csv or folder; see `clips.read_list`.
        output: folder of the dataset.
        storage: ``float32`` or ``bfloat16``.
        workers: processes.
        clips_per_shard: at most; also what a killed run can lose for each worker.
        device: ``cpu`` or ``cuda``; with cuda, workers take the GPUs in turn.

    Raises:
        ConfigError: a value is out of range.
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


ConfigT = TypeVar("ConfigT")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}; see --help.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="preprocess_video.py",
        description="Turns clips with captions into shards of latents and text embeddings.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--input",
        required=True,
        help="clips: a jsonl or csv of path and text, or a folder with .txt files",
    )
    add("--output", required=True, help="folder of the dataset to write")
    add("--buckets", required=True, metavar="JSON", help="bucket plan: a file, or JSON such as "
        '{"256px": {"17": [probability, micro-batch size]}}, or {"17": probability}')  # fmt: skip
    add(
        "--codec",
        default="patch",
        help="what makes latents: patch, or the folder of a diffusers VAE",
    )
    add(
        "--codec-spatial",
        type=int,
        default=8,
        help="pixels of a side of a latent cell (patch codec)",
    )
    add("--codec-temporal", type=int, default=4, help="frames of a latent frame (patch codec)")
    add(
        "--codec-channels",
        type=int,
        help="latent channels (patch codec); by default all, without loss",
    )
    add(
        "--codec-shift", type=float, default=0.0, help="pixel value that becomes zero (patch codec)"
    )
    add("--codec-scale", type=float, default=1.0, help="factor on the latents (patch codec)")
    add("--text-encoder", default="hashed", help="what encodes captions: hashed, t5-clip or umt5")
    add("--t5-path", help="local folder of T5 or UMT5")
    add("--clip-path", help="local folder of CLIP")
    add("--text-length", type=int, default=512, help="rows of an encoded caption")
    add("--text-width", type=int, default=64, help="features of a row (hashed text encoder)")
    add(
        "--pooled-width",
        type=int,
        default=64,
        help="features of the pooled vector (hashed text encoder)",
    )
    add("--fps-cap", type=int, default=24, help="largest frame rate; faster clips lose frames")
    add("--temporal-crop", default="random", help="where a clip begins: random or start")
    add("--reference-lengths", type=int, nargs="*", default=[1], metavar="N",
        help="latent frames encoded by themselves at both ends: 1 for i2v, 9 and 17 for v2v"
        )  # fmt: skip
    add("--clip-seed", type=int, default=1234, help="seed of the choice of buckets and crops")
    add("--storage", default="float32", help="type of the stored numbers: float32 or bfloat16")
    add("--workers", type=int, default=1, help="processes that encode")
    add(
        "--clips-per-shard",
        type=int,
        default=1000,
        help="most clips of a shard, and most that a killed process loses",
    )
    add(
        "--device",
        default="cpu",
        choices=("cpu", "cuda"),
        help="where codec and text encoder compute",
    )
    return parser


def parse_options(argv: Sequence[str]) -> VideoPreprocessOptions:
    """Turn a command line into options.

    Raises:
        ConfigError: a flag is unknown or cannot be honoured, or the bucket plan is empty.
    """
    values = vars(_parser().parse_args(list(argv)))
    values["reference_lengths"] = tuple(values["reference_lengths"])
    given = values.pop("buckets")
    if not given.lstrip().startswith("{"):
        try:
            given = Path(given).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"`--buckets` ({given}) must be JSON or a file with it, but cannot be read "
                f"({error}); correct it."
            ) from None

    def take(kind: type[ConfigT]) -> ConfigT:
        names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
        return kind(**{name: values.pop(name) for name in names})

    return VideoPreprocessOptions(
        plan=parse_plan(given),
        encode=take(EncodeConfig),
        codec=take(CodecConfig),
        text_encoder=take(TextEncoderConfig),
        **values,
    )
