"""Every form of every network's weights is imported, and exported as the same bits."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ext.video.convert.exporting import Export, export_weights
from megatron_ext.video.convert.importing import import_weights
from tests.text.convert.models import in_child
from tests.video.convert.forms import Model, models, stored

MODELS = list(models())


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def imported(source: Path, target: Path, **options: str) -> None:
    in_child(partial(import_weights, source, target, **options), target.with_suffix(".result"))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_each_form_there_and_back(tmp_path: Path, model: Model) -> None:
    """Import a folder or a file; export its form and the next one, in one file and in several."""
    tensors = model.tensors()
    root = tmp_path / "ours"
    if model.form.write_config is None:
        save_file(tensors, tmp_path / "model.safetensors")
        imported(tmp_path / "model.safetensors", root)
    else:
        imported(model.folder(tmp_path / "source", tensors, files=3), root)
    export = partial(export_weights, model.conversion)
    following = (model.forms.index(model.form) + 1) % len(model.forms)
    for form in (model.form, model.forms[following]):
        file = tmp_path / f"{form.name}.safetensors"
        export(Export(load=root, target=file, naming=form.name))
        if form is model.form:
            assert_same(stored(file), tensors)
        again = tmp_path / f"{form.name} prefixed.safetensors"
        prefix = "model.diffusion_model."
        export(Export(load=root, target=again, naming=form.name, prefix=prefix))
        assert_same(stored(again), {f"{prefix}{name}": x for name, x in stored(file).items()})
        imported(again, tmp_path / f"{form.name} again")
        back = tmp_path / f"{form.name} back.safetensors"
        target = Export(load=tmp_path / f"{form.name} again", target=back, naming=model.form.name)
        export(target)
        assert_same(stored(back), tensors)
    if model.form.write_config is not None:
        folder = tmp_path / "back"
        export(Export(load=root, target=folder, naming=model.form.name, max_shard_size="200KB"))
        assert len(list(folder.glob("*.safetensors"))) > 1
        assert_same(stored(folder), tensors)
        written = model.form.read_config(model.form.write_config(model.sizes), folder)
        if model.form.completed is not None:
            written = model.form.completed(written, model.shapes)
        assert written == model.sizes
