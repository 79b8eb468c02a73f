"""Layers whose attention and MLP stand side by side train in every layout as on one rank.

`tests/text/convert/test_families.py` compares them with transformers' GPT-NeoX, Falcon and others.
"""

from pathlib import Path

import pytest

from tests.training_runs import curve

FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --max-position-embeddings 16 --position-embedding-type rope --mock-data "
    "--split 80,20,0 --tokenizer-type NullTokenizer --vocab-size 63 --padded-vocab-size 64 "
    "--num-workers 0 --eval-iters 0 --log-interval 1 --train-iters 2 --lr 1e-3 --adam-eps 1e-2 "
    "--hidden-dropout 0 --attention-dropout 0 --transformer-impl torch --use-parallel-residual"
).split()
KINDS = {
    "two norms": "",
    "one norm": "--shared-input-norm --no-norm-bias --disable-bias-linear --swiglu",
}
LAYOUTS = {
    "tp2sp vpp2": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2",
    ),
    "recomputed cp2": (
        2,
        "--context-parallel-size 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    "recomputed mlp": (
        1,
        "--recompute-granularity selective --recompute-modules core_attn mlp",
    ),
    "zero bubbles": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "sharded weights": (
        2,
        "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params",
    ),
    "depths": (2, "--mtp-num-layers 1 --pipeline-model-parallel-size 2"),
}
QUICK = {("one norm", "tp2sp vpp2"), ("two norms", "recomputed cp2")}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=[] if (kind, layout) in QUICK else [pytest.mark.slow])
        for kind in KINDS
        for layout in LAYOUTS
    ],
)
def test_a_layout_trains_as_one_rank(kind: str, layout: str, tmp_path: Path) -> None:
    count, words = LAYOUTS[layout]
    flags = [*FLAGS, *KINDS[kind].split()]
    depths = ["--mtp-num-layers", "1"] if layout == "depths" else []
    truth = curve([*flags, *depths], tmp_path / "one")
    mine = curve([*flags, *words.split()], tmp_path / "many", count)
    for ours, theirs in zip(mine, truth, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
