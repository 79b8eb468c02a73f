"""config.json, our flags, and names and rows of weights, against those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_ext.errors import CheckpointError
from megatron_ext.text.config.positions import PositionConfig
from megatron_ext.text.convert.config import HuggingFaceModel, config_json, parse_model, read_model
from megatron_ext.text.convert.entries import write_scaling
from megatron_ext.text.convert.family import Gpt, architecture_of, words_of
from tests.text.convert.models import LLAMA3, MODELS, SIZES
from tests.training_runs import SMALL, config_of


def read(folder: Path, **changed: Any) -> HuggingFaceModel:
    content = {"model_type": "llama", **SIZES, **changed}
    (folder / "config.json").write_text(json.dumps(content))
    return read_model(folder)


def test_a_name_of_the_hub_is_answered_with_its_download() -> None:
    with pytest.raises(CheckpointError) as caught:
        read_model(Path("Qwen/Qwen3-0.6B"))
    assert "run `hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B`" in str(caught.value)


def test_flags_of_a_model(tmp_path: Path) -> None:
    model = read(tmp_path, model_type="qwen2", rms_norm_eps=1e-6)
    assert (model.family.model_type, model.vocab_size) == ("qwen2", 300)
    assert " ".join(words_of(model.fields)) == (
        "--num-layers 2 --hidden-size 64 --ffn-hidden-size 112 --num-attention-heads 4 "
        "--kv-channels 16 --group-query-attention --num-query-groups 2 "
        "--normalization RMSNorm --norm-epsilon 1e-06 --swiglu --disable-bias-linear "
        "--add-qkv-bias --untie-embeddings-and-output-weights --attention-dropout 0.0 "
        "--hidden-dropout 0.0 --max-position-embeddings 64 --position-embedding-type rope "
        "--rotary-base 50000.0"
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
    assert "rope_scaling" not in old.ignored


@pytest.mark.parametrize(
    "changed",
    [{"original_max_position_embeddings": 4096}, {"high_freq_factor": 3.0}, {"low_freq_factor": 2}],
)
def test_llama3_with_some_values_of_its_own(tmp_path: Path, changed: dict[str, Any]) -> None:
    """The others are those of Llama 3.1, which the flag needs all the same."""
    scaling = {**LLAMA3, **changed}
    gpt = read(tmp_path, rope_scaling=scaling).sections()
    written = gpt.positions.rope_scaling
    assert json.loads(written or "") == scaling == write_scaling(gpt)
    words = ["--position-embedding-type", "rope", "--rope-scaling", str(written)]
    assert config_of([*SMALL, *words]).section(PositionConfig).rope_scaling == written


LINEAR = {"factor": 4.0}


@pytest.mark.parametrize(
    "scaling", [None, LLAMA3, {"rope_type": "linear", **LINEAR}, {"type": "linear", **LINEAR}]
)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rotary_frequencies(tmp_path: Path, scaling: dict[str, Any] | None, theta: float) -> None:
    sizes = {"rope_theta": theta, "max_position_embeddings": 32768, "head_dim": 128}
    gpt = read(tmp_path, rope_scaling=scaling, **sizes).sections()
    positions = gpt.positions
    ours = RotaryEmbedding(
        kv_channels=gpt.model.kv_channels or 0, rotary_percent=positions.rotary_percent,
        rotary_base=positions.rotary_base, rope_scaling=positions.use_rope_scaling,
        rope_scaling_factor=positions.rope_scaling_factor,
        seq_len_interpolation_factor=positions.rotary_seq_len_interpolation_factor,
        use_cpu_initialization=True,
    ).get_freqs_non_repeated(2)[1]  # fmt: skip
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path)).inv_freq
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    plain = theta ** (-torch.arange(0, 128, 2) / 128)
    assert torch.allclose(theirs, plain, rtol=1e-2) == (scaling is None)


QWEN2 = {"model_type": "qwen2", "sliding_window": 32}
DEEPSEEK = MODELS["deepseek_v3"]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"model_type": "olmo9", "hidden_act": "silu", "warp_qkv": 1}, "it has `warp_qkv` besides"),
        ({"model_type": "bert"}, "`model_type` 'bert', which cannot be converted; use one of"),
        ({"model_type": None}, "`model_type` None, which cannot be converted"),
        (
            {"model_type": "olmo_hybrid"},
            "cannot be converted, since its models have linear attention",
        ),
        ({**DEEPSEEK, "partial_rotary_factor": 0.5}, "`partial_rotary_factor` 0.5, which the"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "`activation_function` 'relu'"),
        ({"hidden_act": "gelu"}, "`hidden_act` 'gelu'"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "`quantization_config.quant_method` 'gp",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "`architectures` ['LlamaForSeq"),
        (
            {"rope_scaling": {"rope_type": "warp", "factor": 4.0}},
            "has the rope_type warp, which mus",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "is dynamic, which changes freq",
        ),
        ({"num_attention_heads": "four"}, "mend `num_attention_heads` 'four'."),
    ],
)
def test_what_our_flags_cannot_describe(tmp_path: Path, changed: dict[str, Any], text: str) -> None:
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


@pytest.mark.parametrize(
    ("changed", "window"),
    [
        ({"model_type": "mistral", "max_position_embeddings": 8192}, (4095, 0)),
        ({"model_type": "mistral", "sliding_window": 4096}, None),
        (QWEN2, None),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 0}, (31, 0)),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 1}, (31, 0)),
    ],
)
def test_windows(tmp_path: Path, changed: dict[str, Any], window: tuple[int, int] | None) -> None:
    assert read(tmp_path, **changed).fields.get("window_size") == window


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    first = read(tmp_path, **{**MODELS[name], "bos_token_id": 7})
    gpt = first.sections()
    for like in (first, None):
        content = config_json(gpt, vocab_size=300, dtype=torch.float16, like=like)
        (tmp_path / "config.json").write_text(json.dumps(content))
        again = read_model(tmp_path)
        assert architecture_of(again.sections()) == architecture_of(gpt)
        assert again.vocab_size == 300
        assert content["torch_dtype"] == "float16"
        assert content["bos_token_id"] == (None if like is None else 7)
        # Without the entry, transformers would take the end token of Llama.
        assert like is not None or content["eos_token_id"] is None
        if like is not None:
            assert again.fields == first.fields


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"normalization": "LayerNorm", "final_logit_softcapping": 5.0},
            "is stablelm, but `--final-logit-softcapping` is 5.0, not None",
        ),
        ({"position_embedding_type": "none"}, "`--position-embedding-type` is 'none', not 'rope'"),
        ({"swiglu": False}, "`--swiglu` is False, not True"),
        ({"add_bias_linear": True}, "`--add-bias-linear` is True, not False"),
        ({"mtp_num_layers": 1}, "`--mtp-num-layers` is 1, not None"),
        ({"add_qkv_bias": True, "qk_layernorm": True}, "nearest is qwen2, but `--qk-layernorm` is"),
    ],
)
def test_models_that_have_no_family(tmp_path: Path, changed: dict[str, Any], text: str) -> None:
    gpt = Gpt.of_fields({**read(tmp_path).fields, **changed})
    with pytest.raises(CheckpointError) as caught:
        config_json(gpt, vocab_size=300, dtype=torch.float32, like=None)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("heads", "text"),
    [
        ({"num_attention_heads": 5}, "(`hidden_size` 64, `num_attention_heads` 5)"),
        ({}, "or the size of a head (`hidden_size` 64, `num_attention_heads` missing)"),
    ],
)
def test_heads_that_do_not_fit_a_scaling_are_named(
    heads: dict[str, int], text: str, tmp_path: Path
) -> None:
    content = {**SIZES, **MODELS["phi3 longrope"]}
    del content["num_attention_heads"]
    (tmp_path / "config.json").write_text(json.dumps({**content, **heads}), encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        read_model(tmp_path)
    assert "config.json cannot be read (" in str(caught.value) and text in str(caught.value)


def test_a_missing_entry_without_which_others_cannot_be_read_is_named(tmp_path: Path) -> None:
    content = {**SIZES, "model_type": "deepseek_v2", "n_group": 4}
    with pytest.raises(CheckpointError, match="mend `n_group` 4, or give `num_experts_per_tok`."):
        parse_model(content, tmp_path / "config.json")
