"""MMDiT steps with compiled blocks against plain torch, which knows nothing of either."""

from __future__ import annotations

import pytest

from megatron_ext.layers.compiled import compiled_on_cpu
from megatron_ext.parallel.context import ParallelContext
from tests.layers.test_compiled_layers import called, holders
from tests.ranks import ranks
from tests.video.model.mmdit.problem import (
    Problem,
    build,
    gathered_weights,
    gradient_errors,
    train_step,
    truth,
)

TOLERANCE = 1e-5


def check(context: ParallelContext, problem: Problem) -> None:
    weights = gathered_weights(build(problem, context)[1])
    want, gradients = truth(problem, weights)
    with compiled_on_cpu():
        step = train_step(problem, context)
    assert step.loss == pytest.approx(want, rel=TOLERANCE)
    errors = gradient_errors(step, gradients)
    assert max(errors.values()) < TOLERANCE, errors


@ranks()
def test_one_rank(context: ParallelContext) -> None:
    check(context, Problem())


@pytest.mark.slow
@ranks(tp=2, cp=2)
def test_tensor_sequence_and_context_parallel(context: ParallelContext) -> None:
    """The last context-parallel rank holds no text."""
    check(context, Problem(sequence_parallel=True))


@ranks()
def test_data_parallelism_is_told_of_every_weight_that_is_used(context: ParallelContext) -> None:
    problem = Problem()
    chunk = build(problem, context)[1][0]
    names = called(chunk)
    batch = {k: v for k, v in problem.microbatch(0).items() if k not in ("target", "mask")}
    with compiled_on_cpu("eager"):
        chunk(**batch)
    assert names >= holders(chunk)
