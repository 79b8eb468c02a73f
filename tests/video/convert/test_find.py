"""A sentence tells what was given in place of a network's weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_ext.errors import CheckpointError
from megatron_ext.video.convert.find import form_of_folder, holds_video_weights
from megatron_ext.video.convert.reading import open_published
from megatron_ext.video.networks.wan.convert.conversion import CONVERSION
from tests.video.convert.forms import models


def refusal(source: Path) -> str:
    with pytest.raises(CheckpointError) as caught, open_published(source) as model:
        model.check()
    (sentence,) = caught.value.messages
    assert sentence.endswith(".") and str(source) in sentence
    return str(sentence).replace(f"{source}", "IT")


def described(folder: Path, **content: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_a_folder_finds_its_conversion_by_its_class(tmp_path: Path) -> None:
    assert not holds_video_weights(tmp_path)
    described(tmp_path, model_type="llama")
    assert not holds_video_weights(tmp_path)
    for name, naming in (("WanTransformer3DModel", "diffusers"), ("CausalWanModel", "original")):
        described(tmp_path, _class_name=name)
        assert holds_video_weights(tmp_path)
        assert form_of_folder(tmp_path) == (CONVERSION, CONVERSION.form(naming))


def test_a_folder_at_another_level(tmp_path: Path) -> None:
    pipeline = tmp_path / "pipeline"
    described(pipeline / "transformer")
    (pipeline / "model_index.json").touch()
    assert refusal(pipeline) == "IT holds a whole pipeline; give IT/transformer."
    with pytest.raises(CheckpointError, match="holds a whole pipeline"):
        holds_video_weights(pipeline)
    described(pipeline / "transformer_2")
    experts = "IT holds a whole pipeline with two experts, each for some noise levels; give "
    assert refusal(pipeline) == experts + "IT/transformer or IT/transformer_2."
    original = tmp_path / "Wan2.2"
    for name in ("high_noise_model", "low_noise_model"):
        described(original / name)
    assert refusal(original).endswith("give IT/high_noise_model or IT/low_noise_model.")
    for name in ("diffusion_pytorch_model.safetensors.index.json", "model_index.json"):
        path = pipeline / "transformer" / name
        path.touch()
        assert refusal(path) == f"IT describes a model; give its folder, {path.parent}."
    said = "IT does not exist; give a folder or file of weights on this machine, since nothing"
    assert refusal(tmp_path / "none").startswith(said)


def test_a_folder_of_files_without_description(tmp_path: Path) -> None:
    assert "IT/config.json cannot be read" in refusal(tmp_path)
    (tmp_path / "a.safetensors").touch()
    assert refusal(tmp_path) == "IT has no config.json; give the file IT/a.safetensors."
    (tmp_path / "b.safetensors").touch()
    several = "IT has no config.json, but several files of weights (a.safetensors, b.safetensors); "
    assert refusal(tmp_path) == several + "give one of them."
    (tmp_path / "adapter_config.json").touch()
    assert refusal(tmp_path).startswith("IT holds LoRA adapters instead of whole weights; give")


def test_files_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.touch()
    assert "quantized as GGUF; give the model before it was quantized" in refusal(path)
    path = tmp_path / "a.onnx"
    path.touch()
    assert "must be a folder, or a file that ends with .safetensors, .pt" in refusal(path)
    path = tmp_path / "a-00001-of-00003.safetensors"
    path.touch()
    said = f"IT is only one of several files of a model; give their folder, {tmp_path}."
    assert refusal(path) == said
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    path = tmp_path / "pointer.safetensors"
    path.write_text(pointer)
    assert "IT is only a pointer of Git LFS; fetch the file itself by `git lfs" in refusal(path)
    folder = described(tmp_path / "folder", _class_name="WanTransformer3DModel", num_layers=2,
                       num_attention_heads=4, attention_head_dim=16, ffn_dim=128, in_channels=4,
                       out_channels=4, text_dim=32)  # fmt: skip
    (folder / "diffusion_pytorch_model.safetensors").write_text(pointer)
    assert "diffusion_pytorch_model.safetensors is only a pointer of Git LFS" in refusal(folder)


TENSORS = {
    "transformer.blocks.0.attn1.to_q.lora_A.weight": "LoRA adapters, such as `blocks.0.attn1",
    "lora_unet_blocks_0_cross_attn_k.lora_down.weight": "LoRA adapters, such as `lora_unet_blocks",
    "diffusion_model.blocks.0.attn.q.lora_up.weight": "LoRA adapters, such as `",
    "decoder.middle.0.residual.0.gamma": "holds a VAE, with tensors such as `decoder.middle.0",
    "encoder.down_blocks.0.resnets.0.conv1.weight": "holds a VAE, with tensors such as",
    "first_stage_model.decoder.conv_in.weight": "holds a VAE",
    "text_model.encoder.layers.0.mlp.fc1.weight": "holds a text encoder, with tensors such as",
    "token_embedding.weight": "holds a text encoder",
    "encoder.block.0.layer.0.SelfAttention.q.weight": "holds a text encoder",
    "visual.transformer.0.attn.to_qkv.weight": "holds an image encoder",
    "transformer_blocks.0.qkv_proj.qweight": "as weights have that are quantized by nunchaku",
    "blocks.0.attn1.to_q.weight.absmax": "as weights have that are quantized by bitsandbytes",
    "something.weight": "holds tensors, such as `something.weight`, of no network that can be read",
}


@pytest.mark.parametrize("name", TENSORS)
def test_files_with_tensors_of_something_else(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.safetensors"
    save_file({name: torch.ones(2)}, path)
    assert TENSORS[name] in refusal(path)


CONFIGS = {
    "AutoencoderKLWan": {"_class_name": "AutoencoderKLWan"},
    "which is a VAE; give the folder of the network": {"_class_name": "AutoencoderKL"},
    "which is a scheduler, which has no weights": {"_class_name": "UniPCMultistepScheduler"},
    "names no `_class_name` but is of umt5, such as a text encoder": {"model_type": "umt5"},
    "quantized by bitsandbytes; give the model before it was quantized": {
        "_class_name": "WanTransformer3DModel",
        "quantization_config": {"quant_method": "bitsandbytes"},
    },
}


@pytest.mark.parametrize("said", CONFIGS)
def test_folders_of_something_else(tmp_path: Path, said: str) -> None:
    assert said in refusal(described(tmp_path / "folder", **CONFIGS[said]))


@pytest.mark.parametrize("prefix", ["module.", "model._fsdp_wrapped_module.", "module.model."])
def test_names_of_wrappers_and_variants_are_known(tmp_path: Path, prefix: str) -> None:
    """Read a trainer's names from a file, and a variant of diffusers from a folder."""
    model = next(models())
    tensors = model.tensors(torch.float16)
    path = tmp_path / "a.safetensors"
    save_file({f"{prefix}{name}": tensor for name, tensor in tensors.items()}, path)
    with open_published(path) as opened:
        opened.check()
        assert (opened.form, opened.sizes) == (model.form, model.sizes)
    folder = model.folder(tmp_path / "folder", tensors)
    whole = folder / f"{model.form.stem}.safetensors"
    whole.rename(folder / f"{model.form.stem}.fp16.safetensors")
    with open_published(folder) as opened:
        opened.check()
    save_file(tensors, folder / f"{model.form.stem}.bf16.safetensors")
    assert "IT holds several variants of the weights; give one of the files" in refusal(folder)
