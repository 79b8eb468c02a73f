"""Supervised fine-tuning: what is settled by the conversations before a run starts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from megatron_ext.data.sft.dataset import SftDataset, build_splits
from megatron_ext.errors import ConfigError

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig
    from megatron_ext.data.tokenizers import Tokenizer


def prepare_sft(config: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """Tokenize what is not tokenized yet, check it, and turn epochs into steps.

    Validation goes through the whole split; ``--eval-iters 0`` switches it off.

    Raises:
        ConfigError, DataError: see `build_splits`; flags that do not fit the number of steps.
    """
    train = build_splits(config, tokenizer).train
    training = config.training
    training = dataclasses.replace(training, full_validation=training.eval_iters > 0)
    if training.train_epochs is not None and isinstance(train, SftDataset):
        assert train.plan is not None
        training = training.in_steps(train.plan.steps_per_epoch)
    errors = config.optimizer.errors(training)
    if errors:
        raise ConfigError(errors)
    return dataclasses.replace(config, training=training)
