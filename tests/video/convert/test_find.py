"""A sentence tells what was given in place of a network's weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ext.checkpoint.files import digest_of_weights
from megatron_ext.errors import CheckpointError
from megatron_ext.video.config.weights import is_published
from megatron_ext.video.convert.find import form_of_folder, holds_video_weights
from megatron_ext.video.convert.reading import open_published
from megatron_ext.video.networks.wan.convert.conversion import CONVERSION
from tests.video.convert.forms import Model, models


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
    path = tmp_path / "flux1-dev.sft"
    path.touch()
    assert refusal(path) == "IT must end with .safetensors, of which .sft is short; rename it."
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
    "transformer.blocks.0.attn1.to_q.lora_magnitude_vector": "LoRA adapters, such as",
    "double_blocks.0.processor.qkv_lora1.up.weight": "LoRA adapters, such as",
    "diffusion_model.blocks.0.norm3.diff_b": "LoRA adapters, such as",
    "blocks.0.ffn.0.weight_scale_2": "quantized by ModelOpt or ComfyUI to 4 bits; give the model",
    "something.weight": "holds tensors, such as `something.weight`, of no network that can be read",
}


@pytest.mark.parametrize("name", TENSORS)
def test_files_with_tensors_of_something_else(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.safetensors"
    save_file({name: torch.ones(2)}, path)
    assert TENSORS[name] in refusal(path)


CONFIGS: dict[str, dict[str, object]] = {
    "AutoencoderKLWan": {"_class_name": "AutoencoderKLWan"},
    "which is a VAE; give the folder of the network": {"_class_name": "AutoencoderKL"},
    "which is a scheduler, which has no weights": {"_class_name": "UniPCMultistepScheduler"},
    "SkyReels V2, whose models may be told a frame rate, and cannot be converted; give Wan": {
        "_class_name": "SkyReelsV2Transformer3DModel"
    },
    "names no `_class_name` but is of umt5, such as a text encoder": {"model_type": "umt5"},
    "quantized by bitsandbytes; give the model before it was quantized": {
        "_class_name": "WanTransformer3DModel",
        "quantization_config": {"quant_method": "bitsandbytes"},
    },
}


@pytest.mark.parametrize("said", CONFIGS)
def test_folders_of_something_else(tmp_path: Path, said: str) -> None:
    assert said in refusal(described(tmp_path / "folder", **CONFIGS[said]))


def test_checkpoints_and_caches_of_others(tmp_path: Path) -> None:
    """Say how weights are got from checkpoints of torch and DeepSpeed, and from a hub's cache."""
    for name, said in {
        "dcp/__0_0.distcp": "torch.distributed; write its weights to one file by `python -m",
        "deepspeed/zero_to_fp32.py": "of DeepSpeed; write its weights by the `zero_to_fp32.py`",
        "models--A--B/snapshots/0a1b/x": "cache of Hugging Face; give a snapshot in it, such as",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.touch()
        assert said in refusal(tmp_path / name.partition("/")[0])
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": {"img_in.proj.weight": torch.empty(0)}}, path)
    assert "IT holds tensors without values, as DeepSpeed's ZeRO-3 leaves them" in refusal(path)


def chosen(name: str) -> tuple[Model, dict[str, Tensor]]:
    """Return a model of `models` with its tensors in fp32."""
    (model,) = (model for model in models() if model.name == name)
    return model, model.tensors(torch.float32)


def parameters(source: Path) -> dict[str, Tensor]:
    with open_published(source) as model:
        model.check()
        return {name: model.parameter(name, torch.float32) for name in model.mapped.parameters}


def in_eight_bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in which the matrices of blocks are numbers of 8 bits."""
    return {
        name: x.to(torch.float8_e4m3fn) if "blocks." in name and x.dim() == 2 else x
        for name, x in tensors.items()
    }


def test_scales_lie_in_a_file_beside_the_weights(tmp_path: Path) -> None:
    """Read Tencent's weights of 8 bits, whose scales are in a second file."""
    tensors = in_eight_bits(chosen("hunyuan, original")[1])
    path = tmp_path / "mp_rank_00_model_states_fp8.pt"
    torch.save({"module": tensors}, path)
    said = "whose scales are in a file mp_rank_00_model_states_fp8_map.pt, but it is not there"
    assert said in refusal(path)
    small = [name for name, x in tensors.items() if x.element_size() == 1]
    scales = {name.removesuffix(".weight"): torch.tensor([0.5]) for name in small}
    # Layers that are not in 8 bits have scales, too, which nothing uses.
    place = tmp_path / "mp_rank_00_model_states_fp8_map.pt"
    torch.save({**scales, "img_in.proj": torch.tensor([9.0])}, place)
    whole = {name: x.float() * (0.5 if name in small else 1) for name, x in tensors.items()}
    save_file(whole, tmp_path / "whole.safetensors")
    read, wanted = parameters(path), parameters(tmp_path / "whole.safetensors")
    assert all(torch.equal(read[name], wanted[name]) for name in wanted)
    torch.save(dict([*scales.items()][1:]), place)
    assert f"holds no scale of `{next(iter(scales))}`, whose weight has 8 bits" in refusal(path)


def test_what_a_scale_alone_does_not_give_back(tmp_path: Path) -> None:
    tensors = chosen("wan, original")[1]
    path = tmp_path / "a.safetensors"
    layer = "blocks.0.ffn.0"

    def described_as(**content: object) -> Tensor:
        return torch.tensor([*json.dumps(content).encode()], dtype=torch.uint8)

    for content, said in {
        described_as(format="float8_e4m3fn", convrot=True): "as float8_e4m3fn after a rotation;",
        described_as(format="nvfp4"): "has quantized the weight as nvfp4; give the model before",
        described_as(): "has quantized the weight as {};",
    }.items():
        save_file({**tensors, f"{layer}.comfy_quant": content}, path)
        assert said in refusal(path)
    # Newer files have the same descriptions in their headers.
    for text, said in (
        ('{"layers": {"blocks.0.ffn.0": {"format": "nvfp4"}}}', "0.ffn.0`, so that ComfyUI has qu"),
        ("{", "holds `_quantization_metadata: `, so that ComfyUI has quantized the weight as '{';"),
    ):
        save_file(tensors, path, {"_quantization_metadata": text})
        assert said in refusal(path)
    save_file({**tensors, "blocks.7.ffn.0.scale_weight": torch.ones(())}, path)
    assert "holds `blocks.7.ffn.0.scale_weight`, but no weight that it scales" in refusal(path)
    # A scale counts for a weight of 16 or 32 bits, too, as in ComfyUI.
    save_file(tensors, path)
    name = "blocks.0.linear_fc1.weight"
    once = parameters(path)[name]
    save_file({**tensors, f"{layer}.scale_weight": torch.tensor(0.5)}, path)
    assert torch.equal(parameters(path)[name], once / 2)


def test_a_folder_with_an_index_alone(tmp_path: Path) -> None:
    """Read shards that Open-Sora's trainer saves, without config.json."""
    model, tensors = chosen("open-sora, open-sora")
    names = sorted(tensors)
    files = {f"model-{i + 1:05}.safetensors": names[i::2] for i in range(2)}
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    places = {name: file for file, own in files.items() for name in own}
    index.write_text(json.dumps({"weight_map": places}))
    assert holds_video_weights(tmp_path) and is_published(str(tmp_path))
    with open_published(tmp_path) as opened:
        opened.check()
        assert (opened.form, opened.sizes) == (model.form, model.sizes)
    path = tmp_path / "model-00002.safetensors"
    assert refusal(path).endswith(
        f"one of several files of a model; give their folder, {tmp_path}."
    )
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "a.safetensors"}}))
    assert not holds_video_weights(tmp_path)


def test_names_of_tensors_decide_the_form_of_a_folder(tmp_path: Path) -> None:
    """Read VideoX-Fun's Wan: a class of diffusers' name with arguments and names of the original.

    So, too, a file of Black Forest Labs beside diffusers' config.json with SimpleTuner's class.
    """
    for name, named, own in (
        ("wan, original", "wan, original", "WanTransformer3DModel"),
        ("flux dev, original", "flux dev, diffusers", "FluxTransformer2DModelWithMasking"),
    ):
        model, tensors = chosen(name)
        folder = chosen(named)[0].folder(tmp_path / own, tensors)
        content = json.loads((folder / "config.json").read_text())
        more = {"qk_norm": True} if named == name else {}
        described(folder, **{**content, "_class_name": own, **more})
        with open_published(folder) as opened:
            opened.check()
            assert (opened.form, opened.sizes) == (model.form, model.sizes)


def test_other_models_in_a_file_of_comfyui(tmp_path: Path) -> None:
    model, tensors = chosen("wan, original")
    path = tmp_path / "a.safetensors"
    own = {f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()}
    save_file({**own, "clip_vision.vision_model.x": torch.ones(1), "v_pred": torch.ones(1)}, path)
    with open_published(path) as opened:
        opened.check()
        assert opened.sizes == model.sizes
    lora = {"blocks.0.self_attn.q.lora_up.weight": torch.ones(1)}
    save_file({**tensors, **lora}, path)
    assert "lora_up.weight`, beside whole weights; give the model without them" in refusal(path)


@pytest.mark.parametrize(
    "prefix", ["net.", "module.", "model._fsdp_wrapped_module.", "module.model."]
)
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
    assert "IT holds several variants of the weights (bf16, fp16); give a file" in refusal(folder)


@pytest.mark.parametrize("variant", ["", ".fp16"])
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_shards_of_variants_and_of_pickles_are_read(
    tmp_path: Path, suffix: str, variant: str
) -> None:
    """Name shards and index as diffusers does, and files of torch.save as its older versions."""
    model = next(models())
    tensors = model.tensors(torch.float16)
    folder = model.folder(tmp_path / "folder", tensors)
    whole = parameters(folder)
    stem = model.form.stem
    (folder / f"{stem}.safetensors").unlink()
    places = {}
    for number in range(2):
        own = dict(sorted(tensors.items())[number::2])
        file = f"{stem}{variant}-0000{number + 1}-of-00002{suffix}"
        write = save_file if suffix == ".safetensors" else torch.save
        write(own, folder / file)
        places |= dict.fromkeys(own, file)
    index = folder / f"{stem}{suffix}.index{variant}.json"
    index.write_text(json.dumps({"weight_map": places}))
    found = parameters(folder)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    digest = digest_of_weights(folder)
    index.write_text(json.dumps({"weight_map": {**places, "x": file}}))
    assert f"{file} does not hold `x`, which {stem}" in refusal(folder)
    (folder / file).unlink()
    assert digest_of_weights(folder) != digest
