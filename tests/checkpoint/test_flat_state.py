"""A rank's state as it lies in memory: its places in the layout, and what a load copies."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from megatron_ext.checkpoint import flat_state
from megatron_ext.checkpoint.flat_state import Place
from megatron_ext.optim.shards import Shard


class _Group:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank


def test_a_place_counts_copies_of_dense_weights_and_of_experts_apart() -> None:
    ranks = {"ep": 2, "expt_tp": 3, "dp": 4, "dp_cp": 5, "expt_dp": 6, "tp": 1}
    groups = SimpleNamespace(**{name: _Group(rank) for name, rank in ranks.items()})
    context: Any = SimpleNamespace(pgs=groups, pp_rank=7, tp_rank=1)
    place = Place.of(context)
    assert place == Place("pp7.tp1", "pp7.ep2.tp3", dense_replica=5, expert_replica=6)

    weight, expert = Parameter(torch.zeros(4, 5)), Parameter(torch.zeros(4, 5))
    expert.allreduce = False  # type: ignore[attr-defined]
    values = torch.arange(6.0).view(2, 3)
    group: Any = "group"
    for parameter, where, replica in ((weight, "pp7.tp1", 5), (expert, "pp7.ep2.tp3", 6)):
        whole = place.sharded("name", torch.zeros(4, 5), Shard(parameter, parameter))
        assert (whole.key, whole.replica_id) == (f"name/{where}", replica)
        assert (whole.global_shape, whole.global_offset) == ((20,), (0,))
        part = place.sharded("name", values, Shard(parameter, values, 7, group))
        assert (part.key, part.replica_id) == (f"name/{where}", 0)
        assert (part.local_shape, part.global_shape, part.global_offset) == ((6,), (20,), (7,))
        assert part.data.data_ptr() == values.data_ptr()


def _adam(*weights: Parameter, steps: int) -> Any:
    """Return a chain of one optimizer, which has updated its first group of weights."""
    first = weights[0]
    groups = [{"params": [first], "lr": 0.5}, {"params": list(weights[1:]), "lr": 0.25}]
    inner = torch.optim.AdamW(groups)
    for _ in range(steps):
        first.grad = torch.ones_like(first)
        inner.step()
    for weight in weights:
        state = inner.state[weight]
        state.setdefault("step", torch.tensor(0.0))
        for name in ("exp_avg", "exp_avg_sq"):
            state.setdefault(name, torch.zeros_like(weight))
    scaler = SimpleNamespace(scale=torch.tensor(4.0), tracker=steps)
    scaler.state_dict = lambda: {"scale": scaler.scale, "tracker": scaler.tracker}

    def load(state: dict[str, Any]) -> None:
        scaler.scale, scaler.tracker = state["scale"], state["tracker"]

    scaler.load_state_dict = load
    return SimpleNamespace(
        optimizer=inner, grad_scaler=scaler, get_parameters=lambda: list(weights)
    )


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Parameter(torch.ones(3))
        self.second = Parameter(torch.ones(2))


@pytest.mark.parametrize("steps", [0, 3])
def test_a_loaded_optimizer_has_the_counts_and_rates_but_not_the_memory(steps: int) -> None:
    """Each group keeps its own count, also one of 0; a group without one takes another's."""
    place = Place("pp0.tp0", "pp0.ep0.tp0", 0, 0)
    saved, other = _Model(), _Model()
    source = _adam(saved.first, saved.second, steps=steps)
    target = _adam(other.first, other.second, steps=5)
    target.grad_scaler.scale = torch.tensor(1.0)
    for group in target.optimizer.param_groups:
        group["lr"] = 9.0
    state = flat_state.optimizer_state(source, [saved], place)
    assert flat_state.is_flat(state) and not flat_state.is_flat({})
    records = state[flat_state.RECORDS]
    assert records.data[0]["steps"] == [steps, 0, steps]
    values = {
        name: records.data if name == flat_state.RECORDS else {k: v.data for k, v in kinds.items()}
        for name, kinds in state.items()
    }
    flat_state.load_optimizer(target, [other], values)
    assert torch.equal(other.first, saved.first)
    counts = [float(target.optimizer.state[w]["step"]) for w in (other.first, other.second)]
    assert counts == [steps, 0]
    assert [group["lr"] for group in target.optimizer.param_groups] == [0.5, 0.25]
    assert (target.grad_scaler.scale, target.grad_scaler.tracker) == (4.0, steps)
    # The memory of a snapshot changes later.
    source.grad_scaler.scale.fill_(7.0)
    assert target.grad_scaler.scale == 4.0


def test_the_count_of_a_group_without_elements_here_is_that_of_another() -> None:
    place = Place("pp0.tp0", "pp0.ep0.tp0", 0, 0)
    model = _Model()
    source = _adam(model.first, model.second, steps=3)
    del source.optimizer.state[model.first]["step"]
    source.optimizer.state[model.second]["step"].fill_(2)
    records = flat_state.optimizer_state(source, [model], place)[flat_state.RECORDS].data
    assert records[0]["steps"] == [None, 2, 2]
    source.optimizer.state[model.first]["step"] = torch.tensor(0.0)
    kinds = ("param", "exp_avg", "exp_avg_sq")
    values: dict[str, Any] = {
        f"0.{name}": {kind: torch.zeros_like(weight) for kind in kinds}
        for name, weight in model.named_parameters()
    }
    flat_state.load_optimizer(source, [model], {**values, flat_state.RECORDS: records})
    counts = [float(source.optimizer.state[w]["step"]) for w in (model.first, model.second)]
    assert counts == [2, 2]
