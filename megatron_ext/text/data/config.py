"""Flags of text datasets, their order and their mixtures, and the rules between them."""

import dataclasses
import math
from dataclasses import dataclass

from megatron_ext.config.flags import PROCESSES, SHARE, Range, flag, spelling_of
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import FlagError, exclusive

DEFAULT_SPLIT = "969, 30, 1"


@dataclass(frozen=True)
class DataConfig:
    """The flags of datasets and data loaders, with Megatron-LM's names and defaults."""

    data_path: list[str] | None = flag(
        None, "dataset prefixes, or weights and prefixes in turn", nargs="+"
    )
    split: str | None = flag(
        None, f"shares of train, valid and test, such as 99,1,0; default {DEFAULT_SPLIT}"
    )
    train_data_path: list[str] | None = flag(None, "prefixes of the train split", nargs="+")
    valid_data_path: list[str] | None = flag(None, "prefixes of the validation split", nargs="+")
    test_data_path: list[str] | None = flag(None, "prefixes of the test split", nargs="+")
    data_args_path: str | None = flag(
        None, "a file with the words of --data-path", from_checkpoint=False
    )
    per_split_data_args_path: str | None = flag(
        None, "a JSON file with a blend for each split", from_checkpoint=False
    )
    per_dataset_sequences_path: str | None = flag(
        None, "a JSON file with lengths of datasets", from_checkpoint=False
    )
    data_cache_path: str | None = flag(
        None, "folder for the indices of samples", if_changed="allow", from_checkpoint=False
    )
    data_order: str = flag(
        "megatron",
        "order of samples: Megatron-LM's, from indices that are built before training (megatron), "
        "or computed from seed and sample number, without indices (direct)",
        choices=("megatron", "direct"),
    )
    data_schedule: str | None = flag(
        None,
        "a YAML file of mixtures that change during training, instead of --data-path; needs "
        "--data-order direct",
        if_changed="allow",
        from_checkpoint=False,
    )
    object_storage_cache_path: str | None = flag(
        None,
        "folder on a disk of each machine for what is read of datasets at addresses, such as "
        "s3://bucket/web; default: megatron_ext/data in the user's cache folder",
        if_changed="allow",
        from_checkpoint=False,
    )
    object_storage_cache_size: float = flag(
        32.0,
        "the most that all runs of a machine keep of the tokens at addresses, in GiB; more than "
        "the data is best",
        Range(1 / 1024, 1e6),
        "GiB",
        if_changed="allow",
    )
    document_packing: str = flag(
        "concatenate",
        "what shares a training sample of --data-order direct: a window of the text, which cuts "
        "documents (concatenate), or documents that fit together, few of which are cut (best_fit)",
        choices=("concatenate", "best_fit"),
    )
    mmap_bin_files: bool = flag(True, "map .bin files into memory", if_changed="allow")
    mock_data: bool = flag(False, "train on made-up samples")
    multiple_validation_sets: bool = flag(
        False, "report each validation prefix by itself", if_changed="allow"
    )
    dataloader_type: str = flag(
        "single",
        "order of samples: in order (single), or shuffled anew each epoch (cyclic)",
        choices=("single", "cyclic"),
    )
    data_sharding: bool = flag(
        True, "with --dataloader-type cyclic, give each replica its own share of the samples"
    )
    reset_position_ids: bool = flag(False, "let positions start again after each document")
    reset_attention_mask: bool = flag(False, "keep attention within a document")
    eod_mask_loss: bool = flag(
        False, "leave positions whose input is end-of-document out of the loss"
    )
    num_dataset_builder_threads: int = flag(
        1, "threads that build a blend", bounds=PROCESSES, if_changed="allow"
    )
    mid_level_dataset_surplus: float = flag(
        0.005, "spare samples of each part of a blend", bounds=Range(0, 100), if_changed="allow"
    )
    allow_ambiguous_pad_tokens: bool = flag(False, "let padding share the id of another token")

    @property
    def document_flags(self) -> list[str]:
        """Return the user's flags that depend on where documents end, such as `--eod-mask-loss`."""
        names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        return [spelling_of(self, name) for name in names if getattr(self, name)]

    def resolved(self) -> "DataConfig":
        """Return these flags with the value of ``split`` stripped of quotes.

        A missing ``split`` becomes `DEFAULT_SPLIT` if all splits are cut from the same data.
        """
        if self.split is not None and self.split != self.split.strip("'\""):
            return dataclasses.replace(self, split=self.split.strip("'\""))
        ways = (self.data_path, self.data_args_path, self.data_schedule)
        blended = any(way is not None for way in ways) or self.mock_data
        if self.split is None and blended:
            return dataclasses.replace(self, split=DEFAULT_SPLIT)
        return self

    def given_sources(self) -> list[str]:
        """Return the flags that give data of training, of which a run has one."""
        ways = {
            "--data-path": self.data_path,
            "--data-args-path": self.data_args_path,
            "--per-split-data-args-path": self.per_split_data_args_path,
            "--mock-data": self.mock_data,
            "--train-data-path": self.train_data_path,
            "--data-schedule": self.data_schedule,
        }
        return [name for name, value in ways.items() if value]

    def own_errors(self, *, full_validation: bool) -> list[FlagError]:
        given = self.given_sources()
        errors = []
        if len(given) > 1:
            errors.append(exclusive(*given, remedy="give one source of data"))
        own = {"--valid-data-path": self.valid_data_path, "--test-data-path": self.test_data_path}
        beside = [f"`{name}`" for name, value in own.items() if value]
        alone = ("--train-data-path", "--data-schedule")
        shared = [name for name in given if name not in alone]
        if beside and shared and len(given) == 1:
            errors.append(
                FlagError(
                    shared[0],
                    None,
                    f"and {' and '.join(beside)} exclude each other, since `--split` cuts all "
                    "splits from the former",
                    "give the data of training as `--train-data-path`",
                )
            )
        if self.split is not None and not _is_split(self.split):
            errors.append(
                FlagError(
                    "--split",
                    self.split,
                    "must be one to three shares that are finite and not negative",
                    "use 99,1,0",
                )
            )
        if self.multiple_validation_sets and not full_validation:
            errors.append(
                FlagError(
                    "--multiple-validation-sets", None, "needs `--full-validation`", "give both"
                )
            )
        return errors


@dataclass(frozen=True)
class FimConfig:
    """The flags of fill-in-the-middle, with Megatron-LM's names and defaults.

    One default differs: ``fim_eod_token`` is the tokenizer's own token, not ``<|endoftext|>``.
    """

    fim_data: bool = flag(
        False, "move the middle of documents to their end, between the tokens below"
    )
    fim_rate: float = flag(0.5, "share of documents whose middle is moved", bounds=SHARE)
    fim_spm_rate: float = flag(
        0.5, "share of these whose suffix comes before their prefix", bounds=SHARE
    )
    fim_split_sample: str | None = flag(
        None, "a token that cuts a document into fragments, such as the files of a repository"
    )
    fim_fragment_rate: float | None = flag(
        None, "share of the fragments of a chosen document whose middle is moved", bounds=SHARE
    )
    fim_no_prefix: str | None = flag(
        None, "leave documents and fragments as they are that start with this text"
    )
    fim_prefix_token: str = flag("<fim_prefix>", "token before the prefix")
    fim_middle_token: str = flag("<fim_middle>", "token before the middle")
    fim_suffix_token: str = flag("<fim_suffix>", "token before the suffix")
    fim_pad_token: str = flag(
        "<fim_pad>", "token that fills up samples which have become shorter; it has no loss"
    )
    fim_eod_token: str | None = flag(
        None, "token that ends a document; default: the tokenizer's end of document"
    )

    def own_errors(self) -> list[FlagError]:
        if self.fim_data and self.fim_split_sample and self.fim_fragment_rate is None:
            return [
                FlagError(
                    "--fim-split-sample",
                    self.fim_split_sample,
                    "needs `--fim-fragment-rate`, the share of fragments whose middle is moved",
                    "give it, such as 0.5",
                )
            ]
        return []


def _is_split(split: str) -> bool:
    try:
        shares = [float(part) for part in split.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        return False
    return 1 <= len(shares) <= 3 and min(shares) >= 0 and 0 < sum(shares) < math.inf


def is_number(word: str) -> bool:
    """Tell whether a word of ``--data-path`` is a number, and therefore a weight, not a prefix."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def direct_errors(data: DataConfig, run: RunConfig) -> list[FlagError]:
    """Return an error for each flag that does not go with the value of ``--data-order``."""
    if data.data_order != "direct":
        remedy = "give `--data-order direct`"
        errors = []
        if data.data_schedule is not None:
            rule = "needs an order that can change during a run"
            errors.append(FlagError("--data-schedule", data.data_schedule, rule, remedy))
        if data.document_packing != "concatenate":
            rule = "needs an order that packs documents when they are read"
            errors.append(FlagError("--document-packing", data.document_packing, rule, remedy))
        return errors
    batch = run.training.rampup_batch_size or run.training.step_batch_size_schedule
    if batch and data.data_schedule is not None:
        return [
            FlagError(
                "--data-schedule",
                None,
                "counts whole steps of one size, but `--rampup-batch-size` or "
                "`--step-batch-size-schedule` changes it",
                "leave one of them out",
            )
        ]
    return []
