"""Tensors are read from a checkpoint's files straight into the memory where they belong."""

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron_ext.checkpoint.stored_tensors import StoredTensor, find_tensor
from megatron_ext.checkpoint.unpickling import read_tensors

BEFORE = b"x" * 77


def saved(value: Any, path: Path) -> StoredTensor | None:
    """Save a value in the middle of a file, and look for it there."""
    file = io.BytesIO()
    torch.save(value, file)
    path.write_bytes(BEFORE + file.getvalue() + b"y" * 1000)
    with path.open("rb", buffering=0) as opened:
        return find_tensor(opened, len(BEFORE), file.tell())


def read(stored: StoredTensor | None, path: Path, box: tuple[slice, ...], target: Tensor) -> Tensor:
    assert stored is not None
    sizes = [x.indices(n) for x, n in zip(box, stored.shape, strict=True)]
    offset = [begin for begin, _, _ in sizes]
    size = [end - begin for begin, end, _ in sizes]
    assert stored.holds(offset, size)
    with path.open("rb", buffering=0) as file:
        stored.read(file, offset, size, target)
    return target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_any_box_of_a_tensor_is_read(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "file"
    whole = torch.arange(60).reshape(3, 4, 5).to(dtype)
    stored = saved(whole, path)
    boxes = [
        (slice(None), slice(None), slice(None)),
        (slice(1, 3), slice(None), slice(None)),
        (slice(2, 3), slice(1, 3), slice(None)),
        (slice(0, 3), slice(1, 2), slice(2, 4)),
        (slice(1, 1), slice(None), slice(None)),
    ]
    for box in boxes:
        part = whole[box]
        assert torch.equal(read(stored, path, box, torch.empty_like(part)), part)
        other = torch.zeros(part.shape, dtype=torch.float64)
        assert torch.equal(read(stored, path, box, other), part.double())
        turned = torch.zeros(part.shape[::-1], dtype=dtype).permute(2, 1, 0)
        assert torch.equal(read(stored, path, box, turned), part)
    number = torch.tensor(7).to(dtype)
    assert read(saved(number, path), path, (), torch.empty((), dtype=dtype)) == number


def test_a_part_of_a_saved_storage_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    part = torch.arange(20.0).reshape(5, 4)[2:4]
    stored = saved(part, path)
    assert torch.equal(read(stored, path, (slice(1, 2), slice(None)), torch.empty(1, 4)), part[1:])
    assert stored is not None and not stored.holds([1, 0], [2, 4]) and not stored.holds([0], [1])


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, 4).t(),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(3).to_sparse(),
        torch.ones(3).to(torch.float8_e4m3fn),
        [torch.ones(3)],
        {"a": 1},
    ],
)
def test_what_is_no_contiguous_tensor_of_numbers_is_left_to_torch(
    value: Any, tmp_path: Path
) -> None:
    assert saved(value, tmp_path / "file") is None


def test_a_tensor_that_is_packed_is_left_to_torch(tmp_path: Path) -> None:
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(3000), plain)
    with zipfile.ZipFile(plain) as one, zipfile.ZipFile(packed, "w") as other:
        for name in one.namelist():
            other.writestr(name, one.read(name), compress_type=zipfile.ZIP_DEFLATED)
    (tmp_path / "file").write_bytes(packed.getvalue() + bytes(20_000))
    with (tmp_path / "file").open("rb", buffering=0) as file:
        assert find_tensor(file, 0, packed.tell()) is None


def test_a_file_that_is_cut_off_is_no_tensor_or_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "file"
    stored = saved(torch.ones(3000), path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(EOFError, match="file ends early"):
        read(stored, path, (slice(None),), torch.empty(3000))
    with path.open("rb", buffering=0) as file:
        assert find_tensor(file, len(BEFORE), 4000) is None


def test_tensors_of_any_form_are_read_from_a_checkpoint_of_torch(tmp_path: Path) -> None:
    values = {
        "plain": torch.arange(12.0).reshape(3, 4),
        "turned": torch.arange(12.0).reshape(3, 4).t(),
        "eighth": torch.arange(4.0).to(torch.float8_e4m3fn),
        "number": torch.tensor(3),
    }
    dcp.save(values, checkpoint_id=tmp_path, no_dist=True)
    found = read_tensors(tmp_path, list(values))
    assert all(torch.equal(found[name].float(), values[name].float()) for name in values)
