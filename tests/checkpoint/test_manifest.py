"""Manifests in one file and in parts: who writes and reads what, and damage that is found."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint import manifest, storage, writing
from megatron_ext.checkpoint.files import Files, describe_file, folder_of
from megatron_ext.checkpoint.manifest import (
    MANIFEST,
    read_manifest,
    read_part,
    read_root,
    write_manifest,
    write_parts,
)
from megatron_ext.checkpoint.remote import RemoteFolder
from megatron_ext.checkpoint.stored import CheckpointRef, DamagedFile, fault_of
from megatron_ext.errors import CheckpointError
from tests.checkpoint.tiny import build, load, manager, save, whole_tensors
from tests.ranks import ranks

WORLD, GROUPS = 2048, 16


def shards_of(folder: Path, ranks: range) -> Files:
    """Write made-up shards of some ranks; return their sizes and checksums."""
    folder.mkdir(parents=True, exist_ok=True)
    listed: Files = {}
    for rank in ranks:
        path = folder / f"__{rank}_0.distcp"
        path.write_bytes(str(rank).encode() * (1 + rank % 7))
        listed[path.name] = describe_file(path)
    return listed


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the save folder of a checkpoint of 2,048 ranks in 16 groups of replicas."""
    root = tmp_path_factory.mktemp("large")
    folder = folder_of(root, 1)
    parts: Files = {}
    for group in range(GROUPS):
        # With pipeline stages innermost, the ranks of a group do not follow each other.
        own = shards_of(folder, range(group, WORLD, GROUPS))
        assert all(len(pickle.dumps({name: entry})) < 100 for name, entry in own.items())
        parts |= write_parts(folder, own, group)
    common = folder / "common.pt"
    common.write_bytes(b"common")
    assert write_manifest(folder, parts | {common.name: describe_file(common)}) == [MANIFEST]
    return root


def test_of_a_large_world_rank_0_writes_little_and_each_rank_reads_one_part(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = CheckpointRef(large, 1, weights_only=False)
    folder = checkpoint.path
    assert (folder / MANIFEST).stat().st_size < 3000
    assert json.loads((folder / MANIFEST).read_text())["version"] == 3
    root = read_root(folder)
    assert root is not None and len(root) == GROUPS + 1
    checked = list[str]()
    read = list[str]()
    contents = {name: read_part(folder, name, root[name]) for name in root if "json" in name}
    monkeypatch.setattr(storage, "check_listed", lambda _, listed, names: checked.extend(names))
    monkeypatch.setattr(storage, "read_part", lambda _, x, __: (read.append(x), contents[x])[1])
    for world_size in (WORLD, 40, 3, 1):
        most_parts = max(1, GROUPS // world_size + (world_size == 3))
        checked.clear()
        for rank in range(world_size):
            read.clear()
            storage._check_share(checkpoint, root, rank, world_size)
            assert 1 <= len(read) <= most_parts
        shards = [name for name in checked if manifest.is_shard(name)]
        assert sorted(shards) == sorted(f"__{rank}_0.distcp" for rank in range(WORLD))
        assert checked.count("common.pt") == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("manifest_5_0.json", "manifest_5_0.json does not match its checksum"),
        ("__1234_0.distcp", "__1234_0.distcp does not match its checksum"),
    ],
)
def test_damage_of_a_part_or_of_what_it_lists_is_found_and_named(
    large: Path, name: str, says: str
) -> None:
    checkpoint = CheckpointRef(large, 1, weights_only=False)
    root = read_root(checkpoint.path)
    assert root is not None and fault_of(checkpoint.path) is None
    path = checkpoint.path / name
    content = path.read_bytes()
    path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    faults = list[str]()
    try:
        for rank in range(64):
            try:
                storage._check_share(checkpoint, root, rank, 64)
            except DamagedFile as error:
                faults.append(str(error))
        if name.endswith(".json"):
            assert f"{path} is damaged (it does not match" in str(fault_of(checkpoint.path))
    finally:
        path.write_bytes(content)
    # All ranks that share the part need it, but a shard is checked by one rank.
    assert len(faults) == (4 if name.endswith(".json") else 1)
    assert all(f"{checkpoint.path}/{says}; " in fault for fault in faults)


def test_shards_of_many_ranks_are_listed_in_parts_also_by_a_single_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MAX_LISTED", 3)
    few = shards_of(tmp_path / "few", range(3))
    assert write_manifest(tmp_path / "few", few) == [MANIFEST]
    assert json.loads((tmp_path / "few" / MANIFEST).read_text()) == {"version": 2, "files": few}
    many = shards_of(tmp_path, range(7)) | {"common.pt": {"bytes": 1, "crc32": 2}}
    parts = [f"manifest_0_{number}.json" for number in range(3)]
    assert write_manifest(tmp_path, many) == [*parts, MANIFEST]
    root = read_root(tmp_path)
    assert root is not None and sorted(root) == ["common.pt", *parts]
    listed = read_manifest(tmp_path)
    assert listed == root | many
    # A helper that takes over from one that has died writes what it has read.
    before = (tmp_path / MANIFEST).read_bytes()
    assert write_manifest(tmp_path, root) == [MANIFEST]
    assert (tmp_path / MANIFEST).read_bytes() == before


def listing(tmp_path: Path, content: Any) -> None:
    """Write a manifest with one part that has this ``content``."""
    part = tmp_path / "manifest_0_0.json"
    part.write_text(json.dumps(content) if not isinstance(content, str) else content)
    write_manifest(tmp_path, {part.name: {**describe_file(part), "part": True}})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "manifest_0_0.json is damaged ("),
        ([], "it holds a list instead of an object"),
        ({"version": 3, "files": {"../a": {"bytes": 1, "crc32": 1}}}, "names ../a, which"),
        ({"version": 4, "files": {}}, "manifest_0_0.json has the version 4, but 1, 2 and 3 are"),
        (
            {"version": 3, "files": {"x.json": {"bytes": 1, "crc32": 1, "part": True}}},
            "it is a part, but lists the part 'x.json'",
        ),
        (
            {"version": 3, "files": {"x": {"bytes": 1, "crc32": 1, "part": "yes"}}},
            "it gives no size and checksum of 'x'",
        ),
    ],
)
def test_a_part_is_read_as_carefully_as_the_manifest(
    content: Any, says: str, tmp_path: Path
) -> None:
    listing(tmp_path, content)
    with pytest.raises(CheckpointError) as raised:
        read_manifest(tmp_path)
    assert says in str(raised.value)


def test_a_part_that_is_missing_or_another_one_is_named(tmp_path: Path) -> None:
    listing(tmp_path, {"version": 3, "files": {}})
    part = tmp_path / "manifest_0_0.json"
    assert read_manifest(tmp_path) == read_root(tmp_path)
    part.write_text('{"version": 3, "files": {} }')
    with pytest.raises(CheckpointError, match=r"manifest_0_0.json is damaged \(it does not match"):
        read_manifest(tmp_path)
    part.unlink()
    with pytest.raises(CheckpointError, match=r"manifest_0_0.json is damaged \(No such file"):
        read_manifest(tmp_path)


def test_the_parts_of_a_checkpoint_in_a_store_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MAX_LISTED", 2)
    folder = folder_of(tmp_path, 3)
    shards = shards_of(folder, range(5))
    write_manifest(folder, shards)
    remote = RemoteFolder("load", "s3://bucket/run", tmp_path)

    def read(name: str) -> bytes | None:
        path = tmp_path / name
        return path.read_bytes() if path.exists() else None

    monkeypatch.setattr(remote, "_read", read)
    assert remote._remote_files(3) == read_manifest(folder)
    (folder / "manifest_0_1.json").unlink()
    says = r"s3://bucket/run/iter_0000003/manifest_0_1.json is damaged \(it does not match"
    with pytest.raises(CheckpointError, match=says):
        remote._remote_files(3)


@ranks(tp=2, dp=2)
def test_groups_of_replicas_list_their_files(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 hears of two parts, and, after the first save, of no shard but its group's."""
    monkeypatch.setattr(manifest, "MAX_LISTED", 2)
    monkeypatch.setattr(writing, "MAX_LISTED", 2)
    tiny = build(context, layers=1)
    checkpoints = manager(context, tmp_path)
    save(checkpoints, tiny, 1, context)
    told = list[Any]()
    gather = torch.distributed.gather_object
    monkeypatch.setattr(
        torch.distributed, "gather_object", lambda x, *y, **z: (told.append(x), gather(x, *y, **z))
    )
    path = save(checkpoints, tiny, 2, context)
    monkeypatch.setattr(torch.distributed, "gather_object", gather)
    own, *parts = told
    assert list(own) == [f"__{context.rank}_0.distcp"]
    first = context.dp_rank == 0
    assert [list(x) for x in parts] == ([[f"manifest_{context.rank}_0.json"]] if first else [])
    torch.distributed.barrier()
    root = read_root(path)
    assert root is not None
    assert [x for x in root if manifest.is_part(root[x])] == [
        f"manifest_{rank}_0.json" for rank in (0, 1)
    ]
    assert not any(map(manifest.is_shard, root))
    listed = read_manifest(path)
    assert listed is not None
    assert set(listed) == {x.name for x in path.iterdir()} - {MANIFEST}
    before = whole_tensors(path, tmp_path / f"{context.rank}.pt")
    tiny.spoil()
    assert load(checkpoints, tiny).iteration == 2
    after = whole_tensors(save(checkpoints, tiny, 3, context), tmp_path / f"{context.rank}.pt")
    assert all(torch.equal(before[name], after[name]) for name in before)
    if context.rank == 0:
        (folder_of(tmp_path, 3) / "manifest_1_0.json").write_text("{}")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=r"manifest_1_0.json is damaged|does not match"):
        load(checkpoints, tiny)


def test_who_shares_a_part_divides_its_files(tmp_path: Path) -> None:
    """A load with one rank more than parts gives the first part to two ranks."""
    for number in range(3):
        shards_of(tmp_path / "iter_0000001", range(number, 9, 3))
    folder = tmp_path / "iter_0000001"
    parts: Files = {}
    for number in range(3):
        parts |= write_parts(folder, shards_of(folder, range(number, 9, 3)), number)
    checkpoint = CheckpointRef(tmp_path, 1, weights_only=False)
    (folder / "__3_0.distcp").write_bytes(b"")
    damaged = []
    for rank in range(4):
        try:
            storage._check_share(checkpoint, parts, rank, 4)
        except DamagedFile:
            damaged.append(rank)
    assert len(damaged) == 1 and damaged[0] in (0, 3)
