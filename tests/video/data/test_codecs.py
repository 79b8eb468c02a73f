"""The patch codec, VAEs of diffusers, and latents decoded part by part."""

import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import CodecConfig, EncodeConfig
from megatron_ext.video.data import codecs
from megatron_ext.video.data.cli import main
from megatron_ext.video.data.codec import (
    DiffusersCodec,
    PatchCodec,
    VideoCodec,
    band_order,
    cosine_basis,
    rotation,
)
from megatron_ext.video.data.dataset import OnlineVideos, ShardedVideos
from megatron_ext.video.data.encode import ClipEncoder
from megatron_ext.video.data.randomness import generator
from megatron_ext.video.data.text_encoders import text_encoder_from_manifest
from tests.video.data.making import PLAN, pictures, planned, write_gif, write_vaes

CODECS = [
    CodecConfig(),
    CodecConfig(codec_spatial=2, codec_shift=-0.5, codec_scale=0.7),
    *(
        CodecConfig(codec_temporal=temporal, codec_spatial=spatial)
        for temporal, spatial in ((1, 2), (2, 4), (4, 2), (8, 2))
    ),
]


@pytest.mark.parametrize("config", CODECS)
def test_all_channels_are_inverted_and_no_later_frame_leaks(config: CodecConfig) -> None:
    codec, temporal = codecs.build_codec(config), config.codec_temporal
    size = (1, 3, 2 * temporal + 1, 16, 32)
    pixels = torch.rand(size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = codec.encode(pixels)
    assert latents.shape == (1, *codec.latent_shape(*size[2:]))
    torch.testing.assert_close(codec.decode(latents), pixels, atol=1e-5, rtol=0)
    changed = pixels.clone()
    changed[:, :, 1:] += 1
    assert torch.equal(codec.encode(changed)[:, :, :1], latents[:, :, :1])
    for frames in (1, temporal + 1):
        part = codec.encode(pixels[:, :, :frames])
        torch.testing.assert_close(part, latents[:, :, : part.size(2)])
    if config.codec_scale == 1:
        # The transform keeps the energy of all frames, the first counted repeatedly.
        energy = pixels.square().sum() + (temporal - 1) * pixels[:, :, 0].square().sum()
        torch.testing.assert_close(latents.square().sum(), energy)


def test_fewer_channels_keep_constant_pictures_and_are_a_projection() -> None:
    codec = codecs.build_codec(CodecConfig(codec_channels=12))
    grey = torch.full((1, 3, 5, 16, 16), 0.3)
    torch.testing.assert_close(codec.decode(codec.encode(grey)), grey, atol=1e-5, rtol=0)
    noise = torch.randn(1, 3, 5, 16, 16, generator=torch.Generator().manual_seed(0))
    once = codec.encode(noise)[:, :, 1:]
    again = codec.encode(codec.decode(codec.encode(noise)))[:, :, 1:]
    torch.testing.assert_close(again, once, atol=1e-5, rtol=1e-5)


def test_the_lowest_frequencies_are_kept() -> None:
    """Sort by the distance from zero, in waves of the patch; of equals the first axes vary last."""
    found = band_order(4, 2).tolist()
    axes = [range(3), range(4), range(2), range(2)]
    radius = [(t / 4) ** 2 + (y / 2) ** 2 + (x / 2) ** 2 for _, t, y, x in itertools.product(*axes)]
    assert found == sorted(range(48), key=radius.__getitem__)
    assert found[:6] == [0, 16, 32, 4, 20, 36]


ROTATION_OF_THREE = [
    [0.908295984389481, 0.418197189555119, -0.010464960111879],
    [-0.033019571207838, 0.046733290007737, -0.998361511438769],
    [0.417022916227866, -0.907153300304448, -0.056256351530770],
]


def test_matrices_are_orthogonal_and_made_row_by_row() -> None:
    for matrix in (cosine_basis(4, 2), rotation(48)):
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(48, dtype=torch.float64))
    rows = torch.tensor([5, 0, 47])
    assert torch.equal(cosine_basis(4, 2, rows), cosine_basis(4, 2)[rows])
    colours = cosine_basis(1, 1)
    assert torch.allclose(colours[0], torch.full((3,), 3**-0.5, dtype=torch.float64))
    # The rotation is fixed: other numbers would make every stored latent useless.
    assert rotation(3).tolist() == [pytest.approx(row, abs=1e-12) for row in ROTATION_OF_THREE]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"codec_spatial": 0}, r"`--codec-spatial` \(0\) must be at least 1; 8 is the default"),
        ({"codec_scale": 0.0}, r"`codec_scale` \(0.0\) must differ from 0; use 1 /"),
        ({"codec_scale": float("nan")}, r"`--codec-scale` \(nan\) must be a finite number"),
        ({"codec_shift": float("inf")}, r"`--codec-shift` \(inf\) must be a finite number"),
        ({"codec_channels": 769}, r"`codec_channels` \(769\) must lie between 1 and"),
        ({"codec": "/nowhere"}, r"must be `patch` or a local folder"),
    ],
)
def test_options_of_no_use(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        codecs.build_codec(CodecConfig(**wrong))


def test_sizes_that_do_not_divide_are_refused() -> None:
    codec = codecs.build_codec(CodecConfig())
    for frames, choice in ((16, 13), (12, 9), (8, 5), (0, 1)):
        with pytest.raises(ConfigError, match=rf"frames \({frames}\) must be .* choose {choice}\."):
            codec.latent_shape(frames, 16, 16)
    single = codecs.build_codec(CodecConfig(codec_temporal=1, codec_spatial=2))
    assert single.latent_shape(2, 2, 4)[1:] == (2, 1, 2)
    for size, said in (
        ((0, 2, 2), "frames (0)"),
        ((1, 0, 2), "height (0)"),
        ((1, 2, 0), "width (0)"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            single.latent_shape(*size)
    with pytest.raises(ConfigError, match=r"width \(20\) must be a multiple .* \(8\)"):
        codec.latent_shape(17, 16, 20)
    for decode in (codec.decode, codecs.block_decoder(codec)):
        with pytest.raises(DataError, match=r"have 5 channels, but the codec has 768"):
            decode(torch.zeros(1, 5, 1, 2, 2))


STRETCHES = (3, 3, 1, 5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_vaes(tmp_path_factory.mktemp("vaes"))


def latents_of(codec: Any, frames: int = sum(STRETCHES)) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, codec.channels, frames, 4, 6, generator=generator)


@pytest.mark.parametrize("temporal", [1, 4])
def test_the_patch_codec_is_exact(temporal: int) -> None:
    codec = PatchCodec(CodecConfig(codec_spatial=4, codec_temporal=temporal, codec_channels=24))
    latents = latents_of(codec)
    parts = in_stretches(codecs.block_decoder(codec), latents)
    assert [x.size(2) for x in parts] == [2 * temporal + 1, 3 * temporal, temporal, 5 * temporal]
    torch.testing.assert_close(torch.cat(parts, dim=2), codec.decode(latents), atol=1e-6, rtol=0)


def in_stretches(decoder: Any, latents: Tensor, sizes: Sequence[int] = STRETCHES) -> list[Tensor]:
    return [decoder(part) for part in latents.split(list(sizes), dim=2)]


def test_the_vae_of_wan_is_exact_whatever_else_it_does(folders: dict[str, Path]) -> None:
    codec = codecs.build_codec(CodecConfig(str(folders["AutoencoderKLWan"])))
    latents = latents_of(codec)
    decoder, other = codecs.block_decoder(codec), codecs.block_decoder(codec)
    assert isinstance(decoder, codecs.FeatureCacheDecoder)
    with pytest.raises(DataError, match=r"have 5 channels, but the codec has 4"):
        decoder(torch.zeros(1, 5, 1, 4, 6))
    parts = []
    for part in latents.split(list(STRETCHES), dim=2):
        parts.append(decoder(part))
        other(-part)
        codec.decode(part)
        codec.encode(torch.zeros(1, 3, 5, 32, 48))
    assert [x.size(2) for x in parts] == [9, 12, 4, 20]
    torch.testing.assert_close(torch.cat(parts, dim=2), codec.decode(latents), atol=1e-5, rtol=0)
    # Pixels stay within the range of a screen.
    codec.vae.decoder.conv_out.weight.mul_(100)
    bright = codecs.block_decoder(codec)(latents[:, :, :1])
    assert float(bright.abs().max()) == 1.0
    torch.testing.assert_close(bright, codec.decode(latents[:, :, :1]), atol=1e-5, rtol=0)


def test_the_vae_of_wan_2_2_is_exact_too(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    diffusers.AutoencoderKLWan(
        base_dim=8, decoder_base_dim=8, z_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1,
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4, is_residual=True, in_channels=12,
        out_channels=12, patch_size=2, scale_factor_spatial=16,
    ).save_pretrained(tmp_path)  # fmt: skip
    codec = codecs.build_codec(CodecConfig(str(tmp_path)))
    latents = latents_of(codec, 6)
    parts = in_stretches(codecs.block_decoder(codec), latents, (3, 3))
    torch.testing.assert_close(torch.cat(parts, dim=2), codec.decode(latents), atol=1e-5, rtol=0)


class ReachingCodec:
    """Decodes each frame as a sum over its latent frame and those before that it reaches."""

    channels, spatial, temporal = 3, 1, 2
    check_channels = VideoCodec.check_channels

    def __init__(self, reach: int) -> None:
        self.reach = reach

    def decode(self, latents: Tensor) -> Tensor:
        before = latents.new_zeros(*latents.shape[:2], self.reach, *latents.shape[3:])
        padded = torch.cat([before, latents], dim=2)
        shifted = padded.unfold(2, self.reach + 1, 1) * torch.arange(1.0, self.reach + 2)
        return shifted.sum(-1).repeat_interleave(2, dim=2)[:, :, 1:]


def test_other_codecs_are_exact_where_the_overlap_is_long_enough(folders: dict[str, Path]) -> None:
    codec: Any = ReachingCodec(reach=4)
    latents = latents_of(codec)
    want, errors = codec.decode(latents), []
    for overlap in (1, 3, 4, 20):
        parts = in_stretches(codecs.OverlapDecoder(codec, overlap), latents)
        assert [x.size(2) for x in parts] == [5, 6, 2, 10]
        errors.append(float((torch.cat(parts, dim=2) - want).abs().max()))
    assert errors[0] > 1 and errors[1] > 1 and max(errors[2:]) < 1e-5
    codec = codecs.build_codec(CodecConfig(str(folders["AutoencoderKLHunyuanVideo"])))
    decoder = codecs.block_decoder(codec)
    assert isinstance(decoder, codecs.OverlapDecoder)
    parts = in_stretches(decoder, latents_of(codec))
    assert [x.size(2) for x in parts] == [9, 12, 4, 20]


KINDS = ("AutoencoderKLHunyuanVideo", "AutoencoderKLWan")


def pixels(frames: int = 9) -> torch.Tensor:
    return torch.rand(1, 3, frames, 32, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1


def load(folder: Path, seed: int = 3) -> Any:
    return codecs.build_codec(CodecConfig(str(folder)), seed=seed)


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


def resaved(folder: Path, copy: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    shutil.copytree(folder, copy)
    settings = json.loads((copy / "config.json").read_text())
    change(settings)
    (copy / "config.json").write_text(json.dumps(settings))
    return copy


def test_vae_settings_are_taken_as_by_diffusers(folders: dict[str, Path], tmp_path: Path) -> None:
    """Take missing defaults from the class, and ignore what a newer diffusers notes."""
    wan = folders["AutoencoderKLWan"]
    names = ("scale_factor_spatial", "scale_factor_temporal")
    codec = load(resaved(wan, tmp_path / "old", lambda x: [x.pop(name) for name in names]))
    assert (codec.spatial, codec.temporal) == (8, 4)
    newer = {"_diffusers_version": "99.0", "_name_or_path": "/elsewhere"}
    folder = resaved(wan, tmp_path / "new", lambda x: x.update(newer))
    codecs.codec_from_manifest({"codec": load(wan).identity}, str(folder))
    # As diffusers does for Mochi and LTX: (z - mean) * scaling_factor / std.
    codec = load(wan)
    codec.vae.register_to_config(scaling_factor=0.5)
    mean, std = codec._statistics()
    torch.testing.assert_close(mean.flatten(), torch.tensor([0.1, -0.2, 0.3, 0.0]))
    torch.testing.assert_close(std.flatten(), torch.tensor([2.0, 4.0, 1.0, 6.0]))
    # And with a shift, as for Flux and CogVideoX.
    shifted = load(folders["AutoencoderKLHunyuanVideo"])
    shifted.vae.register_to_config(shift_factor=0.3)
    mean, std = shifted._statistics()
    torch.testing.assert_close(mean.flatten(), torch.full((4,), 0.3))
    torch.testing.assert_close(std.flatten(), torch.full((4,), 1 / 0.476986))


def test_from_a_manifest(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["AutoencoderKLHunyuanVideo"]
    made = load(folder)
    # As a manifest keeps it.
    manifest = json.loads(json.dumps({"codec": made.identity}))
    again = codecs.codec_from_manifest(manifest, str(folder), seed=3)
    assert isinstance(again, DiffusersCodec)
    assert torch.equal(again.encode(pixels()), made.encode(pixels()))
    with pytest.raises(ConfigError, match=r"made with the VAE AutoencoderKLHunyuanVideo, so"):
        codecs.codec_from_manifest(manifest)
    with pytest.raises(DataError, match=r"not made with the VAE .*: `codec` was 'Autoenc"):
        codecs.codec_from_manifest(manifest, str(folders["AutoencoderKLWan"]))
    manifest["codec"]["config"]["scaling_factor"] = 0.7
    with pytest.raises(DataError, match=r"`scaling_factor` was 0.7, but is 0.476986; give the fol"):
        codecs.codec_from_manifest(manifest, str(folder))


def test_folders_of_no_use(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.raises(
        ConfigError, match=r"a local folder with a diffusers VAE, but .*names no class"
    ):
        load(folder)
    codec = load(folders["AutoencoderKLWan"])
    codec.temporal = 2
    with pytest.raises(ConfigError, match=r"gives latents of shape .* but a causal VAE gives"):
        codec.encode(pixels())
    diffusers = pytest.importorskip("diffusers")
    diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"neither of spatial_compression_ratio, scale_factor_sp"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKLWan"}))
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ConfigError, match=r"needs the package diffusers, which is not installed"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"`codec_spatial` \(4\) must be left out with `codec`"):
        CodecConfig(str(tmp_path), codec_spatial=4)


def test_shards_of_a_vae_hold_online_encodings(folders: dict[str, Path], tmp_path: Path) -> None:
    """Read in any order, since a clip's posterior sample depends on its number alone."""
    vae = str(folders["AutoencoderKLHunyuanVideo"])
    for i in range(3):
        write_gif(tmp_path / f"{i}.gif", pictures(5, first=i))
        (tmp_path / f"{i}.txt").write_text(f"bar {i}")
    output = tmp_path.with_name("out_of_a_vae")
    plan = ["--buckets", '{"32px": {"5": 1.0}}', "--text-length=6", "--codec", vae]
    assert main(["--input", str(tmp_path), "--output", str(output), *plan]) == 0
    sharded = ShardedVideos(output)
    codec = codecs.codec_from_manifest(sharded.manifest, vae, seed=EncodeConfig().clip_seed)
    text_encoder = text_encoder_from_manifest(sharded.manifest)
    online = OnlineVideos(planned(tmp_path), ClipEncoder(EncodeConfig(), codec, text_encoder), PLAN)
    for number in (2, 0, 1):
        assert torch.equal(online[number].latents, sharded[number].latents)
        for name, piece in sharded[number].references.items():
            assert torch.equal(online[number].references[name], piece)
        assert torch.equal(online[number].text, sharded[number].text)
    assert codec.decode(sharded[0].latents[None]).shape == (1, 3, 5, 32, 32)


def test_patch_codec_from_a_manifest() -> None:
    config = CodecConfig(codec_spatial=4, codec_channels=20, codec_shift=-0.5, codec_scale=0.7)
    made = codecs.build_codec(config)
    manifest = json.loads(json.dumps({"codec": made.identity}))
    assert torch.equal(codecs.codec_from_manifest(manifest).encode(pixels()), made.encode(pixels()))
    with pytest.raises(ConfigError, match=r"`--codec` \(/vae\) has no effect: .* leave it ou"):
        codecs.codec_from_manifest(manifest, "/vae")
    for wrong in ({}, {"codec": None}, {"codec": {"config": {}}}):
        with pytest.raises(DataError, match=r"The manifest must name its codec, but holds"):
            codecs.codec_from_manifest(wrong)
    for change in ({"codec_spatial": 0}, {"codec_colour": 3}):
        with pytest.raises(DataError, match=r"The manifest's codec \(.*\) cannot be used \("):
            codecs.codec_from_manifest({"codec": manifest["codec"] | change})
