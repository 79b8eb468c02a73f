"""Optimizers of the user's own, against plain torch, in layouts and through checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.config.optimizer import OptimizerConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.optim.custom import findings, load_optimizer
from megatron_ext.optim.update import parts_of
from megatron_ext.train.run import Run
from tests.checkpoint.tiny import whole_tensors
from tests.training_runs import SAME_WEIGHTS, mock_data, train, train_steps

FILE = '''
import math
import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            slow, slower = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(average.lerp(p.grad, 1 - slow).sign_(), alpha=group["lr"])
                average.lerp_(p.grad, 1 - slower)


class Normalized(torch.optim.Optimizer):
    """Moves each weight by its gradient over the gradient's norm."""

    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad / (p.grad.norm() + 1e-8), alpha=group["lr"])


class Counting(torch.optim.Optimizer):
    """Keeps a number of updates and a copy of the first weights, as some optimizers do."""

    def __init__(self, params, lr, grouped=False):
        super().__init__(params, {"lr": lr})
        self.grouped = grouped

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if self.grouped:
                group["step"] = group.get("step", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["first"] = p.clone()
                    state["half"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["step"] += 1
                assert isinstance(state["step"], int)
                state["half"].add_(p.grad)
                p.sub_(p.grad, alpha=group["lr"] / math.sqrt(state["step"]))


class Rows(torch.optim.Optimizer):
    """Keeps one number for each row of a matrix."""

    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("rows", torch.zeros(len(p)))


class Broken(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure=None):
        raise RuntimeError("no idea")


NOTHING = 3
'''
SMALL = [
    *(word for word in SAME_WEIGHTS if word != "--use-distributed-optimizer"),
    *mock_data(),
    *"--vocab-size 200 --num-layers 2 --hidden-size 32 --ffn-hidden-size 64".split(),
    *"--seq-length 16 --global-batch-size 8 --train-iters 4 --save-interval 2".split(),
]
SHARDED = ["--use-distributed-optimizer"]
TP2 = ["--tensor-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own_optimizers.py"
    path.write_text(FILE)
    return path


def flags_of(file: Path, name: str, *arguments: str, **given: Any) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer_class=f"{file}:{name}", optimizer_args=list(arguments), lr=0.1, **given
    )


def saved(folder: Path, iteration: int = 4) -> dict[str, Tensor]:
    return whole_tensors(folder / f"iter_{iteration:07d}", folder / f"{iteration}.pt")


def check_against_torch(run: Run) -> None:
    """Let a plain optimizer of the same class follow the run, on copies of its weights."""
    (part,) = parts_of(run.optimizer)
    kind: Any = type(part.optimizer).__mro__[4]
    assert kind.__name__ == "Lion"
    weights = dict(run.chunks[0].named_parameters())
    copies = {name: x.detach().clone() for name, x in weights.items()}
    flat = [x for name, x in copies.items() if x.dim() == 1]
    wide = [x for name, x in copies.items() if x.dim() > 1]
    groups = [{"params": wide}, {"params": flat}]
    plain = kind(groups, lr=0.0, weight_decay=0.0, betas=[0.8, 0.95])
    step = part.optimizer.step

    def follow() -> None:
        lr = run.optimizer.param_groups[0]["lr"]  # type: ignore[union-attr]
        plain.param_groups[0].update(lr=lr, weight_decay=0.5)
        plain.param_groups[1].update(lr=lr)
        norm = torch.stack([x.main_grad.norm() for x in weights.values()]).norm()
        for name, weight in weights.items():
            copies[name].grad = weight.main_grad.clone()
        assert norm <= 0.101, "the gradients are clipped before"
        step()
        plain.step()
        for name, weight in weights.items():
            assert torch.equal(weight, copies[name]), name
        print("followed", flush=True)

    part.optimizer.step = follow


def test_groups_schedule_and_clipping_are_those_of_a_plain_optimizer(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = f"--optimizer-class {file}:Lion --optimizer-args betas=[0.8,0.95] --weight-decay 0.5"
    words = [*SMALL, *own.split(), "--clip-grad", "0.1"]
    rows = train_steps(words, tmp_path, prepare=check_against_torch)
    assert capfd.readouterr().out.count("followed") == 4
    assert len({row["learning_rate"] for row in rows}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], SHARDED], ids=["whole", "sharded"])
def test_layouts_and_resumed_runs_agree(file: Path, tmp_path: Path, more: list[str]) -> None:
    """Weights and averages of all layouts agree to 1e-6, and those of a resumed run bit for bit."""
    words = [*SMALL, "--optimizer-class", f"{file}:Lion"]
    train(words, tmp_path / "one")
    truth = saved(tmp_path / "one")
    layouts = {"dp2": more, "tp2": [*TP2, *more], "pp2": [*PP2, *more]}
    for name, layout in layouts.items():
        train([*words, *layout], tmp_path / name, ranks=2)
        found = saved(tmp_path / name)
        assert truth.keys() <= found.keys()
        for key, tensor in truth.items():
            assert (found[key].float() - tensor.float()).abs().max() <= 1e-6, (name, key)
    # Two steps more, in the same layout and in others.
    half = ["--load", str(tmp_path / "dp2"), "--ckpt-step", "2"]
    for name, layout in layouts.items():
        train([*words, *layout, *half], tmp_path / f"half_{name}", ranks=2)
        again = saved(tmp_path / f"half_{name}")
        for key, tensor in saved(tmp_path / "dp2").items():
            limit = 0.0 if name == "dp2" else 1e-6
            assert (again[key].float() - tensor.float()).abs().max() <= limit, (name, key)
    with pytest.raises(CheckpointError, match=r"`--optimizer` \(adam\) does not go with the opt"):
        train([*SMALL, *more, *half], tmp_path / "other", ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "arguments"),
    [
        ("", "--optimizer-args grouped=true"),
        ("--use-distributed-optimizer", ""),
        (
            "--use-distributed-optimizer --no-dist-ckpt-optim-fully-reshardable",
            "--optimizer-args grouped=true",
        ),
    ],
)
def test_counts_and_other_state_go_on(
    file: Path, tmp_path: Path, more: str, arguments: str
) -> None:
    own = f"--optimizer-class {file}:Counting --weight-decay 0 --bf16 {arguments} {more}"
    words = [*SMALL, *own.split()]
    whole = train_steps(words, tmp_path / "whole", ranks=2)
    first = tmp_path / "first"
    train([*words, "--exit-interval", "2"], first, ranks=2)

    def look(run: Run) -> None:
        for part in parts_of(run.optimizer):
            for state in part.optimizer.state.values():
                assert state["step"] == 2
                assert state["half"].dtype == torch.bfloat16
            for group in part.optimizer.param_groups:
                assert group.get("step") == (2 if arguments else None)

    rest = train_steps([*words, "--load", str(first)], tmp_path / "rest", ranks=2, prepare=look)
    assert [row["lm loss"] for row in rest] == [row["lm loss"] for row in whole[2:]]


@pytest.mark.parametrize(
    ("name", "is_elementwise"), [("Lion", True), ("Counting", True), ("Normalized", False)]
)
def test_a_trial_tells_whether_weights_can_be_sharded(
    file: Path, name: str, is_elementwise: bool
) -> None:
    decay = {"weight_decay": 0.0}
    assert findings(flags_of(file, name, **decay)).is_elementwise == is_elementwise
    widths = {"Lion": 4, "Counting": 6, "Normalized": 0}
    assert findings(flags_of(file, name, **decay)).width == widths[name]


def test_a_rule_for_whole_matrices_trains_where_nothing_is_sharded(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--optimizer-class", f"{file}:Normalized", *TP2]
    rows = train_steps(words, tmp_path / "whole", ranks=2)
    assert rows[-1]["lm loss"] < rows[0]["lm loss"]
    assert "each of the 2 tensor-parallel ranks gives it its own part" in capfd.readouterr().out
    with pytest.raises(ConfigError, match="moves an element of a weight by more than the element"):
        train([*words, *SHARDED], tmp_path / "sharded", ranks=2)


REFUSED: dict[str, tuple[str, str]] = {
    "--optimizer custom": ("", r"`--optimizer custom` needs `--optimizer-class`; name the class"),
    "--optimizer-args a=1": ("", r"`--optimizer-args` \(a=1\) needs `--optimizer-class`; name"),
    "--optimizer sgd": ("Lion", r"`--optimizer` \(sgd\) .*`--optimizer-class`"),
    "--optimizer-args beta=1": ("Lion", r"must be FIELD=VALUE of .*:Lion; did you mean betas\?"),
    "--optimizer-args lr=1": ("Lion", r"`--optimizer-args` \(lr=1\) must be FIELD=VALUE of"),
    "--optimizer-args betas=3": ("Lion", r"fails to update a weight of shape \(6, 10\): TypeError"),
    "--seed 1": ("Counting", r"`--weight-decay` \(0.01\) is no option of .*:Counting; use 0"),
    "--seed 2": ("NOTHING", r"must name a subclass of torch.optim.Optimizer; derive it from that"),
    "--seed 5": ("Lyon", r"names nothing: .*has no Lyon; did you mean Lion\?"),
    "--seed 3": ("Broken", r"fails to update .*RuntimeError: no idea; correct its `step`"),
    "--seed 4": ("Rows", r"keeps `rows` of shape \(6,\) for a weight of shape \(6, 10\), but `--s"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_used_is_refused(file: Path, tmp_path: Path, words: str) -> None:
    name, message = REFUSED[words]
    own = ["--optimizer-class", f"{file}:{name}"] if name else []
    small = [word for word in SMALL if word not in ("--seed", "1234")]
    with pytest.raises(ConfigError, match=message):
        train([*small, *words.split(), *own], tmp_path)


def test_state_begins_before_the_first_update_without_moving_a_weight(file: Path) -> None:
    optimizer = load_optimizer(flags_of(file, "Counting", weight_decay=0.0))
    weight = torch.ones(3)
    optimizer.param_groups = [{**optimizer.defaults, "params": [weight]}]
    optimizer.start_state()
    assert torch.equal(weight, torch.ones(3))
    state = optimizer.state[weight]
    assert torch.equal(state["first"], weight) and state["step"] == 0
    weight.grad = torch.ones(3)
    for number in (1, 2):
        optimizer.step()
        assert torch.equal(state["first"], torch.ones(3)) and state["step"] == number
