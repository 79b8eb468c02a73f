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


def test_room_is_reserved_for_both_snapshots(tmp_path: Path) -> None:
    pair = SnapshotPair(tmp_path, "rank0")
    pair.reserve(300_000)
    assert [file.path.stat().st_size > 300_000 for file in pair.files] == [True, True]


def test_a_restart_writes_over_the_older_snapshot(tmp_path: Path) -> None:
    """Also over one that is not whole, before any that is."""
    pair = SnapshotPair(tmp_path, "rank0")
    assert [pair.turn().path.name for _ in range(3)] == ["rank0.0", "rank0.1", "rank0.0"]
    for number, iteration in enumerate((9, 7)):
        pair.files[number].write(iteration, content_of([torch.zeros(3)]))
    again = SnapshotPair(tmp_path, "rank0")
    assert [again.turn().path.name for _ in range(3)] == ["rank0.1", "rank0.0", "rank0.1"]
    pair.files[0].discard()
    assert [each.iteration for each in whole_ones(pair)] == [7]
    assert SnapshotPair(tmp_path, "rank0").turn().path.name == "rank0.0"


def test_a_copy_is_whole_only_with_all_its_pieces(tmp_path: Path) -> None:
    state = {"value": torch.arange(5000.0)}
    taken = SnapshotFile(tmp_path / "own").write(3, content_of(state), {"rank": 1})
    raw = taken.raw.clone()
    cuts = [0, 5000, 9000, len(raw)]
    pieces = [(a, raw[a:b]) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    file = SnapshotFile(tmp_path / "copy")
    found = file.write_raw(len(raw), pieces)
    assert found is not None and found.is_intact()
    assert (found.iteration, found.facts) == (3, {"rank": 1})
    assert torch.equal(found.state()["value"], state["value"])

    def broken() -> Iterator[tuple[int, torch.Tensor]]:
        yield pieces[0]
        assert file.read() is None  # The mark of the copy before is gone.
        raise KeyError

    with pytest.raises(KeyError):
        file.write_raw(len(raw), broken())
    assert file.read() is None
    assert file.write_raw(len(raw), pieces[1:]) is None


def test_a_snapshot_is_not_whole_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SnapshotFile(tmp_path / "file")
    content = content_of({"value": torch.ones(3)})
    file.write(1, content)

    def fail(*_: Any) -> None:
        raise KeyError

    with monkeypatch.context() as patch:
        patch.setattr(type(file._mapping), "copy", fail)
        with pytest.raises(KeyError):
            file.write(2, content)
    assert file.read() is None
    file.write(3, content)
    assert (found := file.read()) is not None and found.iteration == 3


def test_a_file_grows_with_its_content_and_belongs_to_its_user(tmp_path: Path) -> None:
    file = SnapshotFile(tmp_path / "file")
    first = file.reserve(10)
    room = first.bytes.numel() - 4096
    assert file.reserve(room) is first
    larger = file.reserve(room + 1)
    assert larger is not first and larger.bytes.numel() >= 4096 + room + 1
    facts = (tmp_path / "file").stat()
    assert facts.st_mode & 0o777 == 0o600
    # Its space is reserved: a write to a page without any would kill the process.
    assert facts.st_blocks * 512 >= facts.st_size == larger.bytes.numel()


@pytest.mark.parametrize("cut", [1, 4095])
def test_a_file_that_is_shorter_than_its_header_says_is_not_read(cut: int, tmp_path: Path) -> None:
    file = SnapshotFile(tmp_path / "file")
    taken = file.write(1, content_of([torch.ones(3000)]))
    os.truncate(tmp_path / "file", 4096 + taken.num_bytes)
    assert SnapshotFile(tmp_path / "file").read() is not None
    os.truncate(tmp_path / "file", 4096 + taken.num_bytes - cut)
    assert SnapshotFile(tmp_path / "file").read() is None


def test_every_byte_of_a_small_state_is_in_its_digest(tmp_path: Path) -> None:
    for size in (10, 1 << 16, (1 << 16) + 100):  # below, at and above a block of sums
        taken = SnapshotFile(tmp_path / str(size)).write(1, content_of([torch.zeros(size)]))
        for place in (0, 4 * size - 1, taken.num_bytes - 1):
            taken.content[place] ^= 1
            assert not taken.is_intact(), (size, place)
            taken.content[place] ^= 1
        assert taken.is_intact()


def test_a_part_at_the_end_and_parts_of_tensors_with_gaps(tmp_path: Path) -> None:
    whole = torch.arange(1000.0)
    content = content_of([whole, whole[990:]])
    assert len(content.tensors) == 1
    wide = torch.arange(2000.0).view(1000, 2)
    # The even elements begin where all of them do, but do not hold the odd ones.
    state = [wide[:, 0], wide.view(-1)[:5], wide[:, 1]]
    found = SnapshotFile(tmp_path / "file").write(1, content_of(state)).state()
    for got, wanted in zip(found, state, strict=True):
        assert torch.equal(got, wanted)


def test_what_is_pickled_later_does_not_take_the_whole_memory(tmp_path: Path) -> None:
    taken = SnapshotFile(tmp_path / "file").write(1, content_of(a_state()))
    state = taken.state(to_pickle=True)
    size = taken.content.untyped_storage().nbytes()
    assert state["moments"][0].untyped_storage().nbytes() < size
    assert state["random"].data[0]["state"].untyped_storage().nbytes() == 9 * 8
    assert state["model"]["weight"].data.untyped_storage().nbytes() == size
    taken.content.zero_()
    assert torch.equal(state["random"].data[0]["state"], torch.arange(9))
