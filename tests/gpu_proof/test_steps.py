"""Whole steps ask for no value of the device, and take no more than their budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.gpu_proof import budget
from tests.gpu_proof.compiler import compiled_graphs
from tests.gpu_proof.fake_cuda import CAPABILITY
from tests.gpu_proof.steps import LAYERS, built, flags

pytestmark = pytest.mark.usefixtures("fake_tensors")
on_h200 = pytest.mark.skipif(CAPABILITY != 90, reason="the budgets are those of an H200")

EIGHT = "--fp8-format hybrid --fp8-recipe"
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024"
DEEPSEEK = (
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-layernorm "
    "--rotary-scaling-factor 4 --mscale-all-dim 1 --moe-layer-freq [0,1] "
    "--moe-shared-expert-intermediate-size 1024 --moe-router-score-function sigmoid "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --mtp-num-layers 1"
)
"""DeepSeek-V3's recipe: a dense layer, one of experts, and one of multi-token prediction."""
GEMMA = (
    "--geglu --sandwich-norm --apply-layernorm-1p --qk-layernorm --kv-channels 256 "
    "--attn-logit-softcapping 50 --final-logit-softcapping 30 --embedding-multiplier 55 "
    "--window-size 1023 0 --window-attn-skip-freq [1,0] --rope-local-base-freq 10000"
)
"""Parts of Gemma 2 and 3: a layer with a window and a base of its own, and one without."""
SINKS = (
    "--softmax-type learnable --window-size 127 0 --window-attn-skip-freq [1,0] --kv-channels 64"
)
PIPELINE = "--pipeline-model-parallel-size 3 --num-layers 3 --global-batch-size 4"
READ = "Event.synchronize at megatron_ext/device/streams.py:read"
"""The host reads what the step before did, which is over by then."""
ONCE = (
    "_local_scalar_dense at megatron_ext/layers/weight_gradients.py:",
    # Weights that start on the host, as here, leave the frequencies there.
    "_to_copy at megatron/core/models/common/embeddings/rotary_pos_embedding.py:",
    # CUDA graphs are recorded in the second step.
    "torch.cuda.synchronize at megatron_ext/layers/graphs.py:_add_slot",
)
"""Beginnings of the waits of a run's first two steps."""
OUTSIDE_OF_LAYERS = (
    "megatron_ext/device/streams.py:",
    "rope_utils.py:get_pos_emb_on_this_cp_rank",
)
"""Where memory is pinned: on the way of batches and of results, and for rotary positions."""
DISPATCHER = "megatron/core/transformer/moe/token_dispatcher.py:"


@dataclass(frozen=True)
class Case:
    """A step: flags beside those of a Llama 3b of two layers at 8192 tokens.

    Attributes:
        ranks: number of ranks in the layout.
        rank: the rank that takes the step; messages of others have shapes only.
        documents: documents of a row do not attend to each other.
        asks: waits of the host in each layer.
        replays: CUDA graphs that the third step launches.
    """

    words: str = ""
    ranks: int = 1
    rank: int = 0
    documents: bool = False
    asks: tuple[str, ...] = ()
    replays: int = 0


CASES = {
    "bf16": Case(),
    "fp8 delayed": Case(f"{EIGHT} delayed"),
    "fp8 tensorwise": Case(f"{EIGHT} tensorwise"),
    "fp8 rowwise": Case(f"{EIGHT} rowwise"),
    "documents": Case("--reset-attention-mask", documents=True),
    "context parallel": Case("--context-parallel-size 2", ranks=2),
    "tensor parallel": Case("--tensor-model-parallel-size 2 --sequence-parallel", ranks=2),
    "pipeline, first stage": Case(PIPELINE, ranks=3, rank=0),
    "pipeline, middle stage": Case(PIPELINE, ranks=3, rank=1),
    "pipeline, last stage": Case(PIPELINE, ranks=3, rank=2),
    "multi-token prediction": Case("--mtp-num-layers 1"),
    "recorded layers": Case(
        "--cuda-graph-impl local --cuda-graph-warmup-steps 1 --global-batch-size 2",
        replays=2 * 2 * LAYERS,
    ),
    "experts": Case(
        EXPERTS,
        asks=(
            f"masked_select at {DISPATCHER}dispatch_postprocess",
            f"_to_copy at {DISPATCHER}dispatch_postprocess",
        ),
    ),
    "grouped experts": Case(
        f"{EXPERTS} --moe-grouped-gemm --moe-token-dispatcher-type alltoall",
        asks=(f"Event.synchronize at {DISPATCHER}_maybe_dtoh_and_synchronize",),
    ),
    "expert parallel": Case(
        f"{EXPERTS} --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 "
        "--global-batch-size 2",
        ranks=2,
        asks=(f"Event.synchronize at {DISPATCHER}_maybe_dtoh_and_synchronize",),
    ),
    "latent attention, experts": Case(
        f"{EXPERTS} {DEEPSEEK}",
        asks=(f"Event.synchronize at {DISPATCHER}_maybe_dtoh_and_synchronize",),
    ),
    "soft caps and windows": Case(GEMMA),
    "sinks": Case(SINKS),
    "muon": Case("--optimizer muon"),
    "muon, data parallel": Case("--optimizer dist_muon --global-batch-size 2", ranks=2),
    "clipped logits": Case("--qk-clip --reset-attention-mask", documents=True),
    "clipped logits, data parallel": Case(
        "--qk-clip --use-distributed-optimizer --optimizer muon --global-batch-size 2", ranks=2
    ),
}


ON_B200 = ("bf16", "fp8 delayed", "documents", "recorded layers")
"""Steps that are traced for B200 too; the others differ in single kernels only, see `cases`."""
TRACED = tuple(CASES) if CAPABILITY == 90 else ON_B200


def unexpected(waits: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """Return the waits of which no part is allowed."""
    return [wait for wait in waits if not any(part in wait for part in allowed)]


@pytest.mark.parametrize("name", TRACED)
def test_a_step_waits_for_nothing_and_keeps_its_budget(name: str) -> None:
    case = CASES[name]
    with built(flags(case.words), ranks=case.ranks, rank=case.rank) as step:
        # The second step knows which scales have a history, the third uses that.
        first, second, third = (step.take(documents=case.documents) for _ in range(3))
        rows = budget.rows_of(third.totals(), step.num_weights, step.num_tokens)
    large = third.over(third.vocabulary * 1024)
    known, known_large = budget.of_step(name, rows), budget.of_operations(name, large)
    assert unexpected([*first.waits, *second.waits], (*ONCE, READ, *case.asks)) == []
    assert Counter(third.waits) == Counter((READ, *LAYERS * case.asks))
    assert unexpected(third.pinned, OUTSIDE_OF_LAYERS) == []
    assert (second.forbidden, third.replays) == ([], case.replays)
    assert budget.exceeded(rows, known) == []
    assert {key: count for key, count in large.items() if count > known_large.get(key, 0)} == {}


LENGTHS = ((1, 512), (2, 512), (1, 1024), (2, 1024), (1, 768), (2, 768))
"""Batch and length of steps of one process; the last two find what was compiled before."""


@on_h200
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
