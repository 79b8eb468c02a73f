"""Recomputation changes no loss and no gradient norm, however it cuts the layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.config.parser import parse_args
from megatron_ext.errors import ConfigError
from megatron_ext.text.task import TEXT
from tests.training_runs import train_on_ranks, training_rows

BASE = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --position-embedding-type rope "
    "--seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 2 --lr 1e-3 --log-interval 1 --eval-iters 0 --num-workers 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 32 "
    "--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1"
).split()
UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
EXPERTS = "--num-experts 4 --disable-bias-linear"


def curve(words: str, ranks: int, save: Path) -> list[tuple[float, float]]:
    """Return the losses and gradient norms of two steps."""
    code, rows = train_on_ranks([*BASE, *words.split()], ranks=ranks, save=save)
    assert code == 0
    return [(row["lm loss"], row["grad_norm"]) for row in training_rows(rows)]


@pytest.mark.parametrize(
    ("model", "recomputed", "layout", "ranks"),
    [
        ("", f"{UNIFORM} 2", "", 1),
        ("--mtp-num-layers 1", f"{UNIFORM} 2", "", 1),
        ("", f"{SELECTIVE} mlp", "", 1),
        ("", f"{SELECTIVE} core_attn mlp", "--tensor-model-parallel-size 2 --sequence-parallel", 2),
        (
            f"{EXPERTS} --num-layers 4",
            f"{UNIFORM} 2",
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            2,
        ),
    ],
    ids=["rest", "multi-token prediction", "mlp with biases", "both modules", "virtual chunks"],
)
def test_recomputation_changes_nothing(
    model: str, recomputed: str, layout: str, ranks: int, tmp_path: Path
) -> None:
    plain = curve(model, 1, tmp_path / "plain")
    again = curve(f"{model} {recomputed} {layout}", ranks, tmp_path / "again")
    for got, want in zip(again, plain, strict=True):
        assert got == pytest.approx(want, rel=1e-6 if ranks == 1 else 1e-5)


def test_transformer_engines_mlp_with_biases_is_refused() -> None:
    """The recomputed part would return its biases, which are parameters."""
    words = f"{SELECTIVE} mlp --transformer-impl transformer_engine".split()
    with pytest.raises(ConfigError) as caught:
        parse_args([*BASE, *words], TEXT, world_size=1, device="cuda")
    assert any(
        "`--recompute-modules` (mlp) with Transformer Engine's layers needs an MLP without biases"
        in message
        for message in caught.value.messages
    )
