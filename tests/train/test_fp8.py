"""Whole runs in 8 bits: near bf16, the same on every layout, and resumed with their scales."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.layers.fp8.scaling import Role
from megatron_ext.train.reporting.files import read_metrics
from tests.checkpoint.tiny import whole_tensors
from tests.training_runs import (
    SAME_WEIGHTS,
    Rows,
    mock_data,
    train,
    train_on_ranks,
    train_steps,
    training_rows,
)

slow = pytest.mark.slow

DELAYED = "--fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
TENSORWISE = "--fp8-recipe tensorwise"
ROWWISE = "--fp8-recipe rowwise"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"


def flags_of(*more: str, steps: int = 4) -> list[str]:
    """Return flags with initial weights that no layout changes."""
    size = "--bf16 --ffn-hidden-size 192 --global-batch-size 8"
    length = f"--train-iters {steps} --lr-decay-iters {max(12, steps)}"
    return [*SAME_WEIGHTS, *mock_data(), *" ".join([size, length, *more]).split()]


def run(save: Path, *more: str, ranks: int = 1, steps: int = 4) -> Rows:
    return train_steps(flags_of(*more, steps=steps), save, ranks)


def losses(rows: Rows) -> list[float]:
    return [row["lm loss"] for row in rows]


def assert_near(fp8: list[float], bf16: list[float]) -> None:
    assert fp8 != bf16
    assert fp8 == pytest.approx(bf16, rel=0.01)


def histories(
    save: Path, iteration: int, *, experts: bool = False, layers: int = 4
) -> dict[str, Tensor]:
    """Return the delayed state in a checkpoint by kind of linear layer, ``layers`` of them.

    ``[layers, steps, 3]``, or ``[layers, experts, steps, 3]`` of the experts alone.
    """
    tensors = whole_tensors(save / f"iter_{iteration:07d}", save / "whole.pt")
    ends = [name for name in tensors if name.endswith("amax_history")]
    found = {name: tensors[name] for name in ends if not experts or "experts" in name}
    assert len(found) == (2 if experts else layers)
    assert all(tensor.shape[-2:] == (4, 3) for tensor in found.values())
    return found


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert all(torch.equal(history, theirs[name]) for name, history in ours.items())


def assert_one_step_later(after: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    for name, history in after.items():
        assert torch.equal(history[..., 1:, :], before[name][..., :-1, :]), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP2, PP2])
def test_200_steps_end_within_1_percent_of_bf16(layout: str, tmp_path: Path) -> None:
    small = (layout, "--global-batch-size 2 --num-layers 2")
    bf16 = losses(run(tmp_path / "bf16", *small, ranks=2, steps=200))
    want = sum(bf16[-10:]) / 10
    assert want < 0.9 * bf16[0]
    for name, recipe in (("d", DELAYED), ("t", TENSORWISE), ("r", ROWWISE)):
        fp8 = run(tmp_path / name, *small, recipe, "--fp8-format hybrid", ranks=2, steps=200)
        got = sum(losses(fp8[-10:])) / 10
        print(f"{recipe}: {got:.5f}, bf16 {want:.5f}, began at {bf16[0]:.5f}")
        assert math.isclose(got, want, rel_tol=0.01)


MORE_LAYOUTS = [
    (2, "--tensor-model-parallel-size 2", ROWWISE),
    (2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1", DELAYED),
    (2, TP2, TENSORWISE),
    (2, TP2, ROWWISE),
    (2, f"{PP2} --pipeline-schedule zb-h1", DELAYED),
    (2, "--context-parallel-size 2", TENSORWISE),
    (2, "--context-parallel-size 2", DELAYED),
    (2, "", DELAYED),
    (2, "", TENSORWISE),
]

Runs = Callable[[str], Path]


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("bf16") / "save"
    run(save)
    return save


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the folder of a recipe's run on one rank, which runs once."""

    @functools.cache
    def saved(recipe: str) -> Path:
        save = tmp_path_factory.mktemp("one") / "save"
        run(save, "--fp8-format hybrid", recipe)
        return save

    return saved


def rows_of(save: Path) -> Rows:
    return training_rows(read_metrics(save / "metrics.jsonl"))


@pytest.mark.parametrize("recipe", [DELAYED, pytest.param(TENSORWISE, marks=slow), ROWWISE])
def test_an_8_bit_run_is_near_bf16(recipe: str, in_bf16: Path, on_one_rank: Runs) -> None:
    assert_near(losses(rows_of(on_one_rank(recipe))), losses(rows_of(in_bf16)))


@pytest.mark.parametrize(
    ("ranks", "layout", "recipe"),
    [(2, TP2, DELAYED), *(pytest.param(*layout, marks=slow) for layout in MORE_LAYOUTS)],
)
def test_other_layouts_train_alike(
    ranks: int, layout: str, recipe: str, on_one_rank: Runs, tmp_path: Path
) -> None:
    want = rows_of(on_one_rank(recipe))
    got = run(tmp_path / "save", "--fp8-format hybrid", recipe, layout, ranks=ranks)
    # Tensors that are cut add in another order in bf16, as they do without 8 bits.
    cuts = "tensor" in layout or "context" in layout
    for ours, theirs in zip(got, want, strict=True):
        for key, near in (("lm loss", 1e-4), ("grad_norm", 3e-3)):
            assert math.isclose(ours[key], theirs[key], rel_tol=near if cuts else 1e-6), key
    if recipe == DELAYED:
        ours, theirs = histories(tmp_path / "save", 4), histories(on_one_rank(recipe), 4)
        for name, history in ours.items():
            assert torch.allclose(history, theirs[name], rtol=0.1 if cuts else 0.0, atol=0), name


LATENT = (
    "--no-group-query-attention --multi-latent-attention --qk-layernorm --q-lora-rank 48 "
    "--kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 32"
)


@pytest.mark.slow
def test_latent_attention_is_near_bf16_on_other_layouts(tmp_path: Path) -> None:
    """Projections to small vectors are whole on every rank; their scales are those of one rank."""
    words = (LATENT, "--fp8-format hybrid", DELAYED)
    assert_near(losses(run(tmp_path / "8", *words)), losses(run(tmp_path / "16", LATENT)))
    run(tmp_path / "cut", *words, TP2, ranks=2)
    one, cut = (histories(tmp_path / name, 4, layers=7) for name in ("8", "cut"))
    for name, history in one.items():
        # Ranks round sums of their own, which grows with the matrix products since.
        for role, near in zip(Role, (0.1, 0.1, 0.3), strict=True):
            ours, theirs = cut[name][..., role], history[..., role]
            assert torch.allclose(ours, theirs, rtol=near, atol=0), (name, role)


@pytest.mark.parametrize(
    "recipe", [DELAYED, pytest.param(TENSORWISE, marks=slow), pytest.param(ROWWISE, marks=slow)]
)
def test_recomputation_changes_nothing(recipe: str, on_one_rank: Runs, tmp_path: Path) -> None:
    """A pass that is computed twice enters the history once."""
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    got = run(tmp_path / "save", "--fp8-format hybrid", recipe, full)
    assert losses(got) == losses(rows_of(on_one_rank(recipe)))
    if recipe == DELAYED:
        assert_equal(histories(tmp_path / "save", 4), histories(on_one_rank(recipe), 4))


@slow
def test_a_step_enters_the_history_once(tmp_path: Path) -> None:
    """The number of micro-batches does not matter; the latest entry comes first."""
    run(tmp_path / "save", "--fp8-format hybrid", DELAYED, "--save-interval 2", steps=3)
    after_2, after_3 = histories(tmp_path / "save", 2), histories(tmp_path / "save", 3)
    assert_one_step_later(after_3, after_2)
    for history in after_3.values():
        assert (history[:, :3] > 0).all() and not history[:, 3].any()


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, TP2), pytest.param(1, "", marks=slow), pytest.param(2, PP2, marks=slow)],
)
def test_resuming_is_bit_identical(ranks: int, layout: str, tmp_path: Path) -> None:
    more = ("--fp8-format hybrid", DELAYED, layout, "--save-interval 2")
    whole = run(tmp_path / "whole", *more, ranks=ranks)
    save = tmp_path / "broken"
    run(save, *more, "--exit-interval 2", ranks=ranks)
    resumed = run(save, *more, f"--load {save}", ranks=ranks)
    for key in ("lm loss", "grad_norm"):
        assert [row[key] for row in resumed] == [row[key] for row in whole]
    assert_equal(histories(save, 4), histories(tmp_path / "whole", 4))


@pytest.mark.parametrize(
    "layout", [pytest.param(TP2, marks=slow), f"{PP2} --num-layers-per-virtual-pipeline-stage 1"]
)
def test_another_layout_goes_on_alike(layout: str, on_one_rank: Runs, tmp_path: Path) -> None:
    start = on_one_rank(DELAYED)
    more = f"--load {start} --override-opt-param-scheduler"
    run(tmp_path / "save", "--fp8-format hybrid", DELAYED, layout, more, ranks=2, steps=5)
    assert_one_step_later(histories(tmp_path / "save", 5), histories(start, 4))


def test_starts_from_bf16(in_bf16: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save = tmp_path / "save"
    flags = flags_of("--fp8-format hybrid", DELAYED, f"--load {in_bf16}", steps=2)
    assert train_on_ranks(flags, save=save)[0] != 0
    shown = capfd.readouterr().err
    assert "amax_history`, which the model needs; give `--finetune`" in shown
    assert len(train_steps([*flags, "--finetune"], save)) == 2
    history = histories(save, 2)["decoder.layers.mlp.linear_fc1.fp8.amax_history"]
    assert (history[:, :2] > 0).all() and not history[:, 2:].any()


@slow
def test_a_bf16_run_goes_on_from_8_bits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save = tmp_path / "save"
    run(save, "--fp8-format hybrid", DELAYED, "--exit-interval 2")
    rows = run(save, f"--load {save}")
    assert rows[-1]["iteration"] == 4
    assert "amax_history`; they are left out" in capfd.readouterr().out


@slow
def test_first_and_last_layers_stay_in_bf16(tmp_path: Path) -> None:
    """Layers are counted along the whole model."""
    more = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 {} --num-layers-at-end-in-bf16 0"

    def check(run: Any, count: int) -> None:
        names = [name for chunk in run.chunks for name, _ in chunk.named_modules()]
        layers = [n.split(".layers.")[1].partition(".")[0] for n in names if n.endswith(".fp8")]
        assert layers == [str(n) for n in range(count, 4) for _ in range(4)]

    for count in (1, 3):
        flags = flags_of("--fp8-format e4m3", TENSORWISE, more.format(count), steps=1)
        train(flags, tmp_path / str(count), prepare=functools.partial(check, count=count))


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--use-cpu-initialization"
)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, "--expert-model-parallel-size 2"),
        pytest.param(1, "", marks=slow),
        pytest.param(2, f"{TP2} --expert-tensor-parallel-size 2", marks=slow),
        pytest.param(2, f"{TP2} --expert-tensor-parallel-size 1", marks=slow),
        pytest.param(2, PP2, marks=slow),
    ],
)
def test_experts_are_near_bf16_on_every_layout(ranks: int, layout: str, tmp_path: Path) -> None:
    bf16 = losses(run(tmp_path / "bf16", EXPERTS, layout, ranks=ranks, steps=2))
    fp8 = ("--fp8-format hybrid", DELAYED, EXPERTS, layout)
    got = losses(run(tmp_path / "fp8", *fp8, ranks=ranks, steps=2))
    assert_near(got, bf16)
    for name, history in histories(tmp_path / "fp8", 2, experts=True).items():
        assert (history[..., :2, :] > 0).all() and not history[..., 2:, :].any(), name


@slow
def test_experts_go_on_with_their_scales_on_another_layout(tmp_path: Path) -> None:
    save = tmp_path / "save"
    flags = ("--fp8-format hybrid", DELAYED, EXPERTS)
    run(save, *flags, "--exit-interval 4", steps=5)
    before = histories(save, 4, experts=True)
    more = f"--expert-model-parallel-size 2 --load {save} --no-load-optim --exit-interval 5"
    run(save, *flags, more, ranks=2, steps=5)
    assert_one_step_later(histories(save, 5, experts=True), before)


ADAPTERS = "--lora-rank 4 --seed 3"


@pytest.mark.parametrize(
    ("recipe", "words", "steps"),
    [
        # megatron-core adds the bias to a layer's output in place, which must be no view.
        (TENSORWISE, f"--add-bias-linear --num-layers 1 {EXPERTS}", 1),
        pytest.param(TENSORWISE, EXPERTS, 3, marks=slow),
        pytest.param(ROWWISE, EXPERTS, 3, marks=slow),
        pytest.param(DELAYED, ADAPTERS, 2, marks=slow),
        pytest.param(ROWWISE, ADAPTERS, 2, marks=slow),
    ],
)
def test_experts_and_lora_near_bf16(recipe: str, words: str, steps: int, tmp_path: Path) -> None:
    bf16 = losses(run(tmp_path / "bf16", words, steps=steps))
    got = losses(run(tmp_path / "fp8", words, "--fp8-format hybrid", recipe, steps=steps))
    assert_near(got, bf16)


@slow
def test_adapters_go_on_with_the_scales(tmp_path: Path) -> None:
    flags = (ADAPTERS, "--fp8-format hybrid", DELAYED)
    save = tmp_path / "save"
    whole = run(tmp_path / "whole", *flags)
    run(save, *flags, "--save-interval 2 --exit-interval 2")
    resumed = run(save, *flags, f"--load {save}")
    assert [row["grad_norm"] for row in resumed] == [row["grad_norm"] for row in whole]
