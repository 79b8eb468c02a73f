"""Entries of config.json that published models with recurrent layers have, and transformers lacks.

Other programs read them, so none may be lost: it is used, named, or refused.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.checkpoint.conversion import one_rank
from megatron_ext.errors import CheckpointError
from megatron_ext.text.convert.adapters import peft_layers
from megatron_ext.text.convert.config import HuggingFaceModel, parse_model, read_model
from megatron_ext.text.convert.huggingface import build_bare, reference_model
from megatron_ext.text.convert.reading import check_one_dtype, load_folder
from tests.text.convert.models import SIZES, in_child, make_tiny, theirs, tokens
from tests.text.convert.settings import SETTINGS
from tests.text.convert.test_families import PLAIN, chunk_of, difference_in
from tests.training_runs import config_of

THREE: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": None, "mlp_layer_types": None}
LISTS = {
    "full_attn_layers": [3], "kda_layers": [1, 2], "head_dim": 10, "num_heads": 4,
    "short_conv_kernel_size": 3,
}  # fmt: skip


def read(name: str, **changed: Any) -> HuggingFaceModel:
    raw = {**SIZES, "model_type": name, **SETTINGS[name][0], **changed}
    return parse_model(raw, Path("config.json"))


@pytest.mark.parametrize(
    ("name", "changed", "text"),
    [
        ("kimi_linear", {"mla_use_nope": False}, "`mla_use_nope` False"),
        (
            "kimi_linear",
            {"moe_router_activation_func": "softmax"},
            "`moe_router_activation_func` 'softmax'",
        ),
        (
            "kimi_linear",
            {**THREE, "linear_attn_config": {**LISTS, "kda_layers": [0, 1, 2]}},
            "`linear_attn_config.full_attn_layers` [3], which the converted model would not have; "
            "give [] as `layer_types` says, and each layer in one of the lists.",
        ),
        (
            "kimi_linear",
            {
                **THREE,
                "linear_attn_config": LISTS,
                "layer_types": ["full_attention", *["linear_attention"] * 2],
            },
            "`linear_attn_config.full_attn_layers` [3]",
        ),
        ("qwen3_5_text", {"attn_output_gate": False}, "`attn_output_gate` False"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "`norm_topk_prob` False"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, "`mlp_only_layers` [1]"),
        ("bamba", {"attn_layer_indices": [1, 4]}, "give indices below `num_hidden_layers` 4."),
        (
            "nemotron_h",
            {"num_hidden_layers": 9},
            "`num_hidden_layers` 9, which the converted model would not have; give "
            "`hybrid_override_pattern` or `layers_block_type`, now of 7 layers, for 9.",
        ),
        (
            "nemotron_h",
            {"num_hidden_layers": 7, "hybrid_override_pattern": "MEMEM-*"},
            "make it agree with `layers_block_type`, which says ME*EM-*, or leave one out.",
        ),
        (
            "nemotron_h",
            {
                "num_hidden_layers": 3,
                "layers_block_type": None,
                "hybrid_override_pattern": "M|-",
            },
            "mend `hybrid_override_pattern` 'M|-'.",
        ),
    ],
)
def test_what_transformers_does_not_hear_is_refused(
    name: str, changed: dict[str, Any], text: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(name, **changed)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changed", "ignored"),
    [
        ("qwen3_next", {"layer_types": ["full_attention"] * 4}, "full_attention_interval"),
        ("bamba", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        (
            "kimi_linear",
            {**THREE, "linear_attn_config": {**LISTS, "gate_rank": 8}},
            "linear_attn_config.gate_rank",
        ),
        ("nemotron_h", {"num_hidden_layers": 7}, "time_step_min"),
    ],
)
def test_what_has_no_effect_is_named(name: str, changed: dict[str, Any], ignored: str) -> None:
    assert ignored in read(name, **changed).ignored


def test_published_entries_are_used() -> None:
    kimi = read("kimi_linear", **THREE, linear_attn_config=LISTS, mla_use_nope=True)
    assert kimi.fields["hybrid_layer_pattern"] == "K-KE*E"
    assert not {"linear_attn_config", "mla_use_nope"} & {*kimi.ignored}
    assert kimi.fields["linear_conv_kernel_dim"] == 3
    limits = {"time_step_limit": [0.0, {"__float__": "Infinity"}], "time_step_min": 0.001}
    fields = read("nemotron_h", num_hidden_layers=7, **limits).fields
    assert (fields["mamba_time_step_min"], fields["mamba_time_step_max"]) == (0.0, None)


def test_steps_of_nemotron_h_have_the_limits_of_its_publisher(tmp_path: Path) -> None:
    """Steps are as short as they are, other than in transformers' class."""
    name = "nemotron_h"
    settings = {**SETTINGS[name][0], "time_step_limit": [0.0, math.inf], "time_step_min": 0.3}
    source = make_tiny({"model_type": name, **settings}, tmp_path / "hf")

    def compared() -> tuple[float, float]:
        with one_rank(1) as context, torch.no_grad():
            chunk = chunk_of(source, context)
            published = reference_model(read_model(source)).eval()(tokens()).logits
            return (
                difference_in(chunk, tokens(), published),
                difference_in(chunk, tokens(), theirs(source)),
            )

    with_limits, clamped = in_child(compared, tmp_path / "differences")
    assert with_limits < 1e-5
    assert clamped > 1e-3


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("qwen3_5_text", ("A_log", "linear_attn.norm.weight")),
        ("kimi_linear", ("A_log", "dt_bias")),
    ],
)
def test_published_folders_are_read(name: str, exact: tuple[str, ...], tmp_path: Path) -> None:
    """They hold some weights in float32 beside bf16."""
    source = make_tiny({"model_type": name, **SETTINGS[name][0]}, tmp_path / "hf")
    path = source / "model.safetensors"
    tensors = {
        key: tensor if key.endswith(exact) else tensor.bfloat16()
        for key, tensor in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})
    model = read_model(source)
    assert check_one_dtype(model) == "bfloat16"

    def notes() -> list[str]:
        words = ["--load-hf", str(source), *PLAIN, "--bf16"]
        with one_rank(1) as context:
            chunk = build_bare(config_of(words), context)
            return load_folder([chunk.bfloat16()], source, context).notes

    said = " ".join(in_child(notes, tmp_path / "notes"))
    assert "rounded to the model's dtype" in said


def test_adapters_of_layers_with_one_part_have_the_numbers_of_their_modules(tmp_path: Path) -> None:
    """Our second layer is transformers' third and fourth, of which the latter has experts."""
    name = "nemotron_h"
    source = make_tiny({"model_type": name, **SETTINGS[name][0]}, tmp_path / "hf")
    config = config_of(["--load-hf", str(source), *PLAIN, "--lora-rank", "2"])
    layers = peft_layers(config, tmp_path)
    linear = "decoder.layers.1.mlp.experts.experts.linear_fc2.lora"
    matrices = {f"{linear}.a": torch.ones(8, 2, 16), f"{linear}.b": torch.ones(8, 24, 2)}
    (path,) = layers.pairs(matrices)
    assert path.endswith("layers.3.mixer.experts.down_proj")
    assert layers.experts(path) == 8
