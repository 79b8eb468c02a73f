"""The two tasks of pretrain_gpt.py, pretraining and fine-tuning: their flags, rules and parts.

A program imports this file to know its flags, so the parts that need torch or megatron-core are
named by `later`. Most of them are in `text.run`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.config.inapplicable import names_of
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import FlagError, all_of
from megatron_ext.text.config.hugging_face import HuggingFaceConfig
from megatron_ext.text.config.hybrid import HybridConfig
from megatron_ext.text.config.inapplicable import TEXT_FLAGS
from megatron_ext.text.config.rules import (
    SECTIONS,
    resolve_text,
    stored_text_model,
    text_rules,
)
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.cost.task_cost import GPT_COST
from megatron_ext.text.evaluation.config import TaskEvaluationConfig
from megatron_ext.text.inputs import conversation_inputs, gpt_inputs, read_settings
from megatron_ext.train.task import STEP_FLAGS, Task, TaskChoice, later

ADAPTERS = "megatron_ext.text.convert.adapter_training"
"""The module for ``--adapter-path``; only runs with this flag import it."""
FOLDERS = "megatron_ext.text.convert.training"
"""The module for ``--load-hf`` and ``--save-hf``; only runs with such flags import it."""
RUN = "megatron_ext.text.run"
"""The module of the functions that run before the first step and between steps."""


def loads_folder(config: RunConfig) -> bool:
    """Return whether ``--load-hf`` gives the folder of a Hugging Face model."""
    return config.section(HuggingFaceConfig).load_hf is not None


def model_of_folder(config: RunConfig) -> Mapping[str, Mapping[str, Any]]:
    """Return the values of flags that the model in the folder of ``--load-hf`` determines.

    They are {section of the configuration: {field: value}}; {} without the flag.
    """
    folder = config.section(HuggingFaceConfig).load_hf
    if folder is None:
        return {}
    # A folder that is none is told of before torch is imported.
    read_settings(Path(folder))
    values: Mapping[str, Mapping[str, Any]] = later(f"{FOLDERS}:model_of_folder")(config)
    return values


def resolved(config: RunConfig) -> RunConfig:
    """Return the configuration with the values that follow from other flags and ``--load-hf``.

    Those of adapters follow from ``--adapter-path``.
    """
    if config.section(HuggingFaceConfig).adapter_path is not None:
        config = later(f"{ADAPTERS}:with_adapters")(config)
    config = resolve_text(config)
    if loads_folder(config):
        config = later(f"{FOLDERS}:resolve_folder")(config)
    return config


def adapter_errors(given: RunConfig, run: RunConfig) -> list[FlagError]:
    """Return an error for each flag that contradicts ``--adapter-path``."""
    if run.section(HuggingFaceConfig).adapter_path is None:
        return []
    return list(later(f"{ADAPTERS}:adapter_errors")(given, run))


def folder_errors(config: RunConfig) -> list[str]:
    """Return a sentence on each error in flags such as ``--load-hf`` and ``--save-hf``."""
    given = config.section(HuggingFaceConfig)
    if given == dataclasses.replace(HuggingFaceConfig(), origin=given.origin):
        return []
    errors: list[str] = later(f"{FOLDERS}:folder_errors")(config)
    return errors


def training_rules(given: RunConfig, run: RunConfig) -> list[str]:
    """Return the errors in the flags of a text model's training run.

    ``given`` has the user's flags, ``run`` the flags with derived values.
    """
    own = [*run.section(TaskEvaluationConfig).training_errors(), *folder_errors(run)]
    return [*text_rules(given, run), *own, *adapter_errors(given, run)]


def gpt_rules(given: RunConfig, run: RunConfig) -> list[str]:
    """Return the errors in the flags of a pretraining run.

    ``--sft`` is an error here, since it would have no effect. ``given`` has the user's flags,
    ``run`` the flags with derived values.
    """
    errors = training_rules(given, run)
    if run.section(SftConfig).sft:
        errors.append(
            FlagError(
                "--sft",
                None,
                "is left out of account by the datasets of this task (`build_datasets`)",
                "leave it out, or start from the task `megatron_ext.text.task.SFT`",
            )
        )
    return errors


def prepare_pretraining(config: RunConfig) -> tuple[RunConfig, Any]:
    """Raise an error at once if a file is missing; then prepare the run, see `Task.preflight`."""
    all_of(gpt_inputs(config))
    prepared: tuple[RunConfig, Any] = later(f"{RUN}:prepare_gpt")(config)
    return prepared


def prepare_fine_tuning(config: RunConfig) -> tuple[RunConfig, Any]:
    """Raise an error at once if a file is missing; then prepare the run, see `Task.preflight`."""
    all_of(conversation_inputs(config))
    prepared: tuple[RunConfig, Any] = later("megatron_ext.text.sft.task:prepare_sft")(config)
    return prepared


GPT_STEP = later("megatron_ext.text.step:gpt_forward_step")
GPT_CHUNK = later("megatron_ext.text.model.gpt:build_gpt_chunk")

GPT = Task(
    sections=(*SECTIONS, HuggingFaceConfig),
    inapplicable=TEXT_FLAGS,
    resolve=resolved,
    rules=gpt_rules,
    stored_model=stored_text_model,
    described_model=model_of_folder,
    initial_weights=later(f"{RUN}:weights_of_folder"),
    preflight=prepare_pretraining,
    inputs=gpt_inputs,
    data_lines=later(f"{RUN}:tokenizer_lines"),
    datasets=later(f"{RUN}:build_datasets"),
    source=later(f"{RUN}:text_source"),
    model_chunk=GPT_CHUNK,
    forward_step=GPT_STEP,
    implements={
        GPT_STEP: f"{STEP_FLAGS} mtp-num-layers",
        GPT_CHUNK: names_of(HybridConfig),
    },
    prepare_batches=later("megatron_ext.text.step:prepare_batches"),
    step_stats=later("megatron_ext.text.step:text_step_stats"),
    callbacks=(
        later(f"{RUN}:data_ledger"),
        later(f"{RUN}:task_scores"),
        later(f"{RUN}:text_samples"),
        later(f"{RUN}:saved_folders"),
        later(f"{RUN}:storage_notes"),
    ),
    cost=GPT_COST,
    perplexity=True,
)


SFT = dataclasses.replace(
    GPT,
    rules=training_rules,
    preflight=prepare_fine_tuning,
    inputs=conversation_inputs,
    datasets=later("megatron_ext.text.sft.dataset:build_splits"),
    data_lines=later("megatron_ext.text.sft.task:conversation_lines"),
)
"""The fine-tuning task."""


def task_of(config: RunConfig) -> Task:
    """Return the fine-tuning task if ``--sft`` is given, else the pretraining task."""
    return SFT if config.section(SftConfig).sft else GPT


TEXT = TaskChoice((GPT, SFT), task_of)
