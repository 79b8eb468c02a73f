"""config.json, our flags, and names and rows of weights, against those of transformers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_ext.config.model import ModelConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.text.convert.config import HuggingFaceModel, config_json, read_model, words_of
from megatron_ext.text.convert.names import (
    RowShape,
    from_hf,
    hf_names,
    join_rows,
    split_rows,
    to_hf,
)
from tests.text.convert.models import LLAMA3, MODELS, SIZES


def read(folder: Path, **changed: Any) -> HuggingFaceModel:
    content = {"model_type": "llama", **SIZES, **changed}
    (folder / "config.json").write_text(json.dumps(content))
    return read_model(folder)


def resolved(fields: dict[str, Any]) -> ModelConfig:
    return dataclasses.replace(ModelConfig(), **fields).resolved(has_te=False)


def test_flags_of_a_model(tmp_path: Path) -> None:
    model = read(tmp_path, model_type="qwen2", rms_norm_eps=1e-6)
    assert (model.family, model.vocab_size) == ("qwen2", 300)
    assert " ".join(words_of(model.fields)) == (
        "--num-layers 2 --hidden-size 64 --ffn-hidden-size 112 --num-attention-heads 4 "
        "--kv-channels 16 --group-query-attention --num-query-groups 2 "
        "--max-position-embeddings 64 --position-embedding-type rope --rotary-base 50000 "
        "--normalization RMSNorm --norm-epsilon 1e-06 --swiglu --disable-bias-linear "
        "--add-qkv-bias --untie-embeddings-and-output-weights --attention-dropout 0.0 "
        "--hidden-dropout 0.0"
    )


def test_both_spellings_of_positions(tmp_path: Path) -> None:
    old = read(tmp_path, rope_theta=1e6, rope_scaling={**LLAMA3, "factor": 32})
    sizes = {name: value for name, value in SIZES.items() if name != "rope_theta"}
    new = AutoConfig.for_model("llama", **sizes, rope_parameters={**LLAMA3, "rope_theta": 1e6})
    new.rope_parameters["factor"] = 32.0
    new.save_pretrained(tmp_path / "new")
    assert read_model(tmp_path / "new").fields == old.fields
    assert old.fields["rotary_base"] == 1000000
    assert (old.fields["use_rope_scaling"], old.fields["rope_scaling_factor"]) == (True, 32)


@pytest.mark.parametrize("scaling", [None, LLAMA3, {"rope_type": "linear", "factor": 4.0}])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rotary_frequencies(tmp_path: Path, scaling: dict[str, Any] | None, theta: float) -> None:
    sizes = {"rope_theta": theta, "max_position_embeddings": 32768, "head_dim": 128}
    model = resolved(read(tmp_path, rope_scaling=scaling, **sizes).fields)
    ours = RotaryEmbedding(
        kv_channels=model.kv_channels or 0, rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base, rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        use_cpu_initialization=True,
    ).get_freqs_non_repeated(2)[1]  # fmt: skip
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path)).inv_freq
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    plain = theta ** (-torch.arange(0, 128, 2) / 128)
    assert torch.allclose(theirs, plain, rtol=1e-2) == (scaling is None)


MISTRAL = {"model_type": "mistral", "max_position_embeddings": 8192}
QWEN2 = {"model_type": "qwen2", "sliding_window": 32}
POSITIONS = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"model_type": "gpt2"}, "`model_type` 'gpt2', which cannot be converted; use one of"),
        ({"model_type": "mixtral"}, "`model_type` 'mixtral', which cannot be converted"),
        ({"model_type": None}, "`model_type` None, which cannot be converted"),
        ({"model_type": "mistral"}, ""),
        ({**MISTRAL, "sliding_window": 4096}, "`sliding_window` 4096, which the converted mod"),
        (MISTRAL, "`sliding_window` 4096"),
        ({**QWEN2, "use_sliding_window": True}, "`sliding_window` 32"),
        (QWEN2, ""),
        ({"attention_bias": True}, "`attention_bias` True"),
        ({"mlp_bias": True}, "`mlp_bias` True"),
        ({"hidden_act": "gelu"}, "`hidden_act` 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "`quantization_config` {'quant_method"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "`architectures` ['LlamaForSeq"),
        ({"rope_theta": 10000.5}, "`rope_theta` 10000.5 with `partial_rotary_factor` 1.0"),
        ({"partial_rotary_factor": 0.5}, "with `partial_rotary_factor` 0.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "describe; linear with an int"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "'rope_type': 'dynamic'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, "'factor': 2.5"),
        ({"rope_scaling": {**LLAMA3, POSITIONS: 32}}, f"'{POSITIONS}': 32}}, which our flags"),
        ({"num_attention_heads": "four"}, "config.json is refused by transformers"),
    ],
)
def test_what_our_flags_cannot_describe(tmp_path: Path, changed: dict[str, Any], text: str) -> None:
    if not text:
        assert read(tmp_path, **changed).fields["num_layers"] == 2
        return
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, **changed)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json cannot be read .*; give a folder of"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config.json must hold names and values"):
        read_model(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    first = read(tmp_path, **MODELS[name], bos_token_id=7)
    model = resolved(first.fields)
    for like in (first, None):
        content = config_json(model, vocab_size=300, dtype=torch.float16, like=like)
        (tmp_path / "config.json").write_text(json.dumps(content))
        again = read_model(tmp_path)
        assert (again.fields, again.vocab_size) == (first.fields, 300)
        assert content["torch_dtype"] == "float16"
        assert content["bos_token_id"] == (None if like is None else 7)
    assert again.family == first.family.replace("mistral", "llama")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"normalization": "LayerNorm"}, "`--normalization` is 'LayerNorm', but Hugging Face's"),
        ({"position_embedding_type": "none"}, "`--position-embedding-type` is 'none'"),
        ({"rotary_percent": 0.5}, "`--rotary-percent` is 0.5"),
        ({"swiglu": False}, "`--swiglu` is False"),
        ({"add_bias_linear": True}, "`--add-bias-linear` is True"),
        ({"mtp_num_layers": 1}, "`--mtp-num-layers` is 1"),
        ({"add_qkv_bias": True, "qk_layernorm": True}, "both `--add-qkv-bias` and"),
    ],
)
def test_models_that_have_no_family(tmp_path: Path, changed: dict[str, Any], text: str) -> None:
    model = dataclasses.replace(resolved(read(tmp_path).fields), **changed)
    with pytest.raises(CheckpointError) as caught:
        config_json(model, vocab_size=300, dtype=torch.float32, like=None)
    assert text in str(caught.value)


SHAPES = [RowShape(8, 2, 4), RowShape(4, 4, 6), RowShape(6, 1, 2), RowShape(1, 1, 8)]


def parts_by_loop(tensor: Tensor, shape: RowShape) -> dict[str, Tensor]:
    """Sort rows one by one: each group has its query heads, then one key, then one value."""
    found: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
    row = 0
    for _ in range(shape.num_query_groups):
        per_group = shape.num_attention_heads // shape.num_query_groups
        for kind in ["q"] * per_group + ["k", "v"]:
            for _ in range(shape.kv_channels):
                found[kind].append(tensor[row])
                row += 1
    assert row == tensor.shape[0]
    return {f"self_attn.{kind}_proj": torch.stack(rows) for kind, rows in found.items()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("columns", [(5,), (), (3,)], ids=["weight", "bias", "LoRA B"])
def test_qkv_rows(shape: RowShape, columns: tuple[int, ...]) -> None:
    rows = (shape.num_attention_heads + 2 * shape.num_query_groups) * shape.kv_channels
    tensor = torch.randn(rows, *columns)
    parts = split_rows("self_attention.linear_qkv", tensor, shape)
    for name, expected in parts_by_loop(tensor, shape).items():
        assert torch.equal(parts[name], expected)
    assert len(parts) == 3
    joined = join_rows("decoder.layers.0.self_attention.linear_qkv.lora_B", parts, shape)
    assert torch.equal(joined, tensor)


def test_rows_of_ranks_and_gated_and_plain_rows() -> None:
    shape, tensor = RowShape(8, 4, 2), torch.randn(32, 3)
    whole = split_rows("linear_qkv", tensor, shape)
    halves = [split_rows("linear_qkv", half, RowShape(4, 2, 2)) for half in tensor.chunk(2)]
    for name in whole:
        assert torch.equal(torch.cat([half[name] for half in halves]), whole[name])
    tensor, shape = torch.arange(6.0), SHAPES[0]
    parts = split_rows("linear_fc1", tensor, shape)
    found = {name: part.tolist() for name, part in parts.items()}
    assert found == {"mlp.gate_proj": [0, 1, 2], "mlp.up_proj": [3, 4, 5]}
    assert torch.equal(join_rows("linear_fc1", parts, shape), tensor)
    assert split_rows("linear_fc2", tensor, shape) == {"mlp.down_proj": tensor}
    assert join_rows("linear_proj", {"self_attn.o_proj": tensor}, shape) is tensor


def test_full_names_there_and_back() -> None:
    shape, name = SHAPES[0], "decoder.layers.12.self_attention.linear_qkv.bias"
    names = [f"self_attn.{x}_proj" for x in "qkv"]
    assert hf_names(name) == {name: f"model.layers.12.{name}.bias" for name in names}
    tensor = torch.randn(48)
    theirs = to_hf(name, tensor, shape)
    assert theirs.keys() == set(hf_names(name).values())
    assert torch.equal(from_hf(name, theirs, shape), tensor)
    outer = to_hf("output_layer.weight", tensor, shape)
    assert outer == {"lm_head.weight": tensor}
    assert from_hf("output_layer.weight", outer, shape) is tensor


def test_refusals() -> None:
    with pytest.raises(CheckpointError, match="`linear_qkv` has 47 rows, but .* gives 48"):
        split_rows("linear_qkv", torch.zeros(47), SHAPES[0])
    with pytest.raises(CheckpointError, match="`linear_fc1` has 5 rows, but .* gives 4"):
        split_rows("linear_fc1", torch.zeros(5), SHAPES[0])
    parts = {f"self_attn.{x}_proj": torch.zeros(8) for x in "qkv"}
    with pytest.raises(CheckpointError, match="`self_attn.q_proj` has 8 rows, but .* gives 32"):
        join_rows("linear_qkv", parts, SHAPES[0])
    with pytest.raises(CheckpointError, match="`router` has no place in a llama-like model"):
        split_rows("router", torch.zeros(2), SHAPES[0])
    for name in ("mtp.layers.0.eh_proj.weight", "decoder.layers.0.mlp.router.weight"):
        with pytest.raises(CheckpointError, match=f"`{name}` has no place in a llama-like"):
            hf_names(name)
