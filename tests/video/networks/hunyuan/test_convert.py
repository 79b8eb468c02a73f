"""Weights of HunyuanVideo: there and back in each naming, and what does not fit is refused."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideoTransformer3DModel
from diffusers.loaders.single_file_utils import (
    convert_hunyuan_video_transformer_to_diffusers as to_diffusers,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_ext.errors import CheckpointError
from megatron_ext.layers.initialization import shards_of
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Layout
from megatron_ext.video.convert.exporting import Export, export_weights, public_tensor
from megatron_ext.video.convert.importing import import_weights
from megatron_ext.video.convert.reading import fill, open_published
from megatron_ext.video.networks.hunyuan.config import SIZES, HunyuanSizes
from megatron_ext.video.networks.hunyuan.convert.conversion import CONVERSION
from megatron_ext.video.networks.hunyuan.convert.names import Naming, parameters
from megatron_ext.video.networks.published import Mapped
from tests.ranks import ranks, run_on_ranks
from tests.text.convert.models import in_child
from tests.video.networks.harness import build, largest, one
from tests.video.networks.hunyuan.problem import I2V, Problem, diffusers_model, run_plain

STEM = "diffusion_pytorch_model"
OTHER = dataclasses.replace(
    I2V, hidden_size=48, num_heads=3, axes_dim=(4, 4, 8), num_double_blocks=1, num_single_blocks=3,
    num_refiner_blocks=1, mlp_ratio=3, rope_theta=100.0, channels=6, guidance_embed=False,
)  # fmt: skip
"""Sizes of which no two are equal, for image to video."""


def network(sizes: HunyuanSizes) -> HunyuanVideoTransformer3DModel:
    """Return a model of diffusers whose parameters are all random, so that none can be mixed up."""
    torch.manual_seed(3)
    model = diffusers_model(sizes).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            width = parameter[0].numel() if parameter.dim() > 1 else 25
            is_scale = parameter.dim() == 1 and "norm" in name and ".linear." not in name
            parameter.copy_(width**-0.5 * torch.randn_like(parameter) + is_scale)
    return model


def make(folder: Path, sizes: HunyuanSizes = I2V, dtype: torch.dtype = torch.float32) -> Path:
    network(sizes).to(dtype).save_pretrained(folder)
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / f"{STEM}.safetensors")


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def ours_of(source: Path) -> dict[str, Tensor]:
    """Return our parameters, as a run on one rank reads them."""
    with open_published(source) as model:
        model.check()
        weights = {}
        for name, shape in parameters(model.sizes).items():
            weights[name] = torch.full(shape, torch.nan)
            model.copy(name, [0] * len(shape), weights[name])
    assert not any(bool(tensor.isnan().any()) for tensor in weights.values())
    return weights


def public_of(weights: dict[str, Tensor], sizes: HunyuanSizes, naming: str) -> dict[str, Tensor]:
    mapped = Mapped.of(CONVERSION.form(naming), sizes, parameters(sizes))
    get = weights.__getitem__
    return {name: public_tensor(mapped, name, torch.float32, get) for name in mapped.shapes}


@pytest.mark.parametrize("sizes", [I2V, OTHER, SIZES["tiny"]], ids=["i2v", "other", "t2v"])
def test_each_naming_there_and_back(tmp_path: Path, sizes: HunyuanSizes) -> None:
    source = make(tmp_path / "diffusers", sizes)
    weights = ours_of(source)
    for naming in Naming:
        public = public_of(weights, sizes, naming.value)
        prefix = "model.model." if naming is Naming.COMFYUI else ""
        path = tmp_path / f"{naming.value}.safetensors"
        save_file({f"{prefix}{name}": x.contiguous() for name, x in public.items()}, path)
        if sizes is not OTHER:
            with open_published(path) as model:
                assert (model.form.name, model.sizes) == (naming.value, sizes)
            assert_same(ours_of(path), weights)
        if naming is Naming.DIFFUSERS:
            assert_same(public, tensors_of(source))


def test_a_checkpoint_in_between(tmp_path: Path) -> None:
    for dtype, sizes in ((torch.bfloat16, OTHER), (torch.float32, SIZES["tiny"])):
        source = make(tmp_path / f"{dtype}", sizes, dtype)
        root = tmp_path / f"{dtype} imported"
        write = partial(import_weights, source, root)
        assert in_child(write, root.with_suffix(".result")).dtype == str(dtype).split(".")[1]
        back = tmp_path / f"{dtype} back"
        export_weights(CONVERSION, Export(load=root, target=back))
        assert_same(tensors_of(back), tensors_of(source))
        model, info = HunyuanVideoTransformer3DModel.from_pretrained(back, output_loading_info=True)
        assert not any(info.values())
        wanted = HunyuanVideoTransformer3DModel.load_config(source)
        for name, value in wanted.items():
            if not name.startswith("_"):
                assert model.config[name] == value, name


BIG = dataclasses.replace(
    SIZES["13b"], num_double_blocks=1, num_single_blocks=1, guidance_embed=True
)


def test_names_and_orders_are_those_of_diffusers_own_converter() -> None:
    """Give it numbers of rows for values, since it knows the hidden size of 3072 alone."""
    forms = {
        x: Mapped.of(CONVERSION.form(x.value), BIG, parameters(BIG))
        for x in (Naming.ORIGINAL, Naming.DIFFUSERS)
    }
    original = forms[Naming.ORIGINAL]
    numbered = {
        name: number * 10**6 + torch.arange(shape[0])
        for number, (name, shape) in enumerate(original.shapes.items())
    }
    converted = to_diffusers(dict(numbered))
    assert converted.keys() == forms[Naming.DIFFUSERS].shapes.keys()

    def rows(form: Mapped, name: str, tensors: dict[str, Tensor]) -> Tensor:
        found = torch.full(form.parameters[name][:1], -1)
        for part in form.parts[name]:
            own = tensors[part.tensor][part.start :: part.step][: part.count]
            found[part.row : part.row + part.count] = own
        return found

    for name in original.parameters:
        wanted = rows(original, name, numbered)
        assert torch.equal(rows(forms[Naming.DIFFUSERS], name, converted), wanted), name


@ranks()
def test_diffusers_predicts_the_same(context: ParallelContext, tmp_path: Path) -> None:
    for name, sizes in (("i2v", I2V), ("other", OTHER)):
        problem = Problem(sizes=sizes)
        model = network(sizes)
        model.save_pretrained(tmp_path / name)
        chunk = one(problem, context)
        with open_published(tmp_path / name) as published:
            fill(shards_of(chunk), published)
        with torch.no_grad():
            for number in range(2):
                given = problem.inputs(number)
                assert largest(chunk(**given), run_plain(model, given, sizes)) <= 1e-5


def check_slices(context: ParallelContext, source: Path, weights: dict[str, Tensor]) -> None:
    chunks = build(Problem(sizes=I2V), context)[1]
    with open_published(source) as published:
        fill([x for chunk in chunks for x in shards_of(chunk)], published)
    for chunk in chunks:
        for shard in shards_of(chunk):
            assert torch.equal(shard.tensor, shard.cut(weights[shard.name])), shard.name


def test_ranks_read_their_slices(tmp_path: Path) -> None:
    source = make(tmp_path / "diffusers")
    weights = ours_of(source)
    path = tmp_path / "original.safetensors"
    save_file({k: x.contiguous() for k, x in public_of(weights, I2V, "original").items()}, path)
    layout = Layout(world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    for place in (source, path):
        run_on_ranks(check_slices, layout, {"source": place, "weights": weights})


def changed(**entries: Any) -> Callable[[Path], Path]:
    def change(folder: Path) -> Path:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
        return folder

    return change


def file_of(**added: tuple[int, ...]) -> Callable[[Path], Path]:
    """Return a function that writes a file with further tensors, or tensors of other shapes."""

    def write(folder: Path) -> Path:
        tensors = public_of(ours_of(folder), I2V, "original")
        tensors |= {name.replace("__", "."): torch.zeros(shape) for name, shape in added.items()}
        path = folder.with_suffix(".safetensors")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        return path

    return write


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "token replacement": (
        changed(image_condition_type="token_replace"),
        r"`image_condition_type` 'token_replace', like HunyuanVideo I2V that replaces the first",
    ),
    "SkyReels": (
        changed(in_channels=8, image_condition_type=None),
        r"has 8 channels in front and 4 behind, like SkyReels V1 for image to video, but needs 4,",
    ),
    "HunyuanVideo 1.5": (
        changed(_class_name="HunyuanVideo15Transformer3DModel"), "HunyuanVideo 1.5, which has"
    ),
    "FramePack": (
        changed(_class_name="HunyuanVideoFramepackTransformer3DModel"), "FramePack, which takes"
    ),
    "an unknown entry": (changed(window=3), r"says `window` 3, which HunyuanVideoTransformer3DMod"),
    "another norm": (changed(qk_norm="layer_norm"), r"`qk_norm` 'layer_norm', but must say 'rms_n"),
    "half a ratio": (changed(mlp_ratio=2.5), r"`mlp_ratio` 2.5, which must be a whole number"),
    "no number": (changed(num_layers="20"), r"`num_layers` '20', which must be an integer"),
    "axes": (changed(rope_axes_dim=[4, 6]), "is no model: `axes_dim`"),
    "glyphs": (file_of(byt5_in__fc1__weight=(4, 4)), "holds HunyuanVideo 1.5 or HunyuanImage"),
    "frames of tokens": (
        file_of(img_in__proj__weight=(64, 9, 2, 2, 2)), "has patches of 2 x 2 x 2, which must be"
    ),
    "other channels": (
        file_of(img_in__proj__weight=(64, 5, 1, 2, 2)), "has 5 channels in front and 4 behind, l"
    ),
    "another tensor": (file_of(more__weight=(4,)), "holds `more.weight`, which HunyuanVideo does"),
    "another width": (
        file_of(txt_in__t_embedder__mlp__0__weight=(64, 7)), r"shape \[64, 7\], but the sizes of t"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write, message = REFUSED[name]
    source = write(make(tmp_path / "model"))
    with pytest.raises(CheckpointError, match=message), open_published(source) as model:
        model.check()
