"""`pretrain` trains a model on one rank, from its process groups to its last save."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from megatron_ext import extras
from megatron_ext.config.run import RunConfig
from megatron_ext.device import Device
from megatron_ext.disk.bus import tell_bus_errors
from megatron_ext.layers.compiled import compile_alike, compile_nothing
from megatron_ext.parallel.context import (
    embedding_ranks,
    forked_by_launcher,
    init_groups,
    seed_everything,
)
from megatron_ext.parallel.grid import Layout
from megatron_ext.parallel.recorder import Recorder, open_recorder
from megatron_ext.train.exit_signal import ExitSignal
from megatron_ext.train.launch import Launch
from megatron_ext.train.loop import train
from megatron_ext.train.reporting.build import build_reporters
from megatron_ext.train.run import Run
from megatron_ext.train.setup import build_run
from megatron_ext.train.supervision import supervision_of
from megatron_ext.train.task import Task, later

INJECTED = "MEGATRON_EXT_FAULTS"
"""The environment variable that tells the add-on ``chaos`` which faults to inject into a run."""
# A run that does not save or evaluate imports no code for it.
evaluate_at_end = later("megatron_ext.train.callbacks.evaluation:evaluate_at_end")
_CHECKPOINT = "megatron_ext.checkpoint"
ending = later(f"{_CHECKPOINT}.background:ending")
hold_save_folder = later(f"{_CHECKPOINT}.publish:hold_save_folder")
start_helper = later(f"{_CHECKPOINT}.background:Helper")

Work = Callable[[Run], "int | None"]


def pretrain(
    task: Task,
    config: RunConfig,
    *,
    device: Device,
    assets: Any,
    prepare: Callable[[Run], None] | None = None,
    work: Work | None = None,
    launched: Launch | None = None,
    exit_signal: ExitSignal | None = None,
    transformer_config: TransformerConfig | None = None,
) -> int:
    """Train one model on this rank, and return the exit code; all ranks call this.

    Args:
        assets: what `Task.preflight` returned.
        prepare: called with the `Run` before training, for example to attach an observer.
        work: called with the `Run` instead of training and evaluation.
        launched: the launch of the run. If it is given, the run records how all time since the
            launch began is spent; None to record nothing.
        exit_signal: the exit signal that the program already watches; None to watch it from now on.
        transformer_config: the result of `check_core` for ``config``; None to build it here.
    """
    task = task.loaded()
    exit_signal = exit_signal or ExitSignal.of_run(config.training)
    recorder = open_recorder()
    injector = _injector(recorder, config)
    # The helper must be forked before this process has threads, process groups or a GPU.
    helper = start_helper() if config.checkpoint.async_save else None
    torch_device = device.activate(int(os.environ.get("LOCAL_RANK", "0")))
    context = init_groups(
        Layout.from_config(config.parallel),
        device,
        timeout_minutes=config.parallel.distributed_timeout_minutes,
        hierarchical_context_parallel_sizes=config.engine.hierarchical_context_parallel_sizes,
        get_embedding_ranks=embedding_ranks(config.model, config.parallel),
        recorder=recorder,
    )
    try:
        random_init = config.training.data_parallel_random_init
        seed_everything(context, config.training.seed, data_parallel_random_init=random_init)
        if config.training.deterministic_mode:
            torch.use_deterministic_algorithms(True)
        if not config.model.compile:
            compile_nothing()
        elif context.pgs.tp.size() > 1 and not config.parallel.sequence_parallel:
            # Without sequence parallelism, tensor-parallel ranks hold the same hidden states and
            # gradients of norms, so their kernels must agree bit for bit.
            compile_alike()
        save = config.checkpoint.save
        guard = supervision_of(config).guard(context.rank)
        lock = nullcontext() if save is None else hold_save_folder(save, context)
        with guard, lock, nullcontext() if helper is None else ending(helper):
            tell_bus_errors()
            # The time limit applies to the whole job, with all its restarts.
            started = None if launched is None else launched.started
            run = build_run(
                config,
                task,
                context,
                torch_device,
                assets,
                helper,
                started=started,
                exit_signal=exit_signal,
                transformer_config=transformer_config,
            )
            if injector is not None:
                injector.chunks = run.chunks
            resumed_at = run.progress.iteration
            steps = run.num_iterations
            reporters = build_reporters(
                config,
                context,
                resumed_at=resumed_at,
                num_iterations=steps,
                launched=None if work is not None else launched,
            )
            with reporters as run.reporters:
                if prepare is not None:
                    prepare(run)
                if work is not None:
                    code = work(run)
                else:
                    code = None if config.training.skip_train else train(run)
                    if code is None and config.training.evaluates:
                        evaluate_at_end(run)
                run.finish_saves()
            for store in run.stores:
                store.remove()
        recorder.close()
        return code or 0
    except BaseException:
        context.abort()
        raise
    finally:
        # A forked rank ends next. The system closes its connections at once, whereas gloo takes
        # about 10 ms for each connection of each group.
        if not forked_by_launcher():
            context.destroy()


def _injector(recorder: Recorder, config: RunConfig) -> Any:
    """Return an object that injects faults into this rank for tests; None if none are asked for."""
    if INJECTED not in os.environ:
        return None
    chaos = extras.needed("chaos", "inject", INJECTED)
    return chaos.arm(recorder, config.checkpoint.save)
