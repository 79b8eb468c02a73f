"""MMDiT steps with compiled blocks against plain torch, which knows nothing of either."""

from __future__ import annotations

import pytest

from megatron_ext.layout import ParallelContext
from megatron_ext.models.compiled import compiled_on_cpu
from tests.models.mmdit.problem import (
    Problem,
    build,
    gathered_weights,
    gradient_errors,
    train_step,
    truth,
)
from tests.ranks import ranks

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
