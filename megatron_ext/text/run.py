"""Functions of pretraining around its steps: tokenizer, data, first weights, callbacks.

The task in `text.task` names these functions, and they are imported when a run starts.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_ext import extras
from megatron_ext.config.model import ModelConfig, padded_size
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.data.loader import BatchSource, build_source
from megatron_ext.errors import ConfigError
from megatron_ext.text.config.hugging_face import HuggingFaceConfig
from megatron_ext.text.config.samples import TextSampleConfig
from megatron_ext.text.data.blend import source_options
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.data.gpt import build_mock_datasets, check_mock_data
from megatron_ext.text.evaluation.config import TaskEvaluationConfig
from megatron_ext.text.inputs import plans_without_data
from megatron_ext.text.task import ADAPTERS, FOLDERS, loads_folder
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.callbacks.callback import Callback
from megatron_ext.train.run import Run
from megatron_ext.train.task import Datasets, later

if TYPE_CHECKING:
    import torch

    from megatron_ext.parallel.context import ParallelContext

DIRECT = "megatron_ext.text.data.splits"
"""The module for ``--data-order direct``; only runs with this order import it."""
INDEXED = "megatron_ext.text.data.checked"
"""The module for megatron-core's order of samples; runs with ``--mock-data`` do not import it."""
SCORES = "megatron_ext.text.evaluation.scores"
"""The module that scores a model on ``--eval-tasks``; only runs with this flag import it."""
SAMPLES = "megatron_ext.text.generation.samples"
"""The module that continues prompts between steps, for ``--sample-interval`` alone."""


def weights_of_folder(
    config: RunConfig, context: ParallelContext, chunks: Sequence[torch.nn.Module], loaded: Any
) -> list[str] | None:
    """Load the weights of ``--load-hf`` and ``--adapter-path`` into this rank's model chunks.

    If a checkpoint's weights are ``loaded``, only the adapters are. Return notes for the user, or
    None if neither flag gives any.
    """
    notes = _weights_of_folder(config, context, chunks, loaded)
    if config.section(HuggingFaceConfig).adapter_path is not None:
        notes = [*(notes or ()), *later(f"{ADAPTERS}:load_adapters")(config, chunks)]
    return notes


def _weights_of_folder(
    config: RunConfig, context: ParallelContext, chunks: Sequence[torch.nn.Module], loaded: Any
) -> list[str] | None:
    if loaded is not None or not loads_folder(config):
        return None
    load: Callable[..., list[str]] = later(f"{FOLDERS}:load_initial_weights")
    if not config.optimizer.shards_weights:
        return load(config, context, chunks)
    from megatron_ext.layers.weight_shards import whole_weights

    with whole_weights(chunks, writes=True):
        return load(config, context, chunks)


def with_tokenizer(config: RunConfig) -> tuple[RunConfig, Tokenizer]:
    """Build the tokenizer that the flags give.

    Return the configuration with the padded vocabulary size filled in, and the tokenizer.
    """
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    if loads_folder(config):
        config = later(f"{FOLDERS}:fit_vocabulary")(config, tokenizer.vocab_size)
    model = padded_to_ranks(config.model, config.parallel, tokenizer.vocab_size)
    note = padding_note(config.model, model, config.parallel.tensor_model_parallel_size)
    if note is not None and int(os.environ.get("RANK", "0")) == 0:
        print(f"> {note}", flush=True)
    return dataclasses.replace(config, model=model), tokenizer


def prepare_gpt(config: RunConfig) -> tuple[RunConfig, Tokenizer | None]:
    """Check a run's data before the model is built.

    Return the configuration with the padded vocabulary size filled in, and the tokenizer, which is
    None for a dry run that names none.
    """
    if plans_without_data(config):
        return config, None
    config, tokenizer = with_tokenizer(config)
    if is_direct(config):
        config = later(f"{DIRECT}:prepare_direct")(config, tokenizer)
    elif config.section(DataConfig).mock_data:
        check_mock_data(config, tokenizer)
    else:
        later(f"{INDEXED}:check_files")(config, tokenizer)
    check_writing(config, tokenizer)
    return config, tokenizer


def check_writing(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise an error if a run cannot let its model write while it trains, as its flags ask.

    ``--eval-tasks`` and ``--sample-interval`` ask for texts.
    """
    if config.section(TaskEvaluationConfig).eval_tasks:
        later(f"{SCORES}:check_training")(config)
    if config.section(TextSampleConfig).sample_interval is not None:
        later(f"{SAMPLES}:check_samples")(config, tokenizer)


def padded_to_ranks(model: ModelConfig, parallel: ParallelConfig, vocab_size: int) -> ModelConfig:
    """Return ``model`` with a vocabulary padded so that tensor-parallel ranks share it equally.

    A given ``--padded-vocab-size`` stays; raise a ConfigError if it is less than ``vocab_size``.
    """
    model = dataclasses.replace(model, unpadded_vocab_size=vocab_size)
    given = model.padded_vocab_size
    if given and given < vocab_size:
        raise ConfigError.about(
            "--padded-vocab-size",
            given,
            f"must be at least the {vocab_size} entries of the tokenizer",
            "leave it out to have it computed",
        )
    if not given:
        ranks = parallel.tensor_model_parallel_size
        padded = padded_size(vocab_size, model.make_vocab_size_divisible_by, ranks)
        model = dataclasses.replace(model, padded_vocab_size=padded)
    return model


def padding_note(given: ModelConfig, padded: ModelConfig, ranks: int) -> str | None:
    """Return a note if the vocabulary has more padding than it would have on one rank, else None.

    ``given`` and ``padded`` are the model's flags before and after padding, ``ranks`` is the
    tensor-parallel size. Here as in Megatron-LM, the softmax of the loss includes padded entries,
    so losses depend on the number of these entries.
    """
    if given.padded_vocab_size or not padded.unpadded_vocab_size:
        return None
    alone = padded_size(padded.unpadded_vocab_size, given.make_vocab_size_divisible_by, 1)
    if padded.padded_vocab_size == alone:
        return None
    return (
        f"The vocabulary is padded to {padded.padded_vocab_size} entries for "
        f"`--tensor-model-parallel-size` ({ranks}), but to {alone} on one rank. The softmax of the "
        "loss goes over all of them, so losses differ a little from those of other sizes, as in "
        f"Megatron-LM; `--padded-vocab-size {padded.padded_vocab_size}` makes layouts the same."
    )


def tokenizer_lines(config: RunConfig, assets: Any) -> list[str]:
    """Return lines for the user on entries of the tokenizer's files that have no effect.

    Return [] if ``assets`` is not a tokenizer, as may be so in a task that a user makes from `GPT`.
    """
    return assets.notes() if isinstance(assets, Tokenizer) else []


def is_direct(config: RunConfig) -> bool:
    """Return whether ``--data-order`` is ``direct``, which needs no index of the samples."""
    return config.section(DataConfig).data_order == "direct"


def separator_warnings(config: RunConfig, tokenizer: Tokenizer) -> list[str]:
    """Return warnings if pretraining takes data for padding, or misses the ends of documents."""
    module = DIRECT if is_direct(config) else INDEXED
    warnings: list[str] = later(f"{module}:separator_warnings")(config, tokenizer)
    return warnings


def build_datasets(
    config: RunConfig,
    tokenizer: Tokenizer,
    sizes: Sequence[int | None],
    is_built_on_rank: Callable[[], bool],
) -> Datasets:
    """Build the train, valid and test split in the order of samples that ``--data-order`` names.

    ``sizes`` has the number of samples of each split; None means one epoch. ``is_built_on_rank``
    tells whether this rank reads data.
    """
    if is_direct(config):
        datasets: Datasets = later(f"{DIRECT}:build_direct")(config, tokenizer)
        return datasets
    arguments = config, tokenizer, sizes, is_built_on_rank
    if config.section(DataConfig).mock_data:
        return build_mock_datasets(*arguments)
    built: Datasets = later(f"{INDEXED}:build_checked_datasets")(*arguments)
    return built


def text_source(
    run: Run, dataset: Any, assets: Tokenizer, consumed_samples: int, full_epoch: bool
) -> BatchSource:
    """Return the source of a split's batches, which gives the micro-batches of a step at a time.

    Args:
        dataset: the dataset of the split.
        assets: the tokenizer of the run.
        consumed_samples: number of samples to skip, which the run has read before.
        full_epoch: whether to read the whole split in order, again and again, as
            ``--full-validation`` needs it.
    """
    if is_direct(run.config):
        dataset = later(f"{DIRECT}:continued_split")(run, dataset)
    parts = run.config, run.context, run.device
    options = source_options(run.config.section(DataConfig), assets.eod)
    return build_source(dataset, *parts, consumed_samples, full_epoch, **options)


def saved_folders(run: Run) -> Callback | None:
    """Return the callback that writes the model to ``--save-hf``; None without the flag."""
    has = run.config.has(HuggingFaceConfig)
    if not has or run.config.section(HuggingFaceConfig).save_hf is None:
        return None
    built: Callback = later(f"{FOLDERS}:HuggingFaceFolders")(run)
    return built


def task_scores(run: Run) -> Callback | None:
    """Return the callback that scores the model on ``--eval-tasks``; None without the flag."""
    has = run.config.has(TaskEvaluationConfig)
    if not has or not run.config.section(TaskEvaluationConfig).eval_tasks:
        return None
    built: Callback = later(f"{SCORES}:TaskScores")(run)
    return built


def text_samples(run: Run) -> Callback | None:
    """Return the callback that continues prompts between steps; None without the flag."""
    has = run.config.has(TextSampleConfig)
    if not has or run.config.section(TextSampleConfig).sample_interval is None:
        return None
    built: Callback = later(f"{SAMPLES}:TextSamples")(run)
    return built


def storage_notes(run: Run) -> Callback | None:
    """Return the callback that reports how many requests are made to object storage.

    Return None if the run reads nothing from there, as without ``--data-order direct``, or if this
    rank prints nothing.
    """
    if not is_direct(run.config):
        return None
    built: Callback | None = later("megatron_ext.text.data.storage:storage_notes")(run)
    return built


def data_ledger(run: Run) -> Callback | None:
    """Return the callback that records which samples a run with ``--data-order direct`` reads.

    It is part of the add-on ``ledger``. Return None if the add-on is not installed, without
    ``--save``, with other orders, and on all ranks but 0.
    """
    writes = run.context.rank == 0 and run.config.checkpoint.save is not None
    if not writes or not run.progress.data_order:
        return None
    ledger = extras.part("ledger", "recording")
    built: Callback | None = None if ledger is None else ledger.DataLedger(run)
    return built
