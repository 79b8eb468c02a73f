"""The patch codec, VAEs of diffusers, and latents decoded part by part."""

import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
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
from megatron_ext.video.data.tiles import frames_in_tiles, in_tiles
from megatron_ext.video.data.vae import DiffusersCodec, seam_report
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
        ({"codec_scale": 0.0}, r"`--codec-scale` \(0.0\) must differ from 0; use 1 /"),
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
    assert isinstance(decoder, codecs.TiledDecoder)
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
    manifest["latents"] = json.loads(json.dumps(made.facts))
    codecs.codec_from_manifest(manifest, str(folder), seed=3)
    manifest["latents"]["std"] = [1.0] * 4
    with pytest.raises(DataError, match=r"not made with the VAE .*: `std` was \[1.0, 1.0, 1.0,"):
        codecs.codec_from_manifest(manifest, str(folder))
    del manifest["latents"]
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
    shutil.rmtree(folder)
    diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8,), decoder_block_out_channels=(8,), num_encoder_blocks=(1,),
        num_decoder_blocks=(1,),
    ).save_pretrained(folder)  # fmt: skip
    with pytest.raises(ConfigError, match=r"neither of spatial_compression_ratio, scale_factor_sp"):
        load(folder)
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKLWan"}))
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ConfigError, match=r"needs the package diffusers, which is not installed"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"`--codec-spatial` \(4\) must be left out with"):
        CodecConfig(str(tmp_path), codec_spatial=4)


@pytest.mark.parametrize("kind", ["AutoencoderKL", "AutoencoderDC"])
def test_vaes_of_pictures(folders: dict[str, Path], kind: str) -> None:
    """Compare with the normalization of diffusers' pipelines, FLUX's and SANA's."""
    diffusers = pytest.importorskip("diffusers")
    codec = load(folders[kind])
    assert (codec.channels, codec.spatial, codec.temporal) == (4, 8, 1)
    picture = pixels(1)
    vae = getattr(diffusers, kind).from_pretrained(folders[kind])
    with torch.no_grad():
        encoded = vae.encode(picture[:, :, 0])
        raw = encoded.latent if kind == "AutoencoderDC" else encoded.latent_dist.mean
        decoded = vae.decode(raw).sample[:, :, None]
    shift = 0.1159 if kind == "AutoencoderKL" else 0.0
    scale = 0.3611 if kind == "AutoencoderKL" else 0.41407
    wanted = ((raw - shift) * scale)[:, :, None]
    latents = codec.encode(picture, mean=True)
    torch.testing.assert_close(latents, wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(codec.decode(latents), decoded, atol=1e-5, rtol=1e-5)
    assert torch.equal(codec.encode(picture), latents) == (kind == "AutoencoderDC")
    assert codec.facts["std"] == [pytest.approx(1 / scale)] * 4
    assert codec.facts["mean"] == [pytest.approx(shift)] * 4
    with pytest.raises(ConfigError, match=rf"frames \(5\) must be 1, since the codec \({kind}\)"):
        codec.latent_shape(5, 32, 32)


def test_what_decides_the_scale_must_be_given(folders: dict[str, Path], tmp_path: Path) -> None:
    kept = folders["AutoencoderKL"]
    unscaled = resaved(kept, tmp_path / "unscaled", lambda x: x.pop("scaling_factor"))
    with pytest.raises(ConfigError, match="has the `scaling_factor` None, which must be a number"):
        load(unscaled)
    rule = "which must be a number for each of its"
    for i, (name, numbers, said) in enumerate((
        ("latents_mean", [0.0] * 16, rf"`latents_mean` \[.*, {rule}"),
        ("latents_mean", "abcd", rf"`latents_mean` .*abcd.*, {rule}"),
        ("latents_std", [1, 1, 0, 1], r"`latents_std` \[1.0, 1.0, 0.0, 1.0\], which must be ab"),
    )):  # fmt: skip
        change = partial(dict.update, **{name: numbers})
        wan = resaved(folders["AutoencoderKLWan"], tmp_path / str(i), change)
        with pytest.raises(ConfigError, match=said):
            load(wan)


def test_latents_of_another_vae_than_that_of_the_weights(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Published weights and their VAE lie side by side in a pipeline."""
    wan = folders["AutoencoderKLWan"]
    manifest = json.loads(json.dumps({"codec": load(wan).identity}))
    shutil.copytree(wan, tmp_path / "vae")
    for weights in (tmp_path, tmp_path / "transformer", tmp_path / "w.safetensors", wan):
        codecs.check_codec_beside(str(weights), "data", manifest)
    said = (
        r"`--video-data-path` \(data\) was not encoded by the VAE of `--load-weights`, .*vae: "
        r"`latents_std` was \[1.0, 2.0, 0.5, 3.0\], but is \[1.0, 2.0, 0.5, 4.0\]; encode it"
    )
    (tmp_path / "vae" / "config.json").unlink()
    resaved(wan, tmp_path / "x", lambda x: x.update(latents_std=[1.0, 2.0, 0.5, 4.0]))
    shutil.copy(tmp_path / "x" / "config.json", tmp_path / "vae")
    with pytest.raises(ConfigError, match=said):
        codecs.check_codec_beside(str(tmp_path / "transformer"), "data", manifest)
    with pytest.raises(ConfigError, match="`codec` was 'patch', but is 'AutoencoderKLWan'; encode"):
        codecs.check_codec_beside(str(tmp_path), "data", {"codec": {"codec": "patch"}})


def test_folders_as_they_are_published(folders: dict[str, Path], tmp_path: Path) -> None:
    """Read shards, pickles and variants; explain a folder and a file that hold no single VAE."""
    diffusers = pytest.importorskip("diffusers")
    kept = folders["AutoencoderKL"]
    wanted = load(kept).encode(pixels(1))
    vae = diffusers.AutoencoderKL.from_pretrained(kept)
    for name, how in {
        "sharded": {"max_shard_size": "20KB"},
        "pickled": {"safe_serialization": False},
        "fp16": {"variant": "fp16"},
        "sharded16": {"variant": "fp16", "max_shard_size": "20KB"},
        "pipeline/vae": {},
    }.items():
        vae.save_pretrained(tmp_path / name, **how)
        assert torch.equal(load(tmp_path / name).encode(pixels(1)), wanted), name
    with pytest.raises(ConfigError, match=r"give one of the folders in it \(vae\)"):
        load(tmp_path / "pipeline")
    file = tmp_path / "pipeline" / "vae" / "diffusion_pytorch_model.safetensors"
    with pytest.raises(ConfigError, match=f"file has no settings.; give the folder, {file.parent}"):
        load(file)
    shutil.copy(file, tmp_path / "vae.safetensors")
    with pytest.raises(ConfigError, match="a single file has no settings.*from_single_file"):
        load(tmp_path / "vae.safetensors")


def out_of_memory() -> Any:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    "kind", ["AutoencoderKLWan", "AutoencoderKLHunyuanVideo", "AutoencoderKL", "AutoencoderDC"]
)
def test_tiles_are_blended(
    folders: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles change latents and pixels a little; clips that need none are the same."""
    frames = 1 if kind in ("AutoencoderKL", "AutoencoderDC") else 5
    size = (1, 3, frames, 96, 64)
    large = torch.rand(size, generator=torch.Generator().manual_seed(3)) * 2 - 1
    flags: dict[str, Any] = {"codec_tile": 64}
    if kind == "AutoencoderKLHunyuanVideo":
        flags["codec_tile_frames"] = 5
        large = large.repeat(1, 1, 2, 1, 1)[:, :, :9, :, :32]
    codec: Any = codecs.build_codec(CodecConfig(str(folders[kind]), **flags), seed=3)
    tiled = codec.encode(large, mean=True)
    decoded = codec.decode(tiled)
    parts = codecs.block_decoder(codec)
    if kind == "AutoencoderKLWan":
        blocks = torch.cat([parts(part) for part in tiled.split([1, 1], dim=2)], dim=2)
        torch.testing.assert_close(blocks, decoded, atol=1e-5, rtol=0)
    assert "of the first clip that needs them" in seam_report(codec, large)
    with codec.untiled():
        whole = codec.encode(large, mean=True)
        wanted = codec.decode(tiled)
    assert tiled.shape == whole.shape and decoded.shape == wanted.shape
    assert not torch.equal(tiled, whole)
    far = float((tiled - whole).abs().mean() / whole.std())
    assert 0 < far < 0.7
    assert 0 < float((decoded - wanted).abs().mean() / wanted.std()) < 0.7
    with monkeypatch.context() as patch:
        patch.setattr(codec, "untiled", out_of_memory)
        assert "two tiles together exceed the memory" in seam_report(codec, large)
    # What no tile divides is computed as without tiles.
    small = large[:, :, : min(frames, 5), :64]
    with codec.untiled():
        wanted = codec.encode(small, number=2)
    assert torch.equal(codec.encode(small, number=2), wanted)


def test_tiles_that_no_codec_takes(folders: dict[str, Path]) -> None:
    wan, hunyuan = (str(folders[x]) for x in ("AutoencoderKLWan", "AutoencoderKLHunyuanVideo"))
    for folder, flags, sentence in (
        (wan, {"codec_tile": 60}, r"`--codec-tile` \(60\) must be a multiple .* \(8\), .*; use 64"),
        (wan, {"codec_tile": 8}, r"at least 16; use 16"),
        (wan, {"codec_tile_frames": 9}, r"has no effect, since the VAE .* computes frame after"),
        (hunyuan, {"codec_tile_frames": 8}, r"temporal factor plus 1 \(4k \+ 1\), and .*; use 5"),
        (
            "patch",
            {"codec_tile": 64},
            r"`--codec-tile` \(64\) must be left out with .* patch",
        ),
    ):
        with pytest.raises(ConfigError, match=sentence):
            codecs.build_codec(CodecConfig(folder, **flags))  # type: ignore[arg-type]


@pytest.mark.parametrize("decodes", [False, True])
def test_parts_in_time_of_a_codec_without_reach_are_exact(decodes: bool) -> None:
    codec = PatchCodec(CodecConfig(codec_spatial=4, codec_temporal=2, codec_channels=24))
    clip = torch.rand(1, 3, 15, 8, 12, generator=torch.Generator().manual_seed(0))
    given = codec.encode(clip) if decodes else clip
    compute = codec.decode if decodes else codec.encode
    parts: list[int] = []

    def spatial(part: Tensor) -> Tensor:
        parts.append(part.size(2))
        ratio = Fraction(4) if decodes else Fraction(1, 4)
        unit = 1 if decodes else 4
        return in_tiles(
            lambda piece, _: compute(piece), part, tile=2 * unit, overlap=unit, ratio=ratio
        )

    made = frames_in_tiles(spatial, given, tile=3, overlap=1, temporal=2, decodes=decodes)
    torch.testing.assert_close(made, compute(given), atol=1e-5, rtol=1e-5)
    assert parts == ([3, 4, 4, 4] if decodes else [5, 7, 7, 7])


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
