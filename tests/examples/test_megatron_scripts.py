"""Megatron-LM's own example scripts, made small by flags after theirs, on two ranks of a CPU."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data.indexed_writer import IndexedWriter
from tests.config.test_cli import FP8, GPT3, LLAMA3, MIXTRAL
from tests.text import tiny
from tests.training_runs import train_on_ranks, training_rows

SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --log-interval 1 --save-interval 2 --eval-iters 1 "
    "--eval-interval 4 --num-workers 0 "
)
SCRIPTS = {
    "gpt3": GPT3 + SMALL + "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 "
    "--rampup-batch-size 4 4 12 --global-batch-size 8 --train-iters 4 --lr-decay-iters 4 "
    "--initial-loss-scale 1024",
    "llama3": f"{LLAMA3} {FP8} --fp8-param-gather {SMALL} --tensor-model-parallel-size 2 "
    "--ffn-hidden-size 128 --num-query-groups 2 --kv-channels 16 --vocab-size 250 "
    "--global-batch-size 4 --train-samples 16 --lr-decay-samples 16 --lr-warmup-samples 4",
    # The script names a project of Weights & Biases only where the environment holds a key.
    "mixtral": MIXTRAL.split("--wandb")[0] + "--moe-permute-fusion " + SMALL + "--num-experts 2 "
    "--ffn-hidden-size 128 --num-query-groups 2 --pipeline-model-parallel-size 1 "
    "--expert-model-parallel-size 2 --global-batch-size 4 --train-iters 4 --lr-decay-iters 4 "
    "--lr-warmup-iters 1 --split 8,1,1",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the prefix of 2,000 documents of 20 tokens."""
    prefix = tmp_path_factory.mktemp("corpus") / "text_document"
    dice = np.random.default_rng(1)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(2000):
            writer.add_document(dice.integers(0, 400, 20), [20])
    return prefix


def words_of(name: str, corpus: Path, folder: Path, load: str) -> list[str]:
    """Return the flags of a script, with files in the place of its letters."""
    vocab, merges = tiny.gpt2_files()
    files = {"D": corpus, "V": vocab, "M": merges, "TM": tiny.sentencepiece_model(), "C": load}
    files |= {"P": folder / "cache", "T": folder / "logs", "C/tensorboard": folder / "logs"}
    return [str(files.get(word, word)) for word in SCRIPTS[name].split()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_megatron_lm_trains_and_goes_on(
    name: str, corpus: Path, tmp_path: Path
) -> None:
    save = tmp_path / "whole"
    words = words_of(name, corpus, tmp_path, str(save))
    code, rows = train_on_ranks(words, ranks=2, save=save)
    assert code == 0
    whole = training_rows(rows)
    assert [row["iteration"] for row in whole] == [1, 2, 3, 4]
    assert all(math.isfinite(row["lm loss"]) for row in whole)
    assert whole[-1]["grad_norm"] > 0 and math.isfinite(whole[-1]["grad_norm"])

    again = tmp_path / "again"
    code, rows = train_on_ranks([*words, "--ckpt-step", "2"], ranks=2, save=again)
    assert code == 0
    resumed = training_rows(rows)
    assert [row["iteration"] for row in resumed] == [3, 4]
    # The third step's loss; Mixtral's script starts its optimizer anew.
    equal = 1 if "--no-load-optim" in words else 2
    for row, want in zip(resumed[:equal], whole[2:], strict=False):
        assert row["lm loss"] == want["lm loss"]
