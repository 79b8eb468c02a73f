"""What can be checked before any process group exists: tokenizer, vocabulary, data files."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from megatron_ext.checkpoint.stored import check_resume_path
from megatron_ext.data.blend import training_blend
from megatron_ext.data.gpt import check_inputs
from megatron_ext.data.tokenizers import build_tokenizer
from megatron_ext.losses.custom import load_loss
from megatron_ext.training.batch_size import number_of_iterations
from megatron_ext.training.setup import split_sizes

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig
    from megatron_ext.data.tokenizers import Tokenizer
    from megatron_ext.training.task import Preflight


def with_padded_vocabulary(config: RunConfig, vocab_size: int) -> RunConfig:
    """Round the vocabulary up so that every tensor-parallel rank holds the same share of it."""
    if config.model.padded_vocab_size:
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
        ConfigError, DataError: see `check_inputs`.
    """
    if not config.data.mock_data:
        spec = training_blend(config)
        iterations = number_of_iterations(config, config.parallel.data_parallel_size)
        check_inputs(config, spec, tokenizer, split_sizes(config, iterations))
    return config


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
        CheckpointError: see `check_resume_path`.
        ConfigError, DataError: see `build_tokenizer`, `load_loss` and the task's check.
    """
    check_resume_path(config.checkpoint)
    tokenizer = build_tokenizer(config.tokenizer)
    config = with_padded_vocabulary(config, tokenizer.vocab_size)
    if config.loss.loss is not None:
        load_loss(config.loss.loss, tuple(config.loss.loss_args))
    return check_data(config, tokenizer), tokenizer
