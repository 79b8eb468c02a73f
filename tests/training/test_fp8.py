"""Whole runs in 8 bits: near bf16, the same on every layout, and resumed with their scales."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.training.reporting.metrics_file import read_metrics
from tests.checkpoint.tiny import whole_tensors
from tests.training_runs import TINY, mock_data, train_on_ranks, training_rows

DELAYED = "--fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
TENSORWISE = "--fp8-recipe tensorwise"
ROWWISE = "--fp8-recipe rowwise"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"


def flags_of(*more: str, steps: int = 4) -> list[str]:
    """With initial weights that no layout changes."""
    size = "--bf16 --ffn-hidden-size 192 --global-batch-size 8 --no-use-cpu-initialization"
    length = f"--train-iters {steps} --lr-decay-iters {max(12, steps)}"
    return [*TINY, *mock_data(), *" ".join([size, length, *more]).split()]


def run(save: Path, *more: str, ranks: int = 1, steps: int = 4) -> list[dict[str, Any]]:
    code, rows = train_on_ranks(flags_of(*more, steps=steps), ranks=ranks, save=save)
    assert code == 0
    return training_rows(rows)


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["lm loss"] for row in rows]


def histories(save: Path, iteration: int) -> dict[str, Tensor]:
    """The delayed state in a checkpoint: ``[layers, steps, 3]`` of each kind of layer."""
    tensors = whole_tensors(save / f"iter_{iteration:07d}", save / "whole.pt")
    found = {name: tensor for name, tensor in tensors.items() if name.endswith("amax_history")}
    assert len(found) == 4 and all(tensor.shape == (4, 4, 3) for tensor in found.values())
    return found


def test_an_8_bit_run_is_near_bf16_but_not_the_same(tmp_path: Path) -> None:
    bf16 = losses(run(tmp_path / "bf16", steps=8))
    for name, recipe in (("d", DELAYED), ("t", TENSORWISE), ("r", ROWWISE)):
        fp8 = losses(run(tmp_path / name, "--fp8-format hybrid", recipe, steps=8))
        assert fp8 != bf16
        for got, want in zip(fp8, bf16, strict=True):
            assert math.isclose(got, want, rel_tol=0.01), (name, got, want)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP2, PP2])
def test_200_steps_end_within_1_percent_of_bf16(layout: str, tmp_path: Path) -> None:
    """Means of the last ten steps; and all have learnt."""
    small = (layout, "--global-batch-size 2 --num-layers 2")
    bf16 = losses(run(tmp_path / "bf16", *small, ranks=2, steps=200))
    want = sum(bf16[-10:]) / 10
    assert want < 0.9 * bf16[0]
    for name, recipe in (("d", DELAYED), ("t", TENSORWISE), ("r", ROWWISE)):
        fp8 = losses(
            run(tmp_path / name, *small, recipe, "--fp8-format hybrid", ranks=2, steps=200)
        )
        got = sum(fp8[-10:]) / 10
        print(f"{recipe}: {got:.5f}, bf16 {want:.5f}, began at {bf16[0]:.5f}")
        assert math.isclose(got, want, rel_tol=0.01)


LAYOUTS = [
    (2, TP2, DELAYED),
    (2, TP2, TENSORWISE),
    (2, "--tensor-model-parallel-size 2", ROWWISE),
    (2, f"{PP2} --pipeline-schedule zb-h1", DELAYED),
    (2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1", DELAYED),
    (2, "--context-parallel-size 2", TENSORWISE),
    (2, "--context-parallel-size 2", DELAYED),
    (2, "", DELAYED),
    (2, "", TENSORWISE),
]


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs on one rank by their recipes."""
    found = {}
    for recipe in (DELAYED, TENSORWISE, ROWWISE):
        found[recipe] = tmp_path_factory.mktemp("one") / "save"
        run(found[recipe], "--fp8-format hybrid", recipe)
    return found


@pytest.mark.parametrize(("ranks", "layout", "recipe"), LAYOUTS)
def test_other_layouts_train_alike(
    ranks: int, layout: str, recipe: str, on_one_rank: dict[str, Path], tmp_path: Path
) -> None:
    want = training_rows(read_metrics(on_one_rank[recipe] / "metrics.jsonl"))
    got = run(tmp_path / "save", "--fp8-format hybrid", recipe, layout, ranks=ranks)
    # Tensors that are cut add in another order in bf16, as they do without 8 bits.
    cuts = "tensor" in layout or "context" in layout
    for ours, theirs in zip(got, want, strict=True):
        for key, near in (("lm loss", 1e-4), ("grad_norm", 3e-3)):
            assert math.isclose(ours[key], theirs[key], rel_tol=near if cuts else 1e-6), key
    if recipe == DELAYED:
        ours, theirs = histories(tmp_path / "save", 4), histories(on_one_rank[recipe], 4)
        for name, history in ours.items():
            assert torch.allclose(history, theirs[name], rtol=0.1 if cuts else 0.0, atol=0), name


@pytest.mark.parametrize("recipe", [DELAYED, TENSORWISE, ROWWISE])
def test_recomputation_changes_nothing(
    recipe: str, on_one_rank: dict[str, Path], tmp_path: Path
) -> None:
    """Not even the history: a pass that is computed twice counts once."""
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    got = run(tmp_path / "save", "--fp8-format hybrid", recipe, full)
    want = training_rows(read_metrics(on_one_rank[recipe] / "metrics.jsonl"))
    assert losses(got) == losses(want)
    if recipe == DELAYED:
        ours, theirs = histories(tmp_path / "save", 4), histories(on_one_rank[recipe], 4)
        assert all(torch.equal(history, theirs[name]) for name, history in ours.items())


def test_a_step_enters_the_history_once(tmp_path: Path) -> None:
    """Whatever its number of micro-batches; the latest entry comes first."""
    run(tmp_path / "save", "--fp8-format hybrid", DELAYED, "--save-interval 2", steps=3)
    after_2, after_3 = histories(tmp_path / "save", 2), histories(tmp_path / "save", 3)
    for name, history in after_3.items():
        assert torch.equal(history[:, 1:], after_2[name][:, :-1])
        assert (history[:, :3] > 0).all() and not history[:, 3].any()


@pytest.mark.parametrize(("ranks", "layout"), [(1, ""), (2, TP2), (2, PP2)])
def test_resuming_is_bit_identical(ranks: int, layout: str, tmp_path: Path) -> None:
    more = ("--fp8-format hybrid", DELAYED, layout, "--save-interval 2")
    whole = run(tmp_path / "whole", *more, ranks=ranks)
    save = tmp_path / "broken"
    run(save, *more, "--exit-interval 2", ranks=ranks)
    resumed = run(save, *more, f"--load {save}", ranks=ranks)
    for key in ("lm loss", "grad_norm"):
        assert [row[key] for row in resumed] == [row[key] for row in whole]
    ours, theirs = histories(save, 4), histories(tmp_path / "whole", 4)
    assert all(torch.equal(history, theirs[name]) for name, history in ours.items())


@pytest.mark.parametrize("layout", [TP2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1"])
def test_another_layout_goes_on_with_the_scales(layout: str, tmp_path: Path) -> None:
    save = tmp_path / "save"
    run(save, "--fp8-format hybrid", DELAYED, "--exit-interval 4", steps=5)
    before = histories(save, 4)
    run(save, "--fp8-format hybrid", DELAYED, layout, f"--load {save}", "--exit-interval 5",
        ranks=2, steps=5)  # fmt: skip
    for name, history in histories(save, 5).items():
        assert torch.equal(history[:, 1:], before[name][:, :-1]), name


def test_a_bf16_checkpoint_starts_an_8_bit_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start, save = tmp_path / "start", tmp_path / "save"
    run(start, steps=2)
    flags = flags_of("--fp8-format hybrid", DELAYED, f"--load {start}", steps=4)
    assert train_on_ranks(flags, save=save)[0] != 0
    shown = capfd.readouterr().err
    assert "amax_history`, which the model needs; give `--finetune`" in shown
    code, rows = train_on_ranks([*flags, "--finetune"], save=save)
    assert code == 0 and len(training_rows(rows)) == 4
    assert (histories(save, 4)["decoder.layers.mlp.linear_fc1.fp8.amax_history"] > 0).all()


def test_a_bf16_run_goes_on_from_8_bits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save = tmp_path / "save"
    run(save, "--fp8-format hybrid", DELAYED, "--exit-interval 2")
    rows = run(save, f"--load {save}")
    assert rows[-1]["iteration"] == 4
    assert "amax_history`; they are left out" in capfd.readouterr().out


def test_first_and_last_layers_stay_in_bf16(tmp_path: Path) -> None:
    """Counted along the whole model."""
    more = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 {} --num-layers-at-end-in-bf16 0"

    def note(count: int) -> Any:
        def prepare(run: Any) -> None:
            names = [
                name.split(".layers.")[1].partition(".")[0]
                for chunk in run.chunks
                for name, module in chunk.named_modules()
                if name.endswith(".fp8")
            ]
            assert names == [str(n) for n in range(count, 4) for _ in range(4)]

        return prepare

    for count in (1, 3):
        flags = flags_of("--fp8-format e4m3", TENSORWISE, more.format(count), steps=1)
        code, _ = train_on_ranks(flags, save=tmp_path / str(count), prepare=note(count))
        assert code == 0
