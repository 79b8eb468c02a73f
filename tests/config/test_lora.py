"""Flags of adapters: what is derived, and what is refused."""

from __future__ import annotations

import pytest

from megatron_ext.config.finalize import finalize
from megatron_ext.config.lora import ALL_TARGETS, TARGETS
from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.text.task import GPT, TEXT
from megatron_ext.video.streaming.task import STREAMING
from megatron_ext.video.task import VIDEO
from tests.training_runs import TINY, mock_data

WORDS = [*TINY, *mock_data(), "--train-iters", "1"]


def config(*words: str) -> RunConfig:
    return parse_args([*WORDS, *words], TEXT, world_size=1, device="cpu").config


def streaming(*words: str) -> RunConfig:
    given = ["--task", "streaming", "--prompts-path", "x", "--micro-batch-size", "1"]
    given += ["--global-batch-size", "1", "--train-iters", "1", *words]
    return parse_args(given, VIDEO, world_size=1, device="cpu").config


def test_adapters_of_a_streaming_run_lie_on_all_layers_of_its_blocks() -> None:
    assert streaming().lora.lora_rank is None
    lora = streaming("--lora-rank", "256", "--lora-alpha", "256").lora
    assert lora.lora_target_modules == list(ALL_TARGETS) and lora.scale == 1
    assert config("--lora-rank", "2").lora.lora_target_modules == list(TARGETS)
    one = streaming("--lora-rank", "2", "--lora-target-modules", "linear_kv").lora
    assert one.lora_target_modules == ["linear_kv"]


def test_a_resolved_configuration_is_one_that_can_be_given() -> None:
    run = streaming("--lora-rank", "2")
    again = RunConfig.from_dict(run.to_dict(), VIDEO.sections)
    assert finalize(again, STREAMING, 1, "cpu") == run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lora-dropout 0.1", r"`--lora-dropout` \(0.1\) does not go with `--task streaming`"),
        (
            "--lora-target-modules head",
            r"\(head\) must be names among linear_qkv, .*, linear_q, linear_kv\.",
        ),
    ],
)
def test_what_a_streaming_run_cannot_do(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        streaming("--lora-rank", "2", *words.split())


def test_a_configuration_that_names_layers_without_a_rank_is_read() -> None:
    """Older checkpoints hold such a configuration."""
    stored = config().to_dict()
    stored["lora"]["lora_target_modules"] = list(TARGETS)
    assert (
        finalize(RunConfig.from_dict(stored, TEXT.sections), GPT, 1, "cpu").lora.lora_rank is None
    )


def test_alpha_over_rank() -> None:
    assert config("--lora-rank", "16").lora.scale == 2
    assert config("--lora-rank", "16", "--lora-rslora").lora.scale == 8
    assert config().lora.lora_alpha is None


def test_the_checkpoints_adapters_are_taken_with_its_shape() -> None:
    stored = config("--lora-rank", "4", "--lora-target-modules", "linear_qkv")
    words = [*WORDS, "--use-checkpoint-args", "--load", "x"]

    def read(*more: str) -> RunConfig:
        given = [*words, *more]
        return parse_args(
            given, TEXT, world_size=1, device="cpu", checkpoint_config=stored.to_dict()
        ).config

    assert read().lora == stored.lora
    assert read("--lora-rank", "8").lora.lora_rank == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lora-rank 0", r"`--lora-rank` \(0\) must be at least 1; use 1"),
        ("--lora-alpha 4", "`--lora-alpha` needs `--lora-rank`; give a rank"),
        ("--lora-dropout 0.1", "`--lora-dropout` needs `--lora-rank`"),
        ("--lora-rank 2 --lora-alpha -1", r"`--lora-alpha` \(-1.0\) must be above 0"),
        (
            "--lora-rank 2 --lora-dropout 1",
            r"`--lora-dropout` \(1.0\) must be at least 0 and below",
        ),
        (
            "--lora-rank 2 --lora-target-modules linear_qkv q_proj",
            r"`--lora-target-modules` \(q_proj\) must be names among linear_qkv, linear_proj",
        ),
        (
            "--lora-rank 2 --lora-target-modules linear_q linear_kv",
            r"`--lora-target-modules` \(linear_q linear_kv\) must be names among linear_qkv",
        ),
        (
            "--lora-rank 2 --transformer-impl transformer_engine",
            "`--lora-rank` needs our torch layers",
        ),
        (
            "--lora-rank 2 --num-experts 2",
            r"`--lora-target-modules` \(linear_fc1 linear_fc2\) does not go with `--num-experts`",
        ),
        (
            "--lora-rank 2 --num-experts 2 --moe-router-enable-expert-bias",
            "`--moe-router-enable-expert-bias` would change the frozen model",
        ),
        (
            "--lora-rank 2 --lora-dropout 0.1 --deterministic-dropout",
            "`--lora-dropout` does not go with `--deterministic-dropout`",
        ),
        ("--lora-rank 2 --decoupled-lr 1", "`--decoupled-lr` is for the embedding and the output"),
    ],
)
def test_what_cannot_be_run_is_a_sentence(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*words.split())
