"""Runs with averaged weights: closed forms, resumes, resharding, evaluation, export."""

import math
import shlex
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.optim.ema import ShardedEMA
from megatron_ext.programs import convert_checkpoint
from megatron_ext.train.batch_size import Progress
from megatron_ext.train.callbacks.optional import WeightAverage
from megatron_ext.train.run import Run
from tests.checkpoint.tiny import whole_tensors
from tests.runs_from_inside import spoil_steps
from tests.text.convert.models import in_child
from tests.training_runs import TINY, Rows, mock_data, train, training_rows

SIZE = "--vocab-size 200 --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --seq-length 16"
SMALL = [*TINY, *mock_data(), *SIZE.split()]
DECAY, STEPS = 0.8, 6
EMA = ["--ema-decay", str(DECAY), "--no-ema-warmup"]
WARMED = ["--ema-decay", str(DECAY)]
FOUR = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()


def _train(save: Path, *more: str, ranks: int = 1, steps: int = STEPS, **options: Any) -> Rows:
    return train([*SMALL, "--train-iters", str(steps), *more], save, ranks, **options)


def _stored(save: Path, iteration: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    everything = whole_tensors(save / f"iter_{iteration:07d}", save / "whole.pt")
    averages = {n[len("ema.") :]: t for n, t in everything.items() if n.startswith("ema.")}
    return {name: everything[name] for name in averages}, averages


def _equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(torch.equal(others[name], tensor) for name, tensor in some.items())


def _assert_closed_form(save: Path, steps: list[int]) -> None:
    """Check that the average at the last step follows from the weights at the given steps."""
    weights = [_stored(save, step)[0] for step in steps]
    last, averages = len(steps) - 1, _stored(save, steps[-1])[1]
    assert averages
    for name, average in averages.items():
        assert average.dtype is torch.float32
        wanted = DECAY**last * weights[0][name].double()
        for index in range(1, last + 1):
            wanted += (1 - DECAY) * DECAY ** (last - index) * weights[index][name].double()
        torch.testing.assert_close(average.double(), wanted, rtol=1e-6, atol=1e-7, msg=name)


MOE = "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --moe-ffn-hidden-size 32"


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, "--no-use-distributed-optimizer"),
        (4, f"{shlex.join(FOUR)} --no-untie-embeddings-and-output-weights"),
        (4, MOE),
    ],
)
def test_a_run_averages_each_applied_update_once(ranks: int, more: str, tmp_path: Path) -> None:
    """Eight micro-batches and a skipped step change nothing."""
    flags = [*EMA, *more.split(), "--save-interval", "1", "--no-save-optim", "--ema-start", "3"]
    prepare = partial(spoil_steps, steps=(4,))
    rows = training_rows(_train(tmp_path, *flags, ranks=ranks, prepare=prepare))
    assert [row["skipped_iterations"] for row in rows] == [0, 0, 0, 1, 0, 0]
    assert _equal(*_stored(tmp_path, 2))
    _assert_closed_form(tmp_path, [2, 3, 5, 6])
    assert _equal(_stored(tmp_path, 3)[1], _stored(tmp_path, 4)[1])


@pytest.mark.parametrize("applied", [False, True])
def test_a_step_that_only_the_device_knows_counts_if_it_was_applied(applied: bool) -> None:
    linear = torch.nn.Linear(2, 1, bias=False)
    start = linear.weight.detach().clone()
    ema = ShardedEMA([linear], None, decay=DECAY)
    every = SimpleNamespace(ema=SimpleNamespace(ema_update_every=1))
    runner = SimpleNamespace(model_steps=lambda steps: steps)
    progress = Progress(iteration=1)
    run: Any = SimpleNamespace(ema=ema, config=every, runner=runner, progress=progress)
    with torch.no_grad():
        linear.weight += 1
    update = SimpleNamespace(is_read=False, flag=torch.tensor(applied))
    result: Any = SimpleNamespace(model_update=update)
    WeightAverage(run).after_update(result)
    wanted = start + (1 - DECAY) * applied
    torch.testing.assert_close(ema.parts[0].average, wanted)


@pytest.mark.slow
def test_an_average_every_other_step_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    """Steps 4 and 6 are averaged; before the first averaged step the average is the weights."""
    flags = [*EMA, "--ema-update-every", "2", "--ema-start", "4", "--save-interval", "1"]
    whole = tmp_path / "whole"
    _train(whole, *flags)
    _assert_closed_form(whole, [3, 4, 6])
    assert _equal(_stored(whole, 4)[1], _stored(whole, 5)[1])
    _train(tmp_path / "again", *flags, "--load", str(whole), "--ckpt-step", "3", ranks=2)
    wanted, found = _stored(whole, STEPS)[1], _stored(tmp_path / "again", STEPS)[1]
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-5) for name in wanted)
    _train(tmp_path / "same", *flags, "--load", str(whole), "--ckpt-step", "5")
    assert _equal(wanted, _stored(tmp_path / "same", STEPS)[1])


def _compare_copies(run: Run) -> None:
    """Check after each update that the averages of the tied embedding agree on its stages."""
    ema = run.ema
    update = ema.update

    def checked(step: int, *flag: torch.Tensor, **options: Any) -> None:
        update(step, *flag, **options)
        gathered = list(ema.gathered())
        copies = [average for p, average in gathered if getattr(p, "shared_embedding", False)]
        group = run.context.pgs.embd
        assert group.size() == 3
        if run.context.rank in torch.distributed.get_process_group_ranks(group):
            everyone = [torch.empty_like(copies[0]) for _ in range(group.size())]
            torch.distributed.all_gather(everyone, copies[0], group=group)
            assert all(torch.equal(copies[0], other) for other in everyone)

    ema.update = checked  # type: ignore[method-assign]


def test_tied_and_predicting_copies_of_the_embedding_stay_equal(tmp_path: Path) -> None:
    layout = (
        "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Et|tm|L "
        "--mtp-num-layers 1 --no-untie-embeddings-and-output-weights"
    )
    flags = [*EMA, *layout.split(), "--save-interval", "1", "--no-save-optim", "--ema-start", "2"]
    _train(tmp_path, *flags, ranks=3, steps=3, prepare=_compare_copies)
    _assert_closed_form(tmp_path, [1, 2, 3])


def test_a_resumed_run_averages_bit_for_bit(tmp_path: Path) -> None:
    """The optimizer's state has one format here, and the other in the next test."""
    flags = [*WARMED, "--bf16", "--save-interval", "3", "--ema-start", "2"]
    flags.append("--no-dist-ckpt-optim-fully-reshardable")
    whole = _train(tmp_path / "whole", *flags, ranks=2)
    broken = tmp_path / "broken"
    _train(broken, *flags, "--exit-interval", "3", ranks=2)
    resumed = _train(broken, *flags, "--load", str(broken), ranks=2)
    losses = [[row["lm loss"] for row in training_rows(rows)] for rows in (whole, resumed)]
    assert losses[0] == losses[1]
    wanted, found = _stored(tmp_path / "whole", STEPS)[1], _stored(broken, STEPS)[1]
    assert wanted.keys() == found.keys() and _equal(wanted, found)


def test_one_rank_goes_on_as_tp2_pp2(tmp_path: Path) -> None:
    flags = [*WARMED, "--save-interval", "3"]
    _train(tmp_path / "whole", *flags)
    broken = tmp_path / "broken"
    _train(broken, *flags, "--exit-interval", "3")
    _train(broken, *flags, *FOUR, "--load", str(broken), ranks=4)
    wanted, found = _stored(tmp_path / "whole", STEPS)[1], _stored(broken, STEPS)[1]
    assert wanted.keys() == found.keys()
    for name, average in wanted.items():
        # The vocabulary is padded for the tensor-parallel size; the rows beyond are never used.
        same = found[name][: len(average)]
        torch.testing.assert_close(same, average, rtol=1e-5, atol=1e-6, msg=name)


def test_the_first_updates_of_an_average_forget_its_start(tmp_path: Path) -> None:
    """Steps 3 to 6 are averaged, and the run is resumed after the second of them."""
    flags = ["--ema-decay", "0.99", "--ema-start", "3", "--save-interval", "1", "--no-save-optim"]
    _train(tmp_path, *flags, "--exit-interval", "4")
    _train(tmp_path, *flags, "--load", str(tmp_path), "--no-load-optim", "--no-load-rng")
    wanted = {name: weight.double() for name, weight in _stored(tmp_path, 2)[0].items()}
    for earlier, step in enumerate((3, 4, 5, 6)):
        weights, averages = _stored(tmp_path, step)
        decay = (1 + earlier) / (10 + earlier)
        for name, average in averages.items():
            wanted[name] = decay * wanted[name] + (1 - decay) * weights[name].double()
            torch.testing.assert_close(average.double(), wanted[name], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_training_does_not_notice_the_average(tmp_path: Path) -> None:
    noisy = "--attention-dropout 0.1 --hidden-dropout 0.1 --eval-iters 1 --eval-interval 2".split()
    plain = _train(tmp_path / "plain", *noisy, ranks=2)
    averaging = _train(tmp_path / "ema", *noisy, *EMA, "--eval-ema", ranks=2)
    usual = [row for row in averaging if " ema" not in row.get("split", "")]
    for kind in ("train", "evaluation"):
        losses = [[r["lm loss"] for r in rows if r["kind"] == kind] for rows in (plain, usual)]
        assert losses[0] == losses[1] and losses[0]
    splits = [row["split"] for row in averaging if row["kind"] == "evaluation"]
    assert splits[:2] == ["validation", "validation ema"]


def _tool(scratch: Path, *words: str | Path) -> Any:
    return in_child(lambda: convert_checkpoint.main([str(w) for w in words]), scratch)


def _evaluations(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {row["split"]: row["lm loss"] for row in rows if row["kind"] == "evaluation"}


def test_evaluation_is_that_of_the_exported_average(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--eval-iters", "2", "--lr", "1e-2"]
    run, ours, theirs = tmp_path / "run", tmp_path / "ours", tmp_path / "theirs"
    inside = _evaluations(_train(run, *flags, *EMA, "--eval-ema", "--save-interval", "6", ranks=2))
    assert abs(inside["validation ema"] - inside["validation"]) > 1e-3
    assert "loss at iteration 6 on validation ema set" in capfd.readouterr().out
    only = ["--skip-train", *flags]
    later = _evaluations(_train(tmp_path / "later", *only, "--eval-ema", "--load", str(run)))
    for name, loss in inside.items():
        assert math.isclose(later[name], loss, rel_tol=1e-6), name
    assert _tool(tmp_path / "1", "export", "--load", run, "--hf", theirs, "--ema") == 0
    assert _tool(tmp_path / "2", "import", "--hf", theirs, "--save", ours) == 0
    again = tmp_path / "again"
    assert _tool(tmp_path / "3", "export", "--load", ours, "--hf", again, "--ema") == 2
    assert "holds no averaged weights, which only a run with" in capfd.readouterr().err
    plain = _evaluations(_train(tmp_path / "exported", *only, "--pretrained-checkpoint", str(ours)))
    for name in ("validation", "test"):
        assert math.isclose(plain[name], inside[f"{name} ema"], rel_tol=1e-6), name


@pytest.mark.slow
def test_an_average_starts_from_weights(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--save-interval", "1", "--load", str(tmp_path)]
    _train(tmp_path, *flags, "--exit-interval", "2")
    capfd.readouterr()
    _train(tmp_path, *flags, *EMA, "--exit-interval", "4")
    shown = capfd.readouterr().out
    assert shown.count("holds no averaged weights, so they start from the loaded ones") == 1
    everything = whole_tensors(tmp_path / "iter_0000002", tmp_path / "whole.pt")
    third, average = _stored(tmp_path, 3)
    for name, weight in third.items():
        wanted = DECAY * everything[name] + (1 - DECAY) * weight
        torch.testing.assert_close(average[name], wanted, rtol=1e-6, atol=1e-7)
    _train(tmp_path, *flags, "--exit-interval", "5")
    assert "averaged weights, which a run without `--ema-decay` leaves" in capfd.readouterr().out


def test_finetuning_averages_its_own_weights_only(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    _train(first, *EMA, "--save-interval", "6")
    start = ["--load", str(first), "--finetune", "--save-interval", "1"]
    _train(second, *EMA, *start, steps=1)
    weights, _ = _stored(first, STEPS)
    after, average = _stored(second, 1)
    for name, weight in weights.items():
        wanted = DECAY * weight + (1 - DECAY) * after[name]
        torch.testing.assert_close(average[name], wanted, rtol=1e-6, atol=1e-7)


def test_of_a_model_with_adapters_only_they_are_averaged(tmp_path: Path) -> None:
    flags = [*EMA, *"--lora-rank 2 --ema-start 2 --save-interval 1".split()]
    _train(tmp_path, *flags, "--exit-interval", "2", ranks=2)
    _train(tmp_path, *flags, "--load", str(tmp_path), "--exit-interval", "3")
    _assert_closed_form(tmp_path, [1, 2, 3])
    assert all(".lora." in name for name in _stored(tmp_path, 3)[1])
