"""Megatron-LM's flags decide which parts of a layer may compile."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from megatron_ext.config.parser import parse_args
from megatron_ext.config.transformer_fields import transformer_fields
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.text.task import TEXT

WORDS = (
    "--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128 --transformer-impl torch"
).split()


@pytest.mark.parametrize(
    ("words", "without"),
    [
        ("", ""),
        ("--no-persist-layer-norm", "norm"),
        ("--no-bias-gelu-fusion", "activation"),
        ("--no-bias-swiglu-fusion", ""),
        ("--swiglu --no-bias-swiglu-fusion", "activation"),
        ("--swiglu --no-bias-gelu-fusion", ""),
        ("--no-rope-fusion", "rotary"),
        ("--no-bias-dropout-fusion", "bias_dropout"),
    ],
)
def test_each_flag_leaves_out_its_part(words: str, without: str) -> None:
    config = parse_args([*WORDS, *words.split()], TEXT, world_size=1, device="cpu").config
    fusions = asdict(build_transformer_config(config).fusions)
    assert [name for name, wanted in fusions.items() if not wanted] == without.split()


@pytest.mark.parametrize("word", ["--no-compile", "--disable-jit-fuser"])
def test_one_flag_switches_compilation_off(word: str) -> None:
    assert parse_args(WORDS, TEXT, world_size=1, device="cuda").config.model.compile
    assert not parse_args([*WORDS, word], TEXT, world_size=1, device="cuda").config.model.compile


@pytest.mark.parametrize(
    ("words", "fuses"),
    [
        ("", True),
        ("--disable-bias-linear", False),
        ("--no-bias-gelu-fusion", False),
        ("--swiglu", True),
        ("--swiglu --disable-bias-linear", True),
        ("--swiglu --disable-bias-linear --num-experts 2", True),
        ("--swiglu --num-experts 2", False),
        ("--num-experts 2", False),
        ("--squared-relu", False),
        ("--quick-geglu", False),
    ],
)
def test_cores_compiled_activation_is_asked_for_where_core_has_it(words: str, fuses: bool) -> None:
    """Transformer Engine's layers have megatron-core's MLP, which raises elsewhere."""
    config = parse_args([*WORDS, *words.split()], TEXT, world_size=1, device="cpu").config
    engine = replace(config.model, transformer_impl="transformer_engine")
    fields = transformer_fields(replace(config, model=engine, device="cuda"))
    assert fields["bias_activation_fusion"] is fuses
    assert transformer_fields(config)["bias_activation_fusion"] is False
