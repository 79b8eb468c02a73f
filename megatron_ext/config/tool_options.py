"""Splits a tool's command line at ``--``: the tool's own options, then the flags of a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_ext.config.sections import help_question
from megatron_ext.errors import FlagError, did_you_mean, tell_errors


def own_options(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of the tool before ``--`` in ``argv``, and the words behind it.

    The program exits with code 2 after an error, which has been printed, and with code 0 after an
    answer to ``--help WORD``.
    """
    own = list(argv[: argv.index("--")]) if "--" in argv else list(argv)
    question = help_question(own)
    if question == "all":
        parser.print_help()
        raise SystemExit(0)
    if question:
        raise SystemExit(_answer(parser, question))
    options, unknown = parser.parse_known_args(own)
    words = list(argv[len(own) + 1 :])
    if unknown and "--" not in argv and unknown[0].startswith("--"):
        known = [name for action in parser._actions for name in action.option_strings]
        way = f"flags of a run follow `--`: {parser.prog} OPTIONS -- {' '.join(unknown[:2])}"
        remedy = did_you_mean(unknown[0], known, cutoff=0.8, shown="`{}`".format) or way
        tell_errors([FlagError(unknown[0], None, f"is no option of {parser.prog}", remedy)])
        raise SystemExit(2)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options, words


def _answer(parser: argparse.ArgumentParser, question: str) -> int:
    """Print the tool's options with some words in name or text; return 2 if there are none."""
    formatter = parser._get_formatter()
    words = question.lower().split()
    matching = [
        action
        for action in parser._actions
        if all(word in f"{action.option_strings} {action.help}".lower() for word in words)
    ]
    if not matching:
        remedy = f"ask the program that trains about flags of a run, by `--help {question}`"
        rule = f"is in no option of {parser.prog}"
        tell_errors([FlagError("--help", question, rule, remedy)])
        return 2
    formatter.add_arguments(matching)
    print(formatter.format_help().rstrip())
    return 0
