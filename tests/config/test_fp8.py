"""Which flags of fp8 go together."""

from __future__ import annotations

import pytest

from megatron_ext.config.parser import parse_args
from megatron_ext.config.precision import Fp8Config
from megatron_ext.errors import ConfigError
from megatron_ext.text.task import TEXT

TINY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 16 --train-iters 12 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --bf16 "
)

GOOD = [
    "--fp8-format hybrid",
    "--fp8-format e4m3 --fp8-recipe tensorwise --transformer-impl torch",
    "--fp8 hybrid --fp8-interval 1 --fp8-margin 0 --fp8-amax-history-len 1024 "
    "--fp8-amax-compute-algo max --no-fp8-wgrad",
    "--fp8-format hybrid --fp8-recipe rowwise --first-last-layers-bf16",
    "--fp8-format hybrid --num-experts 2 --moe-ffn-hidden-size 48",
    "--fp8-format hybrid --lora-rank 4",
]

BAD = [
    ("--fp8-recipe tensorwise", "`--fp8-recipe` needs `--fp8-format`; give e4m3 or hybrid."),
    ("--no-fp8-wgrad", "`--no-fp8-wgrad` needs `--fp8-format`"),
    ("--first-last-layers-bf16", "`--first-last-layers-bf16` needs `--fp8-format`"),
    ("--fp8-format e5m2", "`--fp8-format` (e5m2) must be one of e4m3, hybrid."),
    (
        "--fp8-format hybrid --fp8-recipe mxfp8",
        "`--fp8-recipe` (mxfp8) is a recipe of Transformer Engine's layers",
    ),
    (
        "--fp8-format hybrid --fp8-recipe tensorwise --fp8-margin 1",
        "`--fp8-margin` belongs to `--fp8-recipe delayed`, but the recipe is tensorwise",
    ),
    ("--fp8-format hybrid --fp8-margin -1", "`--fp8-margin` (-1) must be at least 0"),
    (
        "--fp8-format hybrid --fp8-amax-history-len 0",
        "`--fp8-amax-history-len` (0) must be at least 1; 1 is",
    ),
    (
        "--fp8-format hybrid --first-last-layers-bf16",
        "`--first-last-layers-bf16` does not go with `--fp8-recipe delayed`",
    ),
    (
        "--fp8-format hybrid --num-layers-at-end-in-bf16 2",
        "`--num-layers-at-end-in-bf16` needs `--first-last-layers-bf16`",
    ),
    (
        "--fp8-format hybrid --fp8-recipe rowwise --first-last-layers-bf16 "
        "--num-layers-at-start-in-bf16 -1",
        "`--num-layers-at-start-in-bf16` (-1) must be at least 0; 1 is",
    ),
    (
        "--fp8-format hybrid --fp8-recipe rowwise --first-last-layers-bf16 "
        "--num-layers-at-start-in-bf16 3",
        "`--first-last-layers-bf16` keeps 4 of the 4 layers in bf16",
    ),
    ("--fp8-format hybrid --no-bf16", "`--fp8-format` needs `--bf16`"),
    (
        "--fp8-format hybrid --num-experts 2 --moe-ffn-hidden-size 40",
        "--moe-ffn-hidden-size (40) over 1 rank(s) does not; use a multiple of 16.",
    ),
    (
        "--fp8-format hybrid --ffn-hidden-size 172",
        "--ffn-hidden-size (172) over 1 rank(s) does not; use a multiple of 16.",
    ),
    ("--fp8-param-gather", "`--fp8-param-gather` needs `--fp8-format`; give e4m3 or hybrid."),
    (
        "--fp8-format hybrid --tp-only-amax-red",
        "`--tp-only-amax-red` is an option of Transformer Engine's layers",
    ),
    ("--fp8-format hybrid --fp8-dot-product-attention", "fp8 and fp4 that is not supported"),
]


@pytest.mark.parametrize("flags", GOOD)
def test_accepted(flags: str) -> None:
    config = parse_args((TINY + flags).split(), TEXT, world_size=1, device="cpu").config
    assert config.fp8.fp8_format is not None


@pytest.mark.parametrize(("flags", "sentence"), BAD)
def test_refused_with_a_sentence(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args((TINY + flags).split(), TEXT, world_size=1, device="cpu")
    assert sentence in str(caught.value)


def test_sides_are_those_of_a_rank() -> None:
    flags = f"{TINY} --fp8-format hybrid --tensor-model-parallel-size 2 --ffn-hidden-size 176"
    with pytest.raises(ConfigError) as caught:
        parse_args(flags.split(), TEXT, world_size=2, device="cpu")
    assert "--ffn-hidden-size (176) over 2 rank(s) does not; use a multiple of 32." in str(
        caught.value
    )


def test_layers_that_stay_in_bf16() -> None:
    config = Fp8Config(
        first_last_layers_bf16=True, num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=1
    )
    kept = [number for number in range(1, 7) if config.keeps_bf16(number, 6)]
    assert kept == [1, 2, 6]
    assert not any(Fp8Config().keeps_bf16(number, 6) for number in range(1, 7))


def test_the_interval_has_no_effect_and_says_so() -> None:
    notes = parse_args(
        f"{TINY} --fp8-format hybrid --fp8-interval 4".split(),
        TEXT,
        world_size=1,
        device="cpu",
    ).notes
    assert any("`--fp8-interval` has no effect" in note for note in notes)
