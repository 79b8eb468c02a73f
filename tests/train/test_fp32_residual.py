"""`--fp32-residual-connection`: a residual stream in float32 through layers, stages and experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.config.parser import parse_args
from megatron_ext.errors import ConfigError
from megatron_ext.text.task import TEXT
from megatron_ext.train.run import Run
from tests.training_runs import train_on_ranks, training_rows

FLAGS = (
    "--fp32-residual-connection --num-layers 2 --hidden-size 32 --num-attention-heads 4 "
    "--position-embedding-type rope --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-3 --log-interval 1 "
    "--eval-iters 0 --num-workers 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 63 "
    "--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1 "
    "--make-vocab-size-divisible-by 32"
).split()
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PP2 = "--pipeline-model-parallel-size 2"
MODELS = {
    "LayerNorm": "--bf16 --mtp-num-layers 1",
    "RMSNorm": "--bf16 --normalization RMSNorm --apply-layernorm-1p --deterministic-dropout "
    "--hidden-dropout 0.1",
    "experts": "--bf16 --num-experts 4",
    "fp16": "--fp16 --initial-loss-scale 256 --mtp-num-layers 1",
    "fp8": "--bf16 --fp8-format hybrid",
}


def curve(words: str, ranks: int, save: Path) -> list[float]:
    """Return the losses of two steps, and check the dtypes within every layer."""
    half = torch.float16 if "--fp16" in words else torch.bfloat16

    def prepare(run: Run) -> None:
        def check(layer: Any, _args: Any, kwargs: Any, output: Any) -> None:
            # A depth of multi-token prediction starts its own stream from a 16-bit product.
            if layer.layer_number <= 2:
                assert kwargs["hidden_states"].dtype == output[0].dtype == torch.float32

        def check_norm(_norm: Any, _args: Any, output: Any) -> None:
            assert output.dtype == half

        layers = [m for c in run.chunks for m in c.modules() if isinstance(m, TransformerLayer)]
        assert layers
        for layer in layers:
            layer.register_forward_hook(check, with_kwargs=True)
            layer.pre_mlp_layernorm.register_forward_hook(check_norm)

    flags = [*FLAGS, *words.split()]
    code, rows = train_on_ranks(flags, ranks=ranks, save=save, prepare=prepare)
    assert code == 0
    return [row["lm loss"] for row in training_rows(rows)]


@pytest.mark.parametrize("model", MODELS)
def test_stages_and_recomputation_keep_the_stream(model: str, tmp_path: Path) -> None:
    one = curve(MODELS[model], 1, tmp_path / "one")
    two = curve(f"{MODELS[model]} {PP2} {FULL}", 2, tmp_path / "two")
    assert two == pytest.approx(one, rel=1e-5)


def test_sequence_parallel_ranks_keep_the_stream(tmp_path: Path) -> None:
    one = curve("--bf16", 1, tmp_path / "one")
    words = "--bf16 --tensor-model-parallel-size 2 --sequence-parallel"
    assert curve(words, 2, tmp_path / "two") == pytest.approx(one, rel=1e-3)


def test_transformer_engines_layers_are_refused() -> None:
    words = "--bf16 --transformer-impl transformer_engine".split()
    with pytest.raises(ConfigError) as caught:
        parse_args([*FLAGS, *words], TEXT, world_size=1, device="cuda")
    assert any(
        "`--fp32-residual-connection` needs our torch layers" in message
        for message in caught.value.messages
    )
