"""Reads the dataset prefixes of each split, and their weights, from Megatron-LM's flags."""

import math
from collections.abc import Sequence
from typing import Any

from megatron_ext.config.sections import blend_in_one_word
from megatron_ext.disk.reading import UnreadableFile, read_json, read_text
from megatron_ext.errors import DataError
from megatron_ext.text.data.blend import SPLITS, Blend, BlendSpec
from megatron_ext.text.data.config import DataConfig, is_number


def plain_prefix(prefix: str) -> str:
    """Return the path of a ``file://`` address; return any other prefix unchanged."""
    return "/" + prefix[7:].lstrip("/") if prefix.startswith("file://") else prefix


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


def _words_of(entry: Any) -> list[str] | None:
    if entry is None or isinstance(entry, str):
        return entry.split() if entry else None
    if not isinstance(entry, list):
        raise TypeError(entry)
    return [str(word) for word in entry]
