"""Parquet, Arrow and folders of texts give the bytes of jsonl with the same texts."""

import decimal
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.preprocess import folders, inputs, tables
from tests.text import tiny
from tests.text.preprocess.runs import check_pair, left_in, run, texts_of


def table_of(documents: list[dict[str, Any]]) -> pyarrow.Table:
    return pyarrow.Table.from_pylist(documents)


def write_stream(path: Path, table: pyarrow.Table, rows: int) -> Path:
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def write_file(path: Path, table: pyarrow.Table, rows: int) -> Path:
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def write_texts(folder: Path, texts: list[str]) -> None:
    """Write texts so that their order is that of the paths, in folders and beside them."""
    for number, text in enumerate(texts):
        path = folder / f"{number // 10:03}" / f"{number:05}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8"))


def write_dataset(folder: Path, table: pyarrow.Table) -> Path:
    """Write what `datasets.Dataset.save_to_disk` writes: streams, and a list of them."""
    folder.mkdir()
    half = table.num_rows // 2
    names = [f"data-{i:05}-of-00002.arrow" for i in range(2)]
    write_stream(folder / names[0], table.slice(0, half), 7)
    write_stream(folder / names[1], table.slice(half), 7)
    (folder / "dataset_info.json").write_text("{}")
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train"}))
    return folder


@pytest.mark.parametrize("workers", [1, 3])
def test_every_kind_of_input_gives_the_bytes_of_jsonl(tmp_path: Path, workers: int) -> None:
    documents = tiny.corpus(160)
    plain = tiny.write_jsonl(tmp_path / "a.jsonl", documents[:30])
    parquet.write_table(table_of(documents[30:60]), tmp_path / "b.parquet", row_group_size=7)
    write_file(tmp_path / "c.arrow", table_of(documents[60:80]), 6)
    write_stream(tmp_path / "d.arrow", table_of(documents[80:100]), 6)
    write_dataset(tmp_path / "e", table_of(documents[100:130]))
    write_texts(tmp_path / "f", texts_of(documents[130:]))
    globbed = f"{tmp_path}/[b-d].*"
    report, _ = run(tmp_path, plain, globbed, tmp_path / "e", tmp_path / "f", workers=workers)
    assert report.documents == 160
    check_pair(tmp_path, texts_of(documents))
    assert left_in(tmp_path) == ["out_text_document.bin", "out_text_document.idx"]


@pytest.mark.parametrize("packing", ["parquet", "arrow file", "arrow stream"])
def test_parts_are_row_groups_and_read_the_named_columns_alone(
    packing: str, tmp_path: Path
) -> None:
    documents = tiny.corpus(40)
    path = tmp_path / "a"
    if packing == "parquet":
        parquet.write_table(table_of(documents), path, row_group_size=10)
    else:
        write = write_file if packing == "arrow file" else write_stream
        write(path, table_of(documents), 10)
    source = inputs.Source(str(path), "a", packing)
    parts = inputs.cut([source], 1, 1e-6, columns=["title"])
    assert [(part.start, part.end) for part in parts] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    rows = [json.loads(line) for block, _ in inputs.blocks(parts[2]) for line in block.splitlines()]
    assert rows == [{"title": document["title"]} for document in documents[20:30]]
    size = path.stat().st_size
    assert 0.9 * size < sum(part.num_bytes for part in parts) <= size
    for part in parts:
        assert sum(read for _, read in inputs.blocks(part)) == part.num_bytes
    assert len(inputs.cut([source], 1, 1.0, columns=["title"])) == 1


def test_rows_are_named_by_their_number_in_the_file(tmp_path: Path) -> None:
    documents = [{"text": document["text"]} for document in tiny.corpus(40)]
    documents[33]["text"] = None  # type: ignore[assignment]
    parquet.write_table(table_of(documents), tmp_path / "a.parquet", row_group_size=10)
    with pytest.raises(DataError, match=r"a.parquet line 34 has null under key 'text', not a text"):
        run(tmp_path, tmp_path / "a.parquet", part_megabytes=1e-6)
    report, _ = run(tmp_path, tmp_path / "a.parquet", on_bad_line="quarantine")
    assert report.rejected_path is not None
    assert json.loads(report.rejected_path.read_text())["line"] == 34


def test_a_text_that_is_not_utf8_is_named_by_its_file(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", ["one", "two", "three"])
    bad = tmp_path / "in" / "000" / "00001.txt"
    bad.write_bytes(b"tw\no\xff")
    (tmp_path / "in" / ".hidden").write_bytes(b"\xff")
    with pytest.raises(DataError) as caught:
        run(tmp_path, tmp_path / "in")
    assert str(caught.value).startswith(f"{bad} is not UTF-8 (byte 5 of the line); mend the line")
    report, _ = run(tmp_path, f"{tmp_path}/in/", on_bad_line="quarantine")
    assert report.rejected_path is not None
    record = json.loads(report.rejected_path.read_text())
    assert (record["file"], record["line"]) == (str(bad), 1)
    check_pair(tmp_path, ["one", "three"])


def test_a_changed_text_starts_anew(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", ["one", "two"])
    before = inputs.identity_of(str(tmp_path / "in"))
    assert inputs.identity_of(str(tmp_path / "in")) == before
    (tmp_path / "in" / "000" / "00001.txt").write_text("owt")
    assert inputs.identity_of(str(tmp_path / "in")) != before


def test_texts_are_listed_in_parts_and_by_their_paths(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", ["a" * 10] * 25)
    folders.write_list(str(tmp_path / "in"), tmp_path / "list")
    spans = list(folders.list_spans(str(tmp_path / "list"), 60))
    assert [size for _, _, size in spans] == [60, 60, 60, 60, 10]
    names = [
        name for a, b, _ in spans for name in folders.paths_in_list(str(tmp_path / "list"), a, b)
    ]
    assert names == sorted(str(path) for path in (tmp_path / "in").rglob("*.txt"))


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (
            "column",
            ConfigError,
            r"`--json-keys` \(text\) names no column of .*in, whose columns ar",
        ),
        ("twice", DataError, r"in has 2 columns of the name text, so that it is not known which"),
        ("parquet", DataError, r"in is not a whole parquet file \(.*\); copy it again"),
        ("arrow", DataError, r"in is not a whole Arrow file \(.*\); copy it again"),
        ("empty", DataError, r"in\) is a folder without a file; give files or a glob"),
        ("warc", DataError, r"but .*in/x.warc is none; name such files by a glob, as in .*\*.warc"),
        ("splits", DataError, r"holds several datasets \(test, train\); give the folder of one or"),
        ("state", DataError, r"state.json does not list the files of a Hugging Face dataset \(Key"),
        (
            "outside",
            DataError,
            r"state.json does not list .* \(ValueError\('a file lies outside of",
        ),
        (
            "keys",
            ConfigError,
            r"a folder of texts, which have no keys, so it does not go with `--js",
        ),
    ],
)
def test_inputs_of_no_use(tmp_path: Path, make: str, error: Any, sentence: str) -> None:
    path, more = tmp_path / "in", {}
    if make == "column":
        parquet.write_table(table_of([{"title": "a", "body": "b"}]), path)
    elif make == "twice":
        texts = pyarrow.array(["a"])
        write_file(path, pyarrow.Table.from_arrays([texts, texts], ["text", "text"]), 1)
    elif make == "parquet":
        parquet.write_table(table_of(tiny.corpus(50)), path)
        path.write_bytes(path.read_bytes()[:-9])
    elif make == "arrow":
        write_file(path, table_of(tiny.corpus(50)), 10)
        path.write_bytes(path.read_bytes()[:900])
    elif make == "splits":
        for split in ("train", "test"):
            (path / split).mkdir(parents=True)
        (path / "dataset_dict.json").write_text("{}")
    else:
        path.mkdir()
    if make == "warc":
        (path / "x.warc").write_bytes(b"WARC/1.0")
    if make == "state":
        (path / "state.json").write_text("{}")
    if make == "outside":
        files = {"_data_files": [{"filename": "../secret"}]}
        (path / "state.json").write_text(json.dumps(files))
    if make == "keys":
        write_texts(path, ["a"])
        more = {"json_keys": ("text", "title")}
    with pytest.raises(error, match=sentence):
        run(tmp_path, path, **more)


def test_without_pyarrow_tables_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.arrow"
    write_stream(path, table_of(tiny.corpus(3)), 3)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ConfigError, match="in.arrow\\) is a file of the kind Arrow, which needs the"
    ):
        tables.group_sizes(str(path), "arrow stream", None)


def test_a_row_that_is_not_utf8_is_refused_with_its_number(tmp_path: Path) -> None:
    offsets, data = np.array([0, 3, 7, 10], np.int32), b"oneb\nd\xfftwo"
    buffers = [None, pyarrow.py_buffer(offsets.tobytes()), pyarrow.py_buffer(data)]
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, buffers)
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet line 2 is not UTF-8 \(byte 4 of the line\);"):
        run(tmp_path, tmp_path / "a.parquet")
    report, _ = run(tmp_path, tmp_path / "a.parquet", on_bad_line="quarantine")
    assert (report.documents, report.rejected) == (2, 1)
    check_pair(tmp_path, ["one", "two"])


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "in", ["one"])
    real = folders.os.scandir

    def scandir(path: str) -> Any:
        if path.endswith("000"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(folders.os, "scandir", scandir)
    with pytest.raises(DataError, match=r"in/000 in `--input` cannot be read \(Permission denied"):
        folders.files_of(str(tmp_path / "in"))


def test_a_column_twice_matters_only_if_it_is_read(tmp_path: Path) -> None:
    columns = [pyarrow.array([text]) for text in ("one", "a", "b")]
    table = pyarrow.Table.from_arrays(columns, names=["text", "id", "id"])
    path = str(write_stream(tmp_path / "a", table, 1))
    assert len(tables.group_sizes(path, "arrow stream", ["text"])) == 1
    assert tables.unread_columns(path, "arrow stream", ["text"]) == ["id"]
    run(tmp_path, path)
    check_pair(tmp_path, ["one"])
    for columns_read in (["id"], ["text", "id"], None):
        with pytest.raises(
            DataError, match="has 2 columns of the name id, so that it is not known"
        ):
            tables.group_sizes(path, "arrow stream", columns_read)


def test_texts_are_those_of_the_folder_itself(tmp_path: Path) -> None:
    """Neither hidden ones nor those behind links, which may lead anywhere, or around."""
    write_texts(tmp_path / "in", ["one"])
    write_texts(tmp_path / "elsewhere", ["two"])
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "around").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "a.txt").symlink_to(tmp_path / "elsewhere" / "000" / "00000.txt")
    (tmp_path / "in" / ".git").mkdir()
    (tmp_path / "in" / ".git" / "x").write_text("x")
    found = [
        Path(path).relative_to(tmp_path / "in") for path, _ in folders.texts_below(f"{tmp_path}/in")
    ]
    assert found == [Path("000/00000.txt"), Path("a.txt")]
    (tmp_path / "in" / "b.WARC").write_bytes(b"WARC")
    with pytest.raises(DataError, match=r"in/b.WARC is none; name such files by a glob"):
        folders.files_of(str(tmp_path / "in"))


def test_a_dataset_that_selects_rows_is_refused(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "in", table_of(tiny.corpus(9)))
    assert len(folders.files_of(str(folder))) == 2
    state = json.loads((folder / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"it selects rows by indices, which flatten_indices\(\)"):
        folders.files_of(str(folder))


def test_the_rows_of_a_part_of_a_file_are_all_of_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_ROWS", 4)
    documents = tiny.corpus(40)
    parquet.write_table(table_of(documents), tmp_path / "a", row_group_size=10)
    write_file(tmp_path / "b", table_of(documents), 10)
    for name, packing in (("a", "parquet"), ("b", "arrow file")):
        pieces = list(tables.rows_of(str(tmp_path / name), packing, 1, 3, ["title"]))
        rows = [json.loads(line) for lines, _ in pieces for line in lines.splitlines()]
        assert [row["title"] for row in rows] == [each["title"] for each in documents[10:30]]
        shares = [share for _, share in pieces]
        assert len(shares) > 4 and shares == sorted(set(shares)) and shares[-1] == 1.0


def test_nulls_within_lists_and_maps_of_a_table_are_those_of_jsonl(tmp_path: Path) -> None:
    """Fields of structs that are null are missing ones, also in lists; other nulls stay."""
    text = pyarrow.string()
    json_map = pyarrow.map_(text, pyarrow.json_())
    storage = pyarrow.array([[("k", '{"a": [1]}'), ("n", None)], None], pyarrow.map_(text, text))
    table = pyarrow.table(
        {
            "structs": [[{"a": 1, "b": None}, {"a": None, "b": [None, {"c": None}]}], None],
            "maps": pyarrow.array([[[("x", 1), ("y", None)], None], []],
                                  pyarrow.list_(pyarrow.map_(text, pyarrow.int64()))),
            "json": storage.cast(json_map),
        }
    )  # fmt: skip
    (lines,) = [tables._lines(batch) for batch in table.to_batches()]
    assert [json.loads(line) for line in lines.splitlines()] == [
        {
            "structs": [{"a": 1}, {"b": [None, {}]}],
            "maps": [{"x": 1}, None],
            "json": {"k": {"a": [1]}},
        },
        {"structs": None, "maps": [], "json": None},
    ]


def test_texts_are_read_without_their_marks_and_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "BLOCK_BYTES", 10)
    contents = [b"\xef\xbb\xbfone", b"four", b"x" * 10, b"", b"last"]
    paths = []
    for number, content in enumerate(contents):
        paths.append(str(tmp_path / str(number)))
        Path(paths[-1]).write_bytes(content)
    found = list(folders.text_lines(paths, "text"))
    texts = [json.loads(line)["text"] for lines, _ in found for line in lines.splitlines()]
    assert texts == ["one", "four", "x" * 10, "", "last"]
    assert [size for _, size in found] == [10, 10, 4]
    Path(paths[3]).unlink()
    with pytest.raises(DataError, match=rf"^{paths[3]} cannot be read \(No such file"):
        list(folders.text_lines(paths, "text"))


def test_values_that_json_lacks_are_written_as_what_they_are(tmp_path: Path) -> None:
    text = pyarrow.string()
    pairs = [[("a", "1"), ("b", "2")]]
    kinds = [
        pyarrow.list_(pyarrow.map_(text, text)), pyarrow.large_list(pyarrow.map_(text, text)),
        pyarrow.list_(pyarrow.map_(text, text), 1),
    ]  # fmt: skip
    table = pyarrow.table(
        {
            "raw": pyarrow.array([b"abc"]),
            "price": pyarrow.array([decimal.Decimal("1.50")]),
            **{f"maps{n}": pyarrow.array([pairs], kind) for n, kind in enumerate(kinds)},
            "named": pyarrow.array(["x"]).dictionary_encode(),
        }
    )
    (lines,) = [tables._lines(batch) for batch in table.to_batches()]
    maps = [{"a": "1", "b": "2"}]
    assert json.loads(lines) == {
        "raw": {"bytes": 3}, "price": "1.50", "maps0": maps, "maps1": maps, "maps2": maps,
        "named": "x",
    }  # fmt: skip
