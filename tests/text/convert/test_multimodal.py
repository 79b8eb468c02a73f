"""Multimodal folders: their text part in and out, and all else as it was."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from megatron_ext.errors import CheckpointError
from megatron_ext.text.convert.config import read_model
from megatron_ext.text.convert.families import MULTIMODAL
from megatron_ext.text.convert.huggingface import Export, Import, export_model, import_model
from tests.text.convert.models import LENGTH, SIZES, in_child, tokens
from tests.text.convert.settings import SETTINGS
from tests.text.convert.test_families import difference_of
from tests.text.convert.test_training import LAYOUTS, flags_of
from tests.training_runs import train

VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
QWEN = {
    "image_token_id": 299, "video_token_id": 298, "vision_start_token_id": 297,
    "vision_end_token_id": 296,
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "patch_size": 8,
        "out_hidden_size": 64,
    },
}  # fmt: skip
WHOLE: dict[str, dict[str, Any]] = {
    "mistral3": {"spatial_merge_size": 2, "image_token_index": 299, "vision_config": VISION},
    "kimi_k25": {
        "image_token_id": 299,
        "video_token_id": 298,
        "projection_hidden_size": 128,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 8,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
        },
    },
    "qwen3_vl_moe": {
        "image_token_id": 299,
        "video_token_id": 298,
        "vision_start_token_id": 297,
        "vision_end_token_id": 296,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "depth": 2,
            "num_heads": 2,
            "patch_size": 8,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
    },
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "gemma3": {"mm_tokens_per_image": 4, "image_token_index": 299, "vision_config": VISION},
}
"""Entries of config.json beside those of the text part, by `model_type`."""


TEXT: dict[str, dict[str, Any]] = {
    # Without it, transformers cannot read what it has written.
    "kimi_k25": {"q_lora_rank": 20},
    # Less rounding in recurrent layers, see `settings.mixers`.
    "qwen3_5_moe": {"rms_norm_eps": 1e-2},
}
"""Other entries of the text part."""


def make_whole(name: str, folder: Path, number: int = 0) -> Path:
    """Save a random model, with a file that no program knows beside it."""
    torch.manual_seed(number)
    kind = MULTIMODAL[name].texts[0]
    text = {**SIZES, **SETTINGS[kind][number], **TEXT.get(name, {}), "model_type": kind}
    tied = text.get("tie_word_embeddings", kind.startswith("gemma"))
    config = AutoConfig.for_model(
        name, **{**WHOLE[name], "text_config": text, "tie_word_embeddings": tied}
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    model.save_pretrained(folder)
    if name == "kimi_k25":
        # transformers 5.23 renames the layers of the text part as it does those of the vision part.
        written = load_file(folder / "model.safetensors")
        paths = "language_model.model.blocks.", "language_model.model.layers."
        renamed = {key.replace(*paths): value for key, value in written.items()}
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"size": 16}')
    return folder


def logits_of(folder: Path) -> torch.Tensor:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    ids = tokens() % 290
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits
    return logits


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def there_and_back(source: Path, root: Path, back: Path) -> tuple[float, list[str]]:
    difference = difference_of(source, tokens() % 290, logits_of(source))
    _, notes = import_model(Import(source, root))
    export_model(Export(root, back, like=source))
    export_model(Export(root, back.with_name("alone")))
    return difference, notes


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WHOLE)
def test_the_text_part_goes_in_and_out(name: str, number: int, tmp_path: Path) -> None:
    source, back = make_whole(name, tmp_path / "hf", number), tmp_path / "back"
    difference, notes = in_child(
        lambda: there_and_back(source, tmp_path / "ours", back), tmp_path / "result"
    )
    assert difference < 1e-5
    assert f"describes a {name} model, of which the text part is used" in notes[0]
    before, after = tensors_of(source), tensors_of(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(logits_of(back), logits_of(source))
    assert (back / "preprocessor_config.json").read_text() == '{"size": 16}'
    alone = json.loads((tmp_path / "alone" / "config.json").read_text())
    assert alone["model_type"] == MULTIMODAL[name].texts[0]


def test_a_run_writes_the_trained_text_part_and_the_rest_as_it_was(tmp_path: Path) -> None:
    source, written = make_whole("gemma3", tmp_path / "hf"), tmp_path / "written"
    count, words = LAYOUTS["pp2dp2"]
    flags = [*flags_of(source, *words.split()), "--save-hf", str(written)]
    train(flags, tmp_path / "run", count)
    before, after = tensors_of(source), tensors_of(written / "iter_0000002")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if not name.startswith("language_model.")}
    assert logits_of(written / "iter_0000002").shape == (2, LENGTH, 300)


def test_names_within_transformers_classes_are_read_too(tmp_path: Path) -> None:
    source = make_whole("gemma3", tmp_path / "hf")
    model = read_model(source)
    names = {name.replace("language_model.model", "model.language_model") for name in
             tensors_of(source)}  # fmt: skip
    table = model.table(names)
    runs = table.runs("decoder.layers.mlp.linear_fc2.weight[1]", 64, 2) or []
    assert [run.tensor for run in runs] == ["model.language_model.layers.1.mlp.down_proj.weight"]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"text_config": None}, "has no `text_config` with the entries of the text model"),
        ({"text_config": {"model_type": "llama"}}, "text part is a 'llama' model, but that of gem"),
        (
            {"architectures": ["Gemma3ForSequenceClassification"]},
            "but of gemma3 only Gemma3ForCond",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "`quantization_config.quant_method` "),
    ],
)
def test_what_cannot_be_the_text_part(changed: dict[str, Any], text: str, tmp_path: Path) -> None:
    content = {"model_type": "gemma3", "text_config": {**SIZES, **SETTINGS["gemma3_text"][0]}}
    (tmp_path / "config.json").write_text(json.dumps({**content, **changed}))
    with pytest.raises(CheckpointError) as caught:
        read_model(tmp_path)
    assert text in str(caught.value)
