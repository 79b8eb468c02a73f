"""A whole program, ``main(task, argv)``, and one run on one rank, ``pretrain(task, config)``."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_ext.checkpoint.files import root_of
from megatron_ext.checkpoint.lock import check_save_folder, hold_save_folder
from megatron_ext.checkpoint.stored import read_run_config
from megatron_ext.config.parser import parse_args, read_words
from megatron_ext.config.run import Program, RunConfig
from megatron_ext.device import Device, select
from megatron_ext.errors import MegatronExtError
from megatron_ext.layers.compiled import compile_nothing
from megatron_ext.parallel.context import embedding_ranks, init_groups, mtp_rank, seed_everything
from megatron_ext.parallel.grid import Layout
from megatron_ext.planning.checks import check_core, check_host_memory
from megatron_ext.planning.report import print_plan
from megatron_ext.train.callbacks.evaluation import evaluate_at_end
from megatron_ext.train.launch import launch, refuse
from megatron_ext.train.loop import train
from megatron_ext.train.preflight import preflight
from megatron_ext.train.reporting.build import build_reporters
from megatron_ext.train.reporting.start import as_yaml, start_lines
from megatron_ext.train.run import Run
from megatron_ext.train.setup import build_run
from megatron_ext.train.task import Task, TaskChoice, check_step_flags

EVERYWHERE = (
    # megatron-core deprecates its own default of a field.
    "full scope is deprecated. Use empty cuda_graph_scope",
    # megatron-core asks every parameter for `.grad`, which is None with its distributed optimizer.
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    # megatron-core calls collectives by names that torch 2.13 gives up later.
    r"`torch\.distributed\.\w+` is deprecated",
    # The readers of checkpoints in megatron-core and torch use deprecated names.
    "`load_state_dict` is deprecated and will be removed in future versions",
    "Please use DTensor instead and we are deprecating ShardedTensor",
)
"""Warnings of the packages below us that every rank would print and no user can act on."""
ON_A_CPU = (
    # The order of GPU kernels matters on a GPU only.
    "When using async grad allreduce it is recommended to set the environment variable",
    "When using sequence parallelism it is recommended to set the environment variable",
)


def silence_known_warnings(device: str) -> None:
    """Filter known warnings in this process and in the ranks that it forks.

    Args:
        device: ``cuda`` or ``cpu``.
    """
    for message in EVERYWHERE + (ON_A_CPU if device == "cpu" else ()):
        warnings.filterwarnings("ignore", message=message)


Work = Callable[[Run], "int | None"]

logger = logging.getLogger(__name__)


def main(
    program: Task | TaskChoice,
    argv: Sequence[str],
    *,
    defaults: Mapping[str, Any] | None = None,
    work: Work | None = None,
    elsewhere: Mapping[str, Sequence[type]] | None = None,
) -> int:
    """Parse the flags, check what can be checked, start the ranks, and train.

    Args:
        program: a task, or several tasks of which the flags choose one.
        argv: the words after the program's name.
        defaults: values of flags in the place of the task's defaults, by their fields' names.
        work: called with the run instead of training and evaluation.
        elsewhere: sections of flags of other programs, by the programs' names.

    Returns:
        The exit code of the program; 2 after a user's error, whose sentences are printed; of
        ``--dry-run`` 1 where the run does not fit the GPU that is named.
    """
    try:
        task, device, config, assets = _prepare(program, argv, defaults, elsewhere)
        if int(os.environ.get("RANK", "0")) == 0 and work is None:
            given = {flag.field for flag in read_words(argv, program).given}
            print("\n".join(start_lines(config, given)), flush=True)
    except MegatronExtError as error:
        return refuse(error)
    except _NothingToRun as asked:
        return asked.exit_code
    return launch(
        lambda: pretrain(task, config, device=device, assets=assets, work=work),
        nproc_per_node=config.parallel.nproc_per_node,
        device=device,
        timeout_minutes=config.parallel.distributed_timeout_minutes,
    )


class _NothingToRun(Exception):
    """The command line asked for something else than a run."""

    def __init__(self, exit_code: int = 0) -> None:
        super().__init__()
        self.exit_code = exit_code


def _prepare(
    program: Task | TaskChoice,
    argv: Sequence[str],
    defaults: Mapping[str, Any] | None,
    elsewhere: Mapping[str, Sequence[type]] | None,
) -> tuple[Task, Device, RunConfig, Any]:
    """Do everything that needs no other rank; it is the same on all of them."""
    device = select()
    parsed = parse_args(
        argv,
        program,
        world_size=int(os.environ.get("WORLD_SIZE", "0")),
        device=device.kind,
        checkpoint_config=stored_config(argv, program),
        defaults=defaults,
        elsewhere=elsewhere,
    )
    first = int(os.environ.get("RANK", "0")) == 0
    if parsed.print_config:
        if first:
            print(as_yaml(parsed.config), end="")
        raise _NothingToRun
    logging.basicConfig(level=parsed.config.logging.logging_level or logging.WARNING)
    device = select(parsed.config.parallel.distributed_backend)
    task = parsed.task
    check_step_flags(task, parsed.config)
    config, assets = preflight(parsed.config, task.preflight)
    silence_known_warnings(device.kind)
    if first:
        for note in parsed.notes:
            print(f"> {note}", flush=True)
    if config.planning.dry_run:
        fits = print_plan(config, task.cost) if first else True
        raise _NothingToRun(0 if fits else 1)
    check_core(config)
    check_host_memory(config, task.cost)
    if first:
        check_save_folder(config.checkpoint.save)
    return task, device, config, assets


def stored_config(argv: Sequence[str], program: Program) -> dict[str, Any] | None:
    """Return the configuration in the checkpoint, where ``--use-checkpoint-args`` asks for it."""
    asked = read_words(argv, program).values.get("checkpoint", {})
    if not asked.get("use_checkpoint_args"):
        return None
    if asked.get("load"):
        return read_run_config(Path(asked["load"]), asked.get("ckpt_step"))
    pretrained = asked.get("pretrained_checkpoint")
    return None if pretrained is None else read_run_config(*root_of(Path(pretrained)))


def train_and_evaluate(run: Run) -> int | None:
    """Train and evaluate as the flags say; return the exit code of a run that ends early."""
    code = None if run.config.training.skip_train else train(run)
    if code is None and run.evaluates:
        evaluate_at_end(run)
    return code


def pretrain(
    task: Task,
    config: RunConfig,
    *,
    device: Device,
    assets: Any,
    prepare: Callable[[Run], None] | None = None,
    work: Work | None = None,
) -> int:
    """Train one model on this rank; all ranks call this.

    Args:
        task: what to train.
        config: the resolved configuration of the run.
        device: the kind of device that the ranks run on.
        assets: what `Task.preflight` returned.
        prepare: called with the parts of the run before it starts, to observe it.
        work: called with the run; None trains and evaluates.

    Returns:
        The exit code: 0, or that of the callback or the work that ended the run.
    """
    torch_device = device.activate(int(os.environ.get("LOCAL_RANK", "0")))
    context = init_groups(
        Layout.from_config(config.parallel),
        device,
        timeout_minutes=config.parallel.distributed_timeout_minutes,
        hierarchical_context_parallel_sizes=config.engine.hierarchical_context_parallel_sizes,
        get_embedding_ranks=embedding_ranks(
            tied=not config.model.untie_embeddings_and_output_weights,
            mtp_rank=mtp_rank(config.model, config.parallel),
        ),
    )
    try:
        seed_everything(
            context,
            config.training.seed,
            data_parallel_random_init=config.training.data_parallel_random_init,
        )
        if config.training.deterministic_mode:
            torch.use_deterministic_algorithms(True)
        if not config.model.compile:
            compile_nothing()
        with hold_save_folder(config.checkpoint.save, context):
            run = build_run(config, task, context, torch_device, assets)
            with build_reporters(
                config,
                context,
                resumed_at=run.progress.iteration,
                num_iterations=run.num_iterations,
            ) as reporters:
                run.reporters = reporters
                if prepare is not None:
                    prepare(run)
                return (work or train_and_evaluate)(run) or 0
    finally:
        context.destroy()
