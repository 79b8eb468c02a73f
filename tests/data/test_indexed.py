"""Reading and checking: megatron-core's files are accepted, each kind of damage is named."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ext.data import indexed
from megatron_ext.data.indexed import (
    check_cached_indices,
    check_indexed_dataset,
    optimal_dtype,
    read_index,
)
from megatron_ext.data.indexed_writer import (
    IndexedWriter,
    append_file,
    merge_indexed,
    narrow,
    publish,
)
from megatron_ext.errors import DataError
from megatron_ext.text.data.inspect import id_range


def core_dataset(prefix: Path, *, multimodal: bool = False) -> Path:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16, multimodal=multimodal)
    modes = (lambda n: {"modes": [1] * n}) if multimodal else (lambda n: {})
    builder.add_document([1, 2, 3, 4, 5], [2, 3], **modes(2))
    builder.add_document([], [], **modes(0))
    builder.add_document([7], [1], **modes(1))
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.mark.parametrize("multimodal", [False, True])
def test_reads_what_core_wrote(tmp_path: Path, multimodal: bool) -> None:
    prefix = core_dataset(tmp_path / "d", multimodal=multimodal)
    info = check_indexed_dataset(prefix)
    assert (info.num_sequences, info.num_documents, info.num_tokens) == (3, 3, 6)
    assert (info.dtype, info.multimodal) == (np.uint16, multimodal)
    index = read_index(prefix)
    assert index.lengths.tolist() == [2, 3, 1]
    assert index.offsets.tolist() == [0, 4, 10]
    assert index.documents.tolist() == [0, 2, 2, 3]
    assert index.modes.tolist() == [1, 1, 1] if multimodal else index.modes is None
    assert id_range(prefix) == (1, 7)


@pytest.mark.parametrize("vocab_size", [1, 65499, 65500, 65536, 200000])
def test_dtype_is_cores_choice(vocab_size: int) -> None:
    from megatron.core.datasets.indexed_dataset import DType

    assert optimal_dtype(vocab_size) == np.dtype(DType.optimal_dtype(vocab_size))


def test_dtypes_have_the_codes_of_megatron_core() -> None:
    from megatron.core.datasets.indexed_dataset import DType

    assert {code: np.dtype(DType.dtype_from_code(code)) for code in range(1, 9)} == (
        indexed.DTYPE_OF_CODE
    )
    assert {indexed.DTYPE_OF_CODE[c].name: c for c in range(1, 9)} == indexed.CODE_OF_DTYPE


@pytest.mark.parametrize(
    ("prefix", "is_one"),
    [
        ("s3://bucket/web", True), ("gs+x.1-a:/web", True), ("file:///a", True), ("web", False),
        ("/data/a:/b", False), ("data/a:/b", False), ("1s3://a", False), ("a:b", False),
    ],
)  # fmt: skip
def test_addresses_and_paths_are_told_apart(prefix: str, is_one: bool) -> None:
    assert indexed.is_address(prefix) == indexed.is_address(Path(prefix)) == is_one


def edit(path: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(prefix: Path) -> None:
        file = Path(f"{prefix}.{path}")
        file.write_bytes(change(file.read_bytes()))

    return apply


def patch(at: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda old: old[:at] + data + old[at + len(data) :]


def remove(path: str) -> Callable[[Path], None]:
    return lambda prefix: Path(f"{prefix}.{path}").unlink()


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (remove("idx"), "Dataset index {p}.idx does not exist; give the path prefix without .bin/.idx"),
    (remove("bin"), "{p}.bin does not exist beside its index {p}.idx; copy both."),
    (edit("idx", lambda b: b"PK" + b[2:]), "{p}.idx does not start with the index magic MMIDIDX"),
    (edit("idx", lambda b: b""), "{p}.idx does not start with the index magic MMIDIDX"),
    (edit("idx", lambda b: b[:20]), "{p}.idx is cut inside its header (20 of at least 34 bytes)"),
    (edit("idx", patch(9, b"\x02")), "{p}.idx has index version 2, but only version 1"),
    (edit("idx", patch(17, b"\x09")), "{p}.idx has dtype code 9, which must be one of 1 to 8"),
    (edit("idx", lambda b: b[:-5]), "{p}.idx has 97 bytes, but its 3 sequences and 4 document bo"),
    (edit("bin", lambda b: b[:-1]),
     "{p}.bin is truncated: it has 11 bytes, but its index counts 6 tokens of 2 bytes (12 byt"),
    (edit("bin", lambda b: b + b"x"), "{p}.bin is longer than its index says: it has 13 bytes"),
    (edit("idx", patch(38, struct.pack("<i", -3))), "{p}.idx gives sequence 1 a negative length "
     "(-3)"),
    (edit("idx", patch(46 + 8, struct.pack("<q", 6))),
     "{p}.idx places sequence 1 at byte 6, but the lengths before it end at byte 4"),
    (edit("idx", patch(70 + 24, struct.pack("<q", 2))), "{p}.idx has document boundaries from 0 "
     "to 2 that must rise from 0 to the number of sequences (3)"),
    (edit("idx", patch(70 + 8, struct.pack("<q", 3))), "{p}.idx has document boundaries from 0 to"),
]  # fmt: skip


@pytest.mark.parametrize("chunk", [indexed.SCAN_ITEMS, 1, 2])
@pytest.mark.parametrize("number", range(len(DAMAGE)))
def test_damage_is_named(
    tmp_path: Path, number: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the chunks end in which an index is looked through."""
    monkeypatch.setattr(indexed, "SCAN_ITEMS", chunk)
    damage, sentence = DAMAGE[number]
    prefix = core_dataset(tmp_path / "d")
    damage(prefix)
    with pytest.raises(DataError) as caught:
        check_indexed_dataset(prefix)
    assert str(caught.value).startswith(sentence.format(p=prefix))
    assert len(caught.value.messages) == 1


def test_an_index_of_nothing_has_one_boundary(tmp_path: Path) -> None:
    prefix = write_ours(tmp_path / "d", [])
    info = check_indexed_dataset(prefix)
    assert (info.num_documents, info.multimodal) == (0, False)
    header = Path(f"{prefix}.idx").read_bytes()[:34]
    Path(f"{prefix}.idx").write_bytes(header[:26] + bytes(8))
    with pytest.raises(DataError, match="its 0 sequences and 0 document boundaries need 34"):
        check_indexed_dataset(prefix)


Documents = list[list[list[int]]]
DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=5), max_size=4))


def write_ours(prefix: Path, documents: Documents, dtype: type = np.uint16) -> Path:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            tokens = np.asarray([i for sequence in document for i in sequence], np.int64)
            writer.add_document(tokens, [len(sequence) for sequence in document])
    return prefix


def write_core(prefix: Path, documents: Documents) -> Path:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document([i for s in document for i in s], [len(s) for s in document])
    builder.finalize(f"{prefix}.idx")
    return prefix


def pair(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def test_golden_bytes(tmp_path: Path) -> None:
    data, index = pair(write_ours(tmp_path / "d", [[[1, 2], [3, 4, 5]], [], [[7]]]))
    assert data.hex() == "010002000300040005000700"
    assert len(index) == 102
    assert index[:18] == b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x08"
    assert np.frombuffer(index, "<i4", 3, 34).tolist() == [2, 3, 1]
    assert np.frombuffer(index, "<i8", 3, 46).tolist() == [0, 4, 10]
    assert np.frombuffer(index, "<i8", 4, 70).tolist() == [0, 2, 2, 3]


EXAMPLES = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@EXAMPLES
@given(documents=DOCUMENTS)
def test_bytes_are_cores(tmp_path: Path, documents: Documents) -> None:
    theirs = pair(write_core(tmp_path / "b", documents))
    assert pair(write_ours(tmp_path / "a", documents)) == theirs


def test_core_reads_modes_back(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    with IndexedWriter(tmp_path / "d", np.dtype(np.int32), multimodal=True) as writer:
        writer.add_document(np.arange(5), [2, 3], [0, 1])
        writer.add_document(np.arange(4), [1, 3])
    dataset = IndexedDataset(str(tmp_path / "d"), multimodal=True)
    found = [(ids.tolist(), int(mode)) for ids, mode in (dataset[i] for i in range(4))]
    assert found == [([0, 1], 0), ([2, 3, 4], 1), ([0], 0), ([1, 2, 3], 0)]
    # A dataset without sequences has no modes to lack.
    nothing = write_ours(tmp_path / "nothing", [], np.int32)
    parts = [tmp_path / "d", nothing, tmp_path / "d"]
    merged = merge_indexed(parts, tmp_path / "m", multimodal=True)
    assert (merged.num_documents, merged.multimodal) == (4, True)


@EXAMPLES
@given(parts=st.lists(DOCUMENTS.filter(bool), min_size=1, max_size=3), chunk=st.integers(1, 5))
def test_merging_is_writing_all_in_one(tmp_path: Path, parts: list[Documents], chunk: int) -> None:
    prefixes = [write_ours(tmp_path / f"p{i}", part) for i, part in enumerate(parts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed, "SCAN_ITEMS", chunk)
        merge_indexed(prefixes, tmp_path / "merged")
    whole = write_core(tmp_path / "whole", [document for part in parts for document in part])
    assert pair(tmp_path / "merged") == pair(whole)


def test_merge_refuses(tmp_path: Path) -> None:
    a = write_ours(tmp_path / "a", [[[1]]])
    b = write_ours(tmp_path / "b", [[[1]]], np.int32)
    with pytest.raises(DataError, match=r"b holds int32 tokens, but .*a holds uint16; merge only"):
        merge_indexed([a, b], tmp_path / "m")
    with pytest.raises(DataError, match=r"a stores no mode per sequence; merge it without --multi"):
        merge_indexed([a], tmp_path / "m", multimodal=True)
    with pytest.raises(DataError, match="There is nothing to merge into"):
        merge_indexed([], tmp_path / "m")
    (tmp_path / "m.idx").mkdir()
    with pytest.raises(DataError, match=r"m.idx is a folder, but a dataset must go there; move it"):
        merge_indexed([a], tmp_path / "m")
    left = ["a.bin", "a.idx", "b.bin", "b.idx", "m.idx"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_ids_that_do_not_fit_are_refused() -> None:
    assert narrow(np.asarray([0, 65535], np.uint32), np.dtype(np.uint16)).tolist() == [0, 65535]
    for number in (65536, -1):
        with pytest.raises(DataError, match=f"Token id {number} does not fit the dataset's uint16"):
            narrow(np.asarray([number]), np.dtype(np.uint16))


def test_failed_writer_leaves_the_old_dataset(tmp_path: Path) -> None:
    prefix = write_ours(tmp_path / "d", [[[1]]])
    before = pair(prefix)
    with (
        pytest.raises(DataError, match=r"A document of 1 tokens was given lengths \[2\]"),
        IndexedWriter(prefix, np.dtype(np.uint16)) as writer,
    ):
        writer.add_document(np.asarray([1]), [2])
    with (
        pytest.raises(
            DataError, match=r"lengths \[1\] and modes \[0, 1\]; the lengths must add up"
        ),
        IndexedWriter(prefix, np.dtype(np.uint16), multimodal=True) as writer,
    ):
        writer.add_document(np.asarray([1]), [1], [0, 1])
    assert pair(prefix) == before
    assert len(list(tmp_path.iterdir())) == 2
    check_indexed_dataset(prefix)


def _unsupported(*_: object, **__: object) -> int:
    raise OSError(95, "Operation not supported")


@pytest.mark.parametrize("refused", [(), ("copy_file_range",), ("copy_file_range", "sendfile")])
def test_append_copies_ranges(
    tmp_path: Path, refused: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on file systems on which the kernel does not copy."""
    for name in refused:
        monkeypatch.setattr(os, name, _unsupported)
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 100)
    with open(tmp_path / "out", "wb") as out:
        append_file(out, source, 10, 20)
        append_file(out, source, 25_590)
        with pytest.raises(DataError, match=r"source ended 5 bytes early while it was joined"):
            append_file(out, source, 25_595, 25_605)
    assert (tmp_path / "out").read_bytes()[:20] == bytes(range(10, 20)) + bytes(range(246, 256))


def test_a_dataset_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss must not leave a name without its content, nor an index of other tokens."""
    order: list[str] = []

    def note(word: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **options: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{first}") if word == "sync" else str(first)
            order.append(f"{word} {Path(path).suffix}")
            return real(first, *rest, **options)

        return call

    monkeypatch.setattr(os, "fsync", note("sync", os.fsync))
    monkeypatch.setattr(os, "replace", note("name", os.replace))
    monkeypatch.setattr(Path, "unlink", note("drop", Path.unlink))
    named = ["drop .idx", "name .bin", "name .idx"]
    prefix = write_ours(tmp_path / "d", [[[1, 2]]])
    assert order == ["sync .bin", "sync .idx", *named]
    order.clear()
    merge_indexed([prefix], tmp_path / "m")
    assert order[:5] == ["sync .bin", "sync .idx", *named]
    order.clear()
    with IndexedWriter(prefix, np.dtype(np.uint16), durable=False) as writer:
        writer.add_document(np.asarray([1]), [1])
    assert order == named
    monkeypatch.undo()
    ends = [(tmp_path / f"n.{kind}", tmp_path / f"d.{kind}") for kind in ("idx", "bin")]
    with pytest.raises(FileNotFoundError):
        publish(ends)
    assert not (tmp_path / "d.idx").exists(), "it would belong to other tokens"


def test_folders_of_cached_indices_hold_arrays_and_no_links(tmp_path: Path) -> None:
    own = tmp_path / "docs" / "cache" / "GPT_indices"
    own.mkdir(parents=True)
    np.save(own / "a.npy", np.arange(5))
    (own / "b.npy").touch()
    prefix = str(tmp_path / "docs")
    check_cached_indices([prefix, prefix], None, "GPT")
    check_cached_indices(["elsewhere"], str(own), "GPT")
    (tmp_path / "file").write_text("")
    told = r"file/cache \(.*file is no folder\); give a folder that can"
    with pytest.raises(DataError, match=told):
        check_cached_indices([], str(tmp_path / "file" / "cache"), "GPT")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed, "why_not_writable", lambda folder: "it is read-only")
        check_cached_indices([prefix], None, "GPT")  # It is full already.
        with pytest.raises(DataError, match=r"other.cache.GPT_indices \(it is read-only\)"):
            check_cached_indices([prefix, str(tmp_path / "other")], None, "GPT")
    for name in ("c.txt", "c.dsc", "c.npy"):
        (own / name).symlink_to(own / "a.npy")
        with pytest.raises(DataError, match=rf"{name} is a link, through which an index could"):
            check_cached_indices([prefix], None, "GPT")
        (own / name).unlink()
    (own / "c.npy").write_bytes((own / "a.npy").read_bytes()[:-1])
    with pytest.raises(DataError, match="c.npy is cut, as by a run that was killed"):
        check_cached_indices([prefix], None, "GPT")
    np.save(own / "c.npy", np.array([{}], dtype=object))
    with pytest.raises(DataError, match="c.npy holds objects instead of numbers, and could run"):
        check_cached_indices([], str(own), "GPT")
