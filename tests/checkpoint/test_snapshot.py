"""Snapshots: equal bits, shared memory, kills at random moments, changed bytes, full folders."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from megatron_ext.checkpoint.snapshot import Snapshot, SnapshotFile, SnapshotPair, content_of
from megatron_ext.errors import CheckpointError

KILLS = 20


def halves(key: str, data: Any, replica: Any, _range: Any) -> list[ShardedTensor]:
    return [
        ShardedTensor.from_rank_offsets(f"{key}.{i}", half, replica_id=replica)
        for i, half in enumerate(data.chunk(2))
    ]


def whole_ones(pair: SnapshotPair) -> list[Snapshot]:
    """Return the whole snapshots, the newest first."""
    found = [snapshot for file in pair.files if (snapshot := file.read()) is not None]
    return sorted(found, key=lambda snapshot: -snapshot.iteration)


def a_state() -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.randn(6, 5))
    return {
        "model": {
            "weight": ShardedTensor.from_rank_offsets("weight", weight, (0, 1, 2)),
            "gated": ShardedTensorFactory("gated", torch.randn(8, 3), halves, torch.cat),
            "half": torch.randn(7).bfloat16(),
        },
        "moments": [torch.randn(3, 4).T, torch.empty(0, 2), torch.tensor(3.0)],
        "fp8": torch.tensor([1, 2, 3], dtype=torch.uint8).view(torch.float8_e4m3fn),
        "random": ShardedObject("rng", [{"state": torch.arange(9)}], (1,), (0,)),
        "progress": {"iteration": 7, "name": "x"},
    }


def test_a_snapshot_holds_the_bits_of_the_state(tmp_path: Path) -> None:
    state = a_state()
    content = content_of(state)
    pair = SnapshotPair(tmp_path, "rank0")
    taken = pair.turn().write(7, content)
    assert pair.turn().write(8, content).iteration == 8
    read = whole_ones(pair)
    assert [snapshot.iteration for snapshot in read] == [8, 7]
    assert read[1].digest == taken.digest and all(snapshot.is_intact() for snapshot in read)
    found = read[1].state()
    assert found["progress"] == state["progress"]
    assert found["model"]["weight"].global_offset == state["model"]["weight"].global_offset
    assert torch.equal(found["model"]["weight"].data, state["model"]["weight"].data)
    for got, wanted in zip(found["moments"], state["moments"], strict=True):
        assert torch.equal(got, wanted) and got.dtype == wanted.dtype
    assert torch.equal(found["model"]["half"], state["model"]["half"])
    assert torch.equal(found["fp8"].view(torch.uint8), state["fp8"].view(torch.uint8))
    assert torch.equal(found["random"].data[0]["state"], torch.arange(9))
    made = [entry.data for entry in found["model"]["gated"]]
    assert torch.equal(torch.cat(made), state["model"]["gated"].data)
    # The state itself still has its factory, and both snapshots keep the values of their time.
    assert isinstance(state["model"]["gated"], ShardedTensorFactory)
    state["model"]["half"].add_(1)
    assert not torch.equal(found["model"]["half"], state["model"]["half"])


def test_parts_of_a_tensor_are_copied_once(tmp_path: Path) -> None:
    whole = torch.randn(1000)
    content = content_of([whole[10:20], whole, whole, whole.view(10, 100), whole[::2]])
    assert len(content.tensors) == 2 and content.num_bytes == 4032 + 2048
    state = SnapshotFile(tmp_path / "file").write(1, content).state()
    for found, wanted in zip(state, (whole[10:20], whole, whole, whole, whole[::2]), strict=True):
        assert torch.equal(found.reshape(-1), wanted)


def write_for_ever(folder: Path, start: int) -> None:
    pair, value = SnapshotPair(folder, "rank0"), torch.zeros(400_000)
    for iteration in range(start, start + 10**6):
        value.fill_(iteration)
        content = content_of({"value": value, "of": "x" * (iteration % 5000)})
        pair.turn().write(iteration, content)


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    folder = Path("/dev/shm") / f"megatron_ext_test_{os.getpid()}"
    yield folder
    for path in folder.iterdir() if folder.exists() else ():
        path.unlink()
    folder.rmdir()


def test_a_kill_at_any_moment_leaves_a_whole_snapshot(shared_memory: Path) -> None:
    generator, newest, torn = random.Random(3), 0, 0
    for _ in range(KILLS):
        pid = os.fork()
        if pid == 0:
            try:
                write_for_ever(shared_memory, newest + 1)
            finally:
                os._exit(1)
        end = time.monotonic() + 30
        reader = SnapshotPair(shared_memory, "rank0")
        while len(whole := whole_ones(reader)) < 2 or whole[0].iteration < newest + 2:
            assert time.monotonic() < end
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.01))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        whole = whole_ones(reader)
        assert whole and whole[0].iteration > newest
        for snapshot in whole:
            assert snapshot.is_intact()
            assert snapshot.state()["value"].unique().tolist() == [snapshot.iteration]
        torn += len(whole) == 1
        newest = whole[0].iteration
    assert torn  # Some kill hit a snapshot that was being written.


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    value = torch.zeros(300_000)
    content = content_of({"value": value, "text": "x" * 100})
    snapshot = SnapshotFile(tmp_path / "file").write(1, content)
    for place in (0, 123_457, 4 * len(value) - 1, snapshot.num_bytes - 1):
        snapshot.content[place] ^= 64
        assert not snapshot.is_intact()
        snapshot.content[place] ^= 64
    assert snapshot.is_intact()


def test_a_snapshot_with_a_changed_bit_in_its_header_is_not_read(tmp_path: Path) -> None:
    file = SnapshotFile(tmp_path / "file")
    file.write(12, content_of({"value": torch.zeros(100)}), {"rank": 0})
    content = (tmp_path / "file").read_bytes()
    length = content.index(b"\0", 8)
    for place in range(length):
        (tmp_path / "file").write_bytes(
            bytes([*content[:place], content[place] ^ 1, *content[place + 1 :]])
        )
        assert file.read() is None, place
    (tmp_path / "file").write_bytes(content)
    assert (found := file.read()) is not None and found.iteration == 12


def test_what_is_no_whole_snapshot_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SnapshotFile(tmp_path / "file")
    assert file.read() is None
    for damage in (b"", b"\0" * 5000, b"\x20" + b"\0" * 7 + b"no json" * 100):
        (tmp_path / "file").write_bytes(damage)
        assert file.read() is None
    SnapshotFile(tmp_path / "other").write(1, content_of(torch.zeros(10**5)))
    assert SnapshotFile(tmp_path / "other").read() is not None
    (tmp_path / "file").write_bytes((tmp_path / "other").read_bytes()[:50_000])
    assert file.read() is None
    # Nor is one of another user.
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    assert SnapshotFile(tmp_path / "other").read() is None


def test_a_folder_without_room_is_told(shared_memory: Path) -> None:
    shared_memory.mkdir()
    with pytest.raises(
        CheckpointError, match=r"has no room for a snapshot of .* MiB \(the disk of"
    ):
        SnapshotPair(shared_memory, "rank0").reserve(1 << 50)
