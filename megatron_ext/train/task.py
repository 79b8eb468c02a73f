"""A task: what to train, as a frozen dataclass of callables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_ext.config.flags import changed
from megatron_ext.data.batch import Batch
from megatron_ext.errors import ConfigError
from megatron_ext.layers.chunks import ModelChunk
from megatron_ext.losses.contract import LossFunction, StepCounts
from megatron_ext.text.data.blend import text_source, text_step_stats
from megatron_ext.text.data.gpt import Datasets, build_gpt_datasets
from megatron_ext.text.step import gpt_forward_step
from megatron_ext.train.batch_size import StepStats
from megatron_ext.train.preflight import check_gpt_data

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.data.loader import BatchSource
    from megatron_ext.parallel.context import ParallelContext
    from megatron_ext.text.tokenizers.base import Tokenizer
    from megatron_ext.video.cost.clip import Clip

DatasetsProvider = Callable[
    ["RunConfig", "Tokenizer", Sequence["int | None"], Callable[[], bool]], Datasets
]
Preflight = Callable[["RunConfig", "Tokenizer"], "RunConfig"]
# What a batch is, is between a task's source and its forward step.
ForwardStep = Callable[
    ["RunConfig", Any, torch.nn.Module, "StepCounts | None"], tuple[Tensor, LossFunction]
]
PrepareBatches = Callable[["RunConfig", Sequence[Batch], "ParallelContext"], Sequence[Batch]]
# A run knows its task; so that no file imports in a circle, its type is `Any` here.
Run = Any
SourceProvider = Callable[[Run, Any, "Tokenizer", int, bool], "BatchSource"]
BoundaryShape = Callable[[Sequence[Any], torch.nn.Module], Sequence[int]]
ProcessNonLossData = Callable[[Any, int, Any], None]

STEP_FLAGS = {
    "model": {"mtp_num_layers"},
    "loss": {"loss", "loss_args", "label_smoothing", "z_loss_coeff", "cross_entropy_chunk_size"},
}
"""Flags by section that do nothing but through a forward step that looks at them, as GPT's does."""


@dataclass(frozen=True)
class Task:
    """The three providers that Megatron users know.

    Attributes:
        datasets: ``(config, tokenizer, sizes, is_built_on_rank)`` to the three splits.
        model_chunk: ``(config, transformer_config, context, pre_process=, post_process=,
            vp_stage=)`` to one pipeline chunk.
        forward_step: ``(config, batch, model, counts)`` to the output of the chunk and the loss
            function, which is called on the last stage only. ``counts`` are the targets of the
            whole training step there, None on other stages and in evaluation. It may be None where
            a step runner of the task does without.
        auxiliary_losses: the model attaches losses of its own with
            `layers.auxiliary_loss.attach_microbatch_loss`.
        prepare_batches: ``(config, batches, context)`` to the batches, called on the last stage
            with all micro-batches of a step before its first forward pass.
        source: ``(run, dataset, tokenizer, consumed_samples, full_epoch)`` to the steps of a split.
        step_stats: ``(run, num_microbatches)`` to what the coming step of training does.
        boundary_shape: ``(batches, chunk)`` to the shape ``[s, b, h]`` of what passes between
            pipeline stages in a step, where the flags do not decide it.
        callbacks: ``(run)`` to a `callbacks.callback.Callback`, each called when training begins,
            to do things between the steps; usually subclasses of it.
        sample_name: what a sample is called in the log, whose rate is then shown.
        perplexity: the loss named "lm loss" is a cross-entropy, and evaluation reports its
            exponential too.
        step_runner: ``(config, task, context, core, chunks, optimizer, scheduler)`` to what runs
            the steps and holds what else a checkpoint needs; None for `step.StepRunner`.
        preflight: ``(config, tokenizer)`` to the configuration with what only the data decides;
            checks the data before any process group exists, on every rank alike.
        clips: of a checked run, the buckets of its data, as a plan (``--dry-run``) needs them.
        sections: flags of the task's own, see `config.sections`.
        takes_step_flags: the forward step does what `STEP_FLAGS` say; None means that it is GPT's.
            They are refused otherwise.
        process_non_loss_data: ``(collected, iteration, writer)``, called after each evaluation on
            the reporting rank of a run with ``--tensorboard-dir``, as Megatron-LM's
            ``process_non_loss_data_func``. ``collected`` is, of each micro-batch of the last
            evaluation step, what its loss function returns when it is called once more with
            ``non_loss_data=True``; ``writer`` is TensorBoard's.
        non_loss_data: ``(chunks)`` to what is collected instead, called on all ranks.
    """

    datasets: DatasetsProvider
    model_chunk: ModelChunk
    forward_step: ForwardStep | None = None
    auxiliary_losses: bool = False
    prepare_batches: PrepareBatches | None = None
    source: SourceProvider = text_source
    step_stats: Callable[[Run, int], StepStats] = text_step_stats
    boundary_shape: BoundaryShape | None = None
    callbacks: Sequence[Callable[[Run], Any]] = ()
    sample_name: str | None = None
    perplexity: bool = True
    preflight: Preflight = check_gpt_data
    step_runner: Callable[..., Any] | None = None
    clips: Callable[[RunConfig], Sequence[Clip]] | None = None
    sections: tuple[type, ...] = ()
    takes_step_flags: bool | None = None
    process_non_loss_data: ProcessNonLossData | None = None
    non_loss_data: Callable[[Sequence[torch.nn.Module]], Any] | None = None


TaskOrChoice = Task | Callable[["RunConfig"], Task]


def choose(task: TaskOrChoice, config: RunConfig) -> Task:
    """The task itself, or what it chooses for a configuration.

    Raises:
        ConfigError: flags that the forward step of the task leaves out of account, or sections
            that the configuration lacks.
    """
    chosen = task if isinstance(task, Task) else task(config)
    for kind in chosen.sections:
        config.section(kind)
    errors = [*_step_flag_errors(chosen, config), *_data_flag_errors(chosen, config)]
    if errors:
        raise ConfigError(errors)
    return chosen


def sections_of(task: TaskOrChoice, sections: Sequence[type] = ()) -> Sequence[type]:
    """The task's own sections; those given where a function chooses the task."""
    return task.sections if isinstance(task, Task) else sections


def _step_flag_errors(task: Task, config: RunConfig) -> list[str]:
    takes = task.takes_step_flags
    if takes or (takes is None and task.forward_step is gpt_forward_step):
        return []
    given = [x for name, only in STEP_FLAGS.items() for x in changed(config, [name], only)]
    step = getattr(task.forward_step, "__name__", "none")
    return [
        f"`{flag}` is left out of account by the forward step of this task (`{step}`); leave it "
        "out, or let the step call `text.step.gpt_forward_step`, which knows it, and say "
        "`takes_step_flags=True` in the task."
        for flag in given
    ]


def _data_flag_errors(task: Task, config: RunConfig) -> list[str]:
    """Fine-tuning is another task than GPT's, with datasets of conversations."""
    if not config.sft.sft or task.datasets is not build_gpt_datasets:
        return []
    return [
        "`--sft` is left out of account by the datasets of this task (`build_gpt_datasets`); leave "
        "it out, or start from the task that `pretrain_gpt.task_of(config)` returns."
    ]


def no_datasets(
    config: RunConfig,
    tokenizer: Tokenizer,
    sizes: Sequence[int | None],
    is_built_on_rank: Callable[[], bool],
) -> Datasets:
    """Of a task that reads no samples; see `Task.datasets`."""
    return Datasets(None, None, None)
