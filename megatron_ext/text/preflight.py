"""Checks of a text run before ranks start: tokenizer, vocabulary, data files."""

from __future__ import annotations

import dataclasses
import os

from megatron_ext.config.rules.optimizer import optimizer_errors
from megatron_ext.config.run import RunConfig
from megatron_ext.data.folders import check_cached_indices
from megatron_ext.errors import ConfigError
from megatron_ext.text.config import DataConfig, TokenizerConfig
from megatron_ext.text.data.blend import BlendSpec, training_blend
from megatron_ext.text.data.gpt import (
    KeyedGPTDataset,
    check_index_memory,
    check_inputs,
    given_lengths,
    mock_validation_samples,
)
from megatron_ext.text.sft.dataset import SftDataset, build_splits
from megatron_ext.text.tokenizers import build_tokenizer
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.batch_size import number_of_iterations, split_sizes


def with_tokenizer(config: RunConfig) -> tuple[RunConfig, Tokenizer]:
    """Return the configuration with its padded vocabulary, and the tokenizer.

    Raises:
        ConfigError, DataError: see `build_tokenizer` and `with_padded_vocabulary`.
    """
    tokenizer = build_tokenizer(config.section(TokenizerConfig))
    return with_padded_vocabulary(config, tokenizer.vocab_size), tokenizer


def prepare_gpt(config: RunConfig) -> tuple[RunConfig, Tokenizer]:
    """Build the tokenizer and check the indexed datasets; see `Task.preflight`.

    Raises:
        ConfigError, DataError: see `with_tokenizer` and `check_gpt_data`.
    """
    config, tokenizer = with_tokenizer(config)
    check_gpt_data(config, tokenizer)
    return config, tokenizer


def with_padded_vocabulary(config: RunConfig, vocab_size: int) -> RunConfig:
    """Round the vocabulary up so that every tensor-parallel rank holds the same share of it.

    Raises:
        ConfigError: a given size that is less than the vocabulary.
    """
    model = dataclasses.replace(config.model, unpadded_vocab_size=vocab_size)
    given = model.padded_vocab_size
    if given and given < vocab_size:
        raise ConfigError(
            f"`--padded-vocab-size` ({given}) must be at least the {vocab_size} entries of the "
            "tokenizer; leave it out to have it computed."
        )
    if given:
        return dataclasses.replace(config, model=model)
    multiple = (
        config.model.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
    )
    padded = -(-vocab_size // multiple) * multiple
    model = dataclasses.replace(model, padded_vocab_size=padded)
    return dataclasses.replace(config, model=model)


def with_vocabulary(config: RunConfig) -> RunConfig:
    """The padded vocabulary, of the tokenizer where the flags do not say it.

    Raises:
        ConfigError: see `build_tokenizer`.
    """
    if config.model.padded_vocab_size:
        return config
    return with_padded_vocabulary(
        config, build_tokenizer(config.section(TokenizerConfig)).vocab_size
    )


def check_gpt_data(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Check indexed datasets; cheap, and the same on every rank.

    Raises:
        ConfigError, DataError: see `check_inputs`, `check_index_memory`, `given_lengths` and
            `check_cached_indices`.
    """
    replicas = config.parallel.data_parallel_size
    iterations = number_of_iterations(config.training, config.model.seq_length, replicas)
    sizes = split_sizes(config.training, iterations)
    if config.section(DataConfig).mock_data:
        check_index_memory(config, BlendSpec(None, None), sizes)
        _say_how_long_an_evaluation_is(config, tokenizer)
    else:
        spec = training_blend(config)
        check_inputs(config, spec, tokenizer, sizes)
        check_index_memory(config, spec, sizes)
        cache = config.section(DataConfig).data_cache_path
        check_cached_indices(spec.prefixes(), cache, KeyedGPTDataset.__name__)
        given_lengths(config, spec)


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


def prepare_sft(config: RunConfig) -> tuple[RunConfig, Tokenizer]:
    """Tokenize and check the conversations, and turn epochs into steps; see `Task.preflight`.

    Validation goes through the whole split; ``--eval-iters 0`` switches it off.

    Raises:
        ConfigError, DataError: see `build_splits`; flags that do not fit the number of steps.
    """
    config, tokenizer = with_tokenizer(config)
    train = build_splits(config, tokenizer).train
    training = config.training
    training = dataclasses.replace(training, full_validation=training.eval_iters > 0)
    if training.train_epochs is not None and isinstance(train, SftDataset):
        assert train.plan is not None
        training = training.in_steps(train.plan.steps_per_epoch)
    errors = optimizer_errors(config.optimizer, training)
    if errors:
        raise ConfigError(errors)
    return dataclasses.replace(config, training=training), tokenizer
