"""The parts of a run's state: their keys, rates by flags or checkpoint, and random states."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch.nn import Parameter

from megatron_ext.checkpoint import optimizer_state, state
from megatron_ext.checkpoint.state import (
    _settle_rates,
    chunk_keys,
    common_state,
    content_metadata,
    flat_arguments,
    goes_on_averaging,
    load_averages,
)
from megatron_ext.errors import CheckpointError
from megatron_ext.optim.ema import ShardedEMA


def test_counters_come_before_flags_of_the_same_name() -> None:
    sections = {"a": {"x": 1, "iteration": 0}, "b": {"y": 2}, "device": "cpu"}
    assert vars(flat_arguments(sections, {"iteration": 7})) == {"x": 1, "y": 2, "iteration": 7}
    common = common_state(7, {"floating_point_operations": 3e9}, sections)
    assert common["num_floating_point_operations_so_far"] == 3e9
    assert (common["iteration"], common["args"].x, common["checkpoint_version"]) == (7, 1, 3.0)
    assert common_state(7, {}, {})["num_floating_point_operations_so_far"] == 0.0


def test_the_description_of_the_sharding_follows_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "is_distributed", bool)
    optimizer: Any = object()
    kinds = {
        (True, True): "fully_reshardable",
        (True, False): "dp_reshardable",
        (False, True): None,
        (False, False): None,
    }
    for (distributed, reshardable), kind in kinds.items():
        found = content_metadata(optimizer if distributed else None, reshardable=reshardable)
        assert found.get(state.SHARDING) == kind
        assert ("distrib_optim_fully_reshardable_mem_efficient" in found) == (
            kind == "fully_reshardable"
        )
    assert content_metadata(optimizer, reshardable=False, flat=True)[state.SHARDING] == "flat"
    assert chunk_keys([object()]) == ["model"]  # type: ignore[list-item]
    assert chunk_keys([object()] * 2) == ["model0", "model1"]  # type: ignore[list-item]


def _settled(
    loaded: dict[str, Any], own: dict[str, float], *, override: bool = False, use: bool = False
) -> dict[str, Any]:
    group = dict(loaded)
    scheduler: Any = SimpleNamespace(
        override_opt_param_scheduler=override, use_checkpoint_opt_param_scheduler=use
    )
    _settle_rates([group], [own], scheduler)
    return {name: group[name] for name in ("max_lr", "min_lr")}


OWN, LOADED = {"max_lr": 2.0, "min_lr": 0.2}, {"max_lr": 1.0, "min_lr": 0.1}


def test_rates_of_a_group_are_the_flags_or_the_checkpoints_as_a_flag_says() -> None:
    decoupled = {**LOADED, "is_decoupled_lr": True}
    for group in (LOADED, decoupled):
        assert _settled(group, OWN, override=True) == OWN
        assert _settled(group, OWN, use=True) == LOADED
    assert _settled(LOADED, OWN) == LOADED
    assert _settled({}, OWN) == OWN  # what Megatron-LM has not stored
    assert _settled(decoupled, LOADED) == LOADED
    older = {**LOADED, "default_config": False}
    for group in (decoupled, older):
        with pytest.raises(CheckpointError, match=r"--decoupled-lr` \(2.0\) .*'s \(1.0"):
            _settled(group, OWN)
        with pytest.raises(CheckpointError, match=r"--decoupled-min-lr` \(0.2\) is"):
            _settled(group, {"max_lr": 1.0, "min_lr": 0.2})
    assert _settled({**LOADED, "default_config": True}, OWN) == LOADED


def test_averages_go_on_if_both_run_and_checkpoint_have_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "on_first_rank", lambda work, _what: work())
    ema: Any = object()
    for stored, own, goes_on, said in (
        (True, ema, True, None),
        (False, ema, False, "so they start from the loaded ones"),
        (True, None, False, "which a run without `--ema-decay` leaves out"),
        (False, None, False, None),
    ):
        monkeypatch.setattr(state, "holds_averages", lambda _, stored=stored: stored)
        notes = list[str]()
        assert goes_on_averaging(Path("x"), own, notes) == goes_on
        assert len(notes) == (said is not None) and all(str(said) in note for note in notes)


def test_more_than_ten_averages_are_loaded_in_their_order() -> None:
    model = torch.nn.ParameterList([Parameter(torch.zeros(2)) for _ in range(12)])
    ema = ShardedEMA([model], None)
    load_averages(ema, [], {str(n): torch.full((2,), float(n)) for n in reversed(range(12))})
    assert [float(part.average[0]) for part in ema.parts] == list(range(12))


def test_random_states_of_one_replica_or_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        np.random.seed(seed)
        return {
            "random_rng_state": __import__("random").getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.get_rng_state(),
            "rng_tracker_states": {},
        }

    set_on_device = list[torch.Tensor]()
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_on_device.append)
    states = [own(seed) for seed in range(3)]
    context: Any = SimpleNamespace(dp_rank=1)
    for stored, wanted in ((states, 1), (states[2:], 2)):
        state.restore_random_state(context, stored)
        assert torch.equal(torch.get_rng_state(), states[wanted]["torch_rng_state"])
        drawn = np.random.rand()
        np.random.seed(wanted)
        assert np.random.rand() == drawn
        assert torch.equal(set_on_device[-1], states[wanted]["cuda_rng_state"])


class _Group:
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def test_random_states_of_experts_have_an_entry_for_each_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    for experts, shape, offset, replica in (
        (1, (2, 4), (1, 3), 5),
        (2, (2, 4, 6), (1, 3, 5), 0),
    ):
        layout = SimpleNamespace(
            pipeline_model_parallel_size=2,
            tensor_model_parallel_size=4,
            expert_model_parallel_size=experts,
        )
        groups = SimpleNamespace(dp_cp=_Group(5, 6), dp=_Group(2, 3))
        context: Any = SimpleNamespace(layout=layout, pgs=groups, pp_rank=1, tp_rank=3)
        found = state.random_state(context)
        assert (found.global_shape, found.global_offset) == (shape, offset)
        assert found.replica_id == replica
        assert isinstance(found.data[0]["np_rng_state"], tuple)  # the form that Megatron-LM reads


class _Chunk:
    def __init__(self) -> None:
        self.loaded: Any = None

    def load_state_dict(self, values: Any) -> None:
        self.loaded = values


def test_an_empty_stage_has_nothing_to_load_and_fp32_weights_follow_the_model() -> None:
    chunks: Any = [_Chunk(), _Chunk()]
    reloaded = list[str]()
    optimizer: Any = SimpleNamespace(reload_model_params=lambda: reloaded.append("reloaded"))
    state.apply_state({"model1": "values"}, chunks, optimizer, None, with_optimizer=False)
    assert [chunk.loaded for chunk in chunks] == [None, "values"]
    assert reloaded == ["reloaded"]


def test_a_weight_gets_the_first_stored_name(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = dict.fromkeys(("critic.a", "ema.a", "a", "ema.b", "b", "c"))
    monkeypatch.setattr(state, "stored_entries", lambda _: stored)
    entries = {
        name: ShardedTensor.from_rank_offsets(name, torch.zeros(1)) for name in ("a", "b", "c", "d")
    }
    state.take_named(Path("x"), {"model": entries, "other": 1}, ["model"], ["critic.", "ema."])
    assert [entry.key for entry in entries.values()] == ["critic.a", "ema.b", "c", "d"]
