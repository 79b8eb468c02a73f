"""The command line of tools/preprocess_data.py: Megatron-LM's flags, and our own."""

import argparse
import signal
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from megatron_ext.config.flags import Flag, changed_fields, flags_of, spelling_of
from megatron_ext.config.inapplicable import Inapplicable, by_flag
from megatron_ext.errors import ConfigError, did_you_mean, interrupt_once, say_to_stderr
from megatron_ext.text.config.inapplicable import ALWAYS_FAST, TOKENIZER_FLAGS, WITHOUT_SFT
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.preprocess.options import (
    PreprocessOptions,
    add_flags,
    add_tokenizer_flags,
    tokenizer_config,
)
from megatron_ext.text.preprocess.run import (
    Report,
    plan_for_slurm,
    preprocess,
    run_or_explain,
)
from megatron_ext.text.preprocess.texts import TextEncoding
from megatron_ext.text.tokenizers import TokenizerConfig

_WORKERS_HINT = "use `--workers` with the number of CPU cores"
_idle = partial(Inapplicable, says="has no effect here")
_not_here = partial(Inapplicable, says="is known in Megatron-LM but not supported here")
_FOREIGN = by_flag(
    [
        _not_here(
            "legacy-tokenizer",
            "Megatron-LM has deprecated those tokenizers and their other ids",
            "leave the flag out",
        ),
        _not_here(
            "find-optimal-num-workers",
            "each worker is one process on its own bytes",
            _WORKERS_HINT,
        ),
        _not_here(
            "workers-to-check max-documents",
            "there is no search for a number of workers",
            _WORKERS_HINT,
        ),
        _idle("padded-vocab-size", "it belongs to the model, not to the data"),
        _idle(ALWAYS_FAST.flags, ALWAYS_FAST.reason),
    ]
)
"""Flags of Megatron-LM's tool that this tool refuses or ignores, each with the reason, by name."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}; see --help.")


def _parser(*, status: bool = False) -> argparse.ArgumentParser:
    """Return the parser of the tool's command line.

    With ``status`` return the parser of `--status`, which takes no inputs.
    """
    parser = _Parser(
        description="Turn texts into Megatron's .bin/.idx datasets.",
        allow_abbrev=False,
    )
    files = parser.add_argument_group("input and output")
    what = (
        "files or globs: jsonl, plain or packed with gzip or zstd, parquet, Arrow; a folder is a "
        "Hugging Face dataset saved to disk, or has one text in each file; - reads standard input"
    )
    files.add_argument("--input", nargs="+", required=not status, metavar="FILE", help=what)
    what = "outputs are PREFIX_KEY_document.bin and .idx"
    files.add_argument("--output-prefix", required=True, help=what)
    what = "print how far the run at --output-prefix is, from its files alone, and end"
    files.add_argument("--status", action="store_true", help=what)
    add_flags(parser, "documents and workers", flags_of("preprocess", PreprocessOptions))
    add_flags(parser, "conversations (outputs are PREFIX_sft_document and _mask)", _sft_flags())
    add_tokenizer_flags(parser)
    hidden = parser.add_argument_group("known in Megatron-LM, of no effect or not supported here")
    for flag in _FOREIGN:
        hidden.add_argument(flag, nargs="*", default=None, help=argparse.SUPPRESS)
    return parser


def _sft_flags() -> list[Flag]:
    """Return the flags of `SftConfig` that matter to preprocessing.

    Flags for truncation and batches are left out, since preprocessing stores whole conversations.
    """
    of_batches = ("sft_max_length", "sft_truncation", "sft_batching")
    return [flag for flag in flags_of("sft", SftConfig) if flag.field not in of_batches]


def parse_options(argv: Sequence[str]) -> tuple[PreprocessOptions, list[str]]:
    """Parse a command line; return its options, and sentences on flags without effect.

    Raise a ConfigError that names every unknown or unsupported flag.
    """
    parser = _parser()
    args, unknown = parser.parse_known_args(_dashed(argv))
    values = vars(args)
    foreign = [
        (entry.remedy, entry.sentence(f"`{flag}`"))
        for flag, entry in _FOREIGN.items()
        if values[flag[2:].replace("-", "_")] is not None
    ]
    wrong = [sentence for remedy, sentence in foreign if remedy]
    wrong += _about_unknown(parser, unknown)
    if wrong:
        raise ConfigError(wrong)
    notes = [sentence for remedy, sentence in foreign if not remedy]
    own = [flag.field for flag in flags_of("preprocess", PreprocessOptions)]
    chosen = {name: values[name] for name in ("output_prefix", *own)}
    chosen["inputs"] = args.input
    chosen["tokenizer"] = tokenizer_config(values)
    notes += idle_tokenizer_flags(chosen["tokenizer"])
    sft = SftConfig(**{flag.field: values[flag.field] for flag in _sft_flags()})
    if sft.sft:
        from megatron_ext.text.sft.preprocess import SftPreprocessOptions

        if list(chosen["json_keys"]) == ["text"]:
            del chosen["json_keys"]
        return SftPreprocessOptions(sft=sft, **chosen), notes
    wrong = [
        WITHOUT_SFT.sentence(f"`{flag.positive[0]}`")
        for flag in _sft_flags()
        if values[flag.field] != flag.default
    ]
    if wrong:
        raise ConfigError(wrong)
    return PreprocessOptions(**chosen), notes


def _about_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> list[str]:
    """Return a sentence on each unknown argument, with the most similar flag as a suggestion."""
    options = [option for action in parser._actions for option in action.option_strings]
    wrong = []
    for flag in unknown:
        hint = did_you_mean(flag, options, shown="`{}`".format) or "see --help."
        kind = "flag" if flag.startswith("-") else "argument"
        wrong.append(f"Unknown {kind} `{flag}`; {hint}")
    return wrong


def _dashed(argv: Sequence[str]) -> list[str]:
    """Replace underscores in the names of flags by dashes: `--json_keys` becomes `--json-keys`."""
    return [
        name.replace("_", "-") + equals + value if name.startswith("--") else name + equals + value
        for name, equals, value in (arg.partition("=") for arg in argv)
    ]


def _run(argv: Sequence[str]) -> Report | None:
    if "--status" in argv:
        from megatron_ext.text.preprocess.status import show_status

        parser = _parser(status=True)
        args, unknown = parser.parse_known_args(_dashed(argv))
        if unknown:
            raise ConfigError(_about_unknown(parser, unknown))
        show_status(args.output_prefix)
        return None
    options, notes = parse_options(argv)
    for note in notes:
        say_to_stderr(note)
    if type(options) is not PreprocessOptions:
        return _run_conversations(options)
    if options.slurm_script is not None:
        plan_for_slurm(options, TextEncoding)
        return None
    return preprocess(options)


def _run_conversations(options: PreprocessOptions) -> Report | None:
    from megatron_ext.text.sft.preprocess import (
        SftPreprocessOptions,
        conversation_encoding,
        preprocess_sft,
        with_fixed_date,
    )

    assert isinstance(options, SftPreprocessOptions)
    options = with_fixed_date(options)
    if options.slurm_script is not None:
        plan_for_slurm(options, conversation_encoding)
        return None
    return preprocess_sft(options)


def main(argv: Sequence[str]) -> int:
    """Run one command line and return the exit code.

    The code is 0 for success, 1 for bad input, 2 for bad flags, and 130 after an interrupt.
    """
    before = signal.getsignal(signal.SIGTERM)
    interrupt_once(signal.SIGTERM)
    try:
        return run_or_explain(lambda: _run(argv))
    finally:
        signal.signal(signal.SIGTERM, before)


def idle_tokenizer_flags(settings: TokenizerConfig) -> list[str]:
    """Return a sentence on each flag in ``settings`` that its `--tokenizer-type` does not use."""
    idle = by_flag(TOKENIZER_FLAGS, vars(settings))
    return [
        idle[name].sentence(f"`{spelling_of(settings, field)}` ({getattr(settings, field)})")
        for field in changed_fields(settings)
        if (name := f"--{field.replace('_', '-')}") in idle
    ]
