"""The command line of tools/preprocess_video.py, which encodes clips and captions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import NoReturn

from megatron_ext.config.flags import flags_of
from megatron_ext.disk.reading import UnreadableFile, read_text
from megatron_ext.errors import ConfigError, MegatronExtError, say_to_stderr, tell_errors
from megatron_ext.video.config.encoding import (
    CodecConfig,
    EncodeConfig,
    ImageEncoderConfig,
    TextEncoderConfig,
)
from megatron_ext.video.data.geometry import parse_plan
from megatron_ext.video.data.options import VideoPreprocessOptions


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}; see --help.")


_SECTIONS = {
    "codec": CodecConfig,
    "text_encoder": TextEncoderConfig,
    "image_encoder": ImageEncoderConfig,
    "encode": EncodeConfig,
}


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        description="Turns clips with captions into shards of latents and text embeddings.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--input", required=True,
        help="clips: a jsonl or csv of path and text, or a folder with .txt files")  # fmt: skip
    add("--output", required=True, help="folder of the dataset to write")
    add("--buckets", required=True, metavar="JSON", help="bucket plan: a file, or JSON such as "
        '{"256px": {"17": [probability, micro-batch size]}}, or {"17": probability}')  # fmt: skip
    for kind in _SECTIONS.values():
        for flag in flags_of("", kind):
            help_ = f"{flag.help}: {' or '.join(flag.choices)}" if flag.choices else flag.help
            help_ = help_.replace("%", "%%")
            if flag.type is bool:
                add(flag.positive[0], action=argparse.BooleanOptionalAction, default=flag.default,
                    help=help_)  # fmt: skip
                continue
            add(flag.positive[0], type=flag.type, nargs="*" if flag.nargs else None,
                default=flag.default, help=help_)  # fmt: skip
    add("--storage", default="float32", help="type of the stored numbers: float32 or bfloat16")
    add("--workers", type=int, default=1, help="processes that encode")
    add("--clips-per-shard", type=int, default=1000, help="most clips of a shard")
    add("--drop-missing", action="store_true",
        help="take samples out of --output whose clips are not in --input any more")  # fmt: skip
    add("--device", default="cpu", choices=("cpu", "cuda"),
        help="where codec and text encoder compute")  # fmt: skip
    return parser


def parse_options(argv: Sequence[str]) -> VideoPreprocessOptions:
    """Parse a command line; raise ConfigError for a wrong flag."""
    values = vars(_parser().parse_args(list(argv)))
    given = values.pop("buckets")
    if not given.lstrip().startswith("{"):
        try:
            given = read_text(given)
        except UnreadableFile as error:
            raise ConfigError(
                f"`--buckets` ({given}) must be JSON or a file with it, but cannot be read "
                f"({error.reason}); correct it."
            ) from None
    sections = {
        name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        for name, kind in _SECTIONS.items()
    }
    return VideoPreprocessOptions(plan=parse_plan(given), **sections, **values)


def main(argv: Sequence[str]) -> int:
    """Run a command line and return the exit code.

    The code is 0 for success, 1 for bad input, 2 for bad flags, and 130 after an interrupt.
    """
    try:
        options = parse_options(argv)
        # Imported last, so that help and a wrong flag need no torch.
        from megatron_ext.video.data.preprocess import preprocess

        preprocess(options)
    except KeyboardInterrupt:
        say_to_stderr("Interrupted; what is encoded is kept, so run the same command again.")
        return 130
    except MegatronExtError as error:
        tell_errors(error.messages)
        return 2 if isinstance(error, ConfigError) else 1
    return 0
