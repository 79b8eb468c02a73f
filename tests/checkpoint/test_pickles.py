"""The machine for pickles: it reads what torch and megatron-core write, and patches nothing."""

import collections
import enum
import gc
import io
import pathlib
import pickle
import random
import re
import time
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnBackend
from torch.distributed.checkpoint import filesystem, metadata, planner

from megatron_ext.checkpoint import pickles
from megatron_ext.checkpoint.pickles import (
    ForeignName,
    MetadataMachine,
    Refused,
    Scan,
    read_index,
)
from megatron_ext.checkpoint.unpickling import MetadataReader, plain_content
from megatron_ext.errors import CheckpointError

MARK = "strange_mark"
_METADATA = "torch.distributed.checkpoint.metadata"


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def _made(module: str, name: str, *arguments: bytes) -> bytes:
    """Return instructions that call a class."""
    return _name(module, name) + b"(" + b"".join(arguments) + b"tR"


STATE = b"}(" + _text(MARK) + b"K\x01u"
"""Instructions for the mapping that holds the mark."""
SLOTS = b"(N" + STATE + b"t"
"""Instructions for a state of slots, which is set by attribute."""
FORMAT = (_METADATA, "_MEM_FORMAT_ENCODING")


def _marked() -> list[object]:
    """Return the shared objects that have the mark, and take it away."""
    shared: list[Any] = [
        pathlib.PosixPath, pathlib.PurePosixPath, pathlib.Path, collections.OrderedDict,
        metadata.Metadata, metadata.MetadataIndex, metadata.TensorProperties,
        metadata._MEM_FORMAT_ENCODING, *metadata._MEM_FORMAT_ENCODING, planner.WriteItemType,
        *planner.WriteItemType, filesystem._StorageInfo, torch.serialization._get_layout,
        torch.Size, torch.float32, torch.strided, AttnBackend, *AttnBackend, Namespace, np.dtype,
    ]  # fmt: skip
    found = [each for each in shared if hasattr(each, MARK)]
    for each in found:
        kept = enum.Enum if isinstance(each, enum.EnumMeta) else each
        type.__delattr__(each, MARK) if kept is enum.Enum else delattr(each, MARK)
    return found


ON_SHARED = {
    "a class": _name("pathlib", "PosixPath"),
    "a dataclass": _name(_METADATA, "TensorProperties"),
    "a frozen dataclass": _name(_METADATA, "MetadataIndex"),
    "an enumeration": _name(*FORMAT),
    "a member": _made(*FORMAT, b"K\x00"),
    "a function": _name("torch.serialization", "_get_layout"),
    "a dtype": _name("torch", "float32"),
    "a layout": _made("torch.serialization", "_get_layout", _text("torch.strided")),
    "a class of the memo": _name("pathlib", "PosixPath") + b"q\x00h\x00",
}


@pytest.mark.parametrize("state", [STATE, SLOTS])
@pytest.mark.parametrize("target", ON_SHARED)
def test_an_index_sets_nothing_on_shared_objects(target: str, state: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + ON_SHARED[target] + state + b"b.")
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read \(it sets the state of"):
        MetadataReader(str(tmp_path)).read_metadata()
    assert not _marked()


def _with_one_hash(count: int) -> list[bytes]:
    """Return instructions for pairs of integers which Python hashes alike."""
    word, turned = 1 << 64, 31
    first, second, start = 11400714785074694791, 14029467366897019727, 2870177450012600261

    def turn(value: int, bits: int) -> int:
        return (value << bits | value >> (64 - bits)) % word

    made: list[bytes] = []
    for left in range(1, 1 << 20):
        # The state after the first element, and the second one that leads to a hash of our choice.
        state = turn((start + left * second) % word, turned) * first % word
        wanted = turn(12345678901234567 * pow(first, -1, word) % word, 64 - turned)
        right = (wanted - state) * pow(second, -1, word) % word
        if right < (1 << 61) - 2:
            pair = (left, right)
            made.append(pickle.dumps(pair, protocol=2)[2:-1])
            assert hash(pair) == hash(pickle.loads(b"\x80\x02" + made[0] + b"."))
        if len(made) == count:
            break
    return [re.sub(rb"q.$", b"", each, flags=re.DOTALL) for each in made]


COLLIDING = _with_one_hash(1100)
INDEX = metadata.Metadata({}, storage_data={})
NESTED = b"\x85" * 300_000
_INDEX_OBJECT = _name(_METADATA, "MetadataIndex") + b")\x81"
REFUSED = {
    "a deep key": (b"}K\x01" + NESTED + b"K\x01s.", "a tuple as a key"),
    "a doubling key": (b"}K\x01" + b"q\x00h\x00\x86" * 60 + b"K\x01s.", "a tuple as a key"),
    "a long key": (b"}(" + b"K\x01" * 65 + b"tK\x01s.", "a tuple as a key"),
    "a key without fields": (b"}" + _INDEX_OBJECT + b"K\x01s.", "a MetadataIndex as a key"),
    "keys with one hash": (b"}(" + b"N".join(COLLIDING) + b"Nu.", "with the hash of another one"),
    "a deep value": (b"K\x01" + NESTED + b".", "more than 100 deep"),
    "deep marks": (b"(" * 300_000 + b".", "more than 100 deep"),
    "itself": (b"]q\x00h\x00a.", "lies within itself"),
    "a huge place in the memo": (b"Nr\xff\xff\xff\x7f.", "holds a NoneType"),
    "an extension": (b"\x82\x01.", "instruction .0x82. that no checkpoint has"),
    "an id": (b"Pstrange\n.", "instruction .0x50. that"),
    "an id from the stack": (_text("a") + b"Q.", "a value outside of the file"),
    "an instance in text": (b"(ipathlib\nPosixPath\n.", "instruction .0x69. that"),
    "a class that is called": (_made(_METADATA, "StorageMeta") + b".", "calls what is no function"),
    "what is no class": (b"N)\x81.", "no class of an index"),
    "a call of a text": (_text("a") + b")R.", "calls what is no function"),
    "a call without a tuple": (_name("torch", "Size") + b"NR.", "without a tuple"),
    "items of a class": (_name("pathlib", "PosixPath") + b"NNs.", "sets items of what is no"),
    "more of a text": (_text("a") + b"Na.", "appends to what is no list"),
    "a state twice": (
        _INDEX_OBJECT + b"}" + _text("fqn") + _text("a") + b"sq\x00b" + b"h\x00b.",
        "did not just make",
    ),
    "a field of another type": (
        _INDEX_OBJECT + b"}" + _text("fqn") + b"Nsb.",
        "a NoneType as `fqn` of a MetadataIndex",
    ),
    "a missing field": (_INDEX_OBJECT + b"}b.", "a MetadataIndex without some of its fields"),
    "an instance without state": (_INDEX_OBJECT + b".", "a MetadataIndex without its fields"),
    "a state without names": (_INDEX_OBJECT + b"]b.", "a MetadataIndex whose state has no names"),
    "a negative size": (_made("torch", "Size", b"J\xff\xff\xff\xff\x85") + b".", "a size"),
    "a size of texts": (_made("torch", "Size", _text("a") + b"\x85") + b".", "cannot be read"),
    "an unknown layout": (
        _made("torch.serialization", "_get_layout", _text("torch.load")) + b".",
        "a layout that torch does not know",
    ),
    "a path of numbers": (_made("pathlib", "PosixPath", b"K\x01") + b".", "parts are no texts"),
    "a member by a tuple": (_made(*FORMAT, b")") + b".", "_MEM_FORMAT_ENCODING that is none"),
    "a text that ends early": (b"X\xff\xff\xff\x7fa.", "ends early"),
    "another class": (pickle.dumps(Namespace())[:-1] + b".", "names `argparse.Namespace`"),
    "a dotted name": (
        _text(_METADATA) + _text("Metadata.__init__.__globals__") + b"\x93.",
        "names `.*__globals__`",
    ),
    "a name of no text": (b"NN\x93.", "by what is no text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_index_has_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    content, reason = REFUSED[name]
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + content)
    with pytest.raises(CheckpointError, match=reason) as error:
        MetadataReader(str(tmp_path)).read_metadata()
    assert len(error.value.messages) == 1
    assert not _marked()


def test_an_index_whose_parts_are_of_other_classes_is_refused() -> None:
    entry = metadata.TensorStorageMetadata(
        metadata.TensorProperties(),
        torch.Size([2]),
        ["chunk"],  # type: ignore[list-item]
    )
    place = filesystem._StorageInfo("a", -1, 1)
    described: list[str] = [1]  # type: ignore[list-item]
    changed = filesystem._StorageInfo("a", 1, 1, transform_descriptors=described)
    index = metadata.MetadataIndex("a")
    wrong: dict[str, Any] = {
        "chunks of a": {"state_dict_metadata": {"a": entry}},
        "a str as the entry of a": {"state_dict_metadata": {"a": "b"}},
        "before the start": {"storage_data": {index: place}},
        "no name": {"storage_data": {index: changed}},
        "places of shards": {"storage_data": {"a": place}},
    }
    for reason, fields in wrong.items():
        content = metadata.Metadata(**{"state_dict_metadata": {}, **fields})
        with pytest.raises(Refused, match=reason):
            read_index(pickle.dumps(content))


def _index(count: int) -> metadata.Metadata:
    sizes = [torch.Size([2, 4]), torch.Size([0, 0])]
    chunk = metadata.ChunkStorageMetadata(offsets=sizes[1], sizes=sizes[0])
    tensor = metadata.TensorStorageMetadata(
        metadata.TensorProperties(torch.bfloat16), sizes[0], [chunk]
    )
    names = [f"layer.{number}.weight" for number in range(count)]
    places = {
        metadata.MetadataIndex(name, [0, 0], 0): filesystem._StorageInfo("__0_0.distcp", 5, 16)
        for name in names
    }
    made = metadata.Metadata(
        {**dict.fromkeys(names, tensor), "object": metadata.BytesStorageMetadata()},
        planner_data={name: ("model", 0, name) for name in names},
        storage_data=places,
        storage_meta=metadata.StorageMeta(Path("/a/b"), modules=["a"]),
    )
    written = planner.TensorWriteData(chunk, tensor.properties, tensor.size)
    items = [
        planner.WriteItem(next(iter(places)), planner.WriteItemType.SHARD, tensor_data=written),
        planner.WriteItem(
            metadata.MetadataIndex("object"),
            planner.WriteItemType.BYTE_IO,
            bytes_io_data=planner.BytesIOWriteData(3),
        ),
    ]
    made.all_local_plans = [planner.SavePlan(items)]  # type: ignore[attr-defined]
    return made


def _as_text(index: metadata.Metadata) -> str:
    """Return all values of an index; its paths are pure ones, which ask no file system."""
    return repr(vars(index)).replace("PurePosixPath", "PosixPath")


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_an_index_is_read_as_python_reads_it(protocol: int) -> None:
    content = pickle.dumps(_index(3), protocol=protocol)
    assert _as_text(read_index(content)) == _as_text(pickle.loads(content))


def test_the_index_of_a_checkpoint_of_torch_is_read(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.ones(3, 2)}, "steps": [1, {"a": "b"}]}
    dcp.save(state, checkpoint_id=str(tmp_path))
    content = (tmp_path / ".metadata").read_bytes()
    assert _as_text(read_index(content)) == _as_text(pickle.loads(content))
    again = {"model": {"weight": torch.zeros(3, 2)}, "steps": [0, {"a": ""}]}
    dcp.load(again, storage_reader=MetadataReader(str(tmp_path)))
    assert torch.equal(again["model"]["weight"], torch.ones(3, 2))  # type: ignore[call-overload,index]
    assert again["steps"] == [1, {"a": "b"}]


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_changed_index_is_an_index_or_an_error_of_ours(data: st.DataObject) -> None:
    content = bytearray(pickle.dumps(_index(1)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    try:
        read_index(bytes(content))
    except (RecursionError, MemoryError):
        raise
    except Exception as error:
        # `MetadataReader` makes one sentence of any other.
        del error
    assert not _marked()


@pytest.mark.slow
def test_a_large_index_takes_seconds() -> None:
    content = pickle.dumps(_index(400_000))
    started = time.process_time()
    assert len(read_index(content).storage_data) == 400_000
    assert time.process_time() - started < 60


def _saved(payload: bytes, *, archive: bool) -> io.BytesIO:
    """Return a file of torch.save with a crafted pickle, in the present or in the old format."""
    if not archive:
        magic = torch.serialization.MAGIC_NUMBER
        head = [pickle.dumps(x, protocol=2) for x in (magic, 1001, {})]
        return io.BytesIO(b"".join([*head, payload, pickle.dumps([], protocol=2)]))
    file = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(file)
    writer.write_record("data.pkl", payload, len(payload))
    writer.write_record("byteorder", b"little", 6)
    writer.write_end_of_file()
    return io.BytesIO(file.getvalue())


_ENUMS = "megatron.core.transformer.enums"
MANY = b"\x8a\x05" + bytes(4) + b"\x01"
"""The instruction for 2 ** 32."""
_MEMBER = _made(_ENUMS, "AttnBackend", b"K\x01")
_ARRAY = _name("numpy", "ndarray")
IN_FILES = {
    "a class": (_name("argparse", "Namespace") + STATE + b"b.", "sets the state of what it"),
    "a member": (_MEMBER + STATE + b"b.", "it is no plain pickle"),
    "a member that torch rebuilds": (
        _name("torch._tensor", "_rebuild_from_type_v2")
        + b"("
        + _name(_ENUMS, "AttnBackend") * 2
        + b"K\x01\x85"
        + STATE
        + b"tR.",
        "cannot be read",
    ),
    "an array on raw memory": (
        _ARRAY
        + b"("
        + b"K\x01\x85"
        + _made("numpy", "dtype", _text("f8"))
        + _made("builtins", "bytearray", _text("a" * 8), _text("latin-1"))
        + b"tR.",
        "an array from raw memory",
    ),
    "an array of objects": (_made("numpy", "dtype", _text("O8")) + b".", "no plain numbers"),
    "a deep key": (b"}K\x01" + NESTED + b"K\x01s.", "tuples in tuples with more than"),
    "a deep value": (b"]" * 999 + b"a" * 998 + b".", "more than 100 deep"),
    "a doubling tuple in a set": (
        _made("builtins", "set", b"]K\x01" + b"q\x00h\x00\x86" * 60 + b"a") + b".",
        "tuples in tuples with more than",
    ),
    "another class": (_name("pathlib", "WindowsPath") + b".", "names `pathlib.WindowsPath`"),
    "a state twice": (_name("argparse", "Namespace") + b")\x81}b}b.", "of an object twice"),
    "many bytes": (_made("builtins", "bytearray", MANY) + b".", "a number of bytes"),
    "many numbers": (_made("torch", "FloatTensor", MANY) + b".", "a number of bytes"),
    "a codec": (
        _made("_codecs", "encode", _text("x"), _text("/tmp/evil")) + b".",
        "another way than pickles do",
    ),
    "keys with one hash": (b"}(" + b"N".join(COLLIDING) + b"Nu.", "with the hash of another one"),
    "a set with one hash": (
        _made("builtins", "set", b"](", *COLLIDING, b"e") + b".",
        "with the hash of another one",
    ),
    "a count of large numbers": (
        _made("collections", "Counter", b"](\x8a\x09" + bytes(8) + b"\x01e") + b".",
        "a int as a key",
    ),
    "one text for many calls": (
        b"](" + _text("a" * 3000) + b"q\x00" + _text("latin1") + b"q\x01"
        + _name("_codecs", "encode") + b"q\x02" + b"h\x02h\x00h\x01\x86R" * 2000 + b"e.",
        "again and again",
    ),
}  # fmt: skip


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("name", IN_FILES)
def test_a_file_of_torch_save_sets_nothing_on_shared_objects(name: str, archive: bool) -> None:
    payload, reason = IN_FILES[name]
    with pytest.raises(CheckpointError, match=reason) as error:
        plain_content(_saved(b"\x80\x02" + payload, archive=archive), "the file")
    assert len(error.value.messages) == 1
    assert not _marked()


@pytest.mark.parametrize("old", [False, True])
def test_what_checkpoints_hold_is_read(old: bool) -> None:
    """Check it with random states, arguments and moments, as the common state has them."""
    registered = set(torch.serialization.get_safe_globals())
    content = {
        "args": Namespace(attention_backend=AttnBackend.flash, save=Path("a/b"), sizes=(1, 2)),
        "rng_state": [{"random_rng_state": random.getstate(), "np": np.random.get_state()}],
        "numbers": np.arange(6, dtype=">i4").reshape(2, 3),
        "moment": torch.arange(3.0),
        ("a", 1): collections.OrderedDict(a=b"bytes"),
    }
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=not old)
    file.seek(0)
    read = plain_content(file, "the file")
    assert read["args"] == content["args"]
    assert torch.equal(read.pop("moment"), torch.arange(3.0))
    state, before = read["rng_state"][0], np.random.get_state()
    assert state["random_rng_state"] == random.getstate()
    np.random.seed(0)
    np.random.set_state(state["np"])
    assert all(np.array_equal(x, y) for x, y in zip(np.random.get_state(), before, strict=True))
    assert read["numbers"].tolist() == [[0, 1, 2], [3, 4, 5]]
    # As ranks do that load together.
    assert pickle.loads(pickle.dumps(read["numbers"])).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read["a", 1] == {"a": b"bytes"}
    assert set(torch.serialization.get_safe_globals()) == registered


def test_a_packed_file_is_refused() -> None:
    """A thousandth of its size on disk may be all that a record of zeros takes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + _text("a" * (1 << 20)) + b".")
    packed.seek(0)
    with pytest.raises(CheckpointError, match="it is packed"):
        plain_content(packed, "the file")


def test_a_foreign_name_is_told_by_its_own_error() -> None:
    with pytest.raises(ForeignName, match=r"^os\.system$"):
        read_index(pickle.dumps(_index(1))[:-1] + _name("os", "system") + b".")


def _key(elements: int) -> bytes:
    return b"}(" + b"(" + b"K\x01" * elements + b"t" + b"Nu."


def test_the_names_of_storages_at_the_end_of_an_old_file_are_looked_at_too() -> None:
    parts = (torch.serialization.MAGIC_NUMBER, 1001, {}, [1])
    head = b"".join(pickle.dumps(part, protocol=2) for part in parts)
    good = head + pickle.dumps([], protocol=2)
    assert plain_content(io.BytesIO(good), "the file") == [1]
    for name in ("a deep value", "keys with one hash"):
        payload, reason = IN_FILES[name]
        with pytest.raises(CheckpointError, match=reason):
            plain_content(io.BytesIO(head + b"\x80\x02" + payload), "the file")


def _read(content: bytes) -> Any:
    """Return the value of a pickle of an index's parts, without the check of its class."""
    return MetadataMachine(b"\x80\x04" + content).load()


def test_values_exactly_at_a_limit_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _read(_key(64)) == {(1,) * 64: None}
    with pytest.raises(Refused, match="a tuple as a key"):
        _read(_key(65))
    assert Scan(b"\x80\x04" + _key(64)).load() == {(1,) * 64: None}
    with pytest.raises(Refused, match="a tuple as a key"):
        Scan(b"\x80\x04" + _key(65)).load()
    assert _read(b"]" * 100 + b"a" * 99 + b".")
    with pytest.raises(Refused, match="more than 100 deep"):
        _read(b"]" * 101 + b"a" * 100 + b".")
    size = _made("torch", "Size", b"(" + b"K\x00" * 64 + b"t")
    assert len(_read(size + b".")) == 64
    with pytest.raises(Refused, match="a size that is none"):
        _read(_made("torch", "Size", b"(" + b"K\x00" * 65 + b"t") + b".")
    content = pickle.dumps(_index(1))
    monkeypatch.setattr(pickles, "MAX_BYTES", len(content))
    read_index(content)
    monkeypatch.setattr(pickles, "MAX_BYTES", len(content) - 1)
    with pytest.raises(Refused, match=f"it has {len(content)} bytes, more than"):
        read_index(content)


def test_as_many_keys_with_one_hash_as_are_allowed() -> None:
    """The first key of a hash has no equal yet."""
    for count, refused in ((1001, False), (1002, True)):
        content = b"}(" + b"N".join(COLLIDING[:count]) + b"Nu."
        if refused:
            with pytest.raises(Refused, match="with the hash of another one"):
                _read(content)
        else:
            assert len(_read(content)) == count


def _long(value: int) -> bytes:
    content = value.to_bytes(9, "little", signed=True)
    return b"\x8a\x09" + content


@pytest.mark.parametrize("sign", [1, -1])
def test_keys_are_integers_of_64_bits(sign: int) -> None:
    largest = sign * ((1 << 63) - 1)
    assert _read(b"}" + _long(largest) + b"Ns.") == {largest: None}
    with pytest.raises(Refused, match="a int as a key"):
        _read(b"}" + _long(largest + sign) + b"Ns.")
    with pytest.raises(Refused, match="a int as a key"):
        _read(b"}" + _long(sign << 70) + b"Ns.")


def test_tuples_may_be_long_and_nested_tuples_may_not() -> None:
    """A flat one costs no more than its pickle."""
    flat = b"(" + b"K\x01" * 10_001 + b"t"
    assert len(Scan(b"\x80\x04" + flat + b".").load()) == 10_001
    inner = b"(" + b"K\x01" * 9_999 + b"t"
    assert len(Scan(b"\x80\x04" + inner + b"\x85.").load()) == 1
    with pytest.raises(Refused, match="tuples in tuples"):
        Scan(b"\x80\x04" + inner + b"K\x01\x86.").load()


def test_sizes_of_empty_and_huge_tensors() -> None:
    assert _read(_made("torch", "Size", b"K\x00K\x02\x86") + b".") == torch.Size([0, 2])
    assert _read(_made("torch", "Size", b")") + b".") == torch.Size([])
    with pytest.raises(Refused, match="out of range"):
        _read(_made("torch", "Size", _long(1 << 63) + b"\x85") + b".")


@pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last, torch.preserve_format]
)
def test_each_memory_format_is_read_as_it_was_written(layout: torch.memory_format) -> None:
    index = _index(1)
    entry: Any = index.state_dict_metadata["layer.0.weight"]
    entry.properties.memory_format = layout
    entry.properties.requires_grad, entry.properties.pin_memory = True, False
    found: Any = read_index(pickle.dumps(index)).state_dict_metadata["layer.0.weight"]
    assert found.properties == entry.properties


def test_a_place_has_a_length() -> None:
    for offset, length in ((0, -1), (-1, 0)):
        place = filesystem._StorageInfo("a", offset, length)
        index = metadata.Metadata({}, storage_data={metadata.MetadataIndex("a"): place})
        with pytest.raises(Refused, match="before the start of a"):
            read_index(pickle.dumps(index))


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_afterwards_as_before(collects: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        read_index(pickle.dumps(_index(1)))
        assert gc.isenabled() == collects
        with pytest.raises(Refused):
            read_index(pickle.dumps([]))
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


def test_paths_of_another_system_keep_their_kind() -> None:
    posix = _read(_made("pathlib", "PosixPath", _text("/a"), _text("b")) + b".")
    windows = _read(_made("pathlib", "WindowsPath", _text("C:\\a"), _text("b")) + b".")
    assert posix == pathlib.PurePosixPath("/a/b")
    assert windows == pathlib.PureWindowsPath("C:\\a\\b")


def test_texts_and_bytes_of_every_width_are_read() -> None:
    short, long = b"\x8c\x01a", b"\x8d\x01\0\0\0\0\0\0\0b"
    pieces = [b"C\x01c", b"B\x01\0\0\0d", b"\x8e\x01\0\0\0\0\0\0\0e", b"U\x01f"]
    content = b"(" + short + long + _text("g") + b"".join(pieces) + b"\x89\x88t."
    assert _read(content) == ("a", "b", "g", b"c", b"d", b"e", b"f", False, True)
    with pytest.raises(EOFError, match="ends early"):
        _read(b"\x8d\xff\0\0\0\0\0\0\0b.")


def test_an_ordered_mapping_gets_its_items_by_instructions_alone() -> None:
    pairs = b"](" + b"K\x01K\x02\x86" + b"e"
    assert _read(_made("collections", "OrderedDict", pairs) + b".") == {}
    assert _read(_made("collections", "OrderedDict") + _text("a") + b"Ns.") == {"a": None}
