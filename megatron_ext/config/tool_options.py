"""Splits a tool's command line at ``--``: the tool's own options, then the flags of a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_ext.errors import FlagError, did_you_mean, tell_errors


def own_options(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of the tool before ``--`` in ``argv``, and the words behind it.

    The program exits with code 2 after an error, which has been printed.
    """
    own = list(argv[: argv.index("--")]) if "--" in argv else list(argv)
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
