"""Gradients of every parameter and their norm: many layouts against one rank, from the start."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_ext.data.batch import Batch
from megatron_ext.device import select
from megatron_ext.inspect.layouts import parse_layout
from megatron_ext.programs.parity import main
from megatron_ext.text.task import GPT
from megatron_ext.train.forking import fork_ranks
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepInputs, StepResult
from tests.training_runs import SAME_WEIGHTS, curve, mock_data, prepared

FLAGS = [*SAME_WEIGHTS, *mock_data()]


def agree(
    layouts: str, words: str, capfd: pytest.CaptureFixture[str], *, limit: float = 1e-5
) -> None:
    """Check that no gradient of two steps and no norm differs by more than the limit."""
    limits = f"--steps 2 --loss-tolerance {limit} --gradient-tolerance {limit}".split()
    code = main(["--layouts", layouts, *limits, "--", *FLAGS, "--eod-mask-loss", *words.split()])
    assert code == 0, capfd.readouterr().out


@pytest.mark.parametrize(
    "reduction", ["token", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sample", "square"))]
)
def test_reductions_agree_on_all_layouts(reduction: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Runs with multi-token prediction agree to 1e-6; tests/data checks the denominators."""
    words = f"--loss-reduction {reduction} --mtp-num-layers 1"
    agree("mbs4,dp2,pp2,cp2,tp2sp", words, capfd, limit=1e-6)


def test_one_sample_per_microbatch_is_the_mean_of_means(tmp_path: Path) -> None:
    flags = [*FLAGS, "--eod-mask-loss", "--micro-batch-size", "1", "--train-iters", "3"]
    sample = curve([*flags, "--loss-reduction", "sample"], tmp_path / "sample")
    means = curve([*flags, "--no-calculate-per-token-loss"], tmp_path / "means")
    assert [norm for _, norm in sample] == pytest.approx([norm for _, norm in means], rel=1e-5)


@pytest.mark.parametrize(
    "layouts",
    [
        "mbs1,mbs4,dp2,pp2,pp2dp2,tp2,tp2sp,cp2,cp2pp2,pp2vpp2",
        # megatron-core's own schedule agrees too; its batched messages are never used.
        "pp2vpp2,pp2vpp2coreint,pp2vpp2dp2[--overlap-grad-reduce]",
    ],
)
def test_ragged_masks_and_virtual_chunks(layouts: str, capfd: pytest.CaptureFixture[str]) -> None:
    agree(layouts, "", capfd)


MODEL = (
    "--mtp-num-layers 2 --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
    "--moe-z-loss-coeff 0.001 --moe-token-dispatcher-type alltoall --train-iters 2"
)
MASKED_LAYOUTS = "dp1 dp2 cp2 pp2 tp2sp pp2zbh1cp2 pp2[--no-calculate-per-token-loss]".split()


def masked(batch: Batch) -> Batch:
    """Return the batch without any target, for the model and for the depths."""
    return replace(
        batch,
        loss_weights=torch.zeros_like(batch.loss_weights),
        mtp_loss_weights=tuple(torch.zeros_like(mask) for mask in batch.mtp_loss_weights),
    )


def train_masked(
    layout: str, choose: Callable[[Run, int], bool], check: Callable[[Run, StepResult], None]
) -> None:
    """Train a step; micro-batch i of a rank is masked where ``choose(run, i)`` says so."""
    named = parse_layout(layout)
    flags = [*FLAGS, *MODEL.split(), *named.flags, "--nproc-per-node", str(named.ranks)]
    device = select()
    _, config, tokenizer = prepared(flags, device=device.kind)

    def prepare(run: Run) -> None:
        count = run.batch_size.num_microbatches
        batches = run.train_source.next_step(count)
        if batches is not None:
            batches = [masked(b) if choose(run, i) else b for i, b in enumerate(batches)]

        def gradients_are_numbers() -> None:
            for chunk in run.chunks:
                for name, parameter in chunk.named_parameters():
                    assert bool(torch.isfinite(parameter.main_grad).all()), name  # type: ignore[attr-defined]

        run.runner.observer = gradients_are_numbers
        result = run.runner.train(StepInputs(batches, count), 16)
        for chunk in run.chunks:
            for name, parameter in chunk.named_parameters():
                assert bool(torch.isfinite(parameter).all()), name
        assert all(math.isfinite(float(loss)) for loss in result.losses.values())
        check(run, result)

    main = partial(pretrain, GPT, config, device=device, assets=tokenizer, prepare=prepare)
    assert fork_ranks(main, named.ranks) == 0


def trains(run: Run, result: StepResult) -> None:
    assert result.update.applied
    assert result.update.grad_norm > 0
    if run.context.is_last_stage:
        assert {"lm loss", "mtp_1 loss", "mtp_2 loss"} <= result.losses.keys()
        assert float(result.losses["lm loss"]) == pytest.approx(math.log(2000), rel=0.05)


@pytest.mark.parametrize("layout", ["cp2", "cp2a2a", "pp2zbh1cp2", "dp2"])
def test_a_masked_context_or_data_parallel_rank(layout: str) -> None:
    train_masked(
        layout, lambda run, i: run.context.cp_rank == 1 or run.context.dp_rank == 1, trains
    )


def learns_nothing(run: Run, result: StepResult) -> None:
    """Check that the gradient is exactly zero, the step counts as done, and the log says 0."""
    if run.config.training.calculate_per_token_loss:
        assert result.update.grad_norm == 0
        for chunk in run.chunks:
            assert not any(bool(p.main_grad.any()) for p in chunk.parameters())
    assert result.update.applied
    if run.context.is_last_stage:
        assert float(result.losses["lm loss"]) == 0
        assert float(result.losses["mtp_2 loss"]) == 0


@pytest.mark.parametrize("layout", MASKED_LAYOUTS)
def test_a_masked_micro_batch_and_step(layout: str) -> None:
    train_masked(layout, lambda run, i: i == 1, trains)
    train_masked(layout, lambda run, i: True, learns_nothing)


def test_a_run_goes_on_after_a_masked_step(tmp_path: Path) -> None:
    """Optimizer and schedule stay usable: the next step trains."""

    def train_again(run: Run, result: StepResult) -> None:
        learns_nothing(run, result)
        batches = run.train_source.next_step(run.batch_size.num_microbatches)
        trains(run, run.runner.train(StepInputs(batches, run.batch_size.num_microbatches, 16), 16))

    train_masked("pp2", lambda run, i: True, train_again)
