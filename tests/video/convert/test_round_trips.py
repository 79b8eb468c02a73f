"""Every form of every network's weights is imported, and exported as the same bits."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ext.video.convert.exporting import Export, export_weights
from megatron_ext.video.convert.importing import import_weights
from megatron_ext.video.convert.reading import Published
from tests.text.convert.models import in_child
from tests.video.convert.forms import MODELS, Model, models, stored

PREFIX = "model.diffusion_model."


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def convert(source: Path, model: Model, number: int, *, as_file: bool) -> Path:
    """Import weights, and export them in a model's form, as a file or, if possible, as a folder."""
    form = model.form
    folder = source.parent / f"{number} {form.name}"
    import_weights(source, folder)
    is_file = as_file or form.write_config is None
    target = folder / ("file.safetensors" if is_file else "folder")
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
        is_last = model is first
        place = convert(place, model, number, as_file=not (is_last or number == 0))
        names = {name.removeprefix(PREFIX) for name in stored(place)}
        assert names == model.shapes.keys()
    again = {name.removeprefix(PREFIX): x for name, x in stored(place).items()}
    assert_same(again, tensors)
    if first.form.write_config is not None and first.form.read_config is not None:
        written = first.form.read_config(first.form.write_config(first.sizes), source)
        if first.form.completed is not None:
            written = first.form.completed(written, first.shapes)
        assert written == first.sizes


@pytest.mark.parametrize("name", MODELS)
def test_each_form_there_and_back(tmp_path: Path, name: str) -> None:
    own = [model for model in models() if model.name.partition(",")[0] == name]
    in_child(partial(through_all_forms, own, tmp_path), tmp_path / "result")


def count_held(folder: Path, target: Path) -> int:
    """Import weights; return the most bytes of parameters that were held when one was read."""
    made: list[Tensor] = []
    held: list[int] = []
    read = Published.parameter

    def recorded(model: Published, name: str, dtype: torch.dtype) -> Tensor:
        held.append(sum(tensor.untyped_storage().nbytes() for tensor in made))
        made.append(read(model, name, dtype))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Published, "parameter", recorded)
        import_weights(folder, target)
    return max(held)


def test_an_import_holds_one_parameter_at_a_time(tmp_path: Path) -> None:
    """Count parameters that torch's writer would keep to the end."""
    model = next(models())
    folder = model.folder(tmp_path / "source", model.tensors())
    held = in_child(partial(count_held, folder, tmp_path / "ours"), tmp_path / "result")
    assert held == 0
