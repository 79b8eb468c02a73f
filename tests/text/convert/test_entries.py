"""Entries of each family's config.json: the fields that they become, the way back, refusals."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.text.convert import config as config_module
from megatron_ext.text.convert.adapters import peft_layers
from megatron_ext.text.convert.config import (
    HuggingFaceModel,
    config_json,
    disagreements,
    read_model,
    tokenizer_files,
)
from megatron_ext.text.convert.families import FAMILIES
from megatron_ext.text.convert.family import (
    Gpt,
    Settings,
    architecture_of,
    differences,
    words_of,
)
from tests.text.convert.models import LLAMA3, MODELS, SIZES


def read(folder: Path, name: str = "llama", **changed: Any) -> HuggingFaceModel:
    content = {**SIZES, **MODELS.get(name, {"model_type": name}), **changed}
    (folder / "config.json").write_text(json.dumps(content))
    return read_model(folder)


def written(model: HuggingFaceModel) -> dict[str, Any]:
    return model.family.settings(model.sections())


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"attention_bias": True},
     {"add_qkv_bias": True, "add_proj_bias": True, "add_mlp_bias": False}),
    ("llama", {"mlp_bias": True},
     {"add_qkv_bias": False, "add_proj_bias": False, "add_mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4},
     {"num_query_groups": None, "group_query_attention": False}),
    ("llama", {"num_key_value_heads": 1}, {"num_query_groups": 1, "group_query_attention": True}),
    ("llama", {"head_dim": 24}, {"kv_channels": 24}),
    ("llama", {"tie_word_embeddings": True}, {"untie_embeddings_and_output_weights": False}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
     {"rotary_seq_len_interpolation_factor": 4}),
    ("mistral", {"sliding_window": 63}, {"window_size": (62, 0)}),
    ("phi3 partly rotary", {}, {"rotary_percent": 0.5}),
    ("mixtral", {}, {"moe_router_pre_softmax": False, "moe_ffn_hidden_size": 112}),
    ("qwen2_moe", {"mlp_only_layers": [], "num_hidden_layers": 4, "decoder_sparse_step": 2},
     {"moe_layer_freq": "[0,1,0,1]"}),
    ("qwen2_moe", {"mlp_only_layers": [1], "num_hidden_layers": 3},
     {"moe_layer_freq": "[1,0,1]", "moe_shared_expert_intermediate_size": 40}),
    ("qwen3", {"attention_bias": True}, {"add_qkv_bias": True, "add_proj_bias": True}),
    ("qwen3", {}, {"add_qkv_bias": False, "add_proj_bias": False}),
    ("qwen3_moe", {"norm_topk_prob": False}, {"moe_router_pre_softmax": True}),
    ("qwen3_moe", {"attention_bias": True}, {"add_qkv_bias": True, "add_proj_bias": True}),
    ("qwen2 with a window", {}, {"window_size": (7, 0), "window_attn_skip_freq": None}),
    ("qwen2 with some windows", {}, {"window_size": (7, 0), "window_attn_skip_freq": "[0,1]"}),
    ("gpt2", {"n_inner": None}, {"ffn_hidden_size": 256}),
    ("gpt2", {"activation_function": "gelu_new"}, {"openai_gelu": True}),
    ("gpt2", {"activation_function": "gelu_pytorch_tanh"}, {"openai_gelu": True}),
    ("gpt2", {"activation_function": "gelu"}, {"openai_gelu": False}),
    ("gpt_oss", {"swiglu_limit": 0.25}, {"activation_func_clamp_value": 0.25}),
    ("gemma2", {"attn_logit_softcapping": 30.0, "final_logit_softcapping": 10.0,
                "query_pre_attn_scalar": 25},
     {"attn_logit_softcapping": 30.0, "final_logit_softcapping": 10.0, "softmax_scale": 0.2,
      "embedding_multiplier": 8.0}),
    ("gemma3", {"rope_local_base_freq": 20000.0},
     {"rotary_base": 1e6, "rope_local_base_freq": 20000.0}),
    ("glm4_moe", {"use_qk_norm": False, "attention_bias": False},
     {"qk_layernorm": False, "add_qkv_bias": False}),
    ("glm4_moe", {"num_nextn_predict_layers": 2}, {"mtp_num_layers": 2}),
    ("glm4_moe", {"partial_rotary_factor": 1.0}, {"rotary_percent": 1.0}),
    ("gemma2", {"layer_types": ["sliding_attention"] * 2},
     {"window_size": (7, 0), "window_attn_skip_freq": None}),
    ("gemma2", {"layer_types": ["full_attention"] * 2}, {"window_size": None}),
    ("deepseek_v2 with groups", {}, {"moe_router_num_groups": 4, "moe_router_group_topk": 2,
                                     "moe_router_group_scores": 1}),
    ("deepseek_v2 with groups", {"topk_method": "greedy"}, {"moe_router_num_groups": None,
                                                            "moe_router_group_topk": None}),
    ("deepseek_v3", {"n_shared_experts": 3}, {"moe_shared_expert_intermediate_size": 72}),
    ("deepseek_v3", {"n_shared_experts": 0}, {"moe_shared_expert_intermediate_size": None}),
    ("deepseek_v3", {"first_k_dense_replace": 2}, {"moe_layer_freq": "[0,0]"}),
    ("deepseek_v3", {"first_k_dense_replace": 0}, {"moe_layer_freq": "1"}),
    ("deepseek_v3", {"routed_scaling_factor": 2.5}, {"moe_router_topk_scaling_factor": 2.5}),
    ("deepseek_v3", {"routed_scaling_factor": 1.0}, {"moe_router_topk_scaling_factor": None}),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1},
     {"moe_router_num_groups": None, "moe_router_group_topk": None,
      "moe_router_group_scores": None}),
    ("deepseek_v3", {"num_nextn_predict_layers": 0}, {"mtp_num_layers": None}),
]  # fmt: skip
"""Model, entries of its config.json, and the fields that they must become."""


@pytest.mark.parametrize(
    "case", range(len(CASES)), ids=[f"{name} {[*changed]}" for name, changed, _ in CASES]
)
def test_an_entry_becomes_its_fields_and_comes_back(case: int, tmp_path: Path) -> None:
    name, changed, fields = CASES[case]
    model = read(tmp_path, name, **changed)
    assert {field: model.fields.get(field) for field in fields} == fields
    (tmp_path / "config.json").write_text(json.dumps({**written(model), "vocab_size": 300}))
    again = read_model(tmp_path)
    assert {field: again.fields.get(field) for field in fields} == fields
    assert architecture_of(again.sections()) == architecture_of(model.sections())


def test_dropout_is_that_of_each_place(tmp_path: Path) -> None:
    for name in ("llama", "deepseek_v2", "deepseek_v3", "glm4_moe"):
        assert read(tmp_path, name, attention_dropout=0.25).fields["attention_dropout"] == 0.25
    gpt2 = read(tmp_path, "gpt2", attn_pdrop=0.2, resid_pdrop=0.3).fields
    assert (gpt2["attention_dropout"], gpt2["hidden_dropout"]) == (0.2, 0.3)


def test_a_window_as_long_as_the_positions_hides_nothing(tmp_path: Path) -> None:
    assert "window_size" not in read(tmp_path, "mistral", sliding_window=64).fields
    assert written(read(tmp_path, "mistral", sliding_window=None))["sliding_window"] is None
    assert written(read(tmp_path, "mistral", sliding_window=8))["sliding_window"] == 8
    unused = written(read(tmp_path, "qwen2 tied"))
    assert unused["use_sliding_window"] is False and "sliding_window" not in unused


def test_scalings_of_positions_keep_their_numbers(tmp_path: Path) -> None:
    linear = read(tmp_path, rope_scaling={"rope_type": "linear", "factor": 2.5})
    assert "rotary_seq_len_interpolation_factor" not in linear.fields
    assert written(linear)["rope_scaling"] == {"rope_type": "linear", "factor": 2.5}
    whole = read(tmp_path, rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert written(whole)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_the_growth_of_scores_needs_both_of_its_entries(tmp_path: Path) -> None:
    """transformers ignores `mscale` without `mscale_all_dim`."""
    yarn = MODELS["deepseek_v3"]["rope_scaling"]
    both = read(tmp_path, "deepseek_v3", rope_scaling={**yarn, "mscale": 0.5}).fields
    assert (both["mscale"], both["mscale_all_dim"]) == (0.5, 0.7)
    alone = {name: value for name, value in yarn.items() if name != "mscale_all_dim"}
    one = read(tmp_path, "deepseek_v3", rope_scaling={**alone, "mscale": 0.5}).fields
    assert (one["mscale"], one["mscale_all_dim"]) == (1.0, 0.0)


def test_the_scale_of_scores_is_that_of_the_heads_by_default(tmp_path: Path) -> None:
    gpt = Gpt.of_fields({**read(tmp_path, "gemma2").fields, "softmax_scale": None})
    assert FAMILIES["gemma2"].settings(gpt)["query_pre_attn_scalar"] == 18
    odd = Gpt.of_fields({**read(tmp_path, "gemma2").fields, "softmax_scale": 0.3})
    assert FAMILIES["gemma2"].settings(odd)["query_pre_attn_scalar"] == pytest.approx(1 / 0.09)


def test_windows_without_a_base_of_their_own_have_that_of_the_others(tmp_path: Path) -> None:
    gpt = Gpt.of_fields({**read(tmp_path, "gemma3").fields, "rope_local_base_freq": None})
    content = FAMILIES["gemma3_text"].settings(gpt)
    assert content["rope_local_base_freq"] == 1e6
    bases = {kind: each["rope_theta"] for kind, each in content["rope_parameters"].items()}
    assert bases == {"full_attention": 1e6, "sliding_attention": 1e6}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("mixtral", "intermediate_size"),
        ("gpt_oss", "intermediate_size"),
        ("qwen2_moe", "moe_intermediate_size"),
        ("qwen3_moe", "moe_intermediate_size"),
        ("deepseek_v3", "moe_intermediate_size"),
    ],
)
def test_experts_are_as_wide_as_a_dense_mlp_by_default(name: str, key: str, tmp_path: Path) -> None:
    fields = {**read(tmp_path, name).fields, "ffn_hidden_size": 80}
    for own, width in ((None, 80), (40, 40)):
        gpt = Gpt.of_fields({**fields, "moe_ffn_hidden_size": own})
        assert FAMILIES[name].settings(gpt)[key] == width


def test_a_model_without_groups_of_experts_has_one_group(tmp_path: Path) -> None:
    content = written(read(tmp_path, "deepseek_v3", n_group=1, topk_group=1))
    assert (content["n_group"], content["topk_group"]) == (1, 1)


def test_positions_within_their_scaling_come_before_those_beside_it(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    model = read(tmp_path, rope_scaling=yarn, original_max_position_embeddings=32)
    assert json.loads(model.fields["rope_scaling"])["original_max_position_embeddings"] == 16
    partly = {"rope_type": "default", "rope_theta": 9e4, "partial_rotary_factor": 0.5}
    fields = read(tmp_path, "glm4_moe", rope_parameters=partly, partial_rotary_factor=0.25).fields
    assert (fields["rotary_percent"], fields["rotary_base"]) == (0.5, 9e4)


def test_each_depth_has_a_copy_of_the_embedding_and_the_head(tmp_path: Path) -> None:
    table = read(tmp_path, "deepseek_v3", num_nextn_predict_layers=2).table()
    assert table.copies == {
        f"model.layers.{layer}.{name}": original
        for layer in (2, 3)
        for name, original in (
            ("embed_tokens.weight", "model.embed_tokens.weight"),
            ("shared_head.head.weight", "lm_head.weight"),
        )
    }


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "`scale_attn_by_inverse_layer_idx` Tr"),
        ("gpt2", {"scale_attn_weights": False}, "`scale_attn_weights` False"),
        (
            "gpt_neo",
            {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "far"], 1]]},
            "`attention_types` [[['global', 'far'], 1]]",
        ),
        (
            "gpt_neo",
            {"num_layers": 2, "window_size": 0, "attention_types": [[["global", "local"], 1]]},
            "`window_size` 0",
        ),
        ("falcon", {"alibi": True}, "`alibi` True"),
        ("falcon", {"parallel_attn": False, "new_decoder_architecture": True}, "`parallel_attn` F"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "`num_ln_in_parallel_attn` 2"),
        ("stablelm", {"qk_layernorm": True}, "`qk_layernorm` True"),
        ("cohere", {"use_qk_norm": True}, "`use_qk_norm` True"),
        ("starcoder2", {"hidden_act": "relu"}, "`hidden_act` 'relu'"),
        ("gpt2", {"add_cross_attention": True}, "`add_cross_attention` True"),
        ("qwen2_moe", {"qkv_bias": False}, "`qkv_bias` False"),
        ("gpt_oss", {"swiglu_alpha": 2.0}, "`swiglu_alpha` 2.0"),
        ("gemma2", {"attention_bias": True}, "`attention_bias` True"),
        ("gemma2", {"hidden_activation": "gelu"}, "`hidden_activation` 'gelu'"),
        ("glm4_moe", {"norm_topk_prob": False}, "`norm_topk_prob` False"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "`topk_method` 'noaux_tc'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "`norm_topk_prob` True"),
        ("deepseek_v3", {"norm_topk_prob": False}, "`norm_topk_prob` False"),
        ("deepseek_v3", {"rope_interleave": False}, "`rope_interleave` False"),
        (
            "deepseek_v3",
            {"rope_scaling": {**MODELS["deepseek_v3"]["rope_scaling"], "mscale": 0.0}},
            "`rope_parameters` {",
        ),
        (
            "llama",
            {"architectures": ["LlamaForCausalLM", "LlamaForTokenClassification"]},
            "`architectures` ['LlamaForCausalLM', 'LlamaForTokenClassification']",
        ),
        ("llama", {"num_hidden_layers": 10_001}, "`num_hidden_layers` as 10001, but 10,000 is"),
        ("llama", {"hidden_size": 1 << 49}, "`hidden_size` as 562949953421312, but"),
        ("llama", {"vocab_size": -(1 << 49)}, "`vocab_size` as -562949953421312, but"),
    ],
)
def test_an_entry_that_our_model_would_not_have_is_refused(
    name: str, changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, name, **changed)
    assert said in str(caught.value)


def test_scaled_positions_in_windows_are_refused(tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    full = {"rope_type": "default", "rope_theta": 1e6}
    with pytest.raises(CheckpointError, match="`rope_parameters` "):
        read(
            tmp_path,
            "gemma3",
            rope_parameters={"full_attention": full, "sliding_attention": scaled},
        )
    fields = read(
        tmp_path, "gemma3", rope_parameters={"full_attention": scaled, "sliding_attention": full}
    ).fields
    assert (fields["rotary_base"], fields["rope_local_base_freq"]) == (1e4, 1e6)
    assert fields["rotary_seq_len_interpolation_factor"] == 2


def test_entries_at_their_limits_are_read(tmp_path: Path) -> None:
    """An unset token has the id -1 in some files."""
    assert read(tmp_path, pad_token_id=-1).fields["hidden_size"] == 64
    assert read(tmp_path, num_hidden_layers=10_000).fields["num_layers"] == 10_000


@pytest.mark.parametrize(
    ("changed", "ignored"),
    [
        ({}, ()),
        ({"use_cache": True}, ()),
        ({"pretraining_tp": 2}, ("pretraining_tp",)),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
         ("rope_theta",)),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, ("rope_scaling.factor",)),
        ({"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}}, ()),
        ({"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}},
         ("rope_scaling",)),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8],
                                  "activation_scheme": "dynamic"}},
         ("quantization_config.activation_scheme",)),
    ],
)  # fmt: skip
def test_entries_without_effect_are_named(
    changed: dict[str, Any], ignored: tuple[str, ...], tmp_path: Path
) -> None:
    model = read(tmp_path, **changed)
    assert set(model.ignored) == set(ignored)
    assert (model.notes() == []) == (not ignored)
    assert all(f"`{name}`" in model.notes()[0] for name in ignored)


def test_of_an_entry_given_twice_the_lost_one_is_named(tmp_path: Path) -> None:
    same = read(tmp_path, "gpt2", hidden_size=64)
    other = read(tmp_path, "gpt2", hidden_size=48)
    assert not {"hidden_size", "n_embd"} & {*same.ignored}
    (lost,) = {*other.ignored} - {*same.ignored}
    kept = {"hidden_size": 48, "n_embd": 64}
    del kept[lost]
    assert [*kept.values()] == [other.fields["hidden_size"]]


def test_an_export_like_its_source_keeps_what_flags_do_not_determine(tmp_path: Path) -> None:
    eight = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    like = read(tmp_path, quantization_config=eight, dtype="bfloat16", bos_token_id=7)
    options: dict[str, Any] = {"vocab_size": 299, "dtype": torch.float16, "like": like}
    content = config_json(like.sections(), **options)
    assert (content["torch_dtype"], content["vocab_size"], content["bos_token_id"]) == (
        "float16",
        299,
        7,
    )
    assert not {"quantization_config", "dtype", "rope_parameters"} & content.keys()
    # A model may have been trained with fewer positions than it has, or with more.
    for positions, want in ((32, 64), (64, 64), (128, 128)):
        gpt = Gpt.of_fields({**like.fields, "max_position_embeddings": positions})
        assert config_json(gpt, **options)["max_position_embeddings"] == want
    own = config_json(
        like.sections(), vocab_size=300, dtype=torch.float32, like=None,
        special_tokens={"eos_token_id": 3},
    )  # fmt: skip
    assert (own["bos_token_id"], own["eos_token_id"]) == (None, 3)


def test_depths_need_a_family_that_has_them(tmp_path: Path) -> None:
    fields = read(tmp_path, "deepseek_v3").fields
    gpt = Gpt.of_fields({**fields, "mtp_num_layers": 1})
    content = config_json(gpt, vocab_size=300, dtype=torch.float32, like=None)
    assert (content["model_type"], content["num_nextn_predict_layers"]) == ("deepseek_v3", 1)
    dense = Gpt.of_fields({**read(tmp_path).fields, "mtp_num_layers": 1})
    with pytest.raises(CheckpointError, match=r"`--mtp-num-layers` is 1, not None, so it cannot"):
        config_json(dense, vocab_size=300, dtype=torch.float32, like=None)


def test_what_makes_two_models_the_same(tmp_path: Path) -> None:
    """Fields that may be left out count with the values that they then have."""

    def differ(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> set[str]:
        fields = read(tmp_path, name).fields
        both = [architecture_of(Gpt.of_fields({**fields, **own})) for own in (ours, theirs)]
        return {field for field, *_ in differences(*both)}

    alone = {"num_query_groups": None, "group_query_attention": False}
    assert differ("llama", alone, {"num_query_groups": 4}) == set()
    assert differ("llama", {"num_query_groups": 4}, {}) == {"num_query_groups"}
    assert differ("mistral with a window", {"window_size": [7, 0]}, {}) == set()
    assert differ("mistral with a window", {"window_size": (6, 0)}, {}) == {"window_size"}
    assert differ("gpt2", {"max_position_embeddings": 32}, {}) == {"max_position_embeddings"}
    assert differ("llama", {"max_position_embeddings": 32}, {}) == set()
    width = {"moe_ffn_hidden_size": None, "ffn_hidden_size": 24}
    assert differ("qwen3_moe", width, {}) == set()
    assert differ("qwen3_moe", {"ffn_hidden_size": 48}, {}) == set()
    # The first layer has a dense MLP, whose width matters.
    assert differ("qwen2_moe", {"ffn_hidden_size": 48}, {}) == {"ffn_hidden_size"}
    assert differ("qwen2_moe", {"moe_layer_freq": "1"}, {}) >= {"moe_layer_freq"}
    # Two spellings of the same layers, or of the same scaling, are no difference.
    assert differ("qwen2_moe", {"moe_layer_freq": "([0]+[1]*1)"}, {}) == set()
    some = "qwen2 with some windows"
    assert differ(some, {"window_attn_skip_freq": "([0]+[1]*1)"}, {}) == set()
    assert differ(some, {"window_attn_skip_freq": "[1,0]"}, {}) == {"window_attn_skip_freq"}
    one, two = '{"rope_type": "linear", "factor": 2.5}', '{"factor":2.5,"rope_type":"linear"}'
    assert differ("llama", {"rope_scaling": one}, {"rope_scaling": two}) == set()
    assert differ("llama", {"rope_scaling": one}, {}) == {"rope_scaling"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts", 16),
        ("moe_ffn_hidden_size", 40),
        ("moe_shared_expert_intermediate_size", 48),
        ("moe_shared_expert_gate", True),
        ("moe_router_topk", 6),
        ("moe_router_score_function", "softmax"),
        ("moe_router_pre_softmax", True),
        ("moe_router_num_groups", 8),
        ("moe_router_group_topk", 4),
        ("moe_router_topk_scaling_factor", 3.5),
        ("moe_router_enable_expert_bias", False),
        ("moe_apply_probs_on_input", True),
    ],
)
def test_another_router_or_expert_is_another_model(field: str, value: Any, tmp_path: Path) -> None:
    """A run that changes it is refused, and an export that would lose it too."""
    model = read(tmp_path, "deepseek_v3")
    changed = Gpt.of_fields({**model.fields, field: value})
    (error,) = disagreements(changed, model)
    assert f"`--{field.replace('_', '-')}`" in str(error)
    with pytest.raises(CheckpointError, match=f"`--{field.replace('_', '-')}` is "):
        config_json(changed, vocab_size=300, dtype=torch.float32, like=model)


def test_each_flag_that_contradicts_the_folder_is_told(tmp_path: Path) -> None:
    model = read(tmp_path)
    other = Gpt.of_fields({**model.fields, "ffn_hidden_size": 48, "rotary_base": 9.0})
    told = [str(error) for error in disagreements(other, model)]
    assert [text.split("`")[1] for text in told] == ["--ffn-hidden-size", "--rotary-base"]
    assert all(str(tmp_path) in text and text.endswith("leave the flag out.") for text in told)
    assert disagreements(model.sections(), model) == []


def test_words_of_flags_have_all_numbers_of_a_window(tmp_path: Path) -> None:
    words = " ".join(words_of(read(tmp_path, "mistral with a window").fields))
    assert "--window-size 7 0" in words


def test_files_of_tokenizer_and_generation_are_those_to_copy(tmp_path: Path) -> None:
    names = {"tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja"}
    names |= {"generation_config.json", "special_tokens_map.json", "added_tokens.json"}
    for name in (*names, "config.json", "model.safetensors", "README.md"):
        (tmp_path / name).touch()
    (tmp_path / "tokenizer_folder").mkdir()
    assert [path.name for path in tokenizer_files(tmp_path)] == sorted(names)


def test_a_foreign_file_is_compared_with_the_nearest_family(tmp_path: Path) -> None:
    """A file that shares fewer than four entries with every family is compared with none."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1}
    for extra, compared in (({}, False), ({"num_attention_heads": 1}, True)):
        content = {"model_type": "own", **sizes, **extra}
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError) as caught:
            read_model(tmp_path)
        assert ("the nearest is" in str(caught.value)) == compared


def test_the_family_with_the_fewest_differences_is_the_nearest(tmp_path: Path) -> None:
    gpt = Gpt.of_fields({**read(tmp_path, "gpt2").fields, "add_qkv_bias": True, "swiglu": True})
    with pytest.raises(CheckpointError, match="the nearest is gpt2, but"):
        config_json(gpt, vocab_size=300, dtype=torch.float32, like=None)


def test_adapters_on_an_mlp_with_another_gate_have_the_names_of_its_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 2 has GELU as its gate; only models of no family need ``--swiglu``."""
    gpt = Gpt.of_fields(read(tmp_path, "gemma2").fields)
    monkeypatch.setattr(Gpt, "of", lambda config: gpt)
    config: Any = SimpleNamespace(
        model=SimpleNamespace(num_layers=2, swiglu=False, unpadded_vocab_size=300),
        lora=LoraConfig(lora_rank=3),
        section=lambda kind: kind(),
    )
    both = torch.ones(2 * SIZES["intermediate_size"], 3)
    layers = peft_layers(config, tmp_path)
    assert layers.task == "CAUSAL_LM"
    ours = "decoder.layers.1.mlp.linear_fc1.lora"
    pairs = layers.pairs({f"{ours}.a": torch.ones(3, 8), f"{ours}.b": both})
    names = [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up")]
    shapes = {name: (len(a), len(b)) for name, (a, b) in pairs.items()}
    assert shapes == dict.fromkeys(names, (3, SIZES["intermediate_size"]))


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_an_entry_of_a_scaling_that_has_no_flag_is_not_dropped(
    scaling: dict[str, Any], tmp_path: Path
) -> None:
    assert "rope_scaling" not in read(tmp_path, rope_scaling=scaling).fields
    with pytest.raises(CheckpointError, match="says a `rope_scaling` that"):
        read(tmp_path, rope_scaling={**scaling, "beta_fast": 3.0})


def test_a_scaling_is_taken_over_with_all_of_its_values() -> None:
    read = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    settings = Settings(Path("config.json"), {"rope_parameters": read})
    for given, taken in (
        (None, True),
        ({"type": "linear", "factor": 4.0}, True),
        ({"rope_type": "linear", "factor": 4.0}, True),
        ({"rope_type": "linear", "factor": 2.0}, False),
        ({"rope_type": "linear", "beta_fast": 4.0}, False),
        ({"rope_type": "linear", "type": "dynamic", "factor": 4.0}, False),
    ):
        assert config_module._is_taken_over(given, settings) is taken


def test_an_error_without_words_is_told_by_its_class() -> None:
    told = str(config_module._unreadable({"model_type": "llama"}, Path("c.json"), KeyError()))
    assert told.startswith("c.json cannot be read (KeyError); mend ")
    told = str(
        config_module._unreadable({"model_type": "llama"}, Path("c.json"), KeyError(" a\nb "))
    )
    assert "cannot be read (' a\\nb ')" in told


def test_depths_of_an_export_are_those_of_the_run(tmp_path: Path) -> None:
    like = read(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    for depths in (None, 2):
        gpt = Gpt.of_fields({**like.fields, "mtp_num_layers": depths})
        content = config_json(gpt, vocab_size=300, dtype=torch.float32, like=like)
        assert content["num_nextn_predict_layers"] == (depths or 0)
