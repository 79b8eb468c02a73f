"""The sources of text runs: the datasets of each split by Megatron-LM's flags, and their steps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.datasets.utils import get_blend_from_list

from megatron_ext.data.loader import BatchSource, build_source
from megatron_ext.errors import DataError
from megatron_ext.text.config import DataConfig
from megatron_ext.text.cost.flops import flops_per_sample
from megatron_ext.train.batch_size import StepStats

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.text.tokenizers.base import Tokenizer
    from megatron_ext.train.run import Run

SPLITS = ("train", "valid", "test")
Blend = tuple[list[str], list[float] | None]


@dataclass(frozen=True)
class BlendSpec:
    """The sources of the samples: one blend that --split cuts, or one for each split."""

    blend: Blend | None
    per_split: list[Blend | None] | None

    def prefixes(self) -> list[str]:
        """Return every dataset prefix, in order, without repeats."""
        blends = self.per_split if self.per_split is not None else [self.blend]
        return list(dict.fromkeys(p for blend in blends if blend is not None for p in blend[0]))


def _read_words(flag: str, path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise DataError(
            f"`{flag}` ({path}) cannot be read ({why}); give a file of dataset prefixes."
        ) from error


def _blend(flag: str, words: Sequence[str] | None) -> Blend | None:
    """Parse prefixes, or weights and prefixes, as Megatron-LM does."""
    if not words:
        return None
    try:
        blend = get_blend_from_list(list(words))
    except (ValueError, AssertionError):
        blend = None
    if blend is None or (blend[1] is None and any(map(_is_number, words))):
        raise DataError(
            f"`{flag}` ({' '.join(words)}) mixes weights and prefixes; give only prefixes, or a "
            "weight before each prefix."
        )
    prefixes, weights = blend
    if weights is not None and not (min(weights) >= 0 and 0 < sum(weights) < math.inf):
        raise DataError(
            f"`{flag}` has the weights {weights}; they must be finite, at least 0 and not all 0."
        )
    return prefixes, weights


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def read_blend(data: DataConfig) -> BlendSpec:
    """Collect the dataset prefixes of a run from its flags.

    Raises:
        DataError: a list file that cannot be read, or a malformed blend.
    """
    if data.data_args_path is not None:
        words = _read_words("--data-args-path", data.data_args_path)
        return BlendSpec(_blend("--data-args-path", words), None)
    if data.data_path:
        return BlendSpec(_blend("--data-path", data.data_path), None)
    if data.per_split_data_args_path is not None:
        return BlendSpec(None, _read_per_split(data.per_split_data_args_path))
    given = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if any(given):
        flags = (f"--{split}-data-path" for split in SPLITS)
        return BlendSpec(None, [_blend(f, words) for f, words in zip(flags, given, strict=True)])
    return BlendSpec(None, None)


def training_blend(config: RunConfig) -> BlendSpec:
    """Collect the dataset prefixes of a run that must have data.

    Raises:
        DataError: no dataset is given at all; also see `read_blend`.
    """
    spec = read_blend(config.section(DataConfig))
    if not spec.prefixes():
        raise DataError(
            "No training data is given; use `--data-path` PREFIX, `--train-data-path` PREFIX "
            "or `--mock-data`."
        )
    return spec


def _read_per_split(path: str) -> list[Blend | None]:
    flag = "--per-split-data-args-path"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        lists = [_words_of(content[split]) for split in SPLITS]
    except OSError as error:
        raise DataError(f"`{flag}` ({path}) cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"`{flag}` ({path}) must be a JSON object with the keys train, valid and test, each "
            f"a list of prefixes or of weights and prefixes; reading it failed with: {error!r}."
        ) from error
    return [_blend(flag, words) for words in lists]


def _words_of(entry: Any) -> list[str] | None:
    """Return the words of a split, which JSON may hold as a string, a list or null.

    Raises:
        TypeError: something else.
    """
    if entry is None or isinstance(entry, str):
        return entry.split() if entry else None
    if not isinstance(entry, list):
        raise TypeError(entry)
    return [str(word) for word in entry]


def text_source(
    run: Run, dataset: Any, assets: Tokenizer, consumed_samples: int, full_epoch: bool
) -> BatchSource:
    """Return the steps of a split; see `data.loader.build_source`."""
    data = run.config.section(DataConfig)
    return build_source(
        dataset,
        run.config,
        run.context,
        run.device,
        consumed_samples=consumed_samples,
        mask_documents_at=assets.eod if data.reset_attention_mask else None,
        cyclic=data.dataloader_type == "cyclic",
        data_sharding=data.data_sharding,
        full_epoch=full_epoch,
    )


def text_step_stats(run: Run, num_microbatches: int) -> StepStats:
    """Return the samples that the batch size counts, and the rows computed for them."""
    rows = run.rows_of(num_microbatches)
    return StepStats(
        samples=run.batch_size.global_batch_size,
        tokens=rows * (run.config.model.seq_length or 0),
        flops=rows * flops_per_sample(run.config),
    )
