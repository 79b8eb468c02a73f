#!/usr/bin/env python3
"""Checks .bin/.idx datasets and shows counts, lengths and decoded samples.

Exit code 0: whole (there may be warnings); 1: damaged; 2: bad flags.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.data.inspect import inspect_dataset
from megatron_ext.data.preprocess.tokenizer_flags import add_tokenizer_flags, tokenizer_flags
from megatron_ext.data.tokenizers import build_tokenizer
from megatron_ext.errors import ConfigError, MegatronExtError


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefix", nargs="+", help="paths, with or without .bin/.idx")
    parser.add_argument("--samples", type=int, default=3, help="documents to show (3)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (0)")
    parser.add_argument("--no-scan", action="store_true", help="do not read all ids")
    add_tokenizer_flags(parser)
    args = parser.parse_args(argv)
    damaged = False
    try:
        tokenizer = build_tokenizer(tokenizer_flags(args)) if args.tokenizer_type else None
    except MegatronExtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    for name in args.prefix:
        prefix = name[:-4] if name.endswith((".bin", ".idx")) else name
        try:
            found = inspect_dataset(
                prefix, tokenizer, samples=args.samples, seed=args.seed, scan=not args.no_scan
            )
        except MegatronExtError as error:
            print(f"error: {error}", file=sys.stderr)
            damaged = True
            continue
        print("\n".join(found.lines))
        for warning in found.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    return int(damaged)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
