"""The tasks of pretrain_gpt.py: pretraining, and fine-tuning on conversations."""

from __future__ import annotations

import dataclasses

from megatron_ext.config.run import RunConfig
from megatron_ext.text.config import (
    NEEDS,
    SECTIONS,
    SftConfig,
    resolve_text,
    stored_text_model,
    text_rules,
)
from megatron_ext.text.cost.network import GPT_COST
from megatron_ext.text.data.blend import text_source, text_step_stats
from megatron_ext.text.data.gpt import build_gpt_datasets
from megatron_ext.text.model.gpt import build_gpt_chunk
from megatron_ext.text.preflight import prepare_gpt, prepare_sft
from megatron_ext.text.sft.dataset import build_sft_datasets
from megatron_ext.text.step import gpt_forward_step, prepare_batches
from megatron_ext.train.task import Task, TaskChoice


def gpt_rules(given: RunConfig, run: RunConfig) -> list[str]:
    """Return the rules of text runs, and a sentence where conversations are asked for."""
    found = text_rules(given, run)
    if run.section(SftConfig).sft:
        found.append(
            "`--sft` is left out of account by the datasets of this task (`build_gpt_datasets`); "
            "leave it out, or start from the task `megatron_ext.text.task.SFT`."
        )
    return found


GPT = Task(
    sections=SECTIONS,
    needs=NEEDS,
    resolve=resolve_text,
    rules=gpt_rules,
    stored_model=stored_text_model,
    preflight=prepare_gpt,
    datasets=build_gpt_datasets,
    source=text_source,
    model_chunk=build_gpt_chunk,
    forward_step=gpt_forward_step,
    takes_step_flags=gpt_forward_step,
    prepare_batches=prepare_batches,
    step_stats=text_step_stats,
    cost=GPT_COST,
    perplexity=True,
)

SFT = dataclasses.replace(GPT, rules=text_rules, preflight=prepare_sft, datasets=build_sft_datasets)


def task_of(config: RunConfig) -> Task:
    """Return the task that the flags ask for."""
    return SFT if config.section(SftConfig).sft else GPT


TEXT = TaskChoice((GPT, SFT), task_of)
