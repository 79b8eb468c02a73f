"""Models with Mamba-2, as Nemotron 3 and as Bamba, train alike in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.text.model.test_deepseek import train_alike
from tests.training_runs import train_steps

SIZES = (
    "--hidden-size 32 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
    "--kv-channels 12 --ffn-hidden-size 48 --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --max-position-embeddings 64 --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 1 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 319 --padded-vocab-size 320 --reset-attention-mask --seq-length 32 "
    "--global-batch-size 8 --lr 1 --adam-eps 1 --init-method-std 0.1 --num-workers 0 "
    "--mamba-num-heads 8 --mamba-head-dim 8 --mamba-state-dim 16 --mamba-num-groups 4"
)
"""A model to train. An epsilon of 1 keeps Adam from turning rounding errors into steps."""
NEMOTRON = (
    f"{SIZES} --hybrid-layer-pattern ME*EM-* --squared-relu --position-embedding-type none "
    "--num-experts 8 --moe-ffn-hidden-size 16 --moe-router-topk 4 --moe-router-dtype fp32 "
    "--moe-shared-expert-intermediate-size 20 --moe-router-score-function sigmoid "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none "
    "--mamba-time-step-min 0.01"
)
BAMBA = (
    f"{SIZES} --hybrid-layer-pattern M-M-*-M- --swiglu --position-embedding-type rope "
    "--rotary-percent 0.5 --mamba-conv-kernel-dim 3 --no-mamba-conv-bias --mamba-time-step-max 0.5"
)
FEW = "tp2spep2etp1cp2,pp2vpp2cp2ep2"
MANY = (
    "tp2sp,tp4spcp2,pp2,cp2,cp4,ep2dp2,tp2spep2etp1dp2,pp2ep2dp2do,pp2zbh1tp2spep2etp1,"
    "cp2pp2tp2sp,"
    "pp2dp2[--recompute-granularity full --recompute-method uniform --recompute-num-layers 1],"
    "cp2dp2[--recompute-granularity selective --recompute-modules core_attn]"
)


@pytest.mark.parametrize("layouts", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_layouts_train_alike(layouts: str, capfd: pytest.CaptureFixture[str]) -> None:
    train_alike(layouts, NEMOTRON, capfd)


@pytest.mark.slow
def test_layouts_without_experts_train_alike(capfd: pytest.CaptureFixture[str]) -> None:
    train_alike("tp2,tp4,cp2,cp4,tp2cp2,pp2vpp2cp2,pp4dp2do", BAMBA, capfd)


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    """The weights of a mixer are split over other ranks than those that saved them."""
    words = f"{NEMOTRON} --train-iters 3 --log-interval 1 --eval-iters 0 --save-interval 2".split()
    saved = "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
    first = [*words, *saved.split(), "--expert-tensor-parallel-size", "1"]
    whole = train_steps(first, tmp_path / "run", ranks=2)
    for number, layout in enumerate(
        (
            "--context-parallel-size 2 --pipeline-model-parallel-size 2",
            "--tensor-model-parallel-size 4 --sequence-parallel",
        )
    ):
        goes_on = f"{layout} --load {tmp_path / 'run'} --ckpt-step 2"
        target = tmp_path / f"again_{number}"
        (step,) = train_steps([*words, *goes_on.split()], target, ranks=4)
        for name in ("lm loss", "grad_norm"):
            assert step[name] == pytest.approx(whole[2][name], rel=1e-6), (layout, name)
