"""The datasets of a run's splits, and options by which samples are drawn from them.

`text.data.prefixes` reads them from Megatron-LM's flags.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_ext.disk.reading import UnreadableFile, is_count, read_json
from megatron_ext.errors import DataError
from megatron_ext.text.data.config import DataConfig

SPLITS = ("train", "valid", "test")
Blend = tuple[list[str], list[float] | None]


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
