"""Checks and prepares the conversations of a fine-tuning run before it starts."""

import dataclasses

from megatron_ext.config.rules.optimizer import optimizer_errors
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.run import check_writing, with_tokenizer
from megatron_ext.text.sft.dataset import (
    SftDataset,
    open_splits,
    planned,
    report_conversations,
)
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.callbacks.evaluation import check_validation


def prepare_sft(config: RunConfig) -> tuple[RunConfig, Tokenizer]:
    """Tokenize and check the conversations; return the configuration and the tokenizer.

    In the configuration, the padded vocabulary size and the date that the template writes are
    filled in, and ``--train-epochs`` is converted to steps. Each validation reads its whole split;
    ``--eval-iters 0`` switches validation off.
    """
    config, tokenizer = with_tokenizer(config)
    check_writing(config, tokenizer)
    opened = open_splits(config, tokenizer)
    training = config.training
    splits = planned(config, opened)
    check_validation(config, given=splits.valid is not None and training.eval_iters > 0)
    train = splits.train
    training = dataclasses.replace(training, full_validation=training.eval_iters > 0)
    if training.train_epochs is not None and isinstance(train, SftDataset):
        assert train.plan is not None
        training = training.in_steps(train.plan.steps_per_epoch)
    errors = list(optimizer_errors(config.optimizer, training))
    if errors:
        raise ConfigError(errors)
    sft = dataclasses.replace(config.section(SftConfig), written_date=opened.chat.date)
    return dataclasses.replace(config.with_section(sft), training=training), tokenizer


def conversation_lines(config: RunConfig, tokenizer: Tokenizer) -> list[str]:
    """Return lines on what a run reads from its conversations and what it does not use."""
    report = report_conversations(config, tokenizer)
    return [*tokenizer.notes(), *report.notes, *report.warnings]
