"""A store of tokenized conversations: two indexed datasets, and a JSON file that describes them.

``PREFIX_sft_document.bin/.idx`` holds the token ids, one untruncated document per conversation.
``PREFIX_sft_mask.bin/.idx`` holds 1 for each trained token, else 0 (uint8). ``PREFIX_sft.json``
records tokenizer, template and options. It is written last, so a store without it is incomplete.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.data.indexed import bin_path, check_indexed_dataset, read_index
from megatron_ext.data.indexed_writer import merge_indexed
from megatron_ext.disk.reading import UnreadableFile, is_count, read_json_object, shortened
from megatron_ext.disk.writing import open_new
from megatron_ext.errors import DataError
from megatron_ext.text.data.inspect import check_ids, id_range
from megatron_ext.text.sft.intake import Intake

FORMAT = 1
_SUFFIX = "_sft_document"
_INTAKE = "intake"
_OF_ONE_STORE = {_INTAKE, "files", "format"}
_VOCABULARY_SAMPLE = 1 << 24


def about_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of the JSON file of a store, which holds tokenizer, template and options."""
    return Path(f"{os.fspath(prefix)}_sft.json")


def has_intake(prefix: str | os.PathLike[str]) -> bool:
    """Tell whether a store exists and holds counts of the rows and values read (`Intake`).

    Stores of earlier versions have no counts, and may lack parts of their conversations.
    """
    try:
        return _INTAKE in read_json_object(about_path(prefix))
    except UnreadableFile:
        return False


def prefix_of(name: str) -> str:
    """Return the prefix PREFIX of a store.

    ``name`` is PREFIX itself or ``PREFIX_sft_document``, the prefix of the store's token ids.
    """
    return name.removesuffix(_SUFFIX)


def is_part_of_store(prefix: str) -> bool:
    """Tell whether the dataset ``prefix`` holds the ids or the masks of a store."""
    return any(
        prefix.endswith(suffix) and about_path(prefix.removesuffix(suffix)).exists()
        for suffix in (_SUFFIX, "_sft_mask")
    )


def write_about(
    prefix: str,
    identity: Mapping[str, Any],
    files: Sequence[tuple[str, int]],
    intake: Intake | None,
) -> None:
    """Write the JSON file that completes a store.

    Args:
        identity: JSON values of everything that determines the tokens.
        files: (input file, number of its conversations), in order.
        intake: the counts of what was read from the files; None if unknown.
    """
    path = about_path(prefix)
    temporary = Path(f"{path}.writing.{os.getpid()}")
    about = {"format": FORMAT, **identity, "files": [list(file) for file in files]}
    if intake is not None:
        about[_INTAKE] = intake.as_dict()
    with open_new(temporary) as stream:
        json.dump(about, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def store_prefixes(datasets: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the prefix of each store whose two datasets (ids and masks) are both in ``datasets``.

    The prefixes are in the order of ``datasets``.
    """
    names = [os.fspath(name) for name in datasets]
    stores = [prefix_of(name) for name in names if name.endswith(_SUFFIX)]
    return [store for store in stores if f"{store}_sft_mask" in names]


def merge_stores(prefixes: Sequence[str], output: str) -> int:
    """Join stores, in the given order, into one store with the prefix ``output``.

    Return the number of conversations in it. Raise a DataError if a store is damaged, or if the
    stores differ in tokenizer, template or options.
    """
    stores = [SftStore(prefix) for prefix in prefixes]
    first = stores[0]
    for store in stores[1:]:
        differing = sorted(
            key
            for key in {*first.about, *store.about} - _OF_ONE_STORE
            if first.about.get(key) != store.about.get(key)
        )
        if differing:
            raise DataError(
                f"{about_path(first.prefix)} and {about_path(store.prefix)} were made with another "
                f"{', '.join(differing)}, so they cannot be one store; give both to `--data-path`, "
                "or preprocess one of them again."
            )
    about_path(output).unlink(missing_ok=True)
    for key in ("document", "mask"):
        merge_indexed([f"{prefix}_sft_{key}" for prefix in prefixes], f"{output}_sft_{key}")
    files = [tuple(file) for store in stores for file in store.about["files"]]
    intakes = [store.intake for store in stores if store.intake is not None]
    intake = Intake.total(intakes) if len(intakes) == len(stores) else None
    identity = {key: value for key, value in first.about.items() if key not in _OF_ONE_STORE}
    write_about(output, identity, files, intake)
    return sum(map(len, stores))


Arrays = tuple[NDArray[np.int64], NDArray[Any], NDArray[np.uint8]]
"""The arrays of a store of n conversations with t tokens in all: offsets ``[n + 1]``, token ids
``[t]``, masks ``[t]``. Conversation i is the slice from ``offsets[i]`` to ``offsets[i + 1]``."""


class SftStore:
    """The tokenized conversations of a store (token ids and masks), in the order of the input.

    A DataError is raised if the store is damaged.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.about = read_about(prefix)
        self.intake: Intake | None = None
        if _INTAKE in self.about:
            self.intake = Intake.from_dict(self.about[_INTAKE])
        infos = [check_indexed_dataset(f"{prefix}_sft_{key}") for key in ("document", "mask")]
        indices = [read_index(info.prefix) for info in infos]
        same = np.array_equal(indices[0].lengths, indices[1].lengths)
        if not same or infos[0].num_sequences != infos[0].num_documents:
            raise DataError(
                f"{prefix}_sft_document and {prefix}_sft_mask do not hold the same conversations; "
                "make both again with tools/preprocess_data.py --sft."
            )
        self.num_tokens = infos[0].num_tokens
        self.lengths: NDArray[np.int64] = indices[0].lengths.astype(np.int64)
        self._arrays: Arrays | None = None
        self._vocab_size: int | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without memory-mapped arrays; a data loader's worker maps its own."""
        return {**self.__dict__, "_arrays": None}

    def _map(self, key: str) -> NDArray[Any]:
        prefix = f"{self.prefix}_sft_{key}"
        dtype = read_index(prefix).dtype
        if not self.num_tokens:
            return np.zeros(0, dtype)
        return np.memmap(bin_path(prefix), dtype=dtype, mode="r")

    def conversation(self, number: int) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """Return token ids ``[s]`` and mask ``[s]`` of a conversation; ``number`` counts from 0.

        After `check`, raise a DataError for ids outside of the vocabulary.
        """
        if self._arrays is None:
            begins = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
            self._arrays = begins, self._map("document"), self._map("mask")
        begins, ids, mask = self._arrays
        kept = slice(begins[number], begins[number + 1])
        if self._vocab_size is not None:
            check_ids(f"{self.prefix}{_SUFFIX}", ids[kept], self._vocab_size)
        return ids[kept], mask[kept]

    def has_trained_token(self, number: int, kept: slice) -> bool:
        """Tell whether the slice ``kept`` of a conversation has a label that is trained.

        The first token of the slice is never a label.
        """
        return bool(self.conversation(number)[1][kept][1:].any())

    def source_of(self, number: int) -> tuple[str, int]:
        """Return the input file of a conversation, and the conversation's number there, from 1."""
        for path, count in self.about["files"]:
            if number < count:
                return str(path), number + 1
            number -= count
        raise IndexError(number)

    def check(
        self, identity: Mapping[str, Any], vocab_size: int, *, date_is_given: bool = False
    ) -> None:
        """Raise a DataError unless the store was made with a run's tokenizer and template.

        ``identity`` describes these (`Chat.identity`). The keywords of ``--sft-template-kwargs``,
        if any are given, must be the same too. The date that the template writes may differ, unless
        ``date_is_given``. Ids must be below ``vocab_size``: about the first 16 million are checked
        here, the others when `conversation` reads them.
        """
        for name, flag in (("tokenizer", "--tokenizer-model"), ("template", "--sft-chat-template")):
            if self.about.get(name) != identity[name]:
                raise DataError(
                    f"{about_path(self.prefix)} was made with another {name} than this run's; give "
                    f"the one of the data with `{flag}`, or preprocess the data again."
                )
        given = identity["template_kwargs"]
        if given and self.about.get("template_kwargs") != given:
            raise DataError(
                f"{about_path(self.prefix)} was made with `--sft-template-kwargs` "
                f"({json.dumps(self.about.get('template_kwargs'))}), but this run has "
                f"({json.dumps(given)}); leave it out, or preprocess the data again."
            )
        if date_is_given and self.about.get("date") != identity.get("date"):
            raise DataError(
                f"{about_path(self.prefix)} was made with the date {self.about.get('date')}, but "
                f"`--sft-date` ({identity.get('date')}) is another; leave it out, or preprocess "
                "the data again."
            )
        self._vocab_size = vocab_size
        prefix = f"{self.prefix}{_SUFFIX}"
        check_ids(prefix, id_range(prefix, _VOCABULARY_SAMPLE), vocab_size)


def read_about(prefix: str) -> dict[str, Any]:
    """Return the content of a store's JSON file; raise a DataError if it cannot be used."""
    path = about_path(prefix)
    advice = "make it with tools/preprocess_data.py --sft"
    try:
        about = read_json_object(path)
        stored_format = about["format"]
        files = about["files"]
        counts = [(str(name), is_count(count)) for name, count in files]
    except UnreadableFile as error:
        if error.missing:
            raise DataError(
                f"{path} does not exist, so the store is not whole; {advice}."
            ) from None
        raise DataError(f"{path} cannot be read ({error.reason}); {advice} again.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error!r}); {advice} again.") from None
    if stored_format != FORMAT or not all(fits for _, fits in counts):
        raise DataError(
            f"{path} has format {shortened(stored_format)}, but {FORMAT} is read here; {advice} "
            "again."
        )
    return about
