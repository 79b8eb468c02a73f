"""Adam where Transformer Engine is installed."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core.optimizer as core_optimizer
import pytest
import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_ext.optim import builder
from megatron_ext.optim.adam import start_state
from megatron_ext.optim.fused_adam import CountedAdam
from megatron_ext.optim.fused_adam import FusedAdam as FusedAdamOfTorch
from megatron_ext.optim.shards import take_sharded_gradients
from megatron_ext.optim.update import parts_of
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.run import Run
from tests.checkpoint.tiny import whole_tensors
from tests.ranks import ranks
from tests.runs_from_inside import build
from tests.training_runs import TINY, mock_data, train, without

HALF, SINGLE = torch.bfloat16, torch.float32

SMALL = [
    *TINY,
    *mock_data(),
    *"--vocab-size 200 --num-layers 1 --hidden-size 32 --ffn-hidden-size 64".split(),
    *"--seq-length 16 --train-iters 4 --save-interval 2".split(),
]


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        *,
        adam_w_mode: bool,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode and not capturable
        names = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, {**names, "bias_correction": True})


@pytest.fixture
def installed() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (core_optimizer, distrib_optimizer):
            patch.setattr(module, "Adam", FusedAdam)
        patch.setattr(core_optimizer, "USING_PYTORCH_OPTIMIZER", False)
        patch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
        patch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)
        yield patch


@pytest.mark.parametrize(("name", "rule"), [("adam", "AdamW"), ("muon", "Muon"), ("sgd", "SGD")])
def test_the_flag_names_the_rule(name: str, rule: str, tmp_path: Path) -> None:
    def look(run: Run) -> None:
        (part,) = parts_of(run.optimizer)
        assert type(part.optimizer).__name__ == rule
        # A checkpoint is loaded into a state that exists, with the step count of Adam.
        part.init_state_fn(part.optimizer)
        expected = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "SGD": {"momentum_buffer"}}
        for state in part.optimizer.state.values():
            if rule in expected:
                assert set(state) == expected[rule]
        assert len(part.optimizer.state) == len(part.get_parameters())

    words = f"--train-iters 1 --no-use-distributed-optimizer --optimizer {name}"
    train([*SMALL, *words.split()], tmp_path, prepare=look)


@ranks()
def test_each_moment_has_the_dtype_of_its_own_flag(context: ParallelContext) -> None:
    flags = without(SMALL, "--save-interval")
    for name, moments in (("exp-avg", (HALF, SINGLE)), ("exp-avg-sq", (SINGLE, HALF))):
        words = f"--use-precision-aware-optimizer --{name}-dtype bf16"
        for part in parts_of(build([*flags, *words.split()], context).optimizer):
            assert part.optimizer.moments == moments
            assert all(group["fused"] for group in part.optimizer.param_groups)


def test_momentum_is_kept_only_where_it_is_used() -> None:
    first, second = torch.ones(2), torch.ones(3)
    groups = [{"params": [first], "momentum": 0.9}, {"params": [second], "momentum": 0.0}]
    sgd = torch.optim.SGD(groups, lr=0.1)
    start_state(sgd)
    assert not sgd.state[first]["momentum_buffer"].any()
    assert second not in sgd.state or not sgd.state[second]


def test_sharded_gradients_are_those_of_both_kinds_of_weights() -> None:
    """A run in 16 bits may keep some weights, such as routers', in 32 bits."""

    class Part(DistributedOptimizer):  # type: ignore[misc]
        def __init__(self) -> None:
            pairs = []
            for value in (1.0, 2.0):
                model, main = torch.zeros(2), torch.zeros(1)
                model.main_grad = torch.full((1,), value)  # type: ignore[attr-defined]
                pairs.append((model, main))
            (half, main), (single, own) = pairs
            self.is_stub_optimizer = False
            self.model_float16_groups = [[half]]
            self.shard_fp32_from_float16_groups = [[main]]
            self.model_fp32_groups = [[single]]
            self.shard_fp32_groups = [[own]]

    part: Any = Part()
    take_sharded_gradients(part)
    part._copy_model_grads_to_main_grads()
    assert part.shard_fp32_from_float16_groups[0][0].grad.tolist() == [1.0]
    assert part.shard_fp32_groups[0][0].grad.tolist() == [2.0]


def _expect(run: Run) -> None:
    inner = run.optimizer.chained_optimizers[0].optimizer  # type: ignore[union-attr]
    assert isinstance(inner, CountedAdam)


def _train(folder: Path, *more: str, **options: Any) -> dict[str, torch.Tensor]:
    train([*SMALL, *more], folder, **options)
    if "--exit-interval" in more:
        return {}
    return whole_tensors(folder / "iter_0000004", folder / "whole.pt")


@pytest.mark.slow
def test_checkpoints_go_on_with_either_adam(installed: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = tmp_path / "with"
    _train(first, "--exit-interval", "2", prepare=_expect)
    load = ["--load", str(first)]
    found = {"with": _train(tmp_path / "later", *load, prepare=_expect)}
    installed.undo()
    found["without"] = _train(tmp_path / "without", *load)
    truth = _train(tmp_path / "truth")
    for name, tensor in truth.items():
        for kind, tensors in found.items():
            assert torch.equal(tensors[name], tensor), (kind, name)


def test_what_a_checkpoint_does_not_say_keeps_its_default() -> None:
    """A checkpoint of torch's Adam resumes with Transformer Engine's."""
    weight = torch.nn.Parameter(torch.ones(2))
    theirs = torch.optim.AdamW([weight], lr=0.5).state_dict()
    ours = FusedAdam([weight], 0.1, 0.0, (0.9, 0.99), 1e-8, adam_w_mode=True)

    class Chain:
        chained_optimizers = (type("Part", (), {"optimizer": ours})(),)

    builder.choose_kernels(Chain(), fused=True)  # type: ignore[arg-type]
    ours.load_state_dict(theirs)
    assert ours.param_groups[0]["bias_correction"] is True
    assert ours.param_groups[0]["lr"] == 0.5


def test_groups_keep_their_settings_in_another_adam() -> None:
    """Defaults fill in what a group lacks, and decide nothing else."""
    weight, bias = torch.ones(2), torch.ones(2)
    groups = [{"params": [weight], "lr": 0.5, "betas": (0.8, 0.9)}, {"params": [bias], "eps": 1.0}]
    theirs = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3)
    theirs.param_groups[1]["weight_decay"] = 0.0

    part: Any = SimpleNamespace(optimizer=theirs)
    builder.take_torchs_adam(part, (torch.bfloat16, torch.float32), None)
    assert isinstance(part.optimizer, FusedAdamOfTorch)
    first, second = part.optimizer.param_groups
    assert first["params"][0] is weight and second["params"][0] is bias
    names = ("lr", "betas", "eps", "weight_decay")
    assert [first[name] for name in names] == [0.5, (0.8, 0.9), 1e-8, 0.3]
    assert [second[name] for name in names] == [0.1, (0.9, 0.999), 1.0, 0.0]
    assert [part.optimizer.defaults[name] for name in names] == [0.1, (0.9, 0.999), 1e-8, 0.3]


IN_16_BITS = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16".split()


def _narrow(run: Run) -> None:
    for part in parts_of(run.optimizer):
        for state in part.optimizer.state.values():
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
            assert state["exp_avg"].any()


@pytest.mark.slow
def test_moments_in_16_bits_go_on_in_another_layout(tmp_path: Path) -> None:
    """Checkpoints hold the moments in float32, which changes no bit of them."""
    words = [*SMALL, *IN_16_BITS]
    whole = train(words, tmp_path / "whole", ranks=2)
    first = tmp_path / "first"
    train([*words, "--exit-interval", "2"], first, ranks=2)
    saved = whole_tensors(first / "iter_0000002", first / "whole.pt")
    moments = [tensor for name, tensor in saved.items() if ".exp_avg" in name]
    assert moments
    for moment in moments:
        assert moment.dtype == torch.float32
        assert torch.equal(moment, moment.bfloat16().float())
    layouts = {"same": (2, []), "tp2": (2, "--tensor-model-parallel-size 2".split())}
    for name, (size, more) in layouts.items():
        load = ["--load", str(first), *more]
        rows = train([*words, *load], tmp_path / name, ranks=size, prepare=_narrow)
        for row, other in zip(rows[-2:], whole[-2:], strict=True):
            exact = 0 if name == "same" else 1e-4
            assert row["lm loss"] == pytest.approx(other["lm loss"], rel=exact)
    wide = [word for word in words if word not in IN_16_BITS]
    rows = train([*wide, "--load", str(first)], tmp_path / "wide", ranks=2)
    assert rows[-2]["lm loss"] == whole[-2]["lm loss"]


def test_only_an_adam_that_cannot_skip_on_the_device_is_replaced() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    theirs = FusedAdam([weight], 0.1, 0.2, (0.9, 0.99), 1e-8, adam_w_mode=True)
    for inner, kind in ((theirs, FusedAdamOfTorch), (CountedAdam([weight]), CountedAdam)):
        part: Any = SimpleNamespace(optimizer=inner)
        builder.take_torchs_adam(part, (SINGLE, SINGLE), None)
        assert type(part.optimizer) is kind
        # Settings that the other Adam has no use for have torch's defaults.
        (group,) = part.optimizer.param_groups
        assert (group["lr"], group["amsgrad"]) == (inner.defaults["lr"], False)
    empty: Any = SimpleNamespace(optimizer=None)
    builder.take_torchs_adam(empty, (HALF, HALF), None)
    assert empty.optimizer is None
