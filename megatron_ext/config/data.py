"""Where the samples come from."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from megatron_ext.config.flags import flag
from megatron_ext.config.ranges import PROCESSES, Range

DEFAULT_SPLIT = "969, 30, 1"


@dataclass(frozen=True)
class DataConfig:
    """Datasets and loaders; names and defaults are Megatron-LM's."""

    data_path: list[str] | None = flag(
        None, "dataset prefixes, or weights and prefixes in turn", nargs="+"
    )
    split: str | None = flag(
        None, f"shares of train, valid and test, such as 99,1,0; default {DEFAULT_SPLIT}"
    )
    train_data_path: list[str] | None = flag(None, "prefixes of the train split", nargs="+")
    valid_data_path: list[str] | None = flag(None, "prefixes of the validation split", nargs="+")
    test_data_path: list[str] | None = flag(None, "prefixes of the test split", nargs="+")
    data_args_path: str | None = flag(None, "a file with the words of --data-path")
    per_split_data_args_path: str | None = flag(None, "a JSON file with a blend for each split")
    per_dataset_sequences_path: str | None = flag(None, "a JSON file with lengths of datasets")
    data_cache_path: str | None = flag(None, "folder for the indices of samples")
    mmap_bin_files: bool = flag(True, "map .bin files into memory")
    mock_data: bool = flag(False, "train on made-up samples")
    multiple_validation_sets: bool = flag(False, "report each validation prefix by itself")
    num_workers: int = flag(2, "processes that load data", unit="processes", bounds=Range(0, 256))
    dataloader_type: str = flag(
        "single", "in order, or shuffled anew each epoch", choices=("single", "cyclic")
    )
    data_sharding: bool = flag(True, "give each replica its own shard with cyclic")
    reset_position_ids: bool = flag(False, "positions start again after each document")
    reset_attention_mask: bool = flag(False, "attention stays within a document")
    eod_mask_loss: bool = flag(False, "no loss where the input is end-of-document")
    num_dataset_builder_threads: int = flag(1, "threads that build a blend", bounds=PROCESSES)
    mid_level_dataset_surplus: float = flag(
        0.005, "spare samples of each part of a blend", bounds=Range(0, 100)
    )
    allow_ambiguous_pad_tokens: bool = flag(False, "let padding share the id of another token")

    def resolved(self) -> DataConfig:
        """With the default split; quotes that a quoted bash array passed on are dropped."""
        if self.split is not None and self.split != self.split.strip("'\""):
            return dataclasses.replace(self, split=self.split.strip("'\""))
        blended = self.data_path is not None or self.data_args_path is not None or self.mock_data
        if self.split is None and blended:
            return dataclasses.replace(self, split=DEFAULT_SPLIT)
        return self

    def errors(self, *, full_validation: bool) -> list[str]:
        """What cannot be read, one sentence each."""
        ways = {
            "--data-path": self.data_path,
            "--data-args-path": self.data_args_path,
            "--per-split-data-args-path": self.per_split_data_args_path,
            "--mock-data": self.mock_data,
            "--train-data-path": self.train_data_path,
        }
        given = [f"`{name}`" for name, value in ways.items() if value]
        found = []
        if len(given) > 1:
            found.append(f"{' and '.join(given)} exclude each other; give one source of data.")
        own = {"--valid-data-path": self.valid_data_path, "--test-data-path": self.test_data_path}
        beside = [f"`{name}`" for name, value in own.items() if value]
        shared = [name for name in given if name != "`--train-data-path`"]
        if beside and shared and len(given) == 1:
            found.append(
                f"{shared[0]} and {' and '.join(beside)} exclude each other, since `--split` cuts "
                "all splits from the former; give the data of training as `--train-data-path`."
            )
        if self.split is not None:
            found.extend(self._split_errors(self.split))
        if self.multiple_validation_sets and not full_validation:
            found.append("`--multiple-validation-sets` needs `--full-validation`; give both.")
        return found

    @staticmethod
    def _split_errors(split: str) -> list[str]:
        try:
            shares = [float(part) for part in split.replace("/", ",").split(",") if part.strip()]
        except ValueError:
            shares = []
        if not 1 <= len(shares) <= 3 or not (min(shares) >= 0 and 0 < sum(shares) < math.inf):
            return [
                f"`--split` ({split}) must be one to three shares that are finite and not "
                "negative; use 99,1,0."
            ]
        return []
