"""Weights of Wan go to a checkpoint and back, bit for bit; sources that do not fit are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_ext.errors import CheckpointError
from megatron_ext.video.convert.names import Naming
from megatron_ext.video.convert.wan import WanImport, import_wan
from tests.checkpoint.tiny import whole_tensors
from tests.video.convert.models import (
    STEM,
    exported,
    imported,
    inputs,
    make,
    make_original,
    network,
    original_tensors,
    tensors_of,
    theirs,
)

TWO_FILES = "300KB"


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_namings_there_and_back(tmp_path: Path, dtype: torch.dtype) -> None:
    """Convert a source in one file and one in several files; either naming gives both."""
    diffusers = make(tmp_path / "diffusers", dtype)
    original = make_original(tmp_path / "original", diffusers)
    for source in (diffusers, original):
        root = tmp_path / f"{source.name} imported"
        assert imported(source, root) == ("tiny", str(dtype).removeprefix("torch."))
        back = exported(root, tmp_path / f"{source.name} to diffusers", max_shard_size=TWO_FILES)
        assert len(list(back.glob(f"{STEM}*.safetensors"))) > 1
        assert_same(tensors_of(back), tensors_of(diffusers))
        back = exported(root, tmp_path / f"{source.name} to original", naming=Naming.ORIGINAL)
        assert [path.name for path in back.glob("*.safetensors")] == [f"{STEM}.safetensors"]
        assert_same(tensors_of(back), original_tensors(diffusers))


def test_diffusers_loads_what_is_exported(tmp_path: Path) -> None:
    source = make(tmp_path / "diffusers", max_shard_size=TWO_FILES)
    assert len(list(source.glob("*.safetensors"))) > 1
    imported(source, tmp_path / "ours")
    back = exported(tmp_path / "ours", tmp_path / "back", max_shard_size=TWO_FILES)
    model, info = WanTransformer3DModel.from_pretrained(back, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(theirs(model.eval(), inputs()), theirs(network(), inputs()))
    for name, value in network().config.items():
        if not name.startswith("_"):
            assert model.config[name] == (list(value) if isinstance(value, tuple) else value), name


def test_another_dtype(tmp_path: Path) -> None:
    source = make(tmp_path / "diffusers")
    assert imported(source, tmp_path / "ours", dtype="bfloat16") == ("tiny", "bfloat16")
    whole = whole_tensors(tmp_path / "ours" / "iter_0000000", tmp_path / "whole.pt")
    assert {tensor.dtype for tensor in whole.values()} == {torch.bfloat16}
    back = tensors_of(exported(tmp_path / "ours", tmp_path / "back", dtype="float32"))
    rounded = {name: x.bfloat16().float() for name, x in tensors_of(source).items()}
    assert_same(back, rounded)


# ------------------------------------------------------------------------- files of torch.save


def save_pt(path: Path, diffusers: Path) -> Path:
    """Save as LongLive and Self-Forcing do: a wrapped network, and averages with names of FSDP."""
    tensors = original_tensors(diffusers)
    generator = {f"model.{name}": tensor for name, tensor in tensors.items()}
    averages = {
        f"model._fsdp_wrapped_module.{name.replace('.0.', '.0._fsdp_wrapped_module.')}": 2 * tensor
        for name, tensor in tensors.items()
    }
    torch.save({"generator": generator, "generator_ema": averages, "step": 700}, path)
    return path


@pytest.mark.parametrize("entry", ["generator", "generator_ema"])
def test_a_file_of_longlive(tmp_path: Path, entry: str) -> None:
    source = make(tmp_path / "diffusers")
    path = save_pt(tmp_path / "longlive_base.pt", source)
    assert imported(path, tmp_path / "ours", entry=entry) == ("tiny", "float32")
    back = tensors_of(exported(tmp_path / "ours", tmp_path / "back"))
    factor = {"generator": 1, "generator_ema": 2}[entry]
    assert_same(back, {name: factor * tensor for name, tensor in tensors_of(source).items()})


def test_files_of_torch_with_one_entry_or_none(tmp_path: Path) -> None:
    """Read diffusers' naming too, and the form from before torch 1.6."""
    source = make(tmp_path / "diffusers")
    content = {"bare.pt": tensors_of(source), "one.pth": {"model": original_tensors(source)}}
    for number, (name, value) in enumerate(content.items()):
        torch.save(value, tmp_path / name, _use_new_zipfile_serialization=bool(number))
        root = tmp_path / f"{name} ours"
        assert imported(tmp_path / name, root) == ("tiny", "float32")
        assert_same(tensors_of(exported(root, tmp_path / f"{name} back")), tensors_of(source))


def test_files_of_torch_that_are_refused(tmp_path: Path) -> None:
    path = save_pt(tmp_path / "a.pt", make(tmp_path / "diffusers"))
    assert "those that do are: generator, generator_ema; choose by `--entry`" in refusal(path)
    sentence = refusal(path, entry="critic")
    assert "no weights under `--entry critic`; those that hold any: generator, gen" in sentence
    torch.save({"generator_lora": {"a": torch.ones(2)}}, path)
    assert "holds no `patch_embedding.weight` of 5 dimensions" in refusal(path)
    torch.save({"code": Path}, path)
    assert "names `pathlib.Path`, which does not belong into a checkpoint" in refusal(path)
    path.write_bytes(b"not what torch writes")
    assert "a.pt cannot be read" in refusal(path)
    tensors = original_tensors(path.parent / "diffusers")
    torch.save({**tensors, "head.head.bias": tensors["head.head.bias"].to(torch.int8)}, path)
    assert "`head.head.bias` as int8, which is no float32" in refusal(path, dtype="float32")
    torch.save([torch.ones(2)], path)
    assert "must hold names and tensors" in refusal(path)


# ------------------------------------------------------------------------------------- refusals


def refusal(source: Path, **options: Any) -> str:
    target = source.parent / "refused"
    with pytest.raises(CheckpointError) as caught:
        import_wan(WanImport(source, target, **options))
    assert not target.exists()
    (sentence,) = caught.value.messages
    return str(sentence)


def change(folder: Path, **changed: Tensor | None) -> None:
    """Replace tensors of a model in one file, or take them out."""
    path = folder / f"{STEM}.safetensors"
    tensors = {**load_file(path), **{k.replace("__", "."): v for k, v in changed.items()}}
    save_file({k: v for k, v in tensors.items() if v is not None}, path)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    source = make(tmp_path / "diffusers")
    whole = tensors_of(source)
    change(source, blocks__1__norm2__bias=None)
    assert f"{source} holds no `blocks.1.norm2.bias`, which" in refusal(source)
    change(source, blocks__1__norm2__bias=torch.ones(3))
    sentence = refusal(source)
    assert "`blocks.1.norm2.bias` with shape [3], but the sizes of the model imply [64]" in sentence
    change(source, blocks__1__norm2__bias=whole["blocks.1.norm2.bias"].bfloat16())
    assert "tensors in bfloat16 and float32, but a checkpoint has one dtype" in refusal(source)
    change(source, blocks__1__norm2__bias=torch.ones(64, dtype=torch.int8))
    sentence = refusal(source, dtype="bfloat16")
    assert "as I8, which is no float32, bfloat16 or float16; use the model before" in sentence
    change(source, blocks__1__attn2__add_k_proj__bias=torch.ones(64))
    assert "holds `blocks.1.attn2.add_k_proj.bias`, which Wan 2.1 text to" in refusal(source)


def test_folders_that_are_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "diffusers")
    assert "`--entry model` is for a file of torch.save" in refusal(source, entry="model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_layers": 3}))
    assert "no named size, the nearest being `tiny` (num_blocks 3 instead of 2)" in refusal(source)
    (source / "config.json").unlink()
    assert f"{source / 'config.json'} cannot be read" in refusal(source)
