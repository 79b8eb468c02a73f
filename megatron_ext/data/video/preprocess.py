"""The command line of tools/preprocess_video.py."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn, TypeVar

from megatron_ext.config.encoding import CodecConfig, EncodeConfig, TextEncoderConfig
from megatron_ext.data.preprocess.run import say_to_stderr
from megatron_ext.data.video.geometry import parse_plan
from megatron_ext.data.video.options import VideoPreprocessOptions
from megatron_ext.data.video.run import preprocess
from megatron_ext.errors import ConfigError, MegatronExtError

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
    add("--input", required=True, help="jsonl or csv of path and text, or a folder with .txt files")
    add("--output", required=True, help="folder of the dataset")
    add("--buckets", required=True, metavar="JSON", help="a file, or JSON such as "
        '{"256px": {"17": [probability, micro-batch size]}}, or {"17": probability}')  # fmt: skip
    add("--codec", default="patch", help="patch, or the folder of a diffusers VAE")
    add("--codec-spatial", type=int, default=8, help="pixels of a latent cell (patch)")
    add("--codec-temporal", type=int, default=4, help="frames of a latent frame (patch)")
    add("--codec-channels", type=int, help="latent channels (patch); all, without loss")
    add("--codec-shift", type=float, default=0.0, help="pixel value that becomes zero (patch)")
    add("--codec-scale", type=float, default=1.0, help="factor on the latents (patch)")
    add("--text-encoder", default="hashed", help="hashed, t5-clip or umt5")
    add("--t5-path", help="local folder of T5")
    add("--clip-path", help="local folder of CLIP")
    add("--text-length", type=int, default=512, help="rows of an encoded caption")
    add("--text-width", type=int, default=64, help="width of the rows (hashed)")
    add("--pooled-width", type=int, default=64, help="width of the pooled vector (hashed)")
    add("--fps-cap", type=int, default=24, help="frames per second, at most")
    add("--temporal-crop", default="random", help="random or start")
    add("--reference-lengths", type=int, nargs="*", default=[1], metavar="N",
        help="latent frames encoded by themselves at both ends: 1 for i2v, 9 and 17 for v2v"
        )  # fmt: skip
    add("--clip-seed", type=int, default=1234, help="of buckets and crops")
    add("--storage", default="float32", help="float32 or bfloat16")
    add("--workers", type=int, default=1, help="processes")
    add("--clips-per-shard", type=int, default=1000, help="at most")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="where encoders compute")
    return parser


def parse_options(argv: Sequence[str]) -> VideoPreprocessOptions:
    """Turns a command line into options.

    Raises:
        ConfigError: a flag that is unknown or cannot be honoured, or an empty bucket plan.
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line.

    Returns:
        the exit code: 0, 1 for bad input, 2 for bad flags, 130 when interrupted.
    """
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv)
        done = preprocess(options)
    except KeyboardInterrupt:
        say_to_stderr("Interrupted; finished shards are kept, so run the same command again.")
        return 130
    except MegatronExtError as error:
        for sentence in error.messages:
            say_to_stderr(f"error: {sentence}")
        return 2 if isinstance(error, ConfigError) else 1
    say_to_stderr(
        f"{done.clips} clips in {done.shards} shards, {len(done.dropped)} dropped, in "
        f"{done.seconds:.1f} s -> {options.output}"
    )
    return 0
