"""Learning-rate schedules by their formulas, and Adam where Transformer Engine is installed."""

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core.optimizer as core_optimizer
import pytest
import torch
from megatron.core.optimizer import distrib_optimizer

from megatron_ext.optim import builder
from megatron_ext.optim.adam import CountedAdam
from megatron_ext.optim.update import parts_of
from megatron_ext.train.run import Run
from tests.checkpoint.tiny import whole_tensors
from tests.training_runs import TINY, config_of, mock_data, train, train_steps

PEAK, FLOOR, WARMUP, STEPS = 1e-3, 1e-4, 2, 12


def _rates(*more: str, sizes: Sequence[int] = (16,) * STEPS) -> list[float]:
    config = config_of([*TINY, *mock_data(), "--train-iters", str(STEPS), *more])
    group: dict[str, Any] = {"params": [], "default_config": True}
    optimizer: Any = SimpleNamespace(param_groups=[group])
    scheduler = builder.build_scheduler(config, optimizer)
    rates = [group["lr"]]
    for size in sizes:
        scheduler.step(increment=size)
        rates.append(group["lr"])
    return rates


SHAPES: dict[str, Callable[[int], float]] = {
    "linear": lambda step: 1 - (step - WARMUP) / (STEPS - WARMUP),
    "cosine": lambda step: 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))),
    "constant": lambda step: 1.0,
    "inverse-square-root": lambda step: (
        (max(PEAK * math.sqrt(WARMUP / step), FLOOR) - FLOOR) / (PEAK - FLOOR)
    ),
}
"""The share of the way from floor to peak by step."""


@pytest.mark.parametrize("shape", SHAPES)
def test_decay_follows_its_formula(shape: str) -> None:
    want = [PEAK * step / WARMUP for step in range(WARMUP + 1)]
    want += [FLOOR + SHAPES[shape](step) * (PEAK - FLOOR) for step in range(WARMUP + 1, STEPS + 1)]
    assert _rates("--lr-decay-style", shape) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(
    ("style", "half"),
    [
        ("linear", FLOOR + 0.5 * (PEAK - FLOOR)),
        ("cosine", FLOOR + 0.5 * (PEAK - FLOOR)),
        ("exponential", FLOOR + (2 * 0.5**0.5 - 1) * (PEAK - FLOOR)),
        ("minus_sqrt", FLOOR + (1 - math.sqrt(0.5)) * (PEAK - FLOOR)),
    ],
)
def test_wsd_holds_and_then_falls(style: str, half: float) -> None:
    flags = "--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style".split()
    rates = _rates(*flags, style)
    assert rates[WARMUP : STEPS - 3] == [PEAK] * (STEPS - 3 - WARMUP)
    assert rates[STEPS - 2] == pytest.approx(half, rel=1e-9)
    assert rates[STEPS] == pytest.approx(FLOOR, rel=1e-9)


RAMPS = {
    "--rampup-batch-size 4 4 24": [4, 4, 8, 12, *[16] * 8],
    # Sequences of 64 tokens: batch 8 from 12 samples on, 16 from 40 on.
    "--step-batch-size-schedule '0:4 768:8 2560:16'": [4, 4, 4, 8, 8, 8, 8, *[16] * 5],
}
"""Flags of a growing batch, and the sizes of the first steps, counted by hand."""
WSD = {
    "WSD linear": lambda share: 1 - share,
    "WSD cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
    "WSD exponential": lambda share: 2 * 0.5**share - 1,
    "WSD minus_sqrt": lambda share: 1 - math.sqrt(share),
}
"""The share of the way from floor to peak, by the share of the last phase that is over."""


def _share(style: str, done: int, warmup: int, hold: int, end: int) -> float:
    """Return the share of the way from floor to peak after ``done`` samples, after the warm-up."""
    if style in WSD:
        return 1.0 if done <= hold else WSD[style]((done - hold) / (end - hold))
    if style == "inverse-square-root":
        return (max(PEAK * math.sqrt(warmup / done), FLOOR) - FLOOR) / (PEAK - FLOOR)
    over = (done - warmup) / (end - warmup)
    shapes = {"linear": 1 - over, "cosine": 0.5 * (1 + math.cos(math.pi * over)), "constant": 1.0}
    return shapes[style]


@pytest.mark.parametrize("style", [*SHAPES, *WSD])
@pytest.mark.parametrize("ramp", RAMPS)
def test_lengths_in_iterations_count_the_samples_of_a_growing_batch(ramp: str, style: str) -> None:
    sizes = RAMPS[ramp]
    name, *last_phase = style.split()
    flags = f"--lr-decay-style {name}"
    if last_phase:
        flags += f" --lr-wsd-decay-iters 7 --lr-wsd-decay-style {last_phase[0]}"
    consumed = [sum(sizes[:step]) for step in range(STEPS + 1)]
    warmup, end, hold = consumed[WARMUP], consumed[STEPS], consumed[STEPS - 7]
    want = [
        PEAK * done / warmup
        if step <= WARMUP
        else FLOOR + _share(style, done, warmup, hold, end) * (PEAK - FLOOR)
        for step, done in enumerate(consumed)
    ]
    assert _rates(*flags.split(), *shlex.split(ramp), sizes=sizes) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("ramp", RAMPS)
def test_iterations_and_their_samples_are_the_same_run(ramp: str, tmp_path: Path) -> None:
    """Megatron-LM takes the growing batch with samples alone; losses are the same bits."""
    words = " ".join(TINY).replace("--lr-warmup-iters 2", "").replace("--lr-decay-iters 12", "")
    flags = [*words.split(), *mock_data(), *shlex.split(ramp)]
    flags += "--num-layers 1 --global-batch-size 16 --micro-batch-size 4".split()
    total, warmup = sum(RAMPS[ramp][:7]), sum(RAMPS[ramp][:2])
    by_steps = train_steps([*flags, *"--train-iters 7 --lr-warmup-iters 2".split()], tmp_path / "a")
    samples = f"--train-samples {total} --lr-warmup-samples {warmup}".split()
    by_samples = train_steps([*flags, *samples], tmp_path / "b")
    for key in ("lm loss", "grad_norm", "learning_rate", "consumed_samples"):
        assert [row[key] for row in by_steps] == [row[key] for row in by_samples], key
    assert len(by_steps) == 7 and by_steps[-1]["learning_rate"] == pytest.approx(FLOOR)


def test_lengths_by_samples_and_by_fraction() -> None:
    words = " ".join(TINY).replace("--lr-warmup-iters 2", "").replace("--lr-decay-iters 12", "")
    more = "--train-samples 480 --lr-decay-samples 320 --lr-warmup-fraction 0.1".split()
    config = config_of([*words.split(), *mock_data(), *more])
    lengths = builder.schedule_lengths(config)
    names = ("lr_decay_steps", "lr_warmup_steps", "wd_incr_steps")
    assert [lengths[name] for name in names] == [320, 32.0, 480]


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
        assert [type(part.optimizer).__name__ for part in parts_of(run.optimizer)] == [rule]

    words = f"--train-iters 1 --no-use-distributed-optimizer --optimizer {name}"
    train([*SMALL, *words.split()], tmp_path, prepare=look)


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


IN_16_BITS = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16".split()


def _narrow(run: Run) -> None:
    for part in parts_of(run.optimizer):
        for state in part.optimizer.state.values():
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
            assert state["exp_avg"].any()


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
    for name, (ranks, more) in layouts.items():
        load = ["--load", str(first), *more]
        rows = train([*words, *load], tmp_path / name, ranks=ranks, prepare=_narrow)
        for row, other in zip(rows[-2:], whole[-2:], strict=True):
            exact = 0 if name == "same" else 1e-4
            assert row["lm loss"] == pytest.approx(other["lm loss"], rel=exact)
    wide = [word for word in words if word not in IN_16_BITS]
    rows = train([*wide, "--load", str(first)], tmp_path / "wide", ranks=2)
    assert rows[-2]["lm loss"] == whole[-2]["lm loss"]
