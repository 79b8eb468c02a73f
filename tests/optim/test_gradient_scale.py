"""Updates that divide the gradients by the step's targets, against gradients divided before."""

import math
from unittest import mock

import pytest
import torch

from megatron_ext.optim.builder import choose_kernels
from megatron_ext.optim.update import all_decide_on_device
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepInputs
from tests.ranks import on_ranks
from tests.runs_from_inside import build
from tests.training_runs import SMALL


def _run(context: ParallelContext, words: str) -> Run:
    """Build a run whose kernel decides on a CPU as on a GPU."""
    run = build([*SMALL, *words.split()], context)
    assert run.optimizer is not None
    choose_kernels(run.optimizer, fused=True)
    run.runner.scales_in_update = all_decide_on_device(run.optimizer)
    assert run.runner.scales_in_update
    return run


Trained = tuple[float, list[torch.Tensor], torch.Tensor | None]


def _step(run: Run) -> Trained:
    """Train a step; return the gradient norm, the weights, and what the update multiplies by."""
    number = run.batch_size.num_microbatches
    samples = run.batch_size.global_batch_size
    inputs = StepInputs(run.train_source.next_step(number), number)
    with mock.patch.object(run.runner, "update", wraps=run.runner.update) as update:
        result = run.runner.train(inputs, samples)
    assert result.update.applied
    weights = [p.detach() for c in run.chunks for p in c.parameters()]
    return result.update.grad_norm, weights, update.call_args.args[0].gradient_scale


def _compare(context: ParallelContext, words: str) -> None:
    """Compare steps; float32 rounds a product and a quotient in another order.

    One step of a 16-bit run is compared, after which a rounded weight changes later gradients. The
    biases of keys, whose gradients are noise around zero, are left out of it.
    """
    before, within = (_run(context, words) for _ in range(2))
    before.runner.observer = lambda: None  # Whoever looks at gradients sees them divided.
    half = "fp16" in words
    for _ in range(1 if half else 3):
        norm, weights, nothing = _step(before)
        found, others, scale = _step(within)
        assert nothing is None
        assert scale is not None and scale < 0.1
        assert math.isclose(found, norm, rel_tol=1e-6)
        for weight, other in zip(weights, others, strict=True):
            torch.testing.assert_close(other, weight, rtol=2**-10 if half else 1e-6, atol=2e-7)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"dp": 2}, "--use-distributed-optimizer --mtp-num-layers 1 --num-experts 4 "
         "--expert-model-parallel-size 2 --moe-aux-loss-coeff 0.01 --train-iters 4 "
         "--moe-router-load-balancing-type aux_loss"),
        ({"dp": 2}, "--clip-grad 0 --train-iters 4"),
        ({"dp": 2}, "--fp16 --initial-loss-scale 1024 --use-distributed-optimizer --train-iters 4 "
         "--disable-bias-linear"),
        ({"pp": 2}, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --train-iters 4"),
    ],
)  # fmt: skip
def test_the_update_divides_by_the_targets(sizes: dict[str, int], words: str) -> None:
    on_ranks(_compare, sizes, words=words)


def _looks(context: ParallelContext) -> None:
    """Check that nothing is left to the update if a host decides, or micro-batches have means."""
    hosts = build([*SMALL, *"--train-iters 4 --optimizer sgd".split()], context)
    means = _run(context, "--no-calculate-per-token-loss --train-iters 4")
    for run in (hosts, means):
        assert _step(run)[2] is None
    assert not hosts.runner.scales_in_update


def test_other_runs_have_whole_gradients() -> None:
    on_ranks(_looks, {"dp": 2})
