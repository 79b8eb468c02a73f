"""Reads the dataset prefixes of each split from Megatron-LM's flags."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_ext.config.sections import blend_in_one_word
from megatron_ext.disk.reading import UnreadableFile, is_count, read_json, read_text
from megatron_ext.errors import DataError
from megatron_ext.text.data.config import DataConfig, is_number

SPLITS = ("train", "valid", "test")
Blend = tuple[list[str], list[float] | None]


def plain_prefix(prefix: str) -> str:
    """Return the path of a ``file://`` address; return any other prefix unchanged."""
    return "/" + prefix[7:].lstrip("/") if prefix.startswith("file://") else prefix


@dataclass(frozen=True)
class BlendSpec:
    """The datasets of a run: ``blend``, which ``--split`` divides, or ``per_split``, one per split.

    A blend is a pair: the prefixes of datasets, and the list of their weights (None if no weights
    are given). The field that is not used is None; both are if no data is given.
    """

    blend: Blend | None
    per_split: list[Blend | None] | None

    def prefixes(self) -> list[str]:
        blends = self.per_split if self.per_split is not None else [self.blend]
        return list(dict.fromkeys(p for blend in blends if blend is not None for p in blend[0]))


def _blend(flag: str, words: Sequence[str] | None) -> Blend | None:
    """Parse a flag's value: prefixes, or alternating weights and prefixes, as Megatron-LM does.

    ``words`` are the words of the value; return None if there are none. Raise a DataError, which
    names ``flag``, for bad weights, a mix of both forms, or both in one word.
    """
    if not words:
        return None
    if (error := blend_in_one_word(flag, words)) is not None:
        raise DataError(error)
    weighted = len(words) % 2 == 0 and all(map(is_number, words[::2]))
    if not weighted and any(map(is_number, words)):
        raise DataError.about(
            flag,
            " ".join(words),
            "mixes weights and prefixes",
            "give only prefixes, or a weight before each prefix",
        )
    named = words[1::2] if weighted else words
    prefixes = [plain_prefix(prefix.strip()) for prefix in named]
    weights = [float(word) for word in words[::2]] if weighted else None
    if weights is not None and not (min(weights) >= 0 and 0 < sum(weights) < math.inf):
        raise DataError.about(
            flag,
            None,
            f"has the weights {weights}",
            "they must be finite, at least 0 and not all 0",
        )
    return prefixes, weights


def read_blend(data: DataConfig) -> BlendSpec:
    """Return the dataset prefixes and weights that the flags give; no blends if they give none.

    Raise a DataError if a flag's value or file is bad.
    """
    if data.data_args_path is not None:
        path = data.data_args_path
        try:
            words = read_text(path).split()
        except UnreadableFile as error:
            raise DataError.about(
                "--data-args-path",
                path,
                f"cannot be read ({error.reason})",
                "give a file of dataset prefixes",
            ) from error
        return BlendSpec(_blend("--data-args-path", words), None)
    if data.data_path:
        return BlendSpec(_blend("--data-path", data.data_path), None)
    if data.per_split_data_args_path is not None:
        flag = "--per-split-data-args-path"
        path = data.per_split_data_args_path
        try:
            content = read_json(path)
            lists = [_words_of(content[split]) for split in SPLITS]
        except UnreadableFile as error:
            raise DataError.about(flag, path, f"cannot be read ({error.reason})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DataError.about(
                flag,
                path,
                "must be a JSON object with the keys train, valid and test, each a list of "
                "prefixes or of weights and prefixes",
                f"reading it failed with: {error!r}",
            ) from error
        return BlendSpec(None, [_blend(flag, words) for words in lists])
    given = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if any(given):
        flags = (f"--{split}-data-path" for split in SPLITS)
        return BlendSpec(None, [_blend(f, words) for f, words in zip(flags, given, strict=True)])
    return BlendSpec(None, None)


def training_blend(data: DataConfig) -> BlendSpec:
    """Return the dataset prefixes and weights that the flags give, as `read_blend` does.

    Raise a DataError if a flag's value or file is bad, or if no data is given at all.
    """
    spec = read_blend(data)
    if not spec.prefixes():
        remedy = "use `--data-path` PREFIX, `--train-data-path` PREFIX or `--mock-data`"
        raise DataError.about("No training data", None, "is given", remedy)
    return spec


def _words_of(entry: Any) -> list[str] | None:
    if entry is None or isinstance(entry, str):
        return entry.split() if entry else None
    if not isinstance(entry, list):
        raise TypeError(entry)
    return [str(word) for word in entry]


def given_lengths(data: DataConfig, spec: BlendSpec) -> dict[str, list[int]] | None:
    """Return the counts in the file of ``--per-dataset-sequences-path``, by prefix.

    The counts of a dataset are ``[sequences, document boundaries]``. Return None if the flag is not
    given. Raise a DataError if the file cannot be read, or lacks a prefix that ``spec`` has.
    """
    path = data.per_dataset_sequences_path
    if path is None:
        return None
    refused = partial(DataError.about, "--per-dataset-sequences-path", path)
    try:
        lengths: dict[str, list[int]] = read_json(path)
        missing = [
            prefix
            for prefix in spec.prefixes()
            if len(lengths[prefix]) != 2 or not all(map(is_count, lengths[prefix]))
        ]
    except UnreadableFile as error:
        raise refused(f"cannot be read ({error.reason})", "give a JSON file") from error
    except (ValueError, KeyError, TypeError) as error:
        raise refused(
            "must be a JSON object from each prefix to [sequences, document boundaries]",
            f"reading it failed with: {error!r}",
        ) from error
    if missing:
        raise refused(f"must give two counts, [sequences, document boundaries], for {missing[0]}")
    return lengths


def source_options(data: DataConfig, eod: int) -> dict[str, Any]:
    """Return the keyword arguments of `build_source` that the data flags determine.

    ``eod`` is the id of the end of a document.
    """
    return {
        "mask_documents_at": eod if data.reset_attention_mask else None,
        "cyclic": data.dataloader_type == "cyclic",
        "data_sharding": data.data_sharding,
    }
