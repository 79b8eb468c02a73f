"""What can be checked before any process group exists: tokenizer, vocabulary, data files."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.checkpoint.resume import check_resume
from megatron_ext.checkpoint.stored import check_start
from megatron_ext.data.folders import check_cached_indices, why_not_writable
from megatron_ext.errors import ConfigError
from megatron_ext.losses.custom import load_loss
from megatron_ext.text.data.blend import BlendSpec, training_blend
from megatron_ext.text.data.gpt import (
    KeyedGPTDataset,
    check_index_memory,
    check_inputs,
    given_lengths,
    mock_validation_samples,
)
from megatron_ext.text.tokenizers import build_tokenizer
from megatron_ext.train.batch_size import number_of_iterations, split_sizes

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.text.tokenizers.base import Tokenizer
    from megatron_ext.train.task import Preflight


def with_padded_vocabulary(config: RunConfig, vocab_size: int) -> RunConfig:
    """Round the vocabulary up so that every tensor-parallel rank holds the same share of it.

    Raises:
        ConfigError: a given size that is less than the vocabulary.
    """
    given = config.model.padded_vocab_size
    if given and given < vocab_size:
        raise ConfigError(
            f"`--padded-vocab-size` ({given}) must be at least the {vocab_size} entries of the "
            "tokenizer; leave it out to have it computed."
        )
    if given:
        return config
    multiple = (
        config.model.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
    )
    padded = -(-vocab_size // multiple) * multiple
    model = dataclasses.replace(config.model, padded_vocab_size=padded)
    return dataclasses.replace(config, model=model)


def with_vocabulary(config: RunConfig) -> RunConfig:
    """The padded vocabulary, of the tokenizer where the flags do not say it.

    Raises:
        ConfigError: see `build_tokenizer`.
    """
    if config.model.padded_vocab_size:
        return config
    return with_padded_vocabulary(config, build_tokenizer(config.tokenizer).vocab_size)


def check_gpt_data(config: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """Check indexed datasets; cheap, and the same on every rank.

    Raises:
        ConfigError, DataError: see `check_inputs`, `check_index_memory`, `given_lengths` and
            `check_cached_indices`.
    """
    replicas = config.parallel.data_parallel_size
    iterations = number_of_iterations(config.training, config.model.seq_length, replicas)
    sizes = split_sizes(config.training, iterations)
    if config.data.mock_data:
        check_index_memory(config, BlendSpec(None, None), sizes)
        _say_how_long_an_evaluation_is(config, tokenizer)
    else:
        spec = training_blend(config)
        check_inputs(config, spec, tokenizer, sizes)
        check_index_memory(config, spec, sizes)
        cache = config.data.data_cache_path
        check_cached_indices(spec.prefixes(), cache, KeyedGPTDataset.__name__)
        given_lengths(config, spec)
    return config


def _say_how_long_an_evaluation_is(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Made-up data is long: at a short sequence length one evaluation of it takes minutes."""
    training = config.training
    if training.full_validation and int(os.environ.get("RANK", "0")) == 0:
        samples = mock_validation_samples(config, tokenizer)
        print(
            f"> `--full-validation` goes through all {samples} samples of the made-up validation "
            f"data, {samples // training.batch_sizes[1]} steps, each time; `--eval-iters` without "
            "it takes as many steps as you say.",
            flush=True,
        )


def check_folders(config: RunConfig) -> None:
    """Check that the folders which a run writes to can be written.

    Raises:
        ConfigError: with one sentence for each that cannot.
    """
    logs = config.logging
    folders = {"save": config.checkpoint.save, "tensorboard-dir": logs.tensorboard_dir}
    if logs.wandb_project and logs.wandb_save_dir:
        folders["wandb-save-dir"] = logs.wandb_save_dir
    reasons = {
        (name, folder): why_not_writable(Path(folder)) for name, folder in folders.items() if folder
    }
    found = [
        f"`--{name}` ({folder}) cannot be written ({reason}); give a folder that can."
        for (name, folder), reason in reasons.items()
        if reason is not None
    ]
    if found:
        raise ConfigError(found)


def preflight(
    config: RunConfig, check_data: Preflight = check_gpt_data
) -> tuple[RunConfig, Tokenizer]:
    """Build the tokenizer and check the data, the same on every rank.

    Args:
        config: the run.
        check_data: the task's own check, see `Task`.

    Returns:
        The configuration with its padded vocabulary and what the data decides, and the tokenizer.

    Raises:
        CheckpointError: see `check_start` and `check_resume`.
        ConfigError, DataError: see `check_folders`, `build_tokenizer`, `load_loss` and the task's
            check.
    """
    if not config.planning.dry_run:
        check_folders(config)
    check_start(config.checkpoint, initializes=config.model.perform_initialization)
    tokenizer = build_tokenizer(config.tokenizer)
    config = with_padded_vocabulary(config, tokenizer.vocab_size)
    if config.loss.loss is not None:
        load_loss(config.loss.loss, tuple(config.loss.loss_args))
    config = check_data(config, tokenizer)
    check_resume(config)
    return config, tokenizer
