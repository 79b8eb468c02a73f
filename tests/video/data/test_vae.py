from __future__ import annotations

import json
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import CodecConfig, EncodeConfig
from megatron_ext.video.data.codecs import build_codec, codec_from_manifest
from megatron_ext.video.data.dataset import OnlineVideos, ShardedVideos
from megatron_ext.video.data.encode import ClipEncoder
from megatron_ext.video.data.preprocess import main
from megatron_ext.video.data.randomness import generator
from megatron_ext.video.data.text_encoders import text_encoder_from_manifest
from megatron_ext.video.data.vae import DiffusersCodec
from tests.video.data.making import PLAN, pictures, planned, write_gif, write_vaes

KINDS = ("AutoencoderKLHunyuanVideo", "AutoencoderKLWan")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny VAE of each kind, as diffusers saves it."""
    return write_vaes(tmp_path_factory.mktemp("vaes"))


def pixels(frames: int = 9) -> torch.Tensor:
    return torch.rand(1, 3, frames, 32, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1


def load(folder: Path, seed: int = 3) -> Any:
    return build_codec(CodecConfig(str(folder)), seed=seed)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_sizes(folders: dict[str, Path], kind: str) -> None:
    codec = load(folders[kind])
    assert (codec.channels, codec.spatial, codec.temporal) == (4, 8, 4)
    assert codec.latent_shape(9, 32, 48) == (4, 3, 4, 6)
    latents = codec.encode(pixels())
    assert latents.shape == (1, 4, 3, 4, 6) and latents.dtype == torch.float32
    assert codec.decode(latents).shape == (1, 3, 9, 32, 48)
    assert codec.encode(pixels(1)).shape == (1, 4, 1, 4, 6)
    with pytest.raises(DataError, match=r"have 5 channels, but the codec has 4"):
        codec.decode(torch.zeros(1, 5, 1, 2, 2))
    with pytest.raises(ConfigError, match=r"frames \(8\) must be a multiple"):
        codec.encode(pixels(8))


@pytest.mark.parametrize("kind", KINDS)
def test_latents_are_normalized_posterior_samples(folders: dict[str, Path], kind: str) -> None:
    codec = load(folders[kind])
    diffusers = pytest.importorskip("diffusers")
    vae = getattr(diffusers, kind).from_pretrained(folders[kind])
    with torch.no_grad():
        posterior = vae.encode(pixels()).latent_dist
        noise = generator(3, 7, "posterior head1").standard_normal((1, 4, 3, 4, 6), np.float32)
        z = posterior.mean + posterior.std * torch.from_numpy(noise)
        decoded = vae.decode(z).sample
    if kind == "AutoencoderKLHunyuanVideo":
        wanted = 0.476986 * z
    else:
        mean = torch.tensor([0.1, -0.2, 0.3, 0.0]).view(4, 1, 1, 1)
        wanted = (z - mean) / torch.tensor([1.0, 2.0, 0.5, 3.0]).view(4, 1, 1, 1)
    latents = codec.encode(pixels(), number=7, piece="head1")
    torch.testing.assert_close(latents, wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(codec.decode(latents), decoded, atol=1e-5, rtol=1e-5)


def test_samples_depend_on_the_clip_and_not_on_the_order(folders: dict[str, Path]) -> None:
    codec, other = load(folders[KINDS[0]]), load(folders[KINDS[0]])
    first, second = (codec.encode(pixels(), number=n) for n in (1, 2))
    assert torch.equal(other.encode(pixels(), number=2), second)
    assert torch.equal(other.encode(pixels(), number=1), first)
    assert not torch.equal(first, second)
    assert not torch.equal(first, codec.encode(pixels(), number=1, piece="tail1"))
    assert not torch.equal(first, load(folders[KINDS[0]], seed=4).encode(pixels(), number=1))


def test_defaults_of_an_old_config_come_from_the_class(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "old"
    shutil.copytree(folders["AutoencoderKLWan"], folder)
    settings = json.loads((folder / "config.json").read_text())
    for name in ("scale_factor_spatial", "scale_factor_temporal"):
        del settings[name]
    (folder / "config.json").write_text(json.dumps(settings))
    codec = load(folder)
    assert (codec.spatial, codec.temporal) == (8, 4)


def test_scale_and_statistics_together(folders: dict[str, Path]) -> None:
    """Pipelines of Mochi and LTX in diffusers do so: ``(z - mean) * scaling_factor / std``."""
    codec = load(folders["AutoencoderKLWan"])
    codec._vae.register_to_config(scaling_factor=0.5)
    mean, std = codec._statistics()
    torch.testing.assert_close(mean.flatten(), torch.tensor([0.1, -0.2, 0.3, 0.0]))
    torch.testing.assert_close(std.flatten(), torch.tensor([2.0, 4.0, 1.0, 6.0]))


def test_from_a_manifest(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["AutoencoderKLHunyuanVideo"]
    made = load(folder)
    # As a manifest keeps it.
    manifest = json.loads(json.dumps({"codec": made.identity}))
    again = codec_from_manifest(manifest, str(folder), seed=3)
    assert isinstance(again, DiffusersCodec)
    assert torch.equal(again.encode(pixels()), made.encode(pixels()))
    with pytest.raises(ConfigError, match=r"made with the VAE AutoencoderKLHunyuanVideo, so"):
        codec_from_manifest(manifest)
    with pytest.raises(DataError, match=r"not made with the VAE .*: `codec` was 'Autoenc"):
        codec_from_manifest(manifest, str(folders["AutoencoderKLWan"]))
    manifest["codec"]["config"]["scaling_factor"] = 0.7
    with pytest.raises(DataError, match=r"`scaling_factor` was 0.7, but is 0.476986; give the fol"):
        codec_from_manifest(manifest, str(folder))


def test_a_newer_diffusers_that_saved_the_same_vae_is_no_difference(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "again"
    shutil.copytree(folders["AutoencoderKLWan"], folder)
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"_diffusers_version": "99.0", "_name_or_path": "/elsewhere"}
    (folder / "config.json").write_text(json.dumps(settings))
    codec_from_manifest({"codec": load(folders["AutoencoderKLWan"]).identity}, str(folder))


def test_folders_of_no_use(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "vae"
    shutil.copytree(folders["AutoencoderKLWan"], folder)
    weights = folder / "diffusion_pytorch_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    with pytest.raises(ConfigError, match=r"holds an AutoencoderKLWan whose weights cannot be"):
        load(folder)
    weights.unlink()
    with pytest.raises(ConfigError, match=r"whose weights cannot be loaded .*; copy the whole"):
        load(folder)
    safetensors = pytest.importorskip("safetensors.torch")
    kept = safetensors.load(whole)
    kept.pop("quant_conv.weight")
    safetensors.save_file(kept, weights)
    with pytest.raises(ConfigError, match=r"lacks the weights quant_conv.weight; copy the whole"):
        load(folder)
    for name in ("AutoencoderKLNobody", "DiffusionPipeline"):
        (folder / "config.json").write_text(json.dumps({"_class_name": name}))
        with pytest.raises(ConfigError, match=rf"of the class {name}, which is no VAE of the inst"):
            load(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"a local folder with a diffusers VAE, but .*KeyError"):
        load(folder)


def test_vaes_that_are_not_causal_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    codec = load(folders["AutoencoderKLWan"])
    codec.temporal = 2
    with pytest.raises(ConfigError, match=r"gives latents of shape .* but a causal VAE gives"):
        codec.encode(pixels())
    diffusers = pytest.importorskip("diffusers")
    diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"neither of spatial_compression_ratio, scale_factor_sp"):
        load(tmp_path)


def test_without_diffusers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKLWan"}))
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ConfigError, match=r"needs the package diffusers, which is not installed"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"`codec_spatial` \(4\) must be left out with `codec`"):
        CodecConfig(str(tmp_path), codec_spatial=4)


def test_shards_of_a_vae_hold_what_online_encoding_gives(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """In any order, since the posterior sample of a clip depends on its number alone."""
    vae = str(folders["AutoencoderKLHunyuanVideo"])
    for i in range(3):
        write_gif(tmp_path / f"{i}.gif", pictures(5, first=i))
        (tmp_path / f"{i}.txt").write_text(f"bar {i}")
    output = tmp_path.with_name("out_of_a_vae")
    plan = ["--buckets", '{"32px": {"5": 1.0}}', "--text-length=6", "--codec", vae]
    assert main(["--input", str(tmp_path), "--output", str(output), *plan]) == 0
    sharded = ShardedVideos(output)
    codec = codec_from_manifest(sharded.manifest, vae, seed=EncodeConfig().clip_seed)
    text_encoder = text_encoder_from_manifest(sharded.manifest)
    online = OnlineVideos(planned(tmp_path), ClipEncoder(EncodeConfig(), codec, text_encoder), PLAN)
    for number in (2, 0, 1):
        assert torch.equal(online[number].latents, sharded[number].latents)
        for name, piece in sharded[number].references.items():
            assert torch.equal(online[number].references[name], piece)
        assert torch.equal(online[number].text, sharded[number].text)
    assert codec.decode(sharded[0].latents[None]).shape == (1, 3, 5, 32, 32)


@cache
def patch_manifest() -> dict[str, Any]:
    config = CodecConfig(codec_spatial=4, codec_channels=20, codec_shift=-0.5, codec_scale=0.7)
    identity = build_codec(config).identity
    return dict(json.loads(json.dumps({"codec": identity})))


def test_patch_codec_from_a_manifest() -> None:
    config = CodecConfig(codec_spatial=4, codec_channels=20, codec_shift=-0.5, codec_scale=0.7)
    codec = codec_from_manifest(patch_manifest())
    assert torch.equal(codec.encode(pixels()), build_codec(config).encode(pixels()))
    with pytest.raises(ConfigError, match=r"`codec_folder` \(/vae\) has no effect: .* leave it ou"):
        codec_from_manifest(patch_manifest(), "/vae")
    for wrong in ({}, {"codec": None}, {"codec": {"config": {}}}):
        with pytest.raises(DataError, match=r"The manifest must name its codec, but holds"):
            codec_from_manifest(wrong)
    for change in ({"codec_spatial": 0}, {"codec_colour": 3}):
        wrong = {"codec": patch_manifest()["codec"] | change}
        with pytest.raises(DataError, match=r"The manifest's codec \(.*\) cannot be used \("):
            codec_from_manifest(wrong)
