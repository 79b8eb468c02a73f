"""Pretrain a GPT model, or fine-tune it on conversations (``--sft``).

Started by torchrun, or plainly: ``python pretrain_gpt.py --nproc-per-node 4 ...`` makes its own
ranks. ``python pretrain_gpt.py --help`` lists the flags; they are Megatron-LM's.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from megatron_ext.errors import end_on_interrupt, run_program

if __name__ == "__main__":
    end_on_interrupt()

from megatron_ext.config.run import RunConfig
from megatron_ext.text.data.gpt import build_gpt_datasets
from megatron_ext.text.model.gpt import build_gpt_chunk
from megatron_ext.text.sft.dataset import build_sft_datasets, prepare_sft
from megatron_ext.text.step import gpt_forward_step, prepare_batches
from megatron_ext.train.main import main
from megatron_ext.train.task import Task

GPT = Task(
    datasets=build_gpt_datasets,
    model_chunk=build_gpt_chunk,
    forward_step=gpt_forward_step,
    prepare_batches=prepare_batches,
)

SFT = dataclasses.replace(GPT, datasets=build_sft_datasets, preflight=prepare_sft)


def task_of(config: RunConfig) -> Task:
    """What the flags ask for."""
    return SFT if config.sft.sft else GPT


if __name__ == "__main__":
    run_program(partial(main, task_of))
