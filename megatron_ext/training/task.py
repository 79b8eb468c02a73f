"""A task: what to train, as a frozen dataclass of callables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_ext.data.batch import Batch
from megatron_ext.data.gpt import Datasets
from megatron_ext.losses.contract import LossFunction, StepCounts
from megatron_ext.models.chunks import ModelChunk
from megatron_ext.training.preflight import check_gpt_data

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig
    from megatron_ext.data.tokenizers import Tokenizer
    from megatron_ext.layout import ParallelContext

DatasetsProvider = Callable[
    ["RunConfig", "Tokenizer", Sequence["int | None"], Callable[[], bool]], Datasets
]
Preflight = Callable[["RunConfig", "Tokenizer"], "RunConfig"]
ForwardStep = Callable[
    ["RunConfig", Batch, torch.nn.Module, "StepCounts | None"], tuple[Tensor, LossFunction]
]

PrepareWindow = Callable[["RunConfig", Sequence[Batch], "ParallelContext"], Sequence[Batch]]


@dataclass(frozen=True)
class Task:
    """The three providers that Megatron users know.

    Attributes:
        datasets: ``(config, tokenizer, sizes, is_built_on_rank)`` to the three splits.
        model_chunk: ``(config, transformer_config, context, pre_process=, post_process=,
            vp_stage=)`` to one pipeline chunk.
        forward_step: ``(config, batch, model, counts)`` to the output of the chunk and the loss
            function, which is called on the last stage only. ``counts`` are the targets of the
            whole training step there, None on other stages and in evaluation.
        auxiliary_losses: the model attaches losses of its own with
            `models.auto_scaler.attach_microbatch_loss`.
        prepare_window: ``(config, batches, context)`` to the batches, called on the last stage with
            all micro-batches of a step before its first forward pass.
        preflight: ``(config, tokenizer)`` to the configuration with what only the data decides;
            checks the data before any process group exists, on every rank alike.
    """

    datasets: DatasetsProvider
    model_chunk: ModelChunk
    forward_step: ForwardStep
    auxiliary_losses: bool = False
    prepare_window: PrepareWindow | None = None
    preflight: Preflight = check_gpt_data


TaskOrChoice = Task | Callable[["RunConfig"], Task]


def choose(task: TaskOrChoice, config: RunConfig) -> Task:
    """The task itself, or what it chooses for a configuration."""
    return task if isinstance(task, Task) else task(config)
