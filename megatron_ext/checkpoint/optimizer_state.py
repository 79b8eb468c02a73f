"""Works around six faults of megatron-core's optimizers in saving and loading their state.

- With torch's own Adam, the distributed optimizer cannot list its state before the first update.
- The distributed optimizer fails on the step count that torch keeps for each parameter, or resets
  it.
- A checkpoint cannot be loaded if only the saving or only the loading run has expert parallelism.
  With expert parallelism, experts have an optimizer of their own.
- On a pipeline stage without experts, the experts' optimizer has no parameters. It then cannot be
  saved, or is saved without its step count.
- A 16-bit run cannot load its state if a parameter group is empty on a pipeline stage.
- The distributed optimizer does not save a weight without Adam's second moment, such as a matrix
  that Muon updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor
from torch.nn import Parameter

from megatron_ext.checkpoint.memory import fills
from megatron_ext.errors import CheckpointError
from megatron_ext.optim.adam import ADAMS, Custom, start_state
from megatron_ext.optim.muon import Muon
from megatron_ext.optim.update import parts_of
from megatron_ext.parallel.collectives import largest_of_all_ranks
from megatron_ext.parallel.context import own_group
from megatron_ext.parallel.grid import Layout

RESHARDABLE = "fully_reshardable"
"""megatron-core's name of distributed optimizer state that loads in any layout."""
GATHERED = "dp_zero_gather_scatter"
"""megatron-core's format of state that the first rank of each data-parallel group saves."""
COUNTING = (*ADAMS, Custom)
"""Optimizers whose state has a step count."""
SECOND_MOMENT = "exp_avg_sq"
MAIN_WEIGHTS = "fp32_from_fp16_params"
"""Key of the fp32 copies of 16-bit weights in an optimizer's state."""
KIND_OF_GROUP = ("wd_mult", "lr_mult", "is_decoupled_lr")
"""Settings that distinguish an optimizer's parameter groups, besides ``is_expert_parallel``."""
RATES = ("max_lr", "min_lr", "start_wd", "end_wd", "optimizer")
"""Settings of a parameter group that a resumed run may change."""


def is_distributed(optimizer: MegatronOptimizer | None) -> bool:
    """Return whether an optimizer's state is sharded over data-parallel ranks."""
    return any(isinstance(part, DistributedOptimizer) for part in parts_of(optimizer))


def has_main_weights(optimizer: MegatronOptimizer | None) -> bool:
    """Return whether an optimizer that is not distributed keeps fp32 weights beside 16-bit ones."""
    return any(isinstance(part, Float16OptimizerWithFloat16Params) for part in parts_of(optimizer))


def can_load_in_boxes(optimizer: MegatronOptimizer) -> bool:
    """Return whether the state of all distributed optimizers exists once `prime` has run.

    Then a checkpoint can be read straight into it (`optimizer_boxes`).
    """
    distributed = [part for part in parts_of(optimizer) if isinstance(part, DistributedOptimizer)]
    return all(isinstance(part.optimizer, COUNTING) for part in distributed)


def prime(optimizer: MegatronOptimizer) -> None:
    """Create the all-zero state of an optimizer that has made no update yet."""
    for part in parts_of(optimizer):
        inner = getattr(part, "optimizer", None)
        if isinstance(inner, (*COUNTING, torch.optim.SGD)):
            start_state(inner)


@contextmanager
def without_stubs(optimizer: MegatronOptimizer | None) -> Iterator[None]:
    """Within the context, leave optimizers without parameters out of a chain of optimizers.

    megatron-core makes one for dense layers even if only experts are trained on a rank, and cannot
    save or load it.
    """
    chain: Any = optimizer
    parts = list(getattr(chain, "chained_optimizers", ()))
    live = [part for part in parts if not getattr(part, "is_stub_optimizer", False)]
    if not live or len(live) == len(parts):
        yield
        return
    chain.chained_optimizers = live
    try:
        yield
    finally:
        chain.chained_optimizers = parts


def _counting(optimizer: MegatronOptimizer) -> list[Any]:
    inners = [getattr(part, "optimizer", None) for part in parts_of(optimizer)]
    return [inner for inner in inners if isinstance(inner, COUNTING)]


def step_count(optimizer: MegatronOptimizer) -> float | None:
    """Return the number of updates so far, None before the first; all ranks call this together.

    A pipeline stage may train no parameter, for example if a LoRA run has no adapter on it. Such a
    stage has no count of its own, and takes that of another rank.
    """
    entries = [entry for inner in _counting(optimizer) for entry in inner.state.values()]
    own = next((float(entry["step"]) for entry in entries if "step" in entry), None)
    (count,) = largest_of_all_ranks([-1 if own is None else int(own)])
    return own if own is not None or count < 0 else float(count)


@contextmanager
def counted(optimizer: MegatronOptimizer, count: float | None) -> Iterator[None]:
    """Within the context, give the step count ``count`` to counting optimizers without parameters.

    One rank saves the step count for all ranks, and its optimizer may have no parameters. If
    ``count`` is None, as before the first update, nothing changes.
    """
    empty = [x for x in _counting(optimizer) if count is not None and not x.state]
    for inner in empty:
        inner.state[_NOTHING] = {"step": torch.tensor(count)}
    try:
        yield
    finally:
        for inner in empty:
            del inner.state[_NOTHING]


@contextmanager
def completed(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Within the context, give Muon's matrices in distributed optimizers an all-zero second moment.

    megatron-core's distributed optimizer does not save a weight without a second moment.
    """
    muons = [
        part.optimizer
        for part in parts_of(optimizer)
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, Muon)
    ]
    for muon in muons:
        for main in muon.matrices:
            muon.state[main][SECOND_MOMENT] = torch.zeros(main.shape, device="cpu")
    try:
        yield
    finally:
        for muon in muons:
            for main in muon.matrices:
                muon.state[main].pop(SECOND_MOMENT, None)


def leave_out_second_moments(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Remove, in place, the second moments that `completed` has added to an optimizer state.

    This applies to the `RESHARDABLE` format only. The format "dp_reshardable" stores whole buffers
    of parameters, so that its files keep the zeros.
    """
    for part, part_state in zip(parts_of(optimizer), _states_of(optimizer, state), strict=True):
        muon = getattr(part, "optimizer", None)
        whole = part_state.get("param_state_sharding_type") == RESHARDABLE
        if whole and isinstance(muon, Muon):
            weights = [weight for buffer in part.buffers for weight in buffer.param_index_map]
            for weight, entry in zip(weights, part_state["param_state"].values(), strict=True):
                if weight in muon.weights:
                    del entry[SECOND_MOMENT]


_NOTHING: Any = "no parameter"


def leave_out_nothing(state: dict[Any, Any]) -> None:
    """Remove from ``state``, in place, the entries that only optimizers without parameters have.

    These are an empty state of the parameters, and the step count that `counted` adds. Ranks with
    parameters lack them, and all ranks must save the same entries. Also replace the list of fp32
    weights per parameter group by a mapping from group index to weights, without groups that are
    empty on this pipeline stage.
    """
    for part in (state, *_numbered(state)):
        inner = part.get("optimizer", part)
        if isinstance(inner, dict):  # else one object, which a single layout reads whole
            inner.get("state", {}).pop(_NOTHING, None)
        if part.get("param_state") == {}:
            del part["param_state"]
        if MAIN_WEIGHTS in part:
            groups = enumerate(part.pop(MAIN_WEIGHTS))
            main_weights = {number: weights for number, weights in groups if weights}
            if main_weights:
                part[MAIN_WEIGHTS] = main_weights


def drop_main_weights(common: dict[Any, Any]) -> None:
    """Drop, in place, the lists of fp32 weights in a checkpoint's common state.

    Their entries are empty, since the weights themselves are stored as shards.
    """
    for part in (common, *_numbered(common)):
        part.pop(MAIN_WEIGHTS, None)


def _states_of(optimizer: MegatronOptimizer | None, state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the states of the optimizers in a chain; a single optimizer gives a list of one."""
    return [state] if len(parts_of(optimizer)) == 1 else _numbered(state)


# The shards of fp32 weights are views of parameters, and loading copies values into them.
@torch.no_grad()
def load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Load the state of an optimizer, or of a chain of them.

    The checkpoint may have been saved with another expert-parallel size, and so with another number
    of optimizers in the chain.
    """
    parts = parts_of(optimizer)
    # With other expert parallelism, several optimizers may read the state of one, or one of
    # several.
    numbered = len(_numbered(state))
    regroups = numbered < len(state) if len(parts) > 1 else numbered > 0
    for each in (state, *_numbered(state)):
        for group in each.get("optimizer", each).get("param_groups", ()):
            group["is_decoupled_lr"] = is_decoupled(group)
    if not is_distributed(optimizer):
        states = _regrouped_whole(parts, state) if regroups else _states_of(optimizer, state)
        inner = [each.get("optimizer", each).setdefault("state", {}) for each in states]
        # megatron-core omits the step count from a checkpoint where it is 0. All optimizers have
        # the same.
        count = next((x["common_step"] for x in inner if "common_step" in x), torch.zeros(()))
        for part, part_state in zip(parts, inner, strict=True):
            if isinstance(getattr(part, "optimizer", None), COUNTING):
                part_state.setdefault("common_step", count)
        for part, part_state in zip(parts, states, strict=True):
            if hasattr(part, "fp32_from_float16_groups"):
                main_weights = part_state.get(MAIN_WEIGHTS, {})
                numbers = range(len(part.fp32_from_float16_groups))
                part_state[MAIN_WEIGHTS] = [main_weights.get(number, []) for number in numbers]
        with _matched_by_kind(parts, states):
            optimizer.load_state_dict(states[0] if len(parts) == 1 else dict(enumerate(states)))
        return
    states = _regrouped(parts, state) if regroups else _states_of(optimizer, state)
    with _matched_by_kind(parts, states):
        for part, part_state in zip(parts, states, strict=True):
            _load_part(part, part_state)


@contextmanager
def _matched_by_kind(parts: list[Any], states: list[dict[str, Any]]) -> Iterator[None]:
    """Within the context, let saved parameter groups load even if their rates have changed.

    Newer releases of megatron-core match a saved group to the run's group not only by its kind
    (`KIND_OF_GROUP` and whether it holds experts), but also by learning rates and weight decays
    (`RATES`). So each saved group in ``states`` gets the rates of the group in ``parts`` with the
    same kind. On leaving the context, the loaded group gets the saved rates.
    """
    saved: list[tuple[Any, int, dict[str, Any]]] = []
    for part, state in zip(parts, states, strict=True):
        groups = getattr(getattr(part, "optimizer", None), "param_groups", ())
        own = {_kind_of(group): number for number, group in enumerate(groups)}
        for group in state.get("optimizer", state).get("param_groups", ()):
            number = own.get(_kind_of(group))
            if number is not None:
                rates = {key: group.pop(key) for key in RATES if key in group}
                group.update({key: groups[number][key] for key in RATES if key in groups[number]})
                saved.append((part, number, rates))
    yield
    for part, number, rates in saved:
        # Loading has replaced the group dictionaries by new ones.
        part.optimizer.param_groups[number].update(rates)


def _kind_of(group: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key) for key in (*KIND_OF_GROUP, "is_expert_parallel"))


def is_decoupled(group: dict[str, Any]) -> bool:
    """Return whether a parameter group has a decoupled learning rate.

    Releases of megatron-core mark such a group by a true ``is_decoupled_lr`` or by a false
    ``default_config``.
    """
    return bool(group.get("is_decoupled_lr")) or not group.get("default_config", True)


def _numbered(state: dict[Any, Any]) -> list[dict[str, Any]]:
    """Return, in order, the values under integer keys: the states of several optimizers."""
    return [state[number] for number in sorted(key for key in state if isinstance(key, int))]


def _regrouped(parts: list[Any], state: dict[Any, Any]) -> list[dict[str, Any]]:
    """Return one state for each distributed optimizer of this run.

    Expert parallelism gives experts an optimizer of their own. So the number of optimizers differs
    if only the saving or only the loading run has expert parallelism. Each parameter group of this
    run gets the saved group that `_group_like` finds.

    Args:
        parts: the optimizers of this run.
        state: the optimizer state that was loaded.
    """
    # The tensors need no regrouping: the checkpoint stores them under their parameters' names.
    alone = {key: value for key, value in state.items() if not isinstance(key, int)}
    numbered = _numbered(state)
    saved = [each for each in (alone, *numbered) if "optimizer" in each]
    own = numbered if len(parts) > 1 else [alone]
    states = []
    for part, tensors in zip(parts, own, strict=True):
        groups = [_group_like(group, saved) for group in part.optimizer.param_groups]
        inner = {**saved[0]["optimizer"], "param_groups": groups}
        states.append({**saved[0], **tensors, "optimizer": inner})
    return states


def _regrouped_whole(parts: list[Any], state: dict[Any, Any]) -> list[dict[str, Any]]:
    """Return one state for each optimizer of this run, for optimizers that are not distributed.

    The saving run may have had another number of optimizers, as in `_regrouped`.

    Args:
        parts: the optimizers of this run.
        state: the optimizer state that was loaded.
    """
    # The state lies under "optimizer" if there are fp32 weights beside it, else at the top level.
    alone = {key: value for key, value in state.items() if not isinstance(key, int)}
    numbered = _numbered(state)
    own, theirs = (numbered, [alone]) if len(parts) > 1 else ([alone], numbered)
    saved = [{"optimizer": each.get("optimizer", each)} for each in theirs]
    counts = [each["optimizer"].get("state", {}) for each in saved]
    count = {key: each[key] for each in counts for key in ("common_step",) if key in each}
    states = []
    for part, mine in zip(parts, own, strict=True):
        inner = mine.get("optimizer", mine)
        groups = [
            {**_group_like(group, saved), "params": named["params"]}
            for group, named in zip(part.optimizer.param_groups, inner["param_groups"], strict=True)
        ]
        filled = {"state": {**inner.get("state", {}), **count}, "param_groups": groups}
        scaler = {key: value for key, value in theirs[0].items() if key == "grad_scaler"}
        states.append({**scaler, **mine, "optimizer": filled} if inner is not mine else filled)
    return states


def _group_like(group: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a copy of the saved group with the same `KIND_OF_GROUP` settings as ``group``.

    Whether a group holds experts is not compared; the copy has the value of ``group``.

    Args:
        saved: states of optimizers, whose parameter groups are searched.

    Raises:
        CheckpointError: no saved group has the same settings.
    """
    kind = [group.get(key) for key in KIND_OF_GROUP]
    for candidate in (group for each in saved for group in each["optimizer"]["param_groups"]):
        if [candidate.get(key) for key in KIND_OF_GROUP] == kind:
            return {**candidate, "is_expert_parallel": group["is_expert_parallel"]}
    shown = ", ".join(f"{key} {value}" for key, value in zip(KIND_OF_GROUP, kind, strict=True))
    raise CheckpointError(
        f"The checkpoint's optimizer has no group of parameters with {shown}; give the flags of "
        "the run that saved it, or `--no-load-optim`."
    )


def give_groups_on_host(optimizer: MegatronOptimizer, layout: Layout) -> None:
    """Give an optimizer the groups over host memory that its loading of `GATHERED` state needs.

    All ranks of the run call this together.
    """
    kinds = layout.groups("dp-cp"), layout.expert_groups("dp")
    made = [own_group(groups, timedelta(minutes=10), backend="gloo") for groups in kinds]
    ranks_of = torch.distributed.get_process_group_ranks
    for part in parts_of(optimizer):
        ranks = ranks_of(part.data_parallel_group)
        part.data_parallel_group_gloo = next(x for x in made if ranks_of(x) == ranks)


def _load_part(part: Any, state: dict[str, Any]) -> None:
    kinds = next(iter(state.get("param_state", {}).values()), None)
    in_boxes = isinstance(kinds, dict) and any(isinstance(x, list) for x in kinds.values())
    whole = part.load_parameter_state_from_fully_reshardable
    loaders = {
        RESHARDABLE: partial(_load_boxes, part) if in_boxes else whole,
        "dp_reshardable": part.load_parameter_state_from_dp_reshardable,
    }
    load = loaders.get(state.get("param_state_sharding_type", ""))
    if load is None or not isinstance(getattr(part, "optimizer", None), COUNTING):
        part.load_state_dict(state)
        return
    part.load_state_dict({k: v for k, v in state.items() if k != "param_state"})
    inner = part.optimizer.state
    # Core copies every entry of the state, but the checkpoint holds one step for all parameters.
    # One of its formats lacks the entry; the other has this rank's own step from before the load.
    steps = {p: entry.pop("step") for p, entry in inner.items() if "step" in entry}
    load(state.get("param_state", {}))
    for parameter, step in steps.items():
        inner[parameter]["step"] = step.clone()


def _load_boxes(part: DistributedOptimizer, states: dict[int, dict[str, list[Tensor]]]) -> None:
    """Copy a loaded state, cut as `optimizer_boxes.sharded_optimizer_state` cuts it, into ``part``.

    Boxes that are the optimizer's own memory need no copy.

    Args:
        part: the optimizer.
        states: the boxes of each kind of state, for each parameter with elements on this rank.
    """
    for number, parameter in enumerate(parameters_of(part)):
        own = part._get_main_param_and_optimizer_states(parameter)
        kinds = states[number]
        if not all(fills(boxes, own[kind]) for kind, boxes in kinds.items()):
            whole = {kind: torch.cat([x.flatten() for x in boxes]) for kind, boxes in kinds.items()}
            part._set_main_param_and_optimizer_states(parameter, whole)


def parameters_of(part: DistributedOptimizer) -> Iterator[Parameter]:
    """Yield, in a fixed order, the model's parameters with elements on this rank."""
    for ranges_by_dtype in part.gbuf_ranges:
        for buckets in ranges_by_dtype.values():
            for bucket in buckets:
                yield from bucket["param_map"]
