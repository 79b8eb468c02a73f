"""Whole runs whose forward and backward passes run in turns: not a bit of a step changes."""

from pathlib import Path

import pytest

from tests.training_runs import SAME_WEIGHTS, curve, mock_data

FLAGS = [
    *SAME_WEIGHTS,
    *mock_data(),
    *"--train-iters 2 --hidden-size 32 --ffn-hidden-size 64 --num-experts 4".split(),
    *"--moe-router-topk 2 --moe-aux-loss-coeff 0.01 --expert-model-parallel-size 2".split(),
    *"--moe-token-dispatcher-type alltoall".split(),
]
PAIRED = "--overlap-moe-expert-parallel-comm"
DELAYED = "--delay-wgrad-compute"
PP = "--pipeline-model-parallel-size 2"
VPP = f"{PP} --num-virtual-stages-per-pipeline-rank 2"
DUAL = f"{PP} --pipeline-schedule dualpipe-v --num-layers 4 --untie-embeddings-and-output-weights"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# The heads of multi-latent attention have keys of their own.
MLA = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias"
)
SHARED = "--moe-shared-expert-intermediate-size 32"
DROPS = "--moe-expert-capacity-factor 0.7"
FLEX = "--moe-token-dispatcher-type flex --moe-ranks-per-node"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        # Three layers of a rank: a forward pass and a recomputation meet in the middle one.
        (2, f"--num-layers 3 {FULL} --hidden-dropout 0.1 {SHARED} {DROPS}"),
        (4, f"{VPP} {DELAYED} --mtp-num-layers 1 --moe-layer-freq [0,1,1,0]"),
        *(
            pytest.param(ranks, words, marks=slow)
            for ranks, words in [
                (2, f"{TP} --expert-tensor-parallel-size 1"),
                (4, f"{TP} --expert-tensor-parallel-size 2 --mtp-num-layers 2"),
                (2, f"{SHARED} {DROPS} --attention-dropout 0.1"),
                (2, "--context-parallel-size 2 --moe-z-loss-coeff 0.01"),
                (2, f"{DROPS} --moe-pad-expert-input-to-capacity"),
                (2, f"{FULL} --hidden-dropout 0.1 --deterministic-dropout"),
                (2, "--moe-layer-recompute --num-layers 3 --moe-input-jitter-eps 0.1"),
                (2, MLA),
                (2, "--bf16 --no-calculate-per-token-loss"),
                (4, f"{PP} --hidden-dropout 0.1 --attention-dropout 0.1"),
                (4, f"{VPP} {OVERLAP} --moe-router-load-balancing-type seq_aux_loss"),
                (4, OVERLAP),
                (2, f"{DELAYED} {SHARED}"),
                (2, f"{FLEX} 1 --num-layers 3 {FULL} --hidden-dropout 0.1 {SHARED}"),
                (4, f"{FLEX} 2 --expert-model-parallel-size 4 {DELAYED} --mtp-num-layers 1"),
                (8, f"{FLEX} 2 --expert-model-parallel-size 4 {VPP} {FULL} --micro-batch-size 1"),
                (4, f"{VPP} {OVERLAP} {DELAYED}"),
                (4, "--data-parallel-sharding-strategy optim_grads"),
                (4, f"{DUAL} {DELAYED} {OVERLAP}"),
                (4, f"{DUAL} {FLEX} 1 {FULL} --hidden-dropout 0.1 {SHARED} {DROPS}"),
                (8, f"{PP} {TP} --expert-tensor-parallel-size 1 --micro-batch-size 1"),
            ]
        ),
    ],
)
def test_losses_and_gradient_norms_are_those_without_pairs(
    ranks: int, words: str, tmp_path: Path
) -> None:
    flags = [*FLAGS, *words.split()]
    if MLA in words:
        flags.remove("--group-query-attention")
    plain = [word for word in flags if word != DELAYED]
    alone = curve(plain, tmp_path / "alone", ranks)
    assert len(alone) == 2
    assert curve([*flags, PAIRED], tmp_path / "paired", ranks) == alone
