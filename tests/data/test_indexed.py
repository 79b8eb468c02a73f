"""Reading and checking: megatron-core's files are accepted, each kind of damage is named."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.data.indexed import check_indexed_dataset, optimal_dtype, read_index
from megatron_ext.errors import DataError
from megatron_ext.text.data.inspect import id_range


def core_dataset(prefix: Path, *, multimodal: bool = False) -> Path:
    """Write two documents and an empty one between them by megatron-core."""
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
    assert (index.modes.tolist() if index.modes is not None else None) == (
        [1, 1, 1] if multimodal else None
    )
    assert id_range(prefix) == (1, 7)


@pytest.mark.parametrize("vocab_size", [1, 65499, 65500, 65536, 200000])
def test_dtype_is_cores_choice(vocab_size: int) -> None:
    from megatron.core.datasets.indexed_dataset import DType

    assert optimal_dtype(vocab_size) == np.dtype(DType.optimal_dtype(vocab_size))


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
    (
        edit("idx", patch(9, struct.pack("<Q", 2))),
        "{p}.idx has index version 2, but only version 1",
    ),
    (edit("idx", patch(17, b"\x09")), "{p}.idx has dtype code 9, which must be one of 1 to 8"),
    (
        edit("idx", lambda b: b[:-5]),
        "{p}.idx has 97 bytes, but its 3 sequences and 4 document boundaries need 102",
    ),
    (
        edit("bin", lambda b: b[:-1]),
        "{p}.bin is truncated: it has 11 bytes, but its index counts 6 tokens of 2 bytes (12 "
        "bytes)",
    ),
    (edit("bin", lambda b: b + b"x"), "{p}.bin is longer than its index says: it has 13 bytes"),
    (
        edit("idx", patch(38, struct.pack("<i", -3))),
        "{p}.idx gives sequence 1 a negative length (-3)",
    ),
    (
        edit("idx", patch(46 + 8, struct.pack("<q", 6))),
        "{p}.idx places sequence 1 at byte 6, but the lengths before it end at byte 4",
    ),
    (
        edit("idx", patch(70 + 24, struct.pack("<q", 2))),
        "{p}.idx has document boundaries from 0 to 2 that must rise from 0 to the number of "
        "sequences (3)",
    ),
    (edit("idx", patch(70 + 8, struct.pack("<q", 3))), "{p}.idx has document boundaries from 0 to"),
]


@pytest.mark.parametrize("number", range(len(DAMAGE)))
def test_damage_is_named(tmp_path: Path, number: int) -> None:
    damage, sentence = DAMAGE[number]
    prefix = core_dataset(tmp_path / "d")
    damage(prefix)
    with pytest.raises(DataError) as caught:
        check_indexed_dataset(prefix)
    assert str(caught.value).startswith(sentence.format(p=prefix))
    assert len(caught.value.messages) == 1
