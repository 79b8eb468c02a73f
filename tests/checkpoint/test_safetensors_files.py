"""Folders of safetensors: what is read and written, and what a failure leaves."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.checkpoint import conversion, safetensors_files
from megatron_ext.checkpoint.conversion import merge_checkpoint
from megatron_ext.checkpoint.safetensors_files import (
    TensorFolder,
    index_of,
    write_tensors,
    written_aside,
)
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError

HALF = torch.bfloat16


def test_a_file_that_is_written_tensor_by_tensor_is_read_by_safetensors(tmp_path: Path) -> None:
    """The header is padded to eight bytes, and no more."""
    for length in range(1, 10):
        tensors = {
            "x" * length: torch.arange(6.0).view(2, 3).T,  # not contiguous
            "half": torch.arange(3.0, dtype=HALF),
            "empty": torch.zeros(0, 4, dtype=torch.float16),
            "number": torch.tensor(2.5),
        }
        path = tmp_path / f"{length}.safetensors"
        described = {name: tensor.to("meta") for name, tensor in tensors.items()}
        write_tensors(path, described, tensors.values())
        found = load_file(path)
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        text = content[8 : 8 + size].decode()
        assert size % 8 == 0 and len(text) - len(text.rstrip()) < 8
        assert json.loads(text)["__metadata__"] == {"format": "pt"}


def test_a_folder_counts_the_bytes_that_it_reads(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4, 3), "b": torch.zeros(5, dtype=HALF)}, tmp_path / "m.safetensors")
    with TensorFolder(tmp_path, "m") as folder:
        assert [folder.dtype(name) for name in "ab"] == ["float32", "bfloat16"]
        assert folder.shapes() == {"a": (4, 3), "b": (5,)}
        folder.tensor("b")
        assert folder.bytes_read == 5 * 2
        assert folder.block("a", (slice(1, 3), slice(None))).shape == (2, 3)
        assert folder.bytes_read == 5 * 2 + 2 * 3 * 4


def test_each_tensor_lies_in_the_file_that_the_index_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({name: torch.full((2,), float(ord(name)))}, tmp_path / f"{name}.safetensors")
    files = {"a": "a.safetensors", "b": "b.safetensors"}
    index = tmp_path / index_of("model")
    index.write_text(json.dumps({"weight_map": files}))
    with TensorFolder(tmp_path) as folder:
        assert float(folder.tensor("b")[0]) == ord("b")
    # The last index opens the file that holds `b`, too, but names another one for it.
    save_file({"b": torch.ones(2), "d": torch.ones(2)}, tmp_path / "b.safetensors")
    for wrong in (
        {**files, "b": "a.safetensors"},
        {**files, "c": "a.safetensors"},
        {**files, "b": "a.safetensors", "d": "b.safetensors"},
    ):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(CheckpointError, match=r"a.safetensors does not hold `[bc]`, which"):
            TensorFolder(tmp_path)


def test_a_failed_export_leaves_nothing_and_a_good_one_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "models" / "out"
    with pytest.raises(KeyError), written_aside(target) as folder:
        (folder / "half").write_text("half")
        raise KeyError
    assert list(target.parent.iterdir()) == []
    with (
        pytest.raises(CheckpointError, match=r"`--to` \(.*/out\) cannot be written \(.*full"),
        written_aside(target, "--to") as folder,
    ):
        raise OSError(5, "the disk is full")
    done = list[str]()
    monkeypatch.setattr(safetensors_files, "make_durable", lambda path: done.append(path.name))
    monkeypatch.setattr(safetensors_files, "sync_folder", lambda path: done.append(path.name))
    rename = Path.rename

    def renamed(path: Path, other: Path) -> Path:
        done.append("rename")
        return rename(path, other)

    monkeypatch.setattr(Path, "rename", renamed)
    with written_aside(target) as folder:
        (folder / "a").write_text("a")
    assert done == ["a", f".out.{os.getpid()}.tmp", "rename", "models"]
    for taken in (target, target / "a"):
        with pytest.raises(CheckpointError, match="holds something already"):
            safetensors_files.check_target(taken)


def test_merged_weights_need_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network: Any = conversion.Network(build=None)  # type: ignore[arg-type]
    device: Any = SimpleNamespace(kind="cpu")
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for save in (tmp_path / "run", tmp_path / "link", tmp_path / "x" / ".." / "run"):
        with pytest.raises(CheckpointError, match="must be another folder than `--load`"):
            merge_checkpoint(RunConfig(), network, tmp_path / "run", save, device)
    for alone, base, text in (
        (False, "base", r"`--pretrained-checkpoint` \(base\) has no effect"),
        (False, None, "holds a model without adapters"),
        (True, "base", "holds a model without adapters"),
    ):
        under = object() if alone else None
        monkeypatch.setattr(conversion.FrozenBase, "under", lambda *_, under=under: under)
        with pytest.raises(CheckpointError, match=text):
            merge_checkpoint(
                RunConfig(), network, tmp_path / "run", tmp_path / "new", device, base=base
            )
