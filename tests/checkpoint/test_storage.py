"""Errors of writers, files that are too short, and plans that are used again."""

import errno
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import is_main_replica
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron_ext.checkpoint import prepared, storage, unpickling, writing
from megatron_ext.checkpoint.files import describe_file, folder_of, is_unchanged
from megatron_ext.checkpoint.prepared import RankPlan, SavePreparer
from megatron_ext.checkpoint.shared_reading import SharedLoadStrategy
from megatron_ext.checkpoint.storage import first_failure, one_line, verify
from megatron_ext.checkpoint.stored import PROGRESS, RUN_CONFIG, CheckpointRef
from megatron_ext.checkpoint.unpickling import MetadataReader, plain_content
from megatron_ext.checkpoint.writing import bytes_of, naming_disk, write_common, write_shards
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.errors import CheckpointError
from tests.checkpoint.tiny import build, load, manager, save, whole_tensors
from tests.ranks import ranks


def test_the_lowest_rank_that_failed_is_named() -> None:
    failures: Any = {
        3: (OSError("third"), []),
        1: (OSError("first\nmore. "), []),
        2: (OSError(), []),
    }
    error = CheckpointException("write", failures)
    rank, cause = first_failure(error)
    assert rank == 1 and str(cause).startswith("first")
    assert one_line(error) == "first"
    nobody = CheckpointException("write", {})
    assert first_failure(nobody) == (0, nobody)
    assert one_line(OSError()) == "OSError"
    assert one_line(ValueError("It failed. ")) == "It failed"


def test_only_a_full_disk_gets_another_error(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), naming_disk(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(RuntimeError, match="a bug"), naming_disk(tmp_path):
        raise RuntimeError("a bug")
    with pytest.raises(CheckpointError, match=f"the disk of {tmp_path}"), naming_disk(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_plan_has_the_bytes_of_the_parts_that_are_written() -> None:
    properties = TensorProperties(torch.bfloat16)
    chunk = ChunkStorageMetadata(torch.Size([0, 2]), torch.Size([3, 4]))
    tensor = TensorWriteData(chunk, properties, torch.Size([3, 8]))
    items = [
        WriteItem(MetadataIndex("a"), WriteItemType.SHARD, tensor_data=tensor),
        WriteItem(MetadataIndex("b"), WriteItemType.BYTE_IO),
    ]
    assert bytes_of(SavePlan(items)) == 3 * 4 * 2


def test_a_file_that_lost_what_was_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may report success, and keep less than it was given."""
    properties = TensorProperties(torch.float32)
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([8]))
    tensor = TensorWriteData(chunk, properties, torch.Size([8]))
    item = WriteItem(MetadataIndex("a", [0]), WriteItemType.SHARD, tensor_data=tensor)
    plan = SavePlan([item], storage_data=SimpleNamespace(prefix="__0_"))
    flush = os.fsync

    def lose(descriptor: int) -> None:
        flush(descriptor)
        os.truncate(f"/proc/self/fd/{descriptor}", 100)

    monkeypatch.setattr(os, "fsync", lose)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has 100 bytes, but \d+ were written"):
        write_shards(tmp_path, plan, [torch.ones(8)])
    monkeypatch.undo()
    (written,), files = write_shards(tmp_path, plan, [torch.ones(8)])
    assert files == {"__0_0.distcp": describe_file(tmp_path / "__0_0.distcp")}
    assert written.index.fqn == "a" and written.storage_data.relative_path == "__0_0.distcp"


def test_tensors_that_are_the_same_memory_are_written_once(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    values = [weight, weight.view(6), weight[:3], weight.view(2, 3), weight.clone()]
    items = []
    for name, value in zip("abcde", values, strict=True):
        chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.shape)
        data = TensorWriteData(chunk, TensorProperties(torch.float32), value.shape)
        index = MetadataIndex(name, [0] * value.dim())
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    plan = SavePlan(items, storage_data=SimpleNamespace(prefix="__0_"))
    written, _ = write_shards(tmp_path, plan, values)
    places = {result.index.fqn: result.storage_data for result in written}
    assert sorted(places) == list("abcde") and places["a"] == places["b"]
    assert len({place.offset for place in places.values()}) == 4
    content = (tmp_path / "__0_0.distcp").read_bytes()
    for name, value in zip("abcde", values, strict=True):
        place = places[name]
        part = io.BytesIO(content[place.offset : place.offset + place.length])
        assert torch.equal(torch.load(part, weights_only=True), value)


def test_each_file_is_verified_by_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks share the files, and begin with the largest."""
    files = {f"f{n}": {"bytes": 10 * n} for n in range(7)}
    shares = list[list[str]]()
    monkeypatch.setattr(storage, "on_every_rank", lambda work, _: work())
    monkeypatch.setattr(storage, "on_first_rank", lambda work, _: work())
    monkeypatch.setattr(storage, "read_root", lambda _: files)
    monkeypatch.setattr(storage, "check_listed", lambda _, listed, names: shares.append(names))
    checkpoint = CheckpointRef(tmp_path, 1, weights_only=False)
    for rank in range(3):
        context: Any = SimpleNamespace(rank=rank, layout=SimpleNamespace(world_size=3))
        verify(checkpoint, context)
    assert shares == [["f6", "f3", "f0"], ["f5", "f2"], ["f4", "f1"]]


def test_common_files_are_on_the_disk_and_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = list[str]()
    monkeypatch.setattr(writing, "make_durable", lambda path: flushed.append(path.name))
    counters = {"iteration": 3}, {"model": {"x": 1}}
    files = write_common(tmp_path, {"args": 1}, *counters, Metadata({}), [])
    assert set(files) == {path.name for path in tmp_path.iterdir()}
    assert set(flushed) == set(files) - {".metadata"}
    assert all(is_unchanged(tmp_path / name, entry) for name, entry in files.items())
    assert json.loads((tmp_path / PROGRESS).read_text()) == {"iteration": 3}
    assert json.loads((tmp_path / RUN_CONFIG).read_text()) == {"model": {"x": 1}}


def _entries(**changed: Any) -> list[Any]:
    """Return the entries of a state whose structure is the same but for ``changed``."""
    how: dict[str, Any] = {"dtype": torch.float32, "shape": (2, 3), "offset": 0, "replica": 0}
    how |= changed
    data = torch.zeros(how["shape"], dtype=how["dtype"])
    tensor = ShardedTensor.from_rank_offsets(
        "weight", data, (0, how["offset"], 2), replica_id=how["replica"]
    )
    replica = how.get("object", 0)
    return [tensor, ShardedObject("random", [1], (2,), (0,), replica_id=replica)]


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": torch.bfloat16},
        {"shape": (3, 2)},
        {"offset": 1},
        {"replica": 1},
        {"object": 1},
    ],
)
def test_another_structure_needs_another_plan(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    preparer = SavePreparer(CheckpointConfig(), [])
    entries = list[Any]()
    monkeypatch.setattr(prepared, "save_preprocess", lambda *_, **__: ({"all": [*entries]}, {}))
    monkeypatch.setattr(preparer, "_decide", lambda *_: None)
    preparer._plan = RankPlan(SavePlan([]), None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    entries += _entries()
    assert preparer.prepare_alike({}) is None
    preparer.prepare({})
    assert preparer.prepare_alike({}) is not None
    entries[:] = _entries(**changed)
    assert preparer.prepare_alike({}) is None
    entries[:] = _entries()
    assert preparer.prepare_alike({}) is not None


def test_a_plan_that_failed_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    preparer = SavePreparer(CheckpointConfig(), [])
    entries = _entries()
    monkeypatch.setattr(prepared, "save_preprocess", lambda *_, **__: ({"all": entries}, {}))

    def fail(_: Any) -> None:
        raise CheckpointError("no plan")

    monkeypatch.setattr(prepared, "check_whole", fail)
    monkeypatch.setattr(prepared, "validate_sharding_integrity", lambda *_, **__: None)
    preparer._structure = [prepared._structure_of(entry) for entry in entries]
    with pytest.raises(CheckpointError):
        preparer.prepare({})
    assert preparer.prepare_alike({}) is None


@pytest.mark.parametrize("value", [None, 0, [], {"a": 1}, torch.zeros(1)])
def test_objects_are_stored_as_megatron_core_stores_them(value: Any) -> None:
    entry = ShardedObject("random", value, (1,), (0,))
    content = prepared._value_of(entry, None)
    assert isinstance(content, bytes)
    (found,) = torch.load(io.BytesIO(content), weights_only=True)
    assert type(found) is type(value) and found == value


@ranks(dp=2)
def test_names_that_only_one_side_has_are_noted_but_for_random_states(
    context: Any, tmp_path: Path
) -> None:
    tiny = build(context, layers=1)
    tiny.step()
    save(manager(context, tmp_path, no_save_rng=True), tiny, 1, context)
    strict = {"dist_ckpt_strictness": "return_all"}
    loaded = load(manager(context, tmp_path, no_load_rng=True, **strict), tiny)
    assert not any("rng_state" in note for note in loaded.notes)
    torch.distributed.barrier()
    save(manager(context, tmp_path), tiny, 2, context)
    # The weights alone leave the state of the optimizer, which only the checkpoint has.
    found = manager(context, tmp_path, finetune=True, **strict).load(model=tiny.model)
    assert found is not None
    (note,) = [note for note in found.notes if "these names are not" in note]
    assert "optimizer.state.exp_avg" in note and "rng_state" not in note


def test_a_connection_that_is_lost_while_loading_is_no_misfit_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [RuntimeError("gloo/transport Connection closed"), RuntimeError("sizes differ")]

    def fail(*_: Any) -> None:
        raise faults.pop(0)

    monkeypatch.setattr(storage, "_load_state", fail)
    given: Any = (storage.PlainLoadStrategy(), CheckpointConfig(), None, [])
    with pytest.raises(RuntimeError, match="Connection closed"):
        storage.read_state(tmp_path, {}, *given)
    with pytest.raises(CheckpointError, match="does not fit this run: sizes differ; give the"):
        storage.read_state(tmp_path, {}, *given)


def test_arrays_that_numpy_1_has_pickled_are_read() -> None:
    """NumPy 1 named its modules otherwise."""
    file = io.BytesIO()
    torch.save(np.arange(3.0), file, _use_new_zipfile_serialization=False)
    for names in ((b"numpy._core.", b"numpy.core."), (b"numpy.core.", b"numpy._core.")):
        found = plain_content(io.BytesIO(file.getvalue().replace(*names)), "the file")
        assert found.tolist() == [0.0, 1.0, 2.0]


def test_a_stream_is_read_from_where_it_stands() -> None:
    file = io.BytesIO()
    file.write(b"before")
    torch.save({"a": 1}, file, _use_new_zipfile_serialization=False)
    file.seek(6)
    assert plain_content(file, "the file") == {"a": 1}


@pytest.mark.parametrize("dtype", ["<c8", ">c16", ">f8", "<i2", "|u1", "|b1"])
def test_arrays_keep_their_numbers_in_any_byte_order(dtype: str) -> None:
    array = np.array([1, 0, 1]).astype(dtype)
    file = io.BytesIO()
    torch.save(array, file)
    file.seek(0)
    found = plain_content(file, "the file")
    assert found.dtype == array.dtype.newbyteorder("=") and found.tolist() == array.tolist()


def test_arrays_of_records_are_refused() -> None:
    plain = unpickling.PlainType("f8")
    with pytest.raises(unpickling.Refused, match="no plain numbers"):
        plain.__setstate__((3, "<", None, ("a",), {"a": 1}, 8, 1, 27))


def test_names_that_others_allow_to_unpickle_stay_and_ours_do_not() -> None:
    before = torch.serialization.get_safe_globals()
    file = io.BytesIO()
    torch.save([1], file)
    file.seek(0)
    with torch.serialization.safe_globals([Path]):
        plain_content(file, "the file")
        assert set(torch.serialization.get_safe_globals()) == {*before, Path}
    assert set(torch.serialization.get_safe_globals()) == set(before)


def test_the_cause_of_a_failed_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: Any = {0: (OSError("the disk is gone"), [])}

    def fail(*_: Any, **__: Any) -> None:
        raise CheckpointException("read", failures)

    monkeypatch.setattr(unpickling, "load", fail)
    with pytest.raises(CheckpointError, match=r"cannot be read \(the disk is gone\)"):
        unpickling._fill({}, tmp_path, MetadataReader(str(tmp_path)))


def _shard(rank: int, of: int, key: str = "weight", replica: int = 0) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(
        key, torch.zeros(2, 3), (0, rank, of), replica_id=replica
    )


@ranks(dp=3)
def test_shards_must_form_whole_tensors(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single number of each rank tells, and only if it does not fit are shards exchanged."""
    calls = list[int]()
    exact = storage.determine_global_metadata

    def count(state: Any) -> Any:
        calls.append(1)
        return exact(state)

    monkeypatch.setattr(storage, "determine_global_metadata", count)
    rank = context.rank
    alike = _shard(0, 1, "norm", replica=rank), ShardedObject("random", 0, (3,), (rank,))
    storage.check_whole([_shard(rank, 3), *alike])
    assert not calls
    for entries in (
        # One rank lacks its shard, two ranks have the same one, and an object lacks a part.
        [_shard(rank, 3)] if rank else [],
        [_shard(min(rank, 1), 3)],
        [ShardedObject("random", 0, (4,), (rank,))],
    ):
        with pytest.raises(CheckpointingException, match=r"weight|Invalid|missing"):
            storage.check_whole(entries)
    assert len(calls) == 3


@ranks(dp=2)
def test_a_second_save_of_the_same_structure_exchanges_no_shards(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = build(context, layers=1)
    checkpoints = manager(context, tmp_path)
    save(checkpoints, tiny, 1, context)
    sent = list[str]()
    for name in ("all_gather_object", "scatter_object_list"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, of=name, **__: sent.append(of))
    told = list[Any]()
    gather = torch.distributed.gather_object
    monkeypatch.setattr(
        torch.distributed, "gather_object", lambda x, *y, **z: (told.append(x), gather(x, *y, **z))
    )
    monkeypatch.setattr(prepared, "save_state", None)
    tiny.step()
    path = save(checkpoints, tiny, 2, context)
    monkeypatch.undo()
    assert not sent
    ((news, files),) = told
    assert news is None and list(files) == [f"__{context.rank}_0.distcp"]
    before = whole_tensors(path, tmp_path / f"{context.rank}.pt")
    tiny.spoil()
    assert load(checkpoints, tiny).iteration == 2
    save(manager(context, tmp_path), tiny, 3, context)
    after = whole_tensors(folder_of(tmp_path, 3), tmp_path / f"{context.rank}.pt")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@ranks(dp=2)
def test_the_index_is_read_by_one_rank_once(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = build(context, layers=1)
    save(manager(context, tmp_path), tiny, 1, context)
    reads = list[Path]()
    read = unpickling._read_metadata

    def count(path: Path) -> Any:
        reads.append(path)
        return read(path)

    monkeypatch.setattr(unpickling, "_read_metadata", count)
    load(manager(context, tmp_path, dist_ckpt_strictness="log_all"), tiny)
    assert len(reads) == (1 if context.rank == 0 else 0) and not unpickling._shared


@ranks(dp=4, ep=2)
def test_replicas_divide_the_reading_of_weights_and_send_each_other_the_rest(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks have the weights and moments of a load in which each reads everything."""
    sizes = {"shared": (4, 6), "tied": (3, 2), f"expert {context.pgs.ep.rank()}": (5,)}
    sizes |= {f"box {context.rank}": (2,)}

    def entries(value: float) -> dict[str, Any]:
        replicas = {"expert": context.pgs.expt_dp.rank(), "box": 0}
        state: dict[str, Any] = {}
        for name, size in [*sizes.items(), ("tied", sizes["tied"])]:
            data = torch.full(size, value).add_(len(name))
            replica = (0, 0, replicas.get(name.split()[0], context.rank))
            entry = ShardedTensor.from_rank_offsets(name, data, replica_id=replica)
            state.setdefault(name, []).append(entry)
        state["tied"][1].replica_id = (0, 1, 0)
        random = ShardedObject("object", {"a": value}, (4,), (context.rank,))
        return {"model": state, "object": random}

    saved = SavePreparer(CheckpointConfig(), []).prepare_together(entries(7.0))
    written, _ = write_shards(tmp_path, saved.plan.items, saved.values)
    parts: list[Any] = [None] * 4
    torch.distributed.all_gather_object(parts, written)
    if context.rank == 0:
        assert saved.plan.metadata is not None
        write_common(tmp_path, {}, {}, {}, saved.plan.metadata, parts)
    torch.distributed.barrier()
    read = list[str]()
    commit = unpickling.PlainObjectsPlanner.commit_tensor

    def count(planner: Any, item: Any, tensor: torch.Tensor) -> None:
        read.append(item.dest_index.fqn)
        commit(planner, item, tensor)

    monkeypatch.setattr(unpickling.PlainObjectsPlanner, "commit_tensor", count)
    strategy = SharedLoadStrategy(prepared.replica_groups(context))
    loaded = strategy.load(entries(0.0), tmp_path)
    for name, size in sizes.items():
        assert all(torch.equal(x, torch.full(size, 7.0 + len(name))) for x in loaded["model"][name])
    assert loaded["object"] == {"a": 7.0} and len(loaded["model"]["tied"]) == 2
    torch.distributed.all_gather_object(parts, read)
    names = sorted(name for part in parts for name in part)
    assert names == ["box 0", "box 1", "box 2", "box 3", "expert 0", "expert 1", "shared", "tied"]


@ranks(dp=2)
def test_a_shared_load_is_exact(context: Any, tmp_path: Path) -> None:
    tiny = build(context, layers=1, precision="bf16")
    tiny.step()
    saved = manager(context, tmp_path / "a")
    save(saved, tiny, 1, context)
    tiny.spoil()
    tiny.step()
    load(manager(context, tmp_path / "a", ckpt_fully_parallel_load=True), tiny)
    again = save(manager(context, tmp_path / "b"), tiny, 1, context)
    if context.rank == 0:
        before = whole_tensors(folder_of(tmp_path / "a", 1), tmp_path / "before")
        after = whole_tensors(again, tmp_path / "after")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def _copy(key: str, rows: int, replica: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.zeros(rows, 2), replica_id=(0, 0, replica))


@ranks(dp=4, ep=2)
def test_replicas_divide_what_all_of_them_hold(context: Any) -> None:
    """Dense weights are on four ranks, experts on two of them, and each rank has its own boxes."""
    dense, experts = prepared.replica_groups(context)
    assert (dense.size(), experts.size()) == (4, 2)
    rank = context.rank
    replica, owner = experts.rank(), context.pgs.ep.rank()
    shared = [_copy(f"dense {n}", n + 1, rank) for n in range(6)]
    twice = [_copy("tied", 1, rank), _copy("tied", 1, 7)]
    mine = [_copy(f"expert {owner}.{n}", 3, replica) for n in range(4)]
    box = _copy(f"box {rank}", 5, 0)
    elsewhere = _copy("norm of another tensor rank", 1, 1)
    entries = [*shared, *twice, *mine, box, elsewhere]
    prepared.share_writing(entries, [dense, experts])
    written = [x.key for x in entries if is_main_replica(x.replica_id)]
    parts: list[Any] = [None] * 4
    torch.distributed.all_gather_object(parts, written)
    names = [name for part in parts for name in part]
    assert sorted(names) == sorted(
        [
            *(f"dense {n}" for n in range(6)),
            "tied",
            *(f"expert {owner}.{n}" for owner in (0, 1) for n in range(4)),
            *(f"box {rank}" for rank in range(4)),
        ]
    )
    # 21 rows of dense weights and the tied row are dealt out as evenly as they can be.
    rows = [sum(int(x.split()[1]) + 1 for x in part if x.startswith("dense")) for part in parts]
    assert max(rows) == 6 and all(sum("expert" in x for x in part) == 2 for part in parts)
