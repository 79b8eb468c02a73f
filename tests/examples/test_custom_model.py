"""examples/custom_model/train.py: each flag of GPT works in it, in any layout, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.custom_model.train import TASK
from megatron_ext.config.parser import parse_args
from megatron_ext.errors import ConfigError
from tests.training_runs import train_on_ranks, training_rows

RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 "
    "--log-interval 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--make-vocab-size-divisible-by 32 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0 "
    "--init-method-std 0.1 --position-embedding-type rope --num-workers 0"
).split()
OWN = {"task": TASK}
FOCAL = "--loss examples/custom_loss/focal.py:FocalLossConfig --loss-args gamma=1.5"
SMOOTH = "--loss cross-entropy --label-smoothing 0.1 --z-loss-coeff 1e-3"
PARTS = "--rotary-percent 0.5 --mtp-num-layers 1"
NAMES = ("lm loss", "mtp_1 loss", "focal loss", "grad_norm")


def run(save: Path, words: str, ranks: int = 1, steps: int = 3, **options: Any) -> list[Any]:
    flags = [*RUN, "--train-iters", str(steps), *words.split()]
    code, rows = train_on_ranks(flags, ranks=ranks, save=save, **options)
    assert code == 0
    return [[row.get(name) for name in NAMES] for row in training_rows(rows)]


def test_with_the_losses_and_parts_of_gpt_it_trains_what_pretrain_gpt_trains(
    tmp_path: Path,
) -> None:
    words = f"{PARTS} {SMOOTH}"
    own = run(tmp_path / "own", words, **OWN)
    assert own == run(tmp_path / "gpt", words)
    assert own[0][1] is not None
    assert own != run(tmp_path / "capped", f"{words} --hidden-cap 1", **OWN)


TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"


@pytest.mark.parametrize(
    ("loss", "layout"),
    [
        pytest.param("", TP2, id="ceiling-TP2"),
        pytest.param(FOCAL, PP2, id="focal-PP2"),
        pytest.param("", PP2, id="ceiling-PP2", marks=pytest.mark.slow),
        pytest.param(FOCAL, TP2, id="focal-TP2", marks=pytest.mark.slow),
        pytest.param(SMOOTH, TP2, id="smooth-TP2", marks=pytest.mark.slow),
        pytest.param(SMOOTH, PP2, id="smooth-PP2", marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_one_rank(loss: str, layout: str, tmp_path: Path) -> None:
    words = f"--hidden-cap 2 {PARTS} {loss}"
    alone = run(tmp_path / "one", words, **OWN)
    cut = run(tmp_path / "two", f"{words} {layout}", ranks=2, **OWN)
    for mine, theirs in zip(cut, alone, strict=True):
        assert [x for x in mine if x] == pytest.approx([x for x in theirs if x], rel=1e-5)


def test_the_ceiling_bounds_what_a_token_costs(tmp_path: Path) -> None:
    low = run(tmp_path / "low", "--loss-args ceiling=0.5", steps=1, **OWN)
    assert low[0][0] == pytest.approx(0.5)


def test_flags_that_its_loss_does_not_know_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(
            [*RUN, *"--train-iters 1 --label-smoothing 0.1 --z-loss-coeff 1e-3".split()],
            TASK,
            world_size=1,
            device="cpu",
        )
    (smoothing, z_loss) = caught.value.messages
    assert smoothing.startswith("`--label-smoothing` (0.1) is a part of cross-entropy, which")
    assert "or give `--loss cross-entropy`" in smoothing
    assert z_loss.startswith("`--z-loss-coeff` (0.001) is a part of cross-entropy")


def test_its_own_flag_comes_back_from_its_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = f"{PARTS} --hidden-cap 2"
    whole = run(tmp_path / "whole", words, steps=4, **OWN)
    half = f"{words} --save-interval 2 --exit-interval 2 --lr-decay-iters 4"
    run(tmp_path / "cut", half, steps=4, **OWN)
    # Neither the flag nor the parts of the model are given again.
    onward = f"--use-checkpoint-args --load {tmp_path / 'cut'}"
    assert run(tmp_path / "cut", onward, steps=4, **OWN) == whole
    run(tmp_path / "other", f"{onward} --ckpt-step 2 --hidden-cap 3", steps=4, **OWN)
    assert "`--hidden-cap` (3.0, before 2.0)" in capfd.readouterr().out
