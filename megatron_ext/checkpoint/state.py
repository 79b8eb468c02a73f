"""The state of a run under Megatron-LM's keys, sharded by megatron-core.

It holds model, optimizer, schedule, random generators and averaged weights. An average is an fp32
tensor ``ema.<name>`` with the shape and the shards of its weight. It loads in any layout, and tools
read it like a weight. A task may add state of its own (`ExtraState`), such as other networks.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model

from megatron_ext.checkpoint import flat_state, optimizer_state
from megatron_ext.checkpoint.files import iteration_in
from megatron_ext.checkpoint.optimizer_boxes import in_boxes, sharded_optimizer_state
from megatron_ext.checkpoint.optimizer_state import RESHARDABLE
from megatron_ext.checkpoint.unpickling import stored_entries
from megatron_ext.errors import CheckpointError
from megatron_ext.optim.ema import ShardedEMA
from megatron_ext.parallel.collectives import on_first_rank
from megatron_ext.parallel.context import ParallelContext

Chunks = list[DistributedDataParallel]
CRITIC = "critic"
"""Name prefix of a second network's weights: the critic, which judges the run's model."""
EMA = "ema"
PREFIX = f"{EMA}."
SHARDING = "distrib_optim_sharding_type"
_MEMORY_EFFICIENT = "distrib_optim_fully_reshardable_mem_efficient"
_SCHEDULES = (
    "give the flags of the run that saved it, or `--override-opt-param-scheduler` or "
    "`--use-checkpoint-opt-param-scheduler`"
)


def content_metadata(
    optimizer: MegatronOptimizer | None, *, reshardable: bool, flat: bool = False
) -> dict[str, Any]:
    """Return megatron-core's description of how a state is sharded, which a later load needs.

    Args:
        reshardable: whether the distributed optimizer's state must load in any layout. Otherwise
            it loads only with the same tensor, pipeline and expert parallel sizes.
        flat: whether optimizer state and averages have the format of `flat_state`: each rank's own
            elements, saved without communication. ``reshardable`` then has no effect.
    """
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if flat:
        return {**metadata, SHARDING: flat_state.FLAT}
    if optimizer_state.is_distributed(optimizer):
        metadata[SHARDING] = RESHARDABLE if reshardable else "dp_reshardable"
        if reshardable:
            metadata[_MEMORY_EFFICIENT] = False
    return metadata


def sharding_of(metadata: dict[str, Any], context: ParallelContext) -> dict[str, Any]:
    """Return a copy of ``metadata`` completed with this rank's process group and coordinates.

    ``metadata`` is the result of `content_metadata`, as a checkpoint stores it; megatron-core needs
    the added values to shard the state for a save or a load.
    """
    cut = {**metadata, "dp_cp_group": context.pgs.dp_cp}
    if _MEMORY_EFFICIENT in cut:
        # A checkpoint of Megatron-LM may ask for it. It only changes the group over which ranks
        # exchange state, and here there are no such groups over host memory.
        cut[_MEMORY_EFFICIENT] = False
    if metadata.get(SHARDING) == flat_state.FLAT:
        cut[flat_state.PLACE] = flat_state.Place.of(context)
    return cut


def values_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state with this rank's values in place of sharded tensors and objects.

    It equals the result of saving the state and loading it in the same layout.
    """

    def value(entry: Any) -> Any:
        if isinstance(entry, LocalNonpersistentObject):
            return entry.unwrap()
        return entry.data if isinstance(entry, ShardedBase) else entry

    values: dict[str, Any] = dict_list_map_outplace(value, state)
    return values


def chunk_keys(model: Chunks) -> list[str]:
    """Return the key of each chunk: ``model``, or ``model0``, ``model1``, … with virtual stages."""
    return ["model"] if len(model) == 1 else [f"model{index}" for index in range(len(model))]


def sharded_state(
    model: Chunks,
    optimizer: MegatronOptimizer | None,
    *,
    metadata: dict[str, Any],
    is_loading: bool,
) -> dict[str, Any]:
    """Return the sharded tensors of model and optimizer; all ranks call this together.

    In the format of `flat_state` they share memory with model and optimizer, and no communication
    is needed.

    Args:
        metadata: the result of `sharding_of`, which decides the format of the optimizer's state.
        is_loading: whether the tensors will be filled from a checkpoint, rather than saved.
    """
    state: dict[str, Any] = {
        key: chunk.sharded_state_dict(metadata=metadata)
        for key, chunk in zip(chunk_keys(model), unwrap_model(model), strict=True)
    }
    if optimizer is None:
        return state
    trains = not getattr(optimizer, "is_stub_optimizer", False)
    with optimizer_state.without_stubs(optimizer):
        return _with_optimizer(state, model, optimizer, trains, metadata, is_loading=is_loading)


def _with_optimizer(
    state: dict[str, Any],
    model: Chunks,
    optimizer: MegatronOptimizer,
    trains: bool,
    metadata: dict[str, Any],
    *,
    is_loading: bool,
) -> dict[str, Any]:
    """Return the model's sharded ``state``, to which that of the optimizer is added."""
    if trains:
        optimizer_state.prime(optimizer)
    if metadata.get(SHARDING) == flat_state.FLAT:
        if trains:
            place = metadata[flat_state.PLACE]
            state["optimizer"] = flat_state.optimizer_state(optimizer, model, place)
        return state
    count = optimizer_state.step_count(optimizer)
    if trains:
        state["optimizer"] = _sharded_optimizer(
            optimizer, state, metadata, count, is_loading=is_loading
        )
        optimizer_state.leave_out_nothing(state["optimizer"])
    return state


def _sharded_optimizer(
    optimizer: MegatronOptimizer,
    model: dict[str, Any],
    metadata: dict[str, Any],
    count: float | None,
    *,
    is_loading: bool,
) -> dict[str, Any]:
    state: dict[str, Any]
    in_boxes = not is_loading or optimizer_state.can_load_in_boxes(optimizer)
    if metadata.get(SHARDING) == RESHARDABLE and in_boxes:
        try:
            with optimizer_state.counted(optimizer, count):
                return sharded_optimizer_state(optimizer, model, metadata, is_loading=is_loading)
        except CheckpointError:
            # Another program may have saved by gathering what cannot be cut.
            if not is_loading:
                raise
    with optimizer_state.counted(optimizer, count), optimizer_state.completed(optimizer):
        state = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    optimizer_state.leave_out_second_moments(optimizer, state)
    return state


def flat_arguments(run_config: dict[str, Any], more: dict[str, Any]) -> argparse.Namespace:
    """Return the flags of all sections in one namespace, like Megatron-LM's ``args``.

    The values in ``more`` are added, and replace flags of the same name.
    """
    sections = [section for section in run_config.values() if isinstance(section, dict)]
    flat = {name: value for section in sections for name, value in section.items()}
    return argparse.Namespace(**flat | more)


def common_state(
    iteration: int, progress: dict[str, Any], run_config: dict[str, Any]
) -> dict[str, Any]:
    """Return the state that all ranks share: flags, format version, iteration and FLOPs so far.

    ``progress`` holds the run's counters, which are stored among the flags.
    """
    return {
        "args": flat_arguments(run_config, progress),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": progress.get("floating_point_operations", 0.0),
    }


def apply_state(
    loaded: dict[str, Any],
    model: Chunks,
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    *,
    with_optimizer: bool,
) -> None:
    """Put the loaded values into model, optimizer and learning-rate schedule.

    Without ``with_optimizer``, only the model gets loaded values, and the optimizer copies its fp32
    weights from the model.
    """
    for key, chunk in zip(chunk_keys(model), model, strict=True):
        # An empty pipeline stage has nothing to load.
        if key in loaded:
            chunk.load_state_dict(loaded[key])
    if optimizer is None:
        return
    if not with_optimizer:
        # The fp32 copies must match the loaded 16-bit weights.
        optimizer.reload_model_params()
        return
    if not getattr(optimizer, "is_stub_optimizer", False):
        with optimizer_state.without_stubs(optimizer):
            _load_optimizer(loaded["optimizer"], model, optimizer, scheduler)
    if scheduler is not None and "opt_param_scheduler" in loaded:
        try:
            scheduler.load_state_dict(loaded["opt_param_scheduler"])
        except AssertionError as error:
            raise CheckpointError(
                f"The learning-rate schedule is not the checkpoint's ({error}); {_SCHEDULES}."
            ) from error
        # megatron-core has set rates and weight decay before it read the checkpoint's decay. A step
        # of 0 sets them again.
        scheduler.step(0)


def _load_optimizer(
    loaded: Any,
    model: Chunks,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler | None,
) -> None:
    keys = ("max_lr", "min_lr")
    rates = [{key: group[key] for key in keys} for group in optimizer.param_groups]
    if flat_state.is_flat(loaded):
        optimizer_state.prime(optimizer)
        flat_state.load_optimizer(optimizer, model, loaded)
    else:
        optimizer_state.load_optimizer(optimizer, loaded)
    if scheduler is not None:
        _settle_rates(optimizer.param_groups, rates, scheduler)


def _settle_rates(
    groups: list[dict[str, Any]], rates: list[dict[str, float]], scheduler: OptimizerParamScheduler
) -> None:
    """Set the largest and smallest learning rate of each parameter group after a load.

    megatron-core prefers rates in a group to those of the schedule. So with
    `--override-opt-param-scheduler` this run's rates replace the loaded ones; otherwise the loaded
    ones stay, and only missing ones are filled in.

    Args:
        groups: the optimizer's parameter groups, with loaded values; changed in place.
        rates: this run's own ``max_lr`` and ``min_lr`` for each group.

    Raises:
        CheckpointError: the loaded decoupled learning rates differ from this run's, and no flag
            says which to use.
    """
    for group, own in zip(groups, rates, strict=True):
        if scheduler.override_opt_param_scheduler:
            group.update(own)
        theirs = {key: group.setdefault(key, rate) for key, rate in own.items()}
        if scheduler.use_checkpoint_opt_param_scheduler or not optimizer_state.is_decoupled(group):
            continue
        for key, name in (("max_lr", "--decoupled-lr"), ("min_lr", "--decoupled-min-lr")):
            if theirs[key] != own[key]:
                raise CheckpointError(
                    f"`{name}` ({own[key]}) is not the checkpoint's ({theirs[key]}); {_SCHEDULES}."
                )


def random_state(context: ParallelContext, *, every_replica: bool = False) -> ShardedObject:
    """Return this rank's random states (Python, numpy, torch, CUDA, megatron-core) to save or load.

    All ranks call this together. With ``every_replica``, the result holds the states of all ranks
    in the data-parallel group, which differ under ``--data-parallel-random-init``.
    """
    own = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    states: list[Any] = [own]
    if every_replica:
        states = [None] * context.pgs.dp.size()
        torch.distributed.all_gather_object(states, own, group=context.pgs.dp)
    layout = context.layout
    replicas = context.pgs.dp_cp
    sizes = [layout.pipeline_model_parallel_size, layout.tensor_model_parallel_size]
    ranks = [context.pp_rank, context.tp_rank]
    replica = replicas.rank()
    if layout.expert_model_parallel_size > 1:
        # Experts differ between data-parallel ranks, and so do their random states.
        sizes = [*sizes, replicas.size()]
        ranks = [*ranks, replica]
        replica = 0
    return ShardedObject("rng_state", states, tuple(sizes), tuple(ranks), replica_id=replica)


def restore_random_state(context: ParallelContext, states: list[dict[str, Any]]) -> None:
    state = states[context.dp_rank] if len(states) > 1 else states[0]
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    safe = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
    own = state["rng_tracker_states"]
    convert = tensor_parallel.convert_cuda_rng_state
    tracker.set_states({name: convert(value, to_graphable=safe) for name, value in own.items()})


class ExtraState(Protocol):
    """State that a task adds to a run's checkpoints; all ranks call each method together."""

    def state_to_save(self, metadata: dict[str, Any], *, with_optimizer: bool) -> dict[str, Any]:
        """Return the state to save: sharded tensors, and values that are equal on all ranks.

        The keys must be ones that Megatron-LM does not use.
        ``metadata`` is megatron-core's description of the sharding. Without ``with_optimizer``,
        leave out the state of optimizers and their schedules.
        """

    def state_to_load(
        self, path: Path, metadata: dict[str, Any], *, with_optimizer: bool
    ) -> dict[str, Any]:
        """Return sharded tensors and objects to fill from the checkpoint in the folder ``path``.

        The other parameters are those of `state_to_save`. Raise an error if the checkpoint does not
        fit this run.
        """

    def load(self, loaded: dict[str, Any], *, with_optimizer: bool, notes: list[str]) -> None:
        """Apply the state of `state_to_load` once it has been filled from a checkpoint.

        Append to ``notes`` one sentence for each part that was left out or starts anew. Without
        ``with_optimizer``, the state of optimizers and their schedules was not loaded.
        """


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The result of a load: ``progress`` and ``run_config`` of the run that saved the checkpoint.

    They are its training counters and its configuration.
    The iteration is 0 if only weights were loaded. The notes say what was not loaded, and why.
    """

    iteration: int
    progress: dict[str, Any]
    run_config: dict[str, Any]
    path: Path
    notes: list[str] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """Return whether the run goes on from the iteration that the folder of the load names.

        A run that loads only weights counts iterations from 0.
        """
        return iteration_in(self.path) == self.iteration


NEW_AVERAGE = {"average_updates": 0, "average_start": 1.0}
"""Counters in `LoadedCheckpoint.progress` if averages (EMA) start as a copy of loaded weights.

There were no updates yet, and the share of that copy in the average is 1.0. See `Progress`.
"""


def holds_averages(path: Path) -> bool:
    return any(name.startswith(PREFIX) for name in stored_entries(path))


def goes_on_averaging(path: Path, ema: ShardedEMA | None, notes: list[str]) -> bool:
    """Return whether the run continues averages: whether it and the checkpoint ``path`` have some.

    ``ema`` is None for a run without averages. If only one of the two has averages, append a
    message to ``notes``.
    """
    there = on_first_rank(lambda: holds_averages(path), f"{path} cannot be read")
    if ema is not None and not there:
        notes.append(f"{path} holds no averaged weights, so they start from the loaded ones.")
    if ema is None and there:
        notes.append(
            f"{path} holds averaged weights, which a run without `--ema-decay` leaves out."
        )
    return there and ema is not None


def take_named(
    path: Path, state: dict[str, Any], chunks: Iterable[str], prefixes: Sequence[str]
) -> None:
    """Prefix names of weights in ``state``, in place, so that the checkpoint ``path`` has them.

    Each of ``prefixes`` is tried in turn before a weight's name, and the first that gives a name in
    the checkpoint is used; if none does, the name stays. ``chunks`` are the keys of the model's
    chunks in ``state``.
    """
    stored = stored_entries(path)
    for chunk in chunks:
        sharded, _ = extract_sharded_tensors_and_factories(state[chunk])
        for entry in nested_values(sharded):
            names = (f"{prefix}{entry.key}" for prefix in prefixes)
            entry.key = next((name for name in names if name in stored), entry.key)


def averages_to_save(
    ema: ShardedEMA,
    model: Chunks,
    state: dict[str, Any],
    metadata: dict[str, Any],
    *,
    frozen: bool = False,
    distributed: bool = False,
) -> dict[str, Any]:
    """Return this rank's part of the averaged weights (EMA), sharded like the weights in ``state``.

    The keys are the weights' positions in ``ema``, as text, such as "0"; in the format of
    `flat_state`, the weights' names.

    Args:
        frozen: whether to add the weights that are not trained; each is its own average.
        distributed: whether the optimizer's state is sharded over data-parallel ranks.
    """
    if metadata.get(SHARDING) == flat_state.FLAT:
        return flat_state.averages(ema, model, metadata[flat_state.PLACE], PREFIX)
    entries = _entries_of({key: state[key] for key in chunk_keys(model)})
    sharded = dict[str, Any]()
    for index, part in enumerate(ema.parts):
        entry = entries[id(part.parameter)]
        if part.group is None:
            sharded[str(index)] = make_sharded_optimizer_tensor(entry, part.whole(), prefix=EMA)
        elif part.average.numel():
            sharded[str(index)] = in_boxes(entry, EMA, part.average, part.start)
    for index, entry in _frozen(ema, entries) if frozen else ():
        value = entry.data.detach().float()
        if (own := _whole(entry, value, boxes=distributed)) is not None:
            sharded[str(index)] = own
    return sharded


def _whole(entry: Any, value: torch.Tensor, *, boxes: bool) -> Any:
    """Return the sharded tensors of a frozen weight's average; None if another rank has them.

    A tensor of all layers is either cut into ``boxes`` everywhere, or nowhere.
    """
    if not boxes:
        return make_sharded_optimizer_tensor(entry, value, prefix=EMA)
    return in_boxes(entry, EMA, value, 0) if entry.replica_id[-1] == 0 else None


def _frozen(ema: ShardedEMA, entries: dict[int, Any]) -> Iterator[tuple[int, Any]]:
    """Yield the entries (`_entries_of`) of weights without an average, numbered after ``ema``'s."""
    averaged = {id(part.parameter) for part in ema.parts}
    weights = (x for x in entries.values() if isinstance(x.data, torch.nn.Parameter))
    yield from enumerate((x for x in weights if id(x.data) not in averaged), len(ema.parts))


def averages_to_load(
    path: Path, ema: ShardedEMA, model: Chunks, state: dict[str, Any], metadata: dict[str, Any]
) -> dict[str, Any]:
    """Return sharded tensors into which averaged weights (EMA) can be loaded from ``path``.

    They are fp32 copies of the weights, sharded like those in ``state``. A load overwrites them,
    except for padding rows of the vocabulary that the checkpoint lacks. In the format of
    `flat_state`, and of weights that are sharded over replicas, they are not copies but this rank's
    averages themselves.
    """
    if metadata.get(SHARDING) == flat_state.FLAT:
        return flat_state.averages(ema, model, metadata[flat_state.PLACE], PREFIX)
    entries = _entries_of({key: state[key] for key in chunk_keys(model)})
    state = dict[str, Any]()
    for index, part in enumerate(ema.parts):
        entry = entries[id(part.parameter)]
        if hasattr(part.parameter, "weight_shard"):
            if part.average.numel():
                state[str(index)] = in_boxes(entry, EMA, part.average, part.start)
        else:
            value = part.parameter.detach().to("cpu", torch.float32, copy=True)
            state[str(index)] = make_sharded_optimizer_tensor(entry, value, prefix=EMA)
    stored = stored_entries(path)
    boxes = any(hasattr(chunk, "whole_weights") for chunk in model)
    for index, entry in _frozen(ema, entries):
        if f"{PREFIX}{entry.key}" in stored:  # a tensor of all layers is read whole
            value = entry.data.detach().to("cpu", torch.float32, copy=True)
            if (own := _whole(entry, value, boxes=boxes)) is not None:
                state[str(index)] = own
    return state


def load_averages(ema: ShardedEMA, model: Chunks, loaded: dict[str, Any]) -> None:
    """Copy loaded averages into ``ema``.

    ``loaded`` is the state of `averages_to_load`, filled from a checkpoint.
    """
    if not all(key.isdigit() for key in loaded):
        flat_state.load_averages(ema, model, loaded)
        return
    ema.load([loaded.get(str(index), []) for index in range(len(ema.parts))])


def _entries_of(weights: dict[str, Any]) -> dict[int, Any]:
    """Map ``id(parameter)`` to its sharded tensor or factory in ``weights``, a sharded state."""
    sharded, _ = extract_sharded_tensors_and_factories(weights)
    return {id(entry.data): entry for entry in nested_values(sharded)}
