"""Flags of fine-tuning: what goes together, and what is refused in which words."""

from __future__ import annotations

import pytest

from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.text.config import SftConfig
from megatron_ext.text.task import TEXT

BASE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --lr 1e-3 --train-iters 2 "
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model t --data-path f"
)


def config_of(words: str) -> RunConfig:
    return parse_args(f"{BASE} {words}".split(), TEXT, world_size=0, device="cpu").config


def test_the_longest_conversation_follows_the_row() -> None:
    assert config_of("--sft").section(SftConfig).sft_max_length == 16
    assert config_of("--sft --sft-max-length 17").section(SftConfig).sft_max_length == 17
    assert config_of("").section(SftConfig).sft_max_length is None


BAD = [
    ("--sft --mock-data", "`--mock-data` does not go with `--sft`: conversations are read"),
    ("--sft --rampup-batch-size 1 1 9", "`--rampup-batch-size` does not go with `--sft`: its"),
    ("--sft --step-batch-size-schedule 0:1", "`--step-batch-size-schedule` does not go with"),
    ("--sft --decrease-batch-size-if-needed", "`--decrease-batch-size-if-needed` does not go"),
    ("--sft --dataloader-type cyclic", "`--dataloader-type` does not go with `--sft`: every epoch"),
    ("--sft --reset-position-ids", "`--reset-position-ids` does not go with `--sft`: positions"),
    ("--sft --no-mmap-bin-files", "`--no-mmap-bin-files` does not go with `--sft`: tokens are"),
    ("--sft --valid-data-path v", "`--data-path` and `--valid-data-path` exclude each other"),
    ("--sft --sft-max-length 18", "`--sft-max-length` (18) must be from 2 to `--seq-length` + 1"),
    (
        "--sft --sft-max-length 1",
        "`--sft-max-length` (1) must be at least 2; use 2.",
    ),
    ("--sft --sft-template-kwargs [", "`--sft-template-kwargs` ([) must be a JSON object; use"),
    ("--sft --sft-batching x", "`--sft-batching` (x) must be one of packed, padded, token-budget."),
    (
        "--sft --sft-batching token-budget --micro-batch-size 2",
        "`--micro-batch-size` (2) must be 1 with `--sft-batching token-budget`",
    ),
    (
        "--sft --deterministic-dropout",
        "`--deterministic-dropout` numbers the samples of a step by their place, which "
        "`--sft-batching packed` changes with the layout; use padded.",
    ),
    ("--sft-tools-key x", "`--sft-tools-key` has an effect only with `--sft`; add it, or leave"),
    ("--train-epochs 2", "`--train-iters` (2) and `--train-epochs` (2) exclude each other"),
    (
        "--sft --context-parallel-size 2 --nproc-per-node 2 --seq-length 18",
        "`--seq-length` (18) must be divisible by 2 × `--context-parallel-size`",
    ),
]


@pytest.mark.parametrize(("words", "sentence"), BAD)
def test_what_cannot_be_run_is_said(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(words)
    assert sentence in str(caught.value)


def test_epochs_need_conversations() -> None:
    words = BASE.replace("--train-iters 2", "--train-epochs 2").split()
    with pytest.raises(ConfigError, match="`--train-epochs` needs `--sft`; give `--train-iters`"):
        parse_args(words, TEXT, world_size=0, device="cpu")
    parse_args([*words, "--sft"], TEXT, world_size=0, device="cpu")
    with pytest.raises(ConfigError, match=r"`--train-epochs` \(0\) must be at least 1."):
        parse_args([*words, "--sft", "--train-epochs", "0"], TEXT, world_size=0, device="cpu")


def test_the_dropout_of_padded_rows_can_be_numbered() -> None:
    config_of("--sft --sft-batching padded --deterministic-dropout")
