"""Every form of every network's weights is imported, and exported as the same bits."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ext.video.convert.exporting import Export, export_weights
from megatron_ext.video.convert.importing import import_weights
from megatron_ext.video.networks.published import Form
from tests.text.convert.models import in_child
from tests.video.convert.forms import MODELS, Model, models, stored

PREFIX = "model.diffusion_model."


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def convert(source: Path, model: Model, form: Form, number: int) -> Path:
    """Import weights and export them in another form, as a file or, for the first, as a folder."""
    folder = source.parent / f"{number} {form.name}"
    import_weights(source, folder)
    target = folder / ("folder" if form.write_config is not None and not number else "file")
    is_file = target.name == "file"
    target = target.with_suffix(".safetensors") if is_file else target
    given = {"prefix": PREFIX} if is_file and number % 2 else {}
    sizes = {} if is_file else {"max_shard_size": "100KB"}
    export = Export(load=folder, target=target, naming=form.name, **given, **sizes)
    export_weights(model.conversion, export)
    return target


def through_all_forms(own: list[Model], tmp_path: Path) -> None:
    """Convert a model of the first form to each other form in turn, and to the first again."""
    first, *others = own
    tensors = first.tensors()
    if first.form.write_config is None:
        source = tmp_path / "source.safetensors"
        save_file(tensors, source)
    else:
        source = first.folder(tmp_path / "source", tensors, files=3)
    place = source
    for number, model in enumerate([*others, first]):
        place = convert(place, model, model.form, number)
        names = {name.removeprefix(PREFIX) for name in stored(place)}
        assert names == model.shapes.keys()
    again = {name.removeprefix(PREFIX): x for name, x in stored(place).items()}
    assert_same(again, tensors)
    if first.form.write_config is not None and first.form.read_config is not None:
        written = first.form.write_config(first.sizes)
        assert first.form.read_config(written, source) == first.sizes


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_each_form_there_and_back(tmp_path: Path, name: str) -> None:
    own = [model for model in models() if model.name.partition(",")[0] == name]
    in_child(partial(through_all_forms, own, tmp_path), tmp_path / "result")
