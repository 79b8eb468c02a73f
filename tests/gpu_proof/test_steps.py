"""Whole steps ask for no value of the device, and take no more than their budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from benchmarks.mmdit_block import Case as VideoCase
from benchmarks.mmdit_block import build, work_of
from megatron_ext.text.task import GPT
from megatron_ext.video.config.mmdit import SIZES
from tests.gpu_proof import budget
from tests.gpu_proof.compiler import compiled_graphs
from tests.gpu_proof.fake_cuda import CAPABILITY, DEVICE
from tests.gpu_proof.fake_ranks import one_rank_of
from tests.gpu_proof.steps import built, flags
from tests.gpu_proof.trace import Trace
from tests.training_runs import prepared

pytestmark = [
    pytest.mark.usefixtures("fake_tensors"),
    pytest.mark.skipif(CAPABILITY != 90, reason="the budgets are those of an H200"),
]

EIGHT = "--fp8-format hybrid --fp8-recipe"
READ = "Event.synchronize at megatron_ext/device/__init__.py:read"
"""The host reads what the step before did, which is over by then."""
ONCE = (
    "_local_scalar_dense at megatron_ext/layers/weight_gradients.py:",
    # Weights that start on the host, as here, leave the frequencies there.
    "_to_copy at megatron/core/models/common/embeddings/rotary_pos_embedding.py:",
)
"""Beginnings of the waits of a run's first step."""
OUTSIDE_OF_LAYERS = (
    "megatron_ext/device/__init__.py:",
    "rope_utils.py:get_pos_emb_on_this_cp_rank",
)
"""Where memory is pinned: on the way of batches and of results, and for rotary positions."""
ROUTING = ("megatron/core/transformer/moe/", "megatron_ext/layers/moe.py")


@dataclass(frozen=True)
class Case:
    """A step: flags beside those of a Llama 3b of two layers at 8192 tokens.

    Attributes:
        ranks: number of ranks in the layout, of which the first takes the step.
        documents: documents of a row do not attend to each other.
        asks: parts of places where the host may wait in every step.
    """

    words: str = ""
    ranks: int = 1
    documents: bool = False
    asks: tuple[str, ...] = (READ,)


CASES = {
    "bf16": Case(),
    "fp8 delayed": Case(f"{EIGHT} delayed"),
    "fp8 tensorwise": Case(f"{EIGHT} tensorwise"),
    "fp8 rowwise": Case(f"{EIGHT} rowwise"),
    "documents": Case("--reset-attention-mask", documents=True),
    "context parallel": Case("--context-parallel-size 2", ranks=2),
    "tensor parallel": Case("--tensor-model-parallel-size 2 --sequence-parallel", ranks=2),
    "experts": Case(
        "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024 --moe-grouped-gemm",
        asks=(READ, *ROUTING),
    ),
}


def unexpected(waits: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """Return the waits of which no part is allowed."""
    return [wait for wait in waits if not any(part in wait for part in allowed)]


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_nothing_and_keeps_its_budget(name: str) -> None:
    case = CASES[name]
    with built(flags(case.words), ranks=case.ranks) as step:
        # The second step knows which scales have a history, the third uses that.
        first, _, third = (step.take(documents=case.documents) for _ in range(3))
        rows = budget.rows_of(third.totals(), step.num_weights, step.num_tokens)
    large = dict(sorted(third.over(third.vocabulary * 1024).items()))
    if budget.WRITES:
        budget.write("steps", name, rows)
        budget.write("operations over the vocabulary", name, large)
    budget.TABLES.append(budget.table(name, rows, budget.read("steps", name)))
    assert unexpected(first.waits, (*ONCE, *case.asks)) == []
    assert unexpected(third.waits, case.asks) == []
    assert unexpected(third.pinned, OUTSIDE_OF_LAYERS) == []
    assert budget.exceeded(rows, budget.read("steps", name)) == []
    known = budget.read("operations over the vocabulary", name)
    assert {key: count for key, count in large.items() if count > known.get(key, 0)} == {}


LENGTHS = ((1, 512), (2, 512), (1, 1024), (2, 1024), (1, 768), (2, 768))
"""Batch and length of steps of one process; the last two find what was compiled before."""


def test_batches_and_lengths_compile_each_function_a_few_times() -> None:
    """One sample and several, a length and any length: four times at most."""
    with compiled_graphs() as graphs:
        for batch, length in LENGTHS:
            with built(flags(size="1b", batch=batch, length=length)) as step:
                step.take()
    counts = dict(sorted(Counter(f"{g.name}{' backward' * g.backward}" for g in graphs).items()))
    if budget.WRITES:
        budget.write("graphs", "bf16", counts)
    assert max(counts.values()) <= 4
    known = budget.read("graphs", "bf16")
    assert {name: count for name, count in counts.items() if count > known.get(name, 0)} == {}


BLOCKS = ("double", "single")


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_video_block_waits_for_nothing_and_keeps_its_budget(kind: str) -> None:
    case = VideoCase(kind, SIZES["11b"], num_image=8192, num_text=512)
    name = f"video, {kind} block"
    _, config, _ = prepared(flags(), GPT, ranks=1, device="cuda")
    with one_rank_of(config) as context:
        with Trace(-1, alone=True):  # answers what is asked before
            weights = sum(x.numel() for x in build(case, context, DEVICE).parameters())
            work = work_of(case, context, DEVICE)
            work()
        with Trace(-1, alone=True) as trace:
            work()
    rows = budget.rows_of(trace.totals(), weights, case.num_tokens)
    if budget.WRITES:
        budget.write("steps", name, rows)
    budget.TABLES.append(budget.table(name, rows, budget.read("steps", name)))
    assert trace.waits == [] and trace.pinned == []
    assert budget.exceeded(rows, budget.read("steps", name)) == []
