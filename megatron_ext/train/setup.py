"""Builds, in order, what a run needs on this rank: model, optimizer, loaded checkpoint and data."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig

from megatron_ext.config.batch_size import BatchSize, number_of_iterations
from megatron_ext.config.optimizer import EmaConfig
from megatron_ext.config.precision import TE_IMPL
from megatron_ext.config.run import RunConfig
from megatron_ext.data.loader import BatchSource, reads_dataset
from megatron_ext.layers.chunks import build_chunks, wrap_chunks
from megatron_ext.layers.sdpa import use_flash_3
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.optim.builder import build_optimizer
from megatron_ext.optim.schedule import build_scheduler
from megatron_ext.optim.update import ParameterGather
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.batch_size import Progress, split_sizes
from megatron_ext.train.exit_signal import ExitSignal
from megatron_ext.train.reporting.start import implementation_line, parameters_line
from megatron_ext.train.run import Run, StopRequests, count_parameters
from megatron_ext.train.step import StepRunner
from megatron_ext.train.supervision import supervision_of
from megatron_ext.train.task import Datasets, Task

if TYPE_CHECKING:
    from megatron_ext.checkpoint.background import BackgroundSaves, Helper
    from megatron_ext.checkpoint.manager import CheckpointManager
    from megatron_ext.checkpoint.state import LoadedCheckpoint
    from megatron_ext.optim.ema import ShardedEMA
    from megatron_ext.train.saves import Saves


def build_run(
    config: RunConfig,
    task: Task,
    context: ParallelContext,
    device: torch.device,
    assets: Any,
    helper: Helper | None = None,
    started: float | None = None,
    exit_signal: ExitSignal | None = None,
    transformer_config: TransformerConfig | None = None,
) -> Run:
    """Build what a run needs on this rank, and load its checkpoint.

    Args:
        assets: what `Task.preflight` returned: what the task's data and steps need.
        helper: the process that writes checkpoints in the background, if any.
        started: when the run began, in seconds since 1970, for its time limit; by default now.
        exit_signal: the exit signal that the program already watches; None to start watching now.
        transformer_config: the configuration built from ``config``, if it has been built already.
    """
    started = time.time() if started is None else started
    if config.model.transformer_impl == TE_IMPL:
        from megatron_ext.layers.transformer_engine import prepare_transformer_engine

        prepare_transformer_engine(config)
    else:
        use_flash_3(config.model, device)
    transformer_config = transformer_config or build_transformer_config(config)
    bare = build_chunks(
        task.model_chunk, config, transformer_config, context, config.model.unpadded_vocab_size
    )
    chunks = wrap_chunks(bare, config, transformer_config, context, device)
    optimizer = scheduler = None
    trains = not config.training.skip_train
    if trains:
        optimizer = build_optimizer(config, chunks, context.pgs)
        scheduler = build_scheduler(config, optimizer)
    _tell_sizes(config, context, chunks, optimizer)
    ema = _average(config.ema, chunks, optimizer, trains=trains)
    background = _background(config, context, device, helper)
    make_runner = task.step_runner or StepRunner
    runner = make_runner(config, task, context, transformer_config, chunks, optimizer, scheduler)
    supervision = supervision_of(config)
    stores = supervision.stores(context) if trains else []
    parts = {"model": chunks, "optimizer": optimizer, "scheduler": scheduler, "ema": ema}
    checkpoints = None
    loaded: LoadedCheckpoint | None = None
    source, saved_at = "start", 0
    notes: list[str] | None = None
    if task.initial_weights is not None and _needs_base(config):
        notes = task.initial_weights(config, context, chunks, None)
    if config.checkpoint.is_used or stores:
        from megatron_ext.checkpoint.resume import Resume

        checkpoints = _checkpoints(config, context, background)
        resume = Resume(checkpoints, config, context)
        recoveries = supervision.recoveries(stores, context)
        loaded, source = resume.load(recoveries, **parts, extra_state=runner.extra_state)
        saved_at = resume.saved_at
    if loaded is not None:
        _continue_schedules(runner, config, loaded, context)
    if task.initial_weights is not None and (loaded is None or loaded.iteration == 0):
        if loaded is not None or notes is None:
            notes = task.initial_weights(config, context, chunks, loaded)
        _follow_new_weights(notes, optimizer, ema, context)
    if config.lora.starts_from_weights:
        from megatron_ext.layers.adapter_start import start_adapters

        if start_adapters(bare, config.lora, context, config.training.seed):
            _follow_new_weights([], optimizer, ema, context)
    overlap = config.optimizer.gathers_in_forward and trains
    parameter_gather = ParameterGather(chunks, transformer_config, overlap=overlap)
    parameter_gather.switch_off(gather=False)
    batch_arguments = config.training, config.model.seq_length, context.layout.data_parallel_size
    run = Run(
        config=config,
        context=context,
        device=device,
        task=task,
        num_iterations=number_of_iterations(*batch_arguments),
        batch_size=BatchSize(*batch_arguments),
        chunks=chunks,
        optimizer=optimizer,
        scheduler=scheduler,
        runner=runner,
        parameter_gather=parameter_gather,
        checkpoints=checkpoints,
        progress=_progress_after(loaded, context),
        ema=ema,
        stop_requests=StopRequests(
            config.training, started, config.fault_tolerance.is_elastic, exit_signal
        ),
        peak_flops=_peak_flops(device),
        saves=_saves(config, context, background),
        stores=stores,
        restored_from=source,
        saved_at=saved_at,
        seq_length=config.model.seq_length,
    )
    # A data loader draws a number from torch's generator when it starts. A new run draws it as
    # well, as Megatron-LM does. A resumed run has drawn it before it saved its state.
    with torch.random.fork_rng(devices=[], enabled=loaded is not None):
        attach_data(run, task, assets)
    return run


def _tell_sizes(
    config: RunConfig,
    context: ParallelContext,
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer | None,
) -> None:
    """Print the size of the model and its implementation; all ranks call this together."""
    sizes = count_parameters(chunks, context)
    if context.rank == 0:
        print(f"> {parameters_line(*sizes)}", flush=True)
        print(f"> {implementation_line(config.model, config.fp8, optimizer)}", flush=True)


def _average(
    config: EmaConfig,
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer | None,
    *,
    trains: bool,
) -> ShardedEMA | None:
    if not config.keeps_average(trains=trains):
        return None
    from megatron_ext.optim.ema import ShardedEMA

    return ShardedEMA(
        chunks,
        optimizer,
        decay=config.ema_decay or 0.0,
        start=config.ema_start or 1,
        warmup=bool(config.ema_warmup),
    )


def _peak_flops(device: torch.device) -> float | None:
    """Return the peak bfloat16 FLOP/s of a known GPU, else None."""
    if device.type != "cuda":
        return None
    from megatron_ext.device.gpus import peak_flops

    return peak_flops(torch.cuda.get_device_name(device))


def _background(
    config: RunConfig, context: ParallelContext, device: torch.device, helper: Helper | None
) -> BackgroundSaves | None:
    """Return the object that saves checkpoints in the background; None without a ``helper``.

    The helper, a separate process, exists only with ``--async-save``.
    """
    if helper is None:
        return None
    from megatron_ext.checkpoint.background import BackgroundSaves

    limit = 60 * config.parallel.distributed_timeout_minutes
    return BackgroundSaves(config.checkpoint, context, device, helper, seconds=limit)


def _needs_base(config: RunConfig) -> bool:
    """Return whether the run's checkpoints hold adapters alone, on published weights."""
    lora = config.lora
    return (
        lora.lora_rank is not None
        and lora.saves_adapters_only
        and bool(config.checkpoint.published)
    )


def _checkpoints(
    config: RunConfig, context: ParallelContext, background: BackgroundSaves | None
) -> CheckpointManager:
    """Return the run's checkpoint manager.

    Its module is imported within this function, for the sake of runs without checkpoints, which do
    not need it.
    """
    from megatron_ext.checkpoint.adapters import FrozenBase
    from megatron_ext.checkpoint.manager import CheckpointManager

    checkpoint = config.checkpoint
    frozen = FrozenBase.of_run(config.lora, config.training.seed, checkpoint.published)
    return CheckpointManager(checkpoint, context, frozen, background=background)


def _saves(
    config: RunConfig, context: ParallelContext, background: BackgroundSaves | None
) -> Saves | None:
    """Return the `Saves` of a run, which reports the outcome of each save; None without saves."""
    save = config.checkpoint.save
    if save is None:
        return None
    from megatron_ext.train.saves import Saves

    tolerant = config.checkpoint.async_save or config.fault_tolerance.may_be_restarted
    return Saves(save, context.rank, background=background, tolerant=tolerant)


def _follow_new_weights(
    notes: list[str] | None,
    optimizer: MegatronOptimizer | None,
    ema: ShardedEMA | None,
    context: ParallelContext,
) -> None:
    """Copy the model's weights, which the task has set, to the optimizer and the averaged weights.

    ``notes`` are the task's sentences on these weights, to print; None if the task has set no
    weights, and nothing is to be done. ``ema`` holds the averaged weights.
    """
    if notes is None:
        return
    if optimizer is not None:
        optimizer.reload_model_params()
    if ema is not None:
        ema.restart()
    for note in notes if context.rank == 0 else ():
        print(f"> {note}", flush=True)


def _continue_schedules(
    runner: StepRunner, config: RunConfig, loaded: LoadedCheckpoint, context: ParallelContext
) -> None:
    """Make each loaded learning-rate schedule continue without a jump of the rate.

    If the flags change the length of the model's schedule, rank 0 prints a note.
    """
    from megatron_ext.optim.resumed_schedule import go_on

    progress = Progress.from_dict({**loaded.progress, "iteration": loaded.iteration})
    consumed = progress.consumed_train_samples
    notes = [go_on(x, config, progress.iteration, consumed) for x in runner.schedules]
    if notes and notes[0] is not None and context.rank == 0:
        print(f"> {notes[0]}", flush=True)


def _progress_after(loaded: LoadedCheckpoint | None, context: ParallelContext) -> Progress:
    """Print the path and notes of a loaded checkpoint; return the progress to resume from.

    If ``loaded`` is None, print nothing and return the progress of a new run.
    """
    if loaded is None:
        return Progress()
    if context.rank == 0:
        what = f"iteration {loaded.iteration}" if loaded.goes_on else "its weights"
        print(f"> loaded {loaded.path} ({what})", flush=True)
        for note in loaded.notes:
            print(f"> {note}", flush=True)
    return Progress.from_dict({**loaded.progress, "iteration": loaded.iteration})


def attach_data(run: Run, task: Task, assets: Any) -> None:
    """Build a run's datasets and batch sources; print a note if a resumed run's data changed."""
    config = run.config
    context = run.context
    replicas = context.layout.data_parallel_size
    datasets = task.datasets(
        config,
        assets,
        split_sizes(config.training, config.model.seq_length, replicas),
        lambda: reads_dataset(config.model, config.parallel, context),
    )

    def source(dataset: Any, consumed: int, *, full_epoch: bool = False) -> BatchSource:
        return task.source(run, dataset, assets, consumed, full_epoch)

    remaining = run.num_iterations - run.progress.iteration
    if not config.training.skip_train and remaining > 0:
        run.train_source = source(datasets.train, run.progress.consumed_train_samples)
    run.valid_sources, run.test_sources = _evaluation_sources(run, datasets, source)
    if config.ema.eval_ema:
        # The same samples again; torch's generator must not draw another number for this source.
        with torch.random.fork_rng(devices=[]):
            valid, test = _evaluation_sources(run, datasets, source)
        run.ema_sources = {"validation": valid, "test": test}
    plan = run.train_source.plan
    if plan is not None:
        before, run.progress.data_plan = run.progress.data_plan, plan.identity
        if before not in ("", plan.identity) and run.context.rank == 0:
            print(
                "> the samples, or how they fill batches, are not those of the checkpoint: the run "
                "goes on at its step of other epochs",
                flush=True,
            )


def _evaluation_sources(
    run: Run, datasets: Datasets, source: Callable[..., BatchSource]
) -> tuple[list[BatchSource], list[BatchSource]]:
    """Return the batch sources of the validation sets and of the test set, as two lists.

    ``source`` builds the batch source of a dataset. A list is empty if its split is not evaluated,
    or if no rank has a dataset for it.
    """
    training = run.config.training
    several = datasets.valid
    valid = list[BatchSource]()
    test = list[BatchSource]()
    if training.evaluates:
        full = training.full_validation
        consumed = 0 if full or training.skip_train else run.progress.consumed_valid_samples
        valid = [
            source(dataset, consumed, full_epoch=full)
            for dataset in (several if isinstance(several, list) else [several])
            if _exists(dataset, run.device)
        ]
    if training.eval_iters > 0 and _exists(datasets.test, run.device):
        test = [source(datasets.test, 0)]
    return valid, test


def _exists(dataset: Any, device: torch.device) -> bool:
    """Return whether any rank has this dataset; all ranks call this together."""
    exists = torch.tensor(int(dataset is not None), device=device)
    torch.distributed.all_reduce(exists, op=torch.distributed.ReduceOp.MAX)
    return bool(exists)
