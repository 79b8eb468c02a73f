"""Writing and joining: the bytes are megatron-core's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ext.data.indexed import check_indexed_dataset
from megatron_ext.data.indexed_writer import IndexedWriter, append_file, merge_indexed, narrow
from megatron_ext.errors import DataError

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


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(documents=DOCUMENTS)
def test_bytes_are_cores(tmp_path: Path, documents: Documents) -> None:
    assert pair(write_ours(tmp_path / "a", documents)) == pair(
        write_core(tmp_path / "b", documents)
    )


def test_core_reads_modes_back(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    with IndexedWriter(tmp_path / "d", np.dtype(np.int32), multimodal=True) as writer:
        writer.add_document(np.arange(5), [2, 3], [0, 1])
        writer.add_document(np.arange(4), [4])
    dataset = IndexedDataset(str(tmp_path / "d"), multimodal=True)
    assert [(ids.tolist(), int(mode)) for ids, mode in (dataset[i] for i in range(3))] == [
        ([0, 1], 0),
        ([2, 3, 4], 1),
        ([0, 1, 2, 3], 0),
    ]
    merged = merge_indexed([tmp_path / "d", tmp_path / "d"], tmp_path / "m", multimodal=True)
    assert (merged.num_documents, merged.multimodal) == (4, True)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(parts=st.lists(DOCUMENTS.filter(bool), min_size=1, max_size=3))
def test_merging_is_writing_all_in_one(tmp_path: Path, parts: list[Documents]) -> None:
    prefixes = [write_ours(tmp_path / f"p{i}", part) for i, part in enumerate(parts)]
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "b.bin", "b.idx"]


def test_ids_that_do_not_fit_are_refused() -> None:
    assert narrow(np.asarray([0, 65535], np.uint32), np.dtype(np.uint16)).tolist() == [0, 65535]
    for ids in ([65536], [-1]):
        with pytest.raises(
            DataError, match=rf"Token id {ids[0]} does not fit the dataset's uint16"
        ):
            narrow(np.asarray(ids), np.dtype(np.uint16))


def test_failed_writer_leaves_the_old_dataset(tmp_path: Path) -> None:
    prefix = write_ours(tmp_path / "d", [[[1]]])
    before = pair(prefix)
    with (
        pytest.raises(DataError, match=r"A document of 1 tokens was given lengths \[2\]"),
        IndexedWriter(prefix, np.dtype(np.uint16)) as writer,
    ):
        writer.add_document(np.asarray([1]), [2])
    assert pair(prefix) == before
    assert len(list(tmp_path.iterdir())) == 2
    check_indexed_dataset(prefix)


def test_append_copies_ranges(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 100)
    with open(tmp_path / "out", "wb") as out:
        append_file(out, source, 10, 20)
        append_file(out, source, 25_590)
        with pytest.raises(DataError, match=r"source ended 5 bytes early while it was joined"):
            append_file(out, source, 25_595, 25_605)
    assert (tmp_path / "out").read_bytes()[:20] == bytes(range(10, 20)) + bytes(range(246, 256))
