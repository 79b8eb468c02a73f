"""Blocks of the video networks wait for nothing, forward and backward, and keep their budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.layer_traffic import training_step, video_block
from benchmarks.mmdit_block import Case, build, work_of
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.task import GPT
from megatron_ext.video.model.window import FrameWindow
from megatron_ext.video.networks.mmdit.config import SIZES
from megatron_ext.video.networks.wan import config as wan_config
from tests.gpu_proof import budget
from tests.gpu_proof.cases import half
from tests.gpu_proof.fake_cuda import CAPABILITY, DEVICE
from tests.gpu_proof.fake_ranks import one_rank_of
from tests.gpu_proof.steps import flags
from tests.gpu_proof.trace import Trace
from tests.gpu_proof.video_cases import FRAMES, TOKENS
from tests.training_runs import prepared

pytestmark = [
    pytest.mark.usefixtures("fake_tensors"),
    pytest.mark.skipif(CAPABILITY != 90, reason="the budgets are those of an H200"),
]

Work = Callable[[], object]
Made = tuple[Work, int, int]
"""A forward and backward pass, the number of weights and the number of tokens."""


def mmdit(kind: str) -> Callable[[ParallelContext], Made]:
    """Return what makes a block of Open-Sora 2.0 with 8192 tokens of a clip."""

    def made(context: ParallelContext) -> Made:
        case = Case(kind, SIZES["11b"], num_image=8192, num_text=512)
        weights = sum(x.numel() for x in build(case, context, DEVICE).parameters())
        return work_of(case, context, DEVICE), weights, case.num_tokens

    return made


def wan(window: FrameWindow | None) -> Callable[[ParallelContext], Made]:
    """Return what makes a block of Wan 2.1 1.3B with 8190 tokens, streamed if there is a window."""

    def made(context: ParallelContext) -> Made:
        sizes = wan_config.SIZES["1.3b"]
        hidden = half(FRAMES * TOKENS, 1, sizes.hidden_size, grad=False)
        block, *given = video_block(context, sizes, hidden, FRAMES, window)
        work = training_step(block, hidden, *given)
        return work, sum(x.numel() for x in block.parameters()), len(hidden)

    return made


BLOCKS = {
    "video, double block": mmdit("double"),
    "video, single block": mmdit("single"),
    "video, Wan block": wan(None),
    "video, causal Wan block": wan(FrameWindow()),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_waits_for_nothing_and_keeps_its_budget(name: str) -> None:
    _, config, _ = prepared(flags(), GPT, ranks=1, device="cuda")
    with one_rank_of(config) as context:
        with Trace(-1, alone=True):  # answers what is asked before
            work, num_weights, num_tokens = BLOCKS[name](context)
            work()
        with Trace(-1, alone=True) as trace:
            work()
    rows = budget.rows_of(trace.totals(), num_weights, num_tokens)
    known = budget.of_step(name, rows)
    assert trace.waits == [] and trace.pinned == []
    assert budget.exceeded(rows, known) == []
