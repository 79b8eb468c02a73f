"""Adapters of each network, in each public form and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_ext.checkpoint.adapter_files import read_adapters, write_adapters
from megatron_ext.checkpoint.adapter_forms import FORMS, AdapterForm
from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.video.convert.adapter_training import read_for
from megatron_ext.video.convert.adapters import AdapterMap, Adapters, layers_of
from megatron_ext.video.convert.exporting import public_tensor
from megatron_ext.video.networks.hunyuan.config import SIZES as HUNYUAN
from megatron_ext.video.networks.hunyuan.convert.conversion import CONVERSION as HUNYUAN_WEIGHTS
from megatron_ext.video.networks.mmdit.config import SIZES as MMDIT
from megatron_ext.video.networks.mmdit.convert.conversion import CONVERSION as MMDIT_WEIGHTS
from megatron_ext.video.networks.wan.convert.conversion import CONVERSION as WAN_WEIGHTS
from tests.video.wan_run import SIZES_OF_CLIPS

NETWORKS = {
    "wan": (WAN_WEIGHTS, SIZES_OF_CLIPS),
    "mmdit": (MMDIT_WEIGHTS, MMDIT["tiny"]),
    "hunyuan": (HUNYUAN_WEIGHTS, HUNYUAN["tiny"]),
}
RANK, ALPHA = 4, 6.0


def sample(name: str, *, separate: bool) -> dict[str, Tensor]:
    """Return random adapters on all layers of a network that take any, by our names."""
    conversion, sizes = NETWORKS[name]
    places = AdapterMap(conversion, conversion.forms[0], sizes)
    torch.manual_seed(7)
    found = dict[str, Tensor]()
    for layer in places.layers:
        outputs, inputs = places.shape(layer)
        count = len(places.projections(layer)) if separate else 1
        found[f"{layer}.lora.a"] = torch.randn(count * RANK, inputs)
        found[f"{layer}.lora.b"] = torch.randn(outputs, RANK)
    return found


def settings(*, separate: bool) -> LoraConfig:
    return LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, lora_separate_projections=separate)


def write(name: str, form: AdapterForm, folder: Path, *, separate: bool) -> Path:
    conversion, sizes = NETWORKS[name]
    naming = next((x for x in form.naming if x in conversion.namings), None)
    layers = layers_of(conversion, sizes, RANK, naming)
    output = folder / ("adapter" if form.file else "adapter.safetensors")
    lora = settings(separate=separate)
    write_adapters(lora, sample(name, separate=separate), layers, output, form)
    return output


def matrices_of(adapters: Adapters) -> dict[str, Tensor]:
    pairs = adapters.matrices.items()
    return {f"{x}.lora.{kind}": m for x, pair in pairs for kind, m in zip("ab", pair, strict=True)}


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", NETWORKS)
def test_adapters_come_back_bit_for_bit(
    name: str, form: AdapterForm, separate: bool, tmp_path: Path
) -> None:
    conversion, sizes = NETWORKS[name]
    path = write(name, form, tmp_path, separate=separate)
    found = read_for(conversion, sizes, path)
    assert (found.rank, found.separate, found.missing) == (RANK, separate, 0)
    scale = 1 if form.name == "original" else ALPHA / RANK
    assert found.alpha == scale * RANK
    wanted = sample(name, separate=separate)
    if form.name == "original":
        wanted = {x: ALPHA / RANK * m if x.endswith("b") else m for x, m in wanted.items()}
    back = matrices_of(found)
    assert back.keys() == wanted.keys()
    assert all(torch.equal(back[x], wanted[x]) for x in wanted)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_file_changes_the_public_weights_as_ours(
    name: str, form: AdapterForm, separate: bool, tmp_path: Path
) -> None:
    conversion, sizes = NETWORKS[name]
    file = read_adapters(write(name, form, tmp_path, separate=separate))
    naming = next((x for x in form.naming if x in conversion.namings), None)
    places = AdapterMap(conversion, conversion.form(naming), sizes)
    ours = {x: torch.zeros(shape) for x, shape in places.mapped.parameters.items()}
    matrices = sample(name, separate=separate)
    for layer in places.layers:
        a, b = (matrices[f"{layer}.lora.{kind}"] for kind in "ab")
        if separate:
            # Rows of a projection, as the published form of diffusers tells.
            parts = places.projections(layer)
            for index, own in enumerate(parts):
                for part in own:
                    rows = slice(part.row, part.row + part.count)
                    low = a[index * RANK : (index + 1) * RANK]
                    ours[f"{layer}.weight"][rows] = ALPHA / RANK * b[rows] @ low
        else:
            ours[f"{layer}.weight"] = ALPHA / RANK * b @ a
    changed = 0
    for public in places.pieces:
        wanted = public_tensor(places.mapped, f"{public}.weight", torch.float32, ours.__getitem__)
        flat = public.replace(".", "_") if form.flat else public
        own = file.layers[flat]
        assert torch.allclose(own.scale * own.b @ own.a, wanted, atol=1e-4)
        changed += 1
    assert changed == len(file.layers)
