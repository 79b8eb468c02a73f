"""The command line of tools/preprocess_data.py: Megatron-LM's flags, and three of ours."""

from __future__ import annotations

import argparse
import difflib
import signal
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

from megatron_ext.config.flags import Flag, flags_of
from megatron_ext.config.megatron_flags import ALWAYS_ON
from megatron_ext.errors import ConfigError, say_to_stderr
from megatron_ext.text.config import SftConfig
from megatron_ext.text.preprocess.encode import LANGUAGES
from megatron_ext.text.preprocess.options import (
    PreprocessOptions,
    add_tokenizer_flags,
    tokenizer_flags,
)
from megatron_ext.text.preprocess.run import Report, preprocess, run_or_explain

_WORKERS_HINT = "use `--workers` with the number of CPU cores"
_NOT_HERE = {
    "--legacy-tokenizer": "Megatron-LM has deprecated those tokenizers and their other ids; leave "
    "the flag out",
    "--find-optimal-num-workers": f"each worker is one process on its own bytes; {_WORKERS_HINT}",
    "--workers-to-check": f"there is no search for a number of workers; {_WORKERS_HINT}",
    "--max-documents": f"there is no search for a number of workers; {_WORKERS_HINT}",
}
_NO_EFFECT = {
    "--padded-vocab-size": "it belongs to the model, not to the data",
    "--tokenizer-hf-use-fast": ALWAYS_ON["tokenizer_hf_use_fast"],
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}; see --help.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="preprocess_data.py",
        description="Turns jsonl into Megatron's .bin/.idx datasets.",
        allow_abbrev=False,
    )
    _add_data_flags(parser)
    _add_sft_flags(parser)
    _add_runtime_flags(parser)
    add_tokenizer_flags(parser)
    hidden = parser.add_argument_group("known in Megatron-LM, of no effect or not supported here")
    for flag in (*_NOT_HERE, *_NO_EFFECT):
        hidden.add_argument(flag, nargs="*", default=None, help=argparse.SUPPRESS)
    return parser


def _add_data_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="jsonl or parquet files or globs, plain, gzip or zstd; - reads standard input",
    )
    group.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to extract (text)"
    )
    group.add_argument(
        "--output-prefix", required=True, help="outputs are PREFIX_KEY_document.bin and .idx"
    )
    group.add_argument(
        "--append-eod", action="store_true", help="end each document with the eod token"
    )
    group.add_argument(
        "--split-sentences",
        action="store_true",
        help="one sequence for each sentence; outputs are PREFIX_KEY_sentence",
    )
    group.add_argument(
        "--keep-newlines",
        action="store_true",
        help="keep the white space between sentences, at the end of the sentence before it",
    )
    group.add_argument(
        "--lang", default="english", help=f"sentence rules (english): {', '.join(LANGUAGES)}"
    )


def _add_sft_flags(parser: argparse.ArgumentParser) -> None:
    """The trainer's own flags, but for those that concern batches only."""
    group = parser.add_argument_group("conversations (outputs are PREFIX_sft_document and _mask)")
    for flag in _sft_flags():
        if flag.type is bool:
            group.add_argument(flag.positive[0], action="store_true", help=flag.help)
        else:
            group.add_argument(
                flag.positive[0], default=flag.default, choices=flag.choices, help=flag.help
            )


def _sft_flags() -> list[Flag]:
    of_batches = ("sft_max_length", "sft_truncation", "sft_batching")
    return [flag for flag in flags_of("sft", SftConfig) if flag.field not in of_batches]


def _add_runtime_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("runtime")
    group.add_argument("--workers", type=int, default=1, help="worker processes (1)")
    group.add_argument(
        "--partitions",
        type=int,
        default=1,
        help="also write PREFIX_0, PREFIX_1, ...: lines dealt round-robin (1: no)",
    )
    group.add_argument(
        "--keep-sequential-samples",
        action="store_true",
        help="partitions are contiguous blocks, so that the merged dataset keeps the input's order",
    )
    group.add_argument(
        "--log-interval",
        type=int,
        default=1000,
        help="documents between progress lines, every 5 seconds at most, without a terminal (1000)",
    )
    group.add_argument(
        "--on-bad-line",
        choices=("stop", "quarantine"),
        default="stop",
        help="stop, or go on and write the line to PREFIX.rejected.jsonl (stop)",
    )
    group.add_argument(
        "--engine",
        choices=("auto", "native"),
        default="auto",
        help="auto uses gigatoken where it is checked to be exact (auto)",
    )
    group.add_argument(
        "--part-megabytes",
        type=float,
        default=None,
        help="size of the pieces that a killed run keeps (chosen by size and workers, 4 to 256)",
    )


def parse_options(argv: Sequence[str]) -> tuple[PreprocessOptions, list[str]]:
    """Turns a command line into options and notes on flags without effect.

    Raises:
        ConfigError: every flag that cannot be honoured, in one go.
    """
    parser = _parser()
    args, unknown = parser.parse_known_args([_dashed(arg) for arg in argv])
    values = vars(args)
    wrong = [
        f"`{flag}` is known in Megatron-LM but not supported here: {why}."
        for flag, why in _NOT_HERE.items()
        if values[_dest(flag)] is not None
    ]
    known = [option for action in parser._actions for option in action.option_strings]
    for flag in unknown:
        near = difflib.get_close_matches(flag, known, n=1)
        hint = f"did you mean `{near[0]}`?" if near else "see --help."
        kind = "flag" if flag.startswith("-") else "argument"
        wrong.append(f"Unknown {kind} `{flag}`; {hint}")
    if wrong:
        raise ConfigError(wrong)
    notes = [
        f"`{flag}` has no effect here: {why}."
        for flag, why in _NO_EFFECT.items()
        if values[_dest(flag)] is not None
    ]
    own = {f.name for f in fields(PreprocessOptions)} - {"inputs", "tokenizer"}
    chosen = {name: values[name] for name in own}
    chosen["inputs"], chosen["tokenizer"] = args.input, tokenizer_flags(args)
    sft = SftConfig(**{flag.field: values[flag.field] for flag in _sft_flags()})
    if sft.sft:
        return _sft_options(chosen, sft), notes
    wrong = [
        f"`{flag.positive[0]}` has an effect only with `--sft`; add it, or leave this out."
        for flag in _sft_flags()
        if values[flag.field] != flag.default
    ]
    if wrong:
        raise ConfigError(wrong)
    return PreprocessOptions(**chosen), notes


def _sft_options(chosen: dict[str, Any], sft: SftConfig) -> PreprocessOptions:
    from megatron_ext.text.sft.preprocess import SftPreprocessOptions

    if chosen["json_keys"] == ["text"]:
        del chosen["json_keys"]
    return SftPreprocessOptions(sft=sft, **chosen)


def run_options(options: PreprocessOptions) -> Report:
    """Runs what `parse_options` understood."""
    from megatron_ext.text.sft.preprocess import SftPreprocessOptions, preprocess_sft

    if isinstance(options, SftPreprocessOptions):
        return preprocess_sft(options)
    return preprocess(options)


def _dashed(arg: str) -> str:
    """`--json_keys` is `--json-keys`."""
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else arg


def _dest(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def main(argv: Sequence[str]) -> int:
    """Runs one command line.

    Returns:
        the exit code: 0, 1 for bad input, 2 for bad flags, 130 when interrupted (by Ctrl-C, or by
        the SIGTERM of a scheduler).
    """
    try:
        options, notes = parse_options(argv)
    except ConfigError as error:
        for sentence in error.messages:
            say_to_stderr(f"error: {sentence}")
        return 2
    for note in notes:
        say_to_stderr(note)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run_or_explain(lambda: run_options(options))
    finally:
        signal.signal(signal.SIGTERM, before)
