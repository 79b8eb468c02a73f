"""Check .bin/.idx datasets and show counts, lengths and decoded samples; measure their quality.

Folders of encoded clips are checked too: their buckets, frame rates and captions, and repeated or
bad samples.

Exit code 0: nothing is damaged (there may be warnings); 1: something is; 2: bad flags.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext import extras, limits
from megatron_ext.config.flags import COUNT
from megatron_ext.errors import (
    ConfigError,
    MegatronExtError,
    tell_errors,
)
from megatron_ext.text.data.inspect import (
    digest_path,
    digests_of,
    inspect_dataset,
    verify,
    write_digests,
)
from megatron_ext.text.data.prefixes import plain_prefix
from megatron_ext.text.preprocess.options import add_tokenizer_flags, tokenizer_config
from megatron_ext.text.sft.store import is_part_of_store
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.task import later

# Imported when they are called, since they need torch.
inspect_videos = later("megatron_ext.video.data.inspect:inspect_videos")
is_video_set = later("megatron_ext.video.data.inspect:is_video_set")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "prefix", nargs="+", help="paths, with or without .bin/.idx; or folders of encoded clips"
    )
    parser.add_argument("--samples", type=int, default=3, help="documents to show (3)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the choice of documents to show (0)"
    )
    parser.add_argument("--no-scan", action="store_true", help="do not read all ids or samples")
    parser.add_argument(
        "--micro-batch-size",
        type=COUNT.integer,
        default=1,
        help="micro-batch size to train encoded clips with, for buckets that name none (1)",
    )
    parser.add_argument(
        "--global-batch-size",
        type=COUNT.integer,
        help="global batch size to train encoded clips with; name buckets too small for one step",
    )
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
    _add_quality_flags(parser)
    add_tokenizer_flags(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Inspect the datasets of one command line; return the exit code."""
    args = _parser().parse_args(argv)
    damaged = False
    whole: list[str] = []
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
        quality = _quality_options(args)
    except MegatronExtError as error:
        tell_errors(error.messages)
        return 2 if isinstance(error, ConfigError) else 1
    for name in args.prefix:
        if is_video_set(Path(name)):
            damaged |= not _print_videos(Path(name), args)
            continue
        prefix = plain_prefix(name[:-4] if name.endswith((".bin", ".idx")) else name)
        try:
            inspection = inspect_dataset(
                prefix,
                tokenizer,
                samples=args.samples,
                seed=args.seed,
                scan=not args.no_scan,
                is_store=is_part_of_store(prefix),
            )
            lines = inspection.lines + _digest_lines(prefix, args)
        except MegatronExtError as error:
            tell_errors(error.messages)
            damaged = True
            continue
        if prefix not in whole:
            whole.append(prefix)
        print("\n".join(lines))
        for warning in inspection.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    if quality is not None and whole:
        try:
            _print_quality(whole, tokenizer, quality, args)
        except MegatronExtError as error:
            tell_errors(error.messages)
            damaged = True
    return int(damaged)


def _print_videos(folder: Path, args: argparse.Namespace) -> bool:
    """Print the report on a folder of encoded clips; return False if the folder is damaged."""
    try:
        inspected = inspect_videos(
            folder,
            micro_batch_size=args.micro_batch_size,
            global_batch_size=args.global_batch_size,
            scan=not args.no_scan,
        )
    except MegatronExtError as error:
        tell_errors(error.messages)
        return False
    print("\n".join(inspected.lines))
    for warning in inspected.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return True


def _add_quality_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "quality", "Each of these flags asks for the figures of quality, of all datasets together."
    )
    group.add_argument(
        "--quality",
        action="store_true",
        help="exact duplicates, lengths, frequent and special tokens, control characters, "
        "languages and repeated spans, as far as tokenizer and installed packages allow",
    )
    group.add_argument(
        "--near-duplicates",
        type=float,
        metavar="JACCARD",
        help="also find documents whose sets of runs of 5 tokens have at least this Jaccard "
        "similarity, for example 0.8; needs the package rensa",
    )
    group.add_argument(
        "--sample-documents",
        type=int,
        metavar="N",
        help="look at N documents only, chosen by --seed; use it where there are too many",
    )
    group.add_argument(
        "--text-documents",
        type=int,
        metavar="N",
        help="documents that are decoded to look at characters and languages (10000)",
    )
    group.add_argument(
        "--span-tokens",
        type=int,
        metavar="N",
        help="tokens that are searched for repeated spans, 60 bytes of memory each (4000000)",
    )
    group.add_argument(
        "--duplicates-out",
        type=Path,
        metavar="FILE",
        help="write all groups of duplicates to a .parquet or .jsonl file",
    )
    group.add_argument("--html", type=Path, metavar="FILE", help="write a page with all figures")
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")


def _quality_options(args: argparse.Namespace) -> Any:
    """Return the options for measuring quality; None if no flag of quality is given.

    Raise a ConfigError for a wrong flag.
    """
    names = "near_duplicates", "sample_documents", "text_documents", "span_tokens"
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    outputs = {"--duplicates-out": args.duplicates_out, "--html": args.html, "--json": args.json}
    if not (args.quality or given or any(outputs.values())):
        return None
    for flag, path in outputs.items():
        _quality("results").check_output(flag, path)
    if "text_documents" in given and args.tokenizer_type is None:
        raise ConfigError(
            f"`--text-documents` ({args.text_documents}) are decoded by a tokenizer; give "
            "`--tokenizer-type` too."
        )
    return _quality("measure").QualityOptions(**given, seed=args.seed)


def _quality(module: str) -> Any:
    """Import and return a module of the add-on that measures quality."""
    return extras.needed("quality", module, "--quality")


def _print_quality(
    prefixes: Sequence[str],
    tokenizer: Tokenizer | None,
    options: Any,
    args: argparse.Namespace,
) -> None:
    """Measure and print the quality of datasets, and write the files that the flags ask for."""
    results = _quality("results")
    quality, documents = _quality("measure").measure(prefixes, tokenizer, options)
    print("\n".join(results.lines(quality)))
    path: Path | None = None
    try:
        for path in filter(None, (args.duplicates_out, args.json, args.html)):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path is args.duplicates_out:
                results.write_duplicates(quality, documents, path)
            elif path is args.json:
                results.write_json(quality, path)
            else:
                _quality("page").write_quality_page(quality, path)
            print(f"written    {path}")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({limits.cause(error, path)}); give another."
        ) from None


def _digest_lines(prefix: str, args: argparse.Namespace) -> list[str]:
    """Return the lines that `--digest` or `--write-digest` print for one dataset."""
    if not (args.digest or args.write_digest):
        return []
    digests = digests_of(prefix)
    lines = [f"sha256     {digest}  {name}" for name, digest in digests.items()]
    if args.write_digest:
        return [*lines, f"written    {write_digests(prefix, digests)}"]
    exists = verify(prefix, digests)
    path = digest_path(prefix)
    return [*lines, f"verified   as in {path}" if exists else f"verified   no: there is no {path}"]
