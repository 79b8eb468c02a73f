"""A resumed run has the optimizer that it would have without an interruption."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint import optimizer_state
from megatron_ext.checkpoint.files import folder_of
from megatron_ext.checkpoint.optimizer_state import (
    MAIN_WEIGHTS,
    counted,
    is_decoupled,
    leave_out_nothing,
    step_count,
)
from megatron_ext.errors import CheckpointError
from tests.checkpoint.tiny import whole_tensors
from tests.training_runs import train_on_ranks, train_steps

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 4 "
    "--lr 1e-2 --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 32 "
    "--num-workers 0 --log-interval 1 --eval-iters 0 --save-interval 2"
).split()
SHARED = "--use-distributed-optimizer"
STAGES = "--pipeline-model-parallel-size 2"
PRECISION_AWARE = "--use-precision-aware-optimizer --exp-avg-dtype bf16"
EXPERTS = "--num-experts 2 --expert-model-parallel-size 2"


def train(flags: str, save: Path, ranks: int = 1) -> list[dict[str, Any]]:
    """Train four steps, or from step 2 on with --load; return the rows of the steps."""
    return train_steps([*TINY, *flags.split()], save, ranks)


def check_that_it_goes_on(flags: str, folder: Path, ranks: int = 1) -> list[dict[str, Any]]:
    """Check that saving after 2 of 4 steps and going on changes no row and no tensor."""
    whole = train(flags, folder / "whole", ranks)
    again = train(f"{flags} --load {folder / 'whole'} --ckpt-step 2", folder / "again", ranks)
    assert [row["iteration"] for row in again] == [3, 4]
    for row, want in zip(again, whole[2:], strict=True):
        for key in ("lm loss", "grad_norm", "learning_rate", "loss_scale", "skipped_iterations"):
            assert repr(row[key]) == repr(want[key]), (row["iteration"], key)
    mine, theirs = (
        whole_tensors(folder_of(folder / name, 4), folder / f"{name}.pt")
        for name in ("again", "whole")
    )
    # One format keeps the padding of buffers, which is whatever memory held before.
    names = {name for name in theirs if "dp_group_idx" not in name}
    assert names and names == {name for name in mine if "dp_group_idx" not in name}
    assert [name for name in names if not torch.equal(mine[name], theirs[name])] == []
    return whole


@pytest.mark.parametrize(("flags", "ranks"), [("", 1), (SHARED, 1), (f"{STAGES} {SHARED}", 2)])
def test_each_group_of_parameters_keeps_its_learning_rate(
    flags: str, ranks: int, tmp_path: Path
) -> None:
    check_that_it_goes_on(f"--decoupled-lr 1e-3 --decoupled-min-lr 1e-4 {flags}", tmp_path, ranks)


@pytest.mark.parametrize("shared", ["", SHARED])
def test_each_group_keeps_its_learning_rate_in_another_layout(shared: str, tmp_path: Path) -> None:
    flags = f"--decoupled-lr 1e-3 --disable-bias-linear {shared}"
    whole = train(flags, tmp_path / "whole")
    load = f"--load {tmp_path / 'whole'} --ckpt-step 2"
    again = train(f"{flags} {STAGES} {load}", tmp_path / "again", ranks=2)
    for row, want in zip(again, whole[2:], strict=True):
        for key in ("lm loss", "grad_norm"):
            assert math.isclose(row[key], want[key], rel_tol=1e-6), (row["iteration"], key)


def test_learning_rates_of_the_flags_or_of_the_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train("--decoupled-lr 1e-3 --lr-decay-style constant", tmp_path / "whole")
    load = f"--lr-decay-style constant --load {tmp_path / 'whole'} --ckpt-step 2"
    other = [*TINY, *f"{load} --decoupled-lr 5e-3".split()]
    assert train_on_ranks(other, save=tmp_path / "refused")[0] != 0
    assert "`--decoupled-lr` (0.005) is not the checkpoint's (0.001)" in capfd.readouterr().err
    # The rate of the line is that of the groups without one of their own.
    flags = f"{load} --decoupled-lr 5e-3 --lr 3e-2"
    (*_, last) = train(f"{flags} --override-opt-param-scheduler", tmp_path / "flags")
    assert math.isclose(last["learning_rate"], 3e-2, rel_tol=1e-6)
    (*_, last) = train(f"{flags} --use-checkpoint-opt-param-scheduler", tmp_path / "checkpoint")
    assert math.isclose(last["learning_rate"], 1e-2, rel_tol=1e-6)


HALF = ["--bf16", "--fp16 --initial-loss-scale 1024", "--bf16 --fp8-format hybrid"]


@pytest.mark.parametrize("flags", ["", *HALF, "--sgd-momentum 0 --bf16"])
def test_sgd_goes_on_with_its_momentum(flags: str, tmp_path: Path) -> None:
    check_that_it_goes_on(f"--optimizer sgd {flags}", tmp_path)


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        (f"--bf16 {SHARED} --ckpt-fully-parallel-save --ema-decay 0.5", 2),
        (f"--fp16 --initial-loss-scale 1024 {EXPERTS} {SHARED}", 2),
        (f"--bf16 {STAGES} {EXPERTS} --moe-layer-freq ([0]*1+[1]*1)", 4),
        (f"--bf16 {SHARED} {PRECISION_AWARE} {STAGES}", 2),
        (f"{SHARED} --no-dist-ckpt-optim-fully-reshardable", 2),
    ],
)
def test_muon_goes_on_bit_for_bit(flags: str, ranks: int, tmp_path: Path) -> None:
    check_that_it_goes_on(f"--optimizer muon --muon-nesterov {flags}", tmp_path, ranks)


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("", 1),
        (SHARED, 1),
        ("--optimizer muon", 1),
        ("--optimizer sgd", 1),
        (f"--optimizer-class torch.optim:RMSprop {SHARED}", 2),
        (EXPERTS, 2),
        (f"{EXPERTS} {SHARED}", 2),
    ],
)
def test_a_run_goes_on_from_before_its_first_update(flags: str, ranks: int, tmp_path: Path) -> None:
    """The first scale of fp16 is so large that no step before the checkpoint is applied."""
    fp16 = "--fp16 --hysteresis 1 --initial-loss-scale 32768"
    rows = check_that_it_goes_on(f"{fp16} {flags}", tmp_path, ranks)
    assert [math.isfinite(row["grad_norm"]) for row in rows] == [False, False, False, True]
    assert [row["loss_scale"] for row in rows] == [16384.0, 8192.0, 4096.0, 4096.0]
    # Gradients have overflown, not losses.
    assert all(math.isfinite(row["lm loss"]) and row["nan_iterations"] == 0 for row in rows)


@pytest.mark.slow
def test_a_stage_with_an_empty_group_of_parameters_goes_on_in_16_bits(tmp_path: Path) -> None:
    # The first stage holds the embedding alone, which has no biases or norms.
    layout = f"{STAGES} --pipeline-model-parallel-layout E|ttL"
    check_that_it_goes_on(f"--bf16 {layout}", tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("flags", HALF[:2])
def test_a_stage_without_experts_goes_on_in_16_bits(flags: str, tmp_path: Path) -> None:
    """Check it although the optimizer of its experts has no weights in the checkpoint."""
    flags = f"{flags} {STAGES} {EXPERTS} --moe-layer-freq ([0]*1+[1]*1)"
    check_that_it_goes_on(flags, tmp_path, ranks=4)


@pytest.mark.parametrize(
    ("before", "now"), [("--bf16", ""), ("", "--bf16"), ("--fp16 --loss-scale 256", "")]
)
def test_shared_state_goes_on_in_another_precision(before: str, now: str, tmp_path: Path) -> None:
    train(f"{SHARED} {before}", tmp_path / "whole")
    load = f"--load {tmp_path / 'whole'} --ckpt-step 2 --lr 1e-30 --override-opt-param-scheduler"
    train(f"{SHARED} {now} {load}", tmp_path / "again")
    mine, theirs = (
        whole_tensors(folder_of(tmp_path / name, step), tmp_path / f"{name}.pt")
        for name, step in (("again", 4), ("whole", 2))
    )
    for name in (name for name in theirs if name.startswith("optimizer.state.param.")):
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("before", "now", "sentence"),
    [
        ("--bf16", "", "was saved in bf16 or fp16, but this run is in fp32"),
        ("", "--fp16", "was saved in fp32, but this run is in bf16 or fp16"),
    ],
)
def test_whole_state_in_another_precision_is_refused_before_any_rank_starts(
    before: str, now: str, sentence: str, tmp_path: Path
) -> None:
    train(before, tmp_path / "whole")
    words = [*TINY, *now.split(), "--load", str(tmp_path / "whole"), "--ckpt-step", "2"]
    with pytest.raises(CheckpointError, match=f"{sentence}.* give `--no-load-optim`"):
        train_on_ranks(words, save=tmp_path / "refused")
    assert train_on_ranks([*words, "--no-load-optim"], save=tmp_path / "anew")[0] == 0


@pytest.mark.parametrize(
    "flags", ["", "--bf16 --grad-reduce-in-bf16 --overlap-grad-reduce --overlap-param-gather"]
)
def test_state_of_one_layout_goes_on(flags: str, tmp_path: Path) -> None:
    """Check the format that needs the same tensor, pipeline and expert parallel sizes."""
    flags = f"{SHARED} --no-dist-ckpt-optim-fully-reshardable --loss-reduction sample {flags}"
    check_that_it_goes_on(flags, tmp_path)


def test_state_of_one_layout_is_refused_in_another_before_any_rank_starts(tmp_path: Path) -> None:
    train(f"{SHARED} --no-dist-ckpt-optim-fully-reshardable", tmp_path / "whole")
    words = [*TINY, "--use-distributed-optimizer", "--load", str(tmp_path / "whole")]
    words += ["--pipeline-model-parallel-size", "2"]
    with pytest.raises(CheckpointError, match="only with the same tensor, pipeline and expert"):
        train_on_ranks(words, ranks=2, save=tmp_path / "refused")


def test_a_group_of_its_own_rate_is_known_by_the_keys_of_either_release() -> None:
    assert is_decoupled({"is_decoupled_lr": True}) and is_decoupled({"default_config": False})
    assert not is_decoupled({}) and not is_decoupled({"default_config": True})


def _chain(*inners: Any) -> Any:
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=x) for x in inners])


def _adam(*steps: float | None) -> torch.optim.AdamW:
    """Return Adam with weights that have been updated so often; None: not at all."""
    weights = [torch.zeros(1) for _ in steps]
    adam = torch.optim.AdamW(weights or [torch.zeros(0)])
    for weight, count in zip(weights, steps, strict=True):
        if count is not None:
            adam.state[weight]["step"] = torch.tensor(count)
    return adam


@pytest.mark.parametrize("others", [[], [None], [5.0]])
def test_the_number_of_updates_may_be_known_to_another_rank(
    others: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = [-1 if count is None else int(count) for count in others]
    monkeypatch.setattr(
        optimizer_state, "largest_of_all_ranks", lambda own: [max(*own, *theirs, -1)]
    )
    known = next((count for count in others if count is not None), None)
    assert step_count(_chain(_adam(), torch.optim.SGD([torch.zeros(1)]))) == known
    assert step_count(_chain(_adam(), _adam(3.0))) == 3.0
    assert step_count(_chain(_adam(0.0))) == 0.0


@pytest.mark.parametrize("count", [None, 0.0, 4.0])
def test_an_optimizer_without_parameters_lends_a_count(count: float | None) -> None:
    empty, full = _adam(), _adam(4.0)
    with pytest.raises(KeyError), counted(_chain(empty, full), count):
        found = [float(entry["step"]) for entry in empty.state.values()]
        assert found == ([] if count is None else [count])
        assert len(full.state) == 1
        raise KeyError
    assert not empty.state and len(full.state) == 1


def test_what_only_an_optimizer_without_parameters_has_is_left_out() -> None:
    nothing = optimizer_state._NOTHING
    part = {"optimizer": {"state": {nothing: 1, 0: 2}}, "param_state": {}}
    weights = {"optimizer": {"state": {}}, MAIN_WEIGHTS: [[], ["w"]], "param_state": {0: "x"}}
    bare = {"state": {nothing: 1}, MAIN_WEIGHTS: [[], []]}
    state: dict[Any, Any] = {0: part, 1: weights, 2: bare, 3: {"optimizer": "one object"}}
    leave_out_nothing(state)
    assert state == {
        0: {"optimizer": {"state": {0: 2}}},
        1: {"optimizer": {"state": {}}, MAIN_WEIGHTS: {1: ["w"]}, "param_state": {0: "x"}},
        2: {"state": {}},
        3: {"optimizer": "one object"},
    }


def test_empty_lists_of_main_weights_are_dropped_from_each_optimizer_of_a_chain() -> None:
    """megatron-core saves them in the common state, where the weights themselves are not."""
    one: dict[Any, Any] = {MAIN_WEIGHTS: [[]], "optimizer": {"state": {}}}
    chain = {0: {MAIN_WEIGHTS: [[]], "grad_scaler": 1}, 1: {MAIN_WEIGHTS: []}, "x": {"y": 2}}
    for state in (one, chain):
        optimizer_state.drop_main_weights(state)
    assert one == {"optimizer": {"state": {}}}
    assert chain == {0: {"grad_scaler": 1}, 1: {}, "x": {"y": 2}}


def _group(mult: float, rate: float, *, expert: bool = False, **more: Any) -> dict[str, Any]:
    kind = {"wd_mult": mult, "lr_mult": 1.0, "is_decoupled_lr": False}
    return {**kind, "is_expert_parallel": expert, "max_lr": rate, "min_lr": rate / 10, **more}


def test_a_regrouped_group_has_the_settings_of_its_kind_and_its_own_experts() -> None:
    saved = [{"optimizer": {"param_groups": [_group(0.0, 1.0), _group(1.0, 2.0, step=7)]}}]
    found = optimizer_state._group_like(_group(1.0, 9.0, expert=True), saved)
    assert found == _group(1.0, 2.0, expert=True, step=7)
    with pytest.raises(CheckpointError, match="no group of parameters with wd_mult 0.5, lr_mult"):
        optimizer_state._group_like(_group(0.5, 1.0), saved)


def test_groups_are_matched_whatever_their_rates_and_get_those_that_were_saved() -> None:
    inner = SimpleNamespace(param_groups=[_group(0.0, 1.0), _group(1.0, 1.0, expert=True)])
    part = SimpleNamespace(optimizer=inner)
    stored = [_group(1.0, 5.0, expert=True), _group(0.0, 3.0), _group(1.0, 7.0)]
    state: dict[str, Any] = {"optimizer": {"param_groups": [dict(group) for group in stored]}}
    with optimizer_state._matched_by_kind([part], [state]):
        inside = state["optimizer"]["param_groups"]
        assert [group["max_lr"] for group in inside] == [1.0, 1.0, 7.0]
        inner.param_groups = [dict(group) for group in inner.param_groups]  # as a load does
    assert [group["max_lr"] for group in inner.param_groups] == [3.0, 5.0]
    assert [group["min_lr"] for group in inner.param_groups] == [0.3, 0.5]


def test_several_whole_optimizers_become_one_with_count_and_loss_scale() -> None:
    part = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[_group(1.0, 9.0)]))
    saved: dict[Any, Any] = {
        number: {
            "optimizer": {"state": state, "param_groups": [_group(1.0, rate)]},
            "grad_scaler": {"scale": 8.0},
        }
        for number, (state, rate) in enumerate((({}, 2.0), ({"common_step": 6}, 3.0)))
    }
    own = {"optimizer": {"state": {0: "moments"}, "param_groups": [{"params": [0]}]}}
    (found,) = optimizer_state._regrouped_whole([part], {**own, **saved})
    assert found["grad_scaler"] == {"scale": 8.0}
    assert found["optimizer"]["state"] == {0: "moments", "common_step": 6}
    assert found["optimizer"]["param_groups"] == [_group(1.0, 2.0, params=[0])]


def test_each_weight_keeps_a_count_of_its_own_after_a_load() -> None:
    """Core copies each entry of the state, but its files hold no count for each weight."""
    adam = _adam(3.0, 3.0)
    shared = torch.tensor(8.0)
    seen = list[Any]()

    class Part:
        optimizer = adam

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert "param_state" not in state
            for entry in adam.state.values():
                entry["step"] = shared

        def load_parameter_state_from_fully_reshardable(self, values: Any) -> None:
            seen.append((values, [dict(entry) for entry in adam.state.values()]))

        load_parameter_state_from_dp_reshardable = None

    state = {"param_state_sharding_type": "fully_reshardable", "param_state": {0: "x"}}
    optimizer_state._load_part(Part(), state)
    assert seen == [({0: "x"}, [{}, {}])]
    steps = [entry["step"] for entry in adam.state.values()]
    assert [float(step) for step in steps] == [8.0, 8.0]
    assert len({step.data_ptr() for step in (*steps, shared)}) == 3
