"""Files of strangers are read within bounds of size, depth and type, or refused in one sentence."""

import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megatron_ext.disk import reading
from megatron_ext.disk.reading import (
    MAX_DEPTH,
    UnreadableFile,
    is_count,
    is_too_deep,
    lines_of,
    parse_json,
    parse_yaml,
    read_bytes,
    read_json,
    read_json_object,
    read_text,
    read_yaml,
    row_of,
)

DEEP = 50_000
JSON_ATTACKS = {
    "deep lists": ("[" * DEEP, "nested more than 64 deep"),
    "deep objects": ('{"a":' * DEEP + "1" + "}" * DEEP, "nested more than 64 deep"),
    "deep but within Python's limit": ("[" * 90 + "]" * 90, "nested more than 64 deep"),
    "huge integer": ("1" + "0" * 4000, "integer of more than 128 bits"),
    "integer of a million digits": ("9" * 1_000_000, "no valid JSON"),
    "not a number": ("[NaN]", "NaN, which is no number"),
    "infinity": ('{"a": -Infinity}', "Infinity, which is no number"),
    "a number that overflows": ('{"a": [1e999]}', "a number that is not finite"),
    "key twice": ('{"seed": 1, "seed": 2}', "the key 'seed' twice"),
    "many small lists": ("[" + "[]," * 3_000_000 + "0]", "more than 5,000,000 values"),
    "key twice among many": (
        "{" + "".join(f'"{n}":0,' for n in range(300_000)) + '"299999":0}',
        "the key '299999' twice",
    ),
    "half a surrogate pair": ('{"a": "\\ud800"}', "half a surrogate pair"),
    "cut": ('{"a": [1, 2', "no valid JSON"),
    "empty": ("", "no valid JSON"),
    "not UTF-8": (b'{"a": "\xff"}', "not UTF-8 at byte 8"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
}
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML_ATTACKS = {
    "deep flow": ("[" * DEEP, "nested more than 64 deep"),
    "deep mappings": ("a: " + "{a: " * DEEP, "nested more than 64 deep"),
    "deep blocks": ("- " * DEEP + "x", "nested more than 64 deep"),
    "deep keys": ("? " * DEEP + "x", "nested more than 64 deep"),
    "aliases of aliases": (BOMB, "stands for more than"),
    "a value within itself": ("a: &a [*a]", "refers to no whole value"),
    "an alias of nothing": ("a: *b", "alias"),
    "deep by aliases": (
        "a: &a " + "[" * 40 + "]" * 40 + "\nb: " + "[" * 40 + "*a" + "]" * 40,
        "nested more than 64 deep",
    ),
    "object of Python": ("!!python/object/apply:os.system ['true']", "could not determine"),
    "number of base 60": (":".join(["1"] * 500_000), "number of 999,999 characters"),
    "hexadecimal number": ("0x" + "f" * 5000, "number of 5,002 characters"),
    "tagged number": ("!!int '" + "1:" * 5000 + "1'", "number of 10,001 characters"),
    "huge integer": ("a: " + "9" * 500, "integer of more than 128 bits"),
    "set": ("!!set {a, b}", "could not determine"),
    "ordered mapping": ("!!omap [a: 1]", "could not determine"),
    "one key as two numbers": ("1: a\n0x1: b", "the key '0x1' twice"),
    "one key as two words": ("true: a\nyes: b", "the key 'yes' twice"),
    "large keys": (f"{1 << 64}: a", "an integer of more than 64 bits as a key"),
    "tag without its value": ("a: !!bool x", "no valid YAML"),
    "empty number": ("a: !!int ''", "no valid YAML"),
    "date that is none": ("a: !!timestamp x", "no valid YAML"),
    "unhashable key": ("? [a]\n: b", "no valid YAML"),
    "key twice": ("seed: 1\nseed: 2", "the key 'seed' twice"),
    "key twice with a merge": ("b: &b {x: 1}\nc: {<<: *b, y: 1, y: 2}", "the key 'y' twice"),
    "control character": ("a: \x00", "no valid YAML"),
    "two documents": ("a: 1\n---\nb: 2\n", "no valid YAML in line 2"),
}


@pytest.mark.parametrize("name", JSON_ATTACKS)
def test_json_of_strangers_is_refused_with_its_file(name: str, tmp_path: Path) -> None:
    content, sentence = JSON_ATTACKS[name]
    path = tmp_path / "run_config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    begun = time.monotonic()
    with pytest.raises(UnreadableFile, match=sentence) as caught:
        read_json(path)
    assert str(caught.value).startswith(f"{path} cannot be used (")
    assert len(str(caught.value)) < 300 + len(str(path))
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("name", YAML_ATTACKS)
def test_yaml_of_strangers_is_refused_with_its_file(name: str, tmp_path: Path) -> None:
    content, sentence = YAML_ATTACKS[name]
    path = tmp_path / "config.yaml"
    path.write_text(content)
    begun = time.monotonic()
    with pytest.raises(UnreadableFile, match=sentence) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"{path} cannot be used (")
    assert time.monotonic() - begun < 10


def test_the_python_parser_of_yaml_has_the_same_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyYAML was built without libyaml, its own parser reads."""
    monkeypatch.delattr(yaml, "CSafeLoader")
    reading._loader.cache_clear()
    try:
        for name in ("deep flow", "aliases of aliases", "key twice", "object of Python"):
            content, sentence = YAML_ATTACKS[name]
            with pytest.raises(UnreadableFile, match=sentence):
                parse_yaml(content[:3000], "a.yaml")
        assert parse_yaml("a: &x [1]\nb: *x", "a.yaml") == {"a": [1], "b": [1]}
    finally:
        reading._loader.cache_clear()


def test_plain_files_are_read_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('\ufeff{"a": [1.5, -3, null, true, "ü"], "b": {}}')
    expected = {"a": [1.5, -3, None, True, "ü"], "b": {}}
    assert read_json(path) == read_json_object(path) == expected
    assert parse_json('{"limit": [0.0, Infinity]}', "x", not_finite=True)["limit"][1] > 1e308
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(deepest, "x") is not None
    assert parse_yaml(deepest, "x") is not None
    merged = "base: &base {lr: 1.0e-3, seed: 1}\nmine: {<<: *base, seed: 2}\nnot: '1:2'\n"
    assert parse_yaml(merged, "x") == yaml.safe_load(merged)
    assert parse_yaml("date: 2026-01-31", "x") == {"date": "2026-01-31"}
    long = "text: '" + "1" * 100_000 + "'\nother: " + "word " * 10_000
    assert parse_yaml(long, "x") == yaml.safe_load(long)
    assert parse_yaml("", "x") is None


def test_an_object_is_asked_for_by_name(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    for content, kind in (("[1]", "a list"), ("3", "a number"), ("null", "nothing")):
        path.write_text(content)
        with pytest.raises(UnreadableFile, match=f"holds {kind} instead of an object"):
            read_json_object(path)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


READERS: list[Callable[[Path], object]] = [
    read_bytes,
    read_text,
    read_json,
    read_yaml,
    lambda path: [*lines_of(path)],
]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("make", "kind"),
    [(_pipe, "a pipe"), (_device, "a device"), (Path.mkdir, "a folder")],
)
def test_no_reader_waits_for_a_pipe_or_reads_a_device(
    reader: Callable[[Path], object], make: Callable[[Path], None], kind: str, tmp_path: Path
) -> None:
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(UnreadableFile, match=rf"it is .*{kind.split()[-1]}.*not a regular file"):
        reader(tmp_path / "metrics.jsonl")


def test_the_pipe_of_a_shell_is_read(tmp_path: Path) -> None:
    """A shell gives `<(command)` as the name of a descriptor."""
    source, sink = os.pipe()
    os.write(sink, b"seed: 3\n")
    os.close(sink)
    try:
        assert read_yaml(f"/dev/fd/{source}") == {"seed": 3}
    finally:
        os.close(source)


def test_missing_and_forbidden_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile, match="No such file") as caught:
        read_json(tmp_path / "absent.json")
    assert caught.value.missing
    with pytest.raises(UnreadableFile, match="null"):
        read_json("a\0b")


def test_a_sparse_file_of_a_terabyte_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.touch()
    os.truncate(path, 1 << 40)
    tracemalloc.start()
    for reader in READERS:
        with pytest.raises(UnreadableFile, match="is larger than"):
            reader(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_line_that_is_too_long_is_passed_over_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "faults.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * (1 << 20) + b'\n{"a": 2}\n' + b"y" * 5000)
    assert [*lines_of(path, line_bytes=1000)] == [b'{"a": 1}\n', None, b'{"a": 2}\n', None]
    assert [*lines_of(path, line_bytes=9)] == [b'{"a": 1}\n', None, b'{"a": 2}\n', None]
    os.truncate(path, 1 << 30)
    tracemalloc.start()
    assert [*lines_of(path)][-1] is None
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "line",
    [b"", b"[1]", b"null", b"[" * 10**6, b'{"a":' * 500 + b"1" + b"}" * 500, b"\xff", b"{", None,
     b'{"a": 1' + b"0" * 400 + b"}", b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}"],
)  # fmt: skip
def test_a_line_that_is_no_row_is_none(line: bytes | None) -> None:
    assert row_of(line) is None


def test_a_row_may_have_bare_nans_of_old_files() -> None:
    row = row_of(b'{"kind": "train", "grad_norm": NaN}')
    assert row is not None and row["grad_norm"] != row["grad_norm"]


def test_limits_are_the_largest_that_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[12]\n")
    assert read_bytes(path, 5) == b"[12]\n" and [*lines_of(path, limit=5)] == [b"[12]\n"]
    for read in (lambda: read_bytes(path, 4), lambda: [*lines_of(path, limit=4)]):
        with pytest.raises(UnreadableFile, match="it is larger than 4 bytes"):
            read()
    deep = {"a": json.loads("[" * 61 + "7" + "]" * 61)}  # 7 lies 62 deep
    for depth, fits in ((64, True), (65, False)):
        text = "[" * (depth - 62) + json.dumps(deep) + "]" * (depth - 62)
        assert is_too_deep(json.loads(text)) is not fits
        for parse in (parse_json, parse_yaml):
            if fits:
                assert parse(text, "x") == json.loads(text)
            else:
                with pytest.raises(UnreadableFile, match="nested more than 64 deep"):
                    parse(text, "x")
    largest = 2**128 - 1
    for number in (largest, -largest):
        assert parse_json(f"[{number}]", "x") == [number]
        beyond = number + (1 if number > 0 else -1)
        with pytest.raises(UnreadableFile, match="integer of more than 128 bits"):
            parse_json(f"[{beyond}]", "x")
    for key in (2**63 - 1, 1 - 2**63):
        assert parse_yaml(f"{key}: a", "x") == {key: "a"}
        with pytest.raises(UnreadableFile, match="integer of more than 64 bits as a key"):
            parse_yaml(f"{key + (1 if key > 0 else -1)}: a", "x")


def test_counts_are_integers_from_zero_on() -> None:
    assert all(map(is_count, (0, 1, 2**53)))
    assert not any(map(is_count, (-1, 2**53 + 1, 1.0, True, False, "1", None)))
