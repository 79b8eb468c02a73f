#!/usr/bin/env python3
"""Check .bin/.idx datasets and show counts, lengths and decoded samples.

Exit code 0: whole (there may be warnings); 1: damaged; 2: bad flags.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.errors import end_on_interrupt, run_program

if __name__ == "__main__":
    end_on_interrupt()

from megatron_ext.data.indexed import plain_prefix
from megatron_ext.errors import ConfigError, MegatronExtError
from megatron_ext.text.config import TokenizerConfig
from megatron_ext.text.data.inspect import (
    digest_path,
    digests_of,
    inspect_dataset,
    verify,
    write_digests,
)
from megatron_ext.text.preprocess.options import add_tokenizer_flags, tokenizer_config
from megatron_ext.text.tokenizers import build_tokenizer


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefix", nargs="+", help="paths, with or without .bin/.idx")
    parser.add_argument("--samples", type=int, default=3, help="documents to show (3)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (0)")
    parser.add_argument("--no-scan", action="store_true", help="do not read all ids")
    parser.add_argument(
        "--digest",
        action="store_true",
        help="show the SHA-256 of both files; compare them with PREFIX.sha256 where it exists",
    )
    parser.add_argument(
        "--write-digest",
        action="store_true",
        help="write the SHA-256 of both files to PREFIX.sha256, which `sha256sum -c` reads too",
    )
    add_tokenizer_flags(parser)
    args = parser.parse_args(argv)
    damaged = False
    try:
        if args.samples < 0:
            raise ConfigError(f"`--samples` ({args.samples}) must not be negative; use 0 or more.")
        if args.digest and args.write_digest:
            raise ConfigError(
                "`--digest` compares with PREFIX.sha256 and `--write-digest` replaces it; give one."
            )
        settings = tokenizer_config(vars(args))
        if settings.tokenizer_type is None and settings != TokenizerConfig(tokenizer_type=None):
            raise ConfigError("`--tokenizer-type` is missing beside its other flags; name it.")
        tokenizer = build_tokenizer(settings) if settings.tokenizer_type else None
    except MegatronExtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    for name in args.prefix:
        prefix = plain_prefix(name[:-4] if name.endswith((".bin", ".idx")) else name)
        try:
            found = inspect_dataset(
                prefix, tokenizer, samples=args.samples, seed=args.seed, scan=not args.no_scan
            )
            lines = found.lines + _digest_lines(prefix, args)
        except MegatronExtError as error:
            print(f"error: {error}", file=sys.stderr)
            damaged = True
            continue
        print("\n".join(lines))
        for warning in found.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    return int(damaged)


def _digest_lines(prefix: str, args: argparse.Namespace) -> list[str]:
    """Return the lines of `--digest` and `--write-digest` for one dataset."""
    if not (args.digest or args.write_digest):
        return []
    digests = digests_of(prefix)
    lines = [f"sha256     {digest}  {name}" for name, digest in digests.items()]
    if args.write_digest:
        return [*lines, f"written    {write_digests(prefix, digests)}"]
    found = verify(prefix, digests)
    path = digest_path(prefix)
    return [*lines, f"verified   as in {path}" if found else f"verified   no: there is no {path}"]


if __name__ == "__main__":
    run_program(main)
