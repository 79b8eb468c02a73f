"""Reproduces defects D29 to D33 of `defects.yaml`, which are in megatron-core's datasets.

A function such as `d29` returns the figure of the installed megatron-core and the right figure.
"""

from __future__ import annotations

import math
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

from megatron_ext.extras.audit.reproduced import Reproduced, Reproductions, on_ranks
from megatron_ext.parallel.context import ParallelContext

SEQUENCE_LENGTH = 8
DOCUMENT_LENGTH = 5
PATIENCE = 2.0
"""Seconds allowed for building a dataset, after which it counts as endless; 1 ms is normal."""


class EndlessError(Exception):
    """Raised by `at_most` if its block of code takes too long."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Limit the time of a block of code, which must run in the main thread.

    Raises:
        EndlessError: the block takes longer than ``seconds``.
    """

    def stop(_signal: int, _frame: object) -> None:
        raise EndlessError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def write_documents(prefix: Path, documents: int, dtype: type = np.uint16) -> None:
    """Write an indexed dataset: the files ``prefix`` + ".bin" and ".idx", with ids of ``dtype``.

    Documents have five tokens each: ``0 1 2 3 4``, ``5 6 7 8 9`` and so on, modulo 80.
    """
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in (torch.arange(documents * DOCUMENT_LENGTH) % 80).view(documents, -1):
        builder.add_document(document, [DOCUMENT_LENGTH])
    builder.finalize(f"{prefix}.idx")


def tokenizer_of(vocabulary: int) -> Any:
    """Return megatron-core's null tokenizer with ``vocabulary`` ids.

    In some releases, the argument of its class counts the end-of-document id, in others not.
    """
    made = (NullTokenizer(size) for size in (vocabulary, vocabulary - 1))
    return next(tokenizer for tokenizer in made if tokenizer.vocab_size == vocabulary)


def dataset_config(
    prefix: Path, vocabulary: int = 90, split: str = "99,1,0", **changes: Any
) -> GPTDatasetConfig:
    """Return a megatron-core configuration for the dataset with the path ``prefix`` + ".bin".

    The index is cached in the same folder. ``vocabulary`` is the number of ids, ``split`` the value
    of Megatron-LM's ``--split``, and ``changes`` are further fields.
    """
    return GPTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQUENCE_LENGTH,
        blend=([str(prefix)], None),
        split=split,
        path_to_cache=str(prefix.parent / "cache"),
        tokenizer=tokenizer_of(vocabulary),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **changes,
    )


def build_train_split(config: GPTDatasetConfig, *samples: int) -> GPTDataset:
    """Build datasets as Megatron-LM does; return the training split's.

    ``samples`` are the numbers of samples of the training, validation and test split.
    """
    train, *_ = BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, config).build()
    return train


def in_folder(measure: Callable[[Path], Any], _context: ParallelContext) -> Any:
    """Call ``measure`` with a new empty folder, which is deleted afterwards, and return the result.

    The second argument is not used; `on_ranks` passes it.
    """
    with tempfile.TemporaryDirectory() as name:
        return measure(Path(name))


def measured(measure: Callable[[Path], Any]) -> Any:
    """Call ``measure`` with an empty folder on one forked rank, and return the result."""
    return on_ranks(partial(in_folder, measure))[0]


def _empty_split(folder: Path) -> tuple[float, str]:
    prefix = folder / "docs"
    write_documents(prefix, 20)
    try:
        with at_most(PATIENCE):
            # One hundredth of 20 documents, rounded down, is no document.
            build_train_split(dataset_config(prefix), 4, 4, 0)
    except EndlessError:
        return math.nan, f"still counted epochs of no tokens after {PATIENCE:.0f} s"
    except Exception as error:
        return 0.0, f"was refused: {error}"
    return 0.0, "was given"


def d29() -> Reproduced:
    """Measure D29 of `defects.yaml`: how many samples an empty split gives when 4 are wanted.

    There should be 0; the figure is NaN if megatron-core has to be stopped.
    """
    stock, outcome = measured(_empty_split)
    what = f"samples of a validation split that --split 99,1,0 leaves empty: it {outcome}"
    return Reproduced(stock, 0.0, what)


def _stale_cache(folder: Path) -> float:
    prefix = folder / "docs"
    for documents in (20, 40):
        write_documents(prefix, documents)
        train = build_train_split(dataset_config(prefix, split="1,0,0"), 6, 0, 0)
    assert train[0]["tokens"].numel() == SEQUENCE_LENGTH  # the index is built only when it is read
    return float(max(train.document_index))


def d30() -> Reproduced:
    """Measure D30 of `defects.yaml`: the highest document number that an outdated cache leads to.

    megatron-core cached the index of 20 documents, and then files of 40 documents replaced them.
    """
    stock = measured(_stale_cache)
    what = (
        "number of the last document in the sample index of 40 documents, whose files have "
        "replaced those of 20 documents for which the cache was made"
    )
    return Reproduced(stock, 39.0, what)


def _first_document(folder: Path) -> list[int]:
    prefix = folder / "docs"
    # Megatron-LM's tools/preprocess_data.py uses 4 bytes per id from a vocabulary of 65,500 on.
    write_documents(prefix, 20, np.int32)
    config = dataset_config(prefix, 65_500, sequences_per_dataset={str(prefix): (20, 21)})
    # Copy the tokens: they are a view of the file, which the dataset closes when it is deleted.
    low = GPTDataset.build_low_level_dataset(str(prefix), config)
    return [int(x) for x in low[0]]


def d31() -> Reproduced:
    """Measure D31 of `defects.yaml`: the sum of a document's ids, 0 1 2 3 4, as they are read.

    They belong to a vocabulary of 65,500 ids, and ``--per-dataset-sequences-path`` is given.
    """
    read = measured(_first_document)
    shown = " ".join(map(str, read))
    what = (
        "sum of the ids 0 1 2 3 4 of a document of a vocabulary of 65,500, which "
        f"--per-dataset-sequences-path reads as {shown}"
    )
    return Reproduced(float(sum(read)), float(sum(range(DOCUMENT_LENGTH))), what)


def _modes(folder: Path) -> tuple[float, list[str]]:
    """Write two multimodal datasets of two sequences: with default modes, and with given modes.

    A mode is a number that the index stores for each sequence. Return the number of modes that can
    be read back (NaN after an error), and a clause for each error.
    """
    modes = math.nan
    raised = []
    for name, given in (("default", {}), ("given", {"modes": [0, 0]})):
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), multimodal=True)
        try:
            builder.add_document(torch.arange(4), [2, 2], **given)
        except TypeError as error:
            raised.append(f"writing {name} modes raises TypeError: {error}")
            builder.data_file.close()
            continue
        builder.finalize(str(folder / f"{name}.idx"))
        dataset = IndexedDataset(str(folder / name), multimodal=True)
        try:
            modes = float(len(dataset.sequence_modes))
        except ValueError as error:
            raised.append(f"reading all modes raises ValueError: {error}")
    return (math.nan if raised else modes), raised


def d32() -> Reproduced:
    """Measure D32 of `defects.yaml`: how many modes a multimodal dataset of two sequences has.

    A mode is a number that the index stores for each sequence; no modes are given here.
    """
    stock, raised = measured(_modes)
    what = "number of modes of a multimodal dataset of 2 sequences in default modes"
    return Reproduced(stock, 2.0, "; ".join([what, *raised]))


def counted_samples(tokens: int, *, drop_last: bool) -> int:
    """Return how many samples megatron-core counts in one document of ``tokens`` tokens.

    With ``drop_last``, a partial sample at the end does not count.
    """
    sizes = np.asarray([tokens], np.int32)
    order = np.zeros(1, np.int32)
    index = helpers.build_sample_idx(sizes, order, SEQUENCE_LENGTH, 1, tokens, drop_last, 1)
    return len(index) - 1


def d33() -> Reproduced:
    """Measure D33 of `defects.yaml`: the number of samples of 8 tokens in 2^24 + 2 tokens.

    The partial sample at the end counts.
    """
    tokens = 2**24 + 2
    (stock,) = on_ranks(lambda _context: counted_samples(tokens, drop_last=False))
    what = f"sequences of 8 in {tokens} tokens with --no-drop-last-partial-validation-sequence"
    return Reproduced(float(stock), float(math.ceil((tokens - 1) / SEQUENCE_LENGTH)), what)


REPRODUCTIONS: Reproductions = {"D29": d29, "D30": d30, "D31": d31, "D32": d32, "D33": d33}
