"""Merge all .bin/.idx datasets of a folder, in sorted order, into one.

Stores of conversations (tools/preprocess_data.py --sft) are merged into one store, and folders of
encoded clips (tools/preprocess_video.py) into one folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.data.indexed import bin_path, idx_path
from megatron_ext.data.indexed_writer import merge_indexed
from megatron_ext.errors import (
    DataError,
    MegatronExtError,
    tell_errors,
)
from megatron_ext.text.sft.store import merge_stores, store_prefixes


def prefixes_in(folder: Path, output_prefix: Path) -> list[Path]:
    """Return the sorted prefixes of the .bin/.idx pairs in a folder.

    Raises:
        DataError: the folder does not exist or has no pair, half of a pair is missing, or the
            output would overwrite an input.
    """
    if not folder.is_dir():
        raise DataError(f"`--input` ({folder}) is not a folder; give the one with the datasets.")
    files = [path for path in folder.iterdir() if path.suffix in (".bin", ".idx")]
    prefixes = sorted({path.with_suffix("") for path in files})
    if not prefixes:
        raise DataError(f"`--input` ({folder}) holds no .bin/.idx pair; give another folder.")
    for prefix in prefixes:
        for path in (bin_path(prefix), idx_path(prefix)):
            if not path.is_file():
                raise DataError(f"{path} is missing beside its other half; copy both or neither.")
    if output_prefix.resolve() in [prefix.resolve() for prefix in prefixes]:
        raise DataError(
            f"`--output-prefix` ({output_prefix}) is one of the datasets to merge; give another."
        )
    if not output_prefix.parent.is_dir():
        raise DataError(f"`--output-prefix` ({output_prefix}) lies in no folder; make it first.")
    return prefixes


def video_sets_in(folder: Path) -> list[Path]:
    """Return the sorted folders of encoded clips in a folder; [] if ``folder`` is not a folder.

    Raise a DataError if the folder also has .bin/.idx files.
    """
    inner = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not inner:
        return []
    # Import this only if needed, since it takes seconds.
    from megatron_ext.video.data.inspect import is_video_set

    sets = [path for path in inner if is_video_set(path)]
    beside = [path for path in folder.iterdir() if path.suffix in (".bin", ".idx")]
    if sets and beside:
        raise DataError(
            f"`--input` ({folder}) holds datasets of clips ({sets[0].name}) and others "
            f"({beside[0].name}); join each kind in a folder of its own."
        )
    return sets


def stores_among(prefixes: Sequence[Path], folder: Path, output_prefix: Path) -> list[str]:
    """Return the prefixes of the stores of conversations among datasets; [] if there are none.

    Raises:
        DataError: there are both stores and other datasets, or the output would overwrite a store.
    """
    stores = store_prefixes(prefixes)
    if stores and len(prefixes) != 2 * len(stores):
        others = [path for path in prefixes if not str(path).startswith(tuple(stores))]
        named = ", ".join(map(str, others or prefixes))
        raise DataError(
            f"`--input` ({folder}) holds stores of conversations and other datasets ({named}); "
            "join each kind in a folder of its own."
        )
    if output_prefix.resolve() in [Path(store).resolve() for store in stores]:
        raise DataError(
            f"`--output-prefix` ({output_prefix}) is one of the stores to merge; give another."
        )
    return stores


def main(argv: Sequence[str]) -> int:
    """Merge the datasets of a folder; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True, help="folder with the datasets")
    parser.add_argument("--output-prefix", required=True, help="path without .bin/.idx")
    parser.add_argument(
        "--multimodal", action="store_true", help="the datasets store a mode for each sequence"
    )
    args = parser.parse_args(argv)
    try:
        if video_sets := video_sets_in(Path(args.input)):
            from megatron_ext.video.data.merge import merge_videos

            count = merge_videos(video_sets, Path(args.output_prefix))
            print(f"{len(video_sets)} datasets, {count} clips -> {args.output_prefix}")
            return 0
        prefixes = prefixes_in(Path(args.input), Path(args.output_prefix))
        stores = stores_among(prefixes, Path(args.input), Path(args.output_prefix))
        if stores:
            count = merge_stores(stores, args.output_prefix)
            print(f"{len(stores)} stores, {count} conversations -> {args.output_prefix}")
            return 0
        info = merge_indexed(prefixes, args.output_prefix, multimodal=args.multimodal)
    except MegatronExtError as error:
        tell_errors(error.messages)
        return 1
    print(
        f"{len(prefixes)} datasets, {info.num_documents} documents, {info.num_tokens} tokens -> "
        f"{info.prefix}"
    )
    return 0
