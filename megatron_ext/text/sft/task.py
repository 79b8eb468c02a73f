"""Checks and prepares the conversations of a fine-tuning run before it starts."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_ext.config.rules.optimizer import optimizer_errors
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.sft.chat import read_template
from megatron_ext.text.sft.dataset import (
    SftDataset,
    names_by_flag,
    open_splits,
    planned,
    report_conversations,
)
from megatron_ext.text.sft.preprocess import check_name
from megatron_ext.text.task import check_scoring, tokenizer_inputs, with_tokenizer
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.callbacks.evaluation import check_validation


def conversation_inputs(config: RunConfig) -> list[Callable[[], Any]]:
    """Return functions that each raise an error if a file of the run cannot be used.

    The files are those of the tokenizer, the chat template and the conversations.
    """
    checks = tokenizer_inputs(config)
    template = config.section(SftConfig).sft_chat_template
    if template is not None:
        checks.append(partial(read_template, "--sft-chat-template", template))
    for flag, names in names_by_flag(config.section(DataConfig)).items():
        checks += [partial(check_name, flag, name) for name in names or ()]
    return checks


def prepare_sft(config: RunConfig) -> tuple[RunConfig, Tokenizer]:
    """Tokenize and check the conversations; return the configuration and the tokenizer.

    In the configuration, the padded vocabulary size and the date that the template writes are
    filled in, and ``--train-epochs`` is converted to steps. Each validation reads its whole split;
    ``--eval-iters 0`` switches validation off.
    """
    config, tokenizer = with_tokenizer(config)
    check_scoring(config)
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
