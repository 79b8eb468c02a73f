"""Sizes of published models, from config.json or shapes alone, and models that are refused."""

import dataclasses
from pathlib import Path

import pytest

from megatron_ext.errors import CheckpointError
from megatron_ext.video.config.joint import JointSizes
from megatron_ext.video.convert.exporting import _check_form
from megatron_ext.video.convert.importing import run_config
from megatron_ext.video.convert.reading import form_of_names
from megatron_ext.video.networks.lookup import network_of
from megatron_ext.video.networks.mmdit.config import SIZES
from megatron_ext.video.networks.mmdit.convert.conversion import CONVERSION
from megatron_ext.video.networks.mmdit.convert.sizes import read_config, write_config
from megatron_ext.video.networks.mmdit.convert.table import parameters
from megatron_ext.video.networks.published import Mapped, Shapes

PATH = Path("model")
DEV = dataclasses.replace(SIZES["11b"], guidance_embed=True)
OPEN_SORA = dataclasses.replace(SIZES["11b"], cond_embed=True)
COMPRESSED = dataclasses.replace(OPEN_SORA, channels=128, patch_size=1)
"""Open-Sora's model on latents of DC-AE."""
NARROW = dataclasses.replace(SIZES["tiny"], num_double_blocks=0, mlp_ratio=3, pooled_width=5)
NAMINGS = CONVERSION.namings


def shapes_of(sizes: JointSizes, naming: str) -> dict[str, tuple[int, ...]]:
    return dict(Mapped.of(CONVERSION.form(naming), sizes, parameters(sizes)).shapes)


def read(shapes: Shapes) -> JointSizes:
    _, form = form_of_names(set(shapes), PATH)
    sizes: JointSizes = form.read_shapes(shapes, PATH)
    return sizes


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("sizes", [SIZES["11b"], DEV, OPEN_SORA, COMPRESSED, NARROW])
def test_shapes_tell_form_and_sizes(sizes: JointSizes, naming: str) -> None:
    doubles = min(sizes.num_double_blocks, 1)
    sizes = dataclasses.replace(sizes, num_double_blocks=doubles, num_single_blocks=2)
    shapes = shapes_of(sizes, naming)
    if naming == "diffusers" and sizes.cond_embed:
        assert not any("cond" in name for name in shapes)
        return
    assert form_of_names(set(shapes), PATH)[1].name == naming
    assert read(shapes) == sizes


def test_config_json_tells_sizes_and_is_written_back() -> None:
    """FLUX.1's own files leave out what has the default of diffusers' class."""
    schnell = {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.30.0"}
    assert read_config(schnell, PATH) == SIZES["11b"]
    assert read_config({**schnell, "guidance_embeds": True, "out_channels": 64}, PATH) == DEV
    for sizes in (SIZES["base"], dataclasses.replace(DEV, axes_dim=(32, 48, 48))):
        assert read_config(write_config(sizes), PATH) == sizes


def test_a_run_gets_the_sizes_by_flags() -> None:
    for sizes in (DEV, OPEN_SORA, COMPRESSED, NARROW):
        sections = CONVERSION.sections(sizes, "mmdit")
        named = sizes in (DEV, OPEN_SORA)
        assert ("mmdit" in sections) == named and ("hidden_size" in str(sections)) != named
        config = run_config(sections, "mmdit", "float32", PATH)
        assert network_of(config).sizes == sizes


USE = "use FLUX.1 dev or schnell, or Open-Sora 2.0."
BAD_CONFIGS = {
    "`patch_size` 2, but FLUX.1 has 1, since its tokens are patches al": {"patch_size": 2},
    "384 features in front and 64 behind, like FLUX.1 Fill, but": {
        "in_channels": 384, "out_channels": 64,
    },
    "front and 64 behind, like FLUX.1 Canny or Depth, but": {
        "in_channels": 128, "out_channels": 64,
    },
    "front and 64 behind, like a model with further input": {
        "in_channels": 196, "out_channels": 64,
    },
    "tokens of 66 features, which must be divisible by the 4 latent pix": {"in_channels": 66},
    "`axes_dims_rope` 'a', which must be a list of integers.": {"axes_dims_rope": "a"},
    "`axes_dim` (16, 56, 48) must be three widths whose sum": {"axes_dims_rope": [16, 56, 48]},
    "`guidance_embeds` 1, which must be true or false.": {"guidance_embeds": 1},
    "`num_layers` 1.5, which must be an integer.": {"num_layers": 1.5},
    "`qk_norm` 'rms', which FluxTransformer2DModel does not have; use F": {"qk_norm": "rms"},
    "is no model: ": {"num_attention_heads": 0},
}  # fmt: skip


@pytest.mark.parametrize("said", BAD_CONFIGS)
def test_a_config_of_another_model_is_refused(said: str) -> None:
    raw = {"_class_name": "FluxTransformer2DModel", **BAD_CONFIGS[said]}
    with pytest.raises(CheckpointError) as error:
        read_config(raw, PATH)
    assert str(error.value).startswith("model ") and said in str(error.value)


def without(name: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {n: shape for n, shape in shapes.items() if n != name}


FLUX = shapes_of(DEV, "original")
BAD_SHAPES: dict[str, Shapes] = {
    "holds Chroma, whose modulation": {**FLUX, "distilled_guidance_layer.in_proj.weight": (1,)},
    "holds FLUX.2, whose blocks": {**FLUX, "double_stream_modulation_img.lin.weight": (1,)},
    "like FLUX.1 Fill, but": {**FLUX, "img_in.weight": (3072, 384)},
    "no vector `double_blocks.0.img_attn.norm.query_norm.scale`": {
        **FLUX, "double_blocks.0.img_attn.norm.query_norm.scale": (2, 64),
    },
    "heads of 100 features, but how many of these rotate by frame, row": {
        **FLUX, "double_blocks.0.img_attn.norm.query_norm.scale": (100,),
    },
    "MLPs of width 5000, which must be": {**FLUX, "double_blocks.0.img_mlp.0.weight": (5000, 9)},
    "no matrix `vector_in.in_layer.weight`": without("vector_in.in_layer.weight", FLUX),
    "tensors, such as `joint_blocks.0.x`, of no network": {"joint_blocks.0.x": (1,)},
    "tensors, such as `redux_down.weight`, of no network": {"redux_down.weight": (1, 1)},
}  # fmt: skip


@pytest.mark.parametrize("said", BAD_SHAPES)
def test_a_file_of_another_model_is_refused(said: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read(BAD_SHAPES[said])
    assert str(error.value).startswith("model ") and said in str(error.value)


def test_what_diffusers_class_lacks_is_not_written_for_it() -> None:
    for sizes, said in (
        (dataclasses.replace(COMPRESSED, cond_embed=False), "has patches of 1 x 1"),
        (NARROW, "has MLPs 3 times as wide as the rest"),
        (dataclasses.replace(DEV, rope_theta=256.0), "rotates with the base 256"),
    ):
        with pytest.raises(CheckpointError, match=f"This MMDiT {said}, unlike diffusers' Flux"):
            write_config(sizes)


def test_what_a_file_would_not_tell_is_not_written_to_it() -> None:
    for sizes, naming, said in (
        (OPEN_SORA, "diffusers", "cond_embed True, which `--naming diffusers` cannot tell: it"),
        (dataclasses.replace(DEV, axes_dim=(32, 48, 48)), "original", "axes_dim (32, 48, 48), whi"),
        (dataclasses.replace(DEV, rope_theta=256.0), "open-sora", "rope_theta 256.0, which `--na"),
    ):
        short = dataclasses.replace(sizes, num_double_blocks=1, num_single_blocks=1)
        form = CONVERSION.form(naming)
        with pytest.raises(CheckpointError) as error:
            _check_form(CONVERSION, form, short, shapes_of(short, naming), is_file=True)
        assert str(error.value).startswith(f"The model has {said}")
