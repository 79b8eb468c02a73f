"""Pretrain a GPT model.

Started by torchrun, or plainly: ``python pretrain_gpt.py --nproc-per-node 4 ...`` makes its own
ranks. ``python pretrain_gpt.py --help`` lists the flags; they are Megatron-LM's.
"""

from __future__ import annotations

import sys

from megatron_ext.data.gpt import build_gpt_datasets
from megatron_ext.models.gpt import build_gpt_chunk
from megatron_ext.training.gpt import gpt_forward_step, prepare_window
from megatron_ext.training.pretrain import main
from megatron_ext.training.task import Task

GPT = Task(
    datasets=build_gpt_datasets,
    model_chunk=build_gpt_chunk,
    forward_step=gpt_forward_step,
    prepare_window=prepare_window,
)

if __name__ == "__main__":
    sys.exit(main(GPT, sys.argv[1:]))
