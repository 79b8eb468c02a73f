"""Whatever a stranger's file holds, its reader passes over it or refuses it in one sentence."""

import json
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ext.errors import MegatronExtError
from tests.disk.readers import Reader, readers
from tests.disk.test_reading import BOMB

NAMES = (
    "manifest", "run_config", "progress", "tracker", "announcement", "run record", "wanted nodes",
    "ledger", "ledger's settings", "metrics", "faults", "config.yaml", "--config", "overlap",
    "schedule", "recipe", "config.json", "Wan's config.json", "text encoder", "index of tensors",
    "tensors", ".idx", "cached index", "video manifest", "marker of a part", "failure of a task",
    "documents", "clips", "register of clips", "prompts of videos", "prompts", "blend",
    "store of conversations", "GPU", "tokenizer.json", "tokenizer_config.json",
    "snapshot", ".metadata",
)  # fmt: skip
"""Names of all readers, so that collecting the tests makes none."""
SECONDS = 30.0
"""Most time of the processor that a content may take, the import of a library included."""


def check(name: str, content: bytes, folder: Path) -> str | None:
    """Let a reader read a content; return what it says, None if it says nothing."""
    reader = readers()[name]
    reader.prepare(folder)
    path = folder / reader.name
    path.write_bytes(content)
    begun = time.process_time()
    said = None
    try:
        reader.read(folder)
    except MegatronExtError as error:
        said = str(error)
        assert len(said) < 20_000
    assert time.process_time() - begun < SECONDS
    return said


def test_every_reader_is_tested() -> None:
    assert sorted(NAMES) == sorted(readers())


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_takes_a_whole_file(name: str, tmp_path: Path) -> None:
    """Else every attack below would be refused for another reason."""
    said = check(name, readers()[name].whole, tmp_path)
    if name == "store of conversations":
        assert said is not None  # it goes on to look at files that are not there
    else:
        assert said is None


DEEP = 50_000
ATTACKS: dict[str, bytes] = {
    "deep lists": b"[" * DEEP,
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep within an object": b'{"files": ' + b"[" * 900 + b"]" * 900 + b"}",
    "a list": b"[1, 2]",
    "a number": b"3",
    "nothing": b"null",
    "empty": b"",
    "no text": bytes(range(256)) * 20,
    "not a number": b'{"consumed_train_samples": NaN, "iteration": NaN, "version": NaN}',
    "huge numbers": b'{"consumed_train_samples": 1' + b"0" * 400 + b"}",
    "aliases": BOMB.encode(),
    "zeros": bytes(1 << 20),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", NAMES)
def test_an_attack_ends_in_a_sentence(name: str, attack: str, tmp_path: Path) -> None:
    said = check(name, ATTACKS[attack], tmp_path)
    # Where several flags are wrong, each has a sentence of its own.
    assert said is None or "\n" not in said or name in ("run_config", "--config")


IRREGULAR = [
    name
    for name in NAMES
    if name not in ("tensors", "recipe", "tokenizer.json", "snapshot", "documents", ".metadata")
]
"""Readers of files that a library does not open by itself, and that users do not make pipes of."""


@pytest.mark.parametrize("name", IRREGULAR)
def test_no_reader_waits_for_a_pipe(name: str, tmp_path: Path) -> None:
    reader = readers()[name]
    reader.prepare(tmp_path)
    os.mkfifo(tmp_path / reader.name)
    begun = time.process_time()
    try:
        reader.read(tmp_path)
    except MegatronExtError:
        pass
    assert time.process_time() - begun < SECONDS


PROGRESS_ATTACKS = {
    "consumed_train_samples": (-4, "must be a whole number from 0 on"),
    "iteration": (1.5, "must be a whole number from 0 on"),
    "skipped_iterations": (True, "must be a whole number from 0 on"),
    "best_checkpoints": ([[1]], "must be a list of checkpoints"),
    "recent_values": (["a"], "must be a list of lists of numbers"),
    "floating_point_operations": ("many", "must be a number"),
    "data_order": ([], "must be an object"),
}


@pytest.mark.parametrize("name", PROGRESS_ATTACKS)
def test_a_counter_has_its_type_and_sign(name: str, tmp_path: Path) -> None:
    value, sentence = PROGRESS_ATTACKS[name]
    whole = json.loads(readers()["progress"].whole)
    said = check("progress", json.dumps({**whole, name: value}).encode(), tmp_path)
    assert said is not None and f"progress.json is damaged (`{name}` is " in said
    assert sentence in said


MANIFESTS = {
    "version 99": ({"version": 99, "files": {}}, "the version 99, but 1, 2 and 3 are read here"),
    "files in a list": ({"version": 1, "files": []}, "`files` is a list instead of an object"),
    "negative size": (
        {"version": 1, "files": {"a": {"bytes": -1, "blake2b": ""}}},
        "gives no size and checksum of 'a'",
    ),
    "no checksum": ({"files": {"a": {"bytes": 1}}}, "gives no size and checksum of 'a'"),
    "another folder": (
        {"version": 1, "files": {"../a": {"bytes": 1, "blake2b": ""}}},
        "names ../a, which does not lie in this folder",
    ),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_lists_files_with_their_sizes(name: str, tmp_path: Path) -> None:
    content, sentence = MANIFESTS[name]
    said = check("manifest", json.dumps(content).encode(), tmp_path)
    assert said is not None and sentence in said


ORDERS: dict[str, tuple[str, Any]] = {
    "weight that fills the memory": ("stages", [{"start": 0, "seq_length": 8,
                                                 "weights": {"a": "1e999999999"}}]),
    "division by nothing": ("stages", [{"start": 0, "seq_length": 8, "weights": {"a": "1/0"}}]),
    "no stage": ("stages", []),
    "no window": ("window", 0),
    "tokens in a list": ("tokens", ["a"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_of_samples_is_of_its_form(name: str, tmp_path: Path) -> None:
    field, value = ORDERS[name]
    whole = json.loads(readers()["progress"].whole)
    order = {**whole["data_order"], field: value}
    said = check("progress", json.dumps({**whole, "data_order": order}).encode(), tmp_path)
    assert said is not None and "holds a damaged order of samples" in said


def _changes(content: Any) -> st.SearchStrategy[Any]:
    """Draw a JSON value with one of its parts replaced, removed or repeated."""
    plain = st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=9),
        st.just([]), st.just({}), st.just([[1]]), st.just({"a": {}}), st.just("../a"),
    )  # fmt: skip
    if isinstance(content, dict) and content:
        keys = st.sampled_from(sorted(content))
        inner = keys.flatmap(
            lambda key: st.one_of(
                _changes(content[key]).map(lambda value: {**content, key: value}),
                st.just({k: v for k, v in content.items() if k != key}),
            )
        )
        return st.one_of(inner, inner, inner, plain)
    if isinstance(content, list) and content:
        places = st.integers(0, len(content) - 1)
        inner = places.flatmap(
            lambda at: _changes(content[at]).map(lambda x: [*content[:at], x, *content[at + 1 :]])
        )
        return st.one_of(inner, inner, st.just(content * 2), plain)
    return plain


def _contents(reader: Reader) -> st.SearchStrategy[bytes]:
    """Draw contents near a whole file: bytes changed, cut or put in, and values replaced."""
    whole = reader.whole
    places = st.integers(0, len(whole))
    drawn = [
        st.tuples(places, places, st.binary(max_size=6)).map(
            lambda x: whole[: x[0]] + x[2] + whole[max(x[0], x[1]) :]
        ),
        st.tuples(places, st.binary(min_size=1, max_size=6)).map(
            lambda x: whole[: x[0]] + x[1] + whole[x[0] + len(x[1]) :]
        ),
        st.binary(max_size=40),
    ]
    if len(whole) < 100_000:
        lines = whole.split(b"\n") if reader.name.endswith("jsonl") else [whole]
        try:
            parsed = [json.loads(line) for line in lines if line.strip()]
        except ValueError:
            return st.one_of(drawn)
        changed = (
            _changes(parsed)
            .filter(lambda x: isinstance(x, list))
            .map(lambda x: b"\n".join(json.dumps(row).encode() for row in x))
        )
        drawn += [changed, changed, changed]
    return st.one_of(drawn)


def _fuzz(name: str, count: int) -> None:
    reader = readers()[name]

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(_contents(reader))
    def run(content: bytes) -> None:
        with TemporaryDirectory() as folder:
            check(name, content, Path(folder))

    run()


@pytest.mark.parametrize("name", NAMES)
def test_only_sentences_leave_a_reader(name: str) -> None:
    _fuzz(name, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_only_sentences_leave_a_reader_at_length(name: str) -> None:
    _fuzz(name, 200)
