"""Files of conversations to stores, by the command line, against tokenizing row by row."""

import datetime
import gzip
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from megatron_ext.config.run import RunConfig
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.preprocess.cli import main
from megatron_ext.text.preprocess.encode import BadLine
from megatron_ext.text.preprocess.inputs import Part, blocks
from megatron_ext.text.sft import chat as chat_module
from megatron_ext.text.sft import preprocess as preprocess_module
from megatron_ext.text.sft import store as store_module
from megatron_ext.text.sft.chat import Chat, build_chat, key_of, with_date, with_known_date
from megatron_ext.text.sft.conversation import Place, read_conversation
from megatron_ext.text.sft.intake import Intake
from megatron_ext.text.sft.masks import TokenizedConversation, tokenize_conversation
from megatron_ext.text.sft.preprocess import (
    ConversationEncoder,
    chat_notes,
    open_stores,
    with_date_of_stores,
)
from megatron_ext.text.sft.store import (
    SftStore,
    about_path,
    is_part_of_store,
    merge_stores,
    store_prefixes,
)
from megatron_ext.text.tokenizers import TokenizerConfig, build_tokenizer
from tests.text.sft import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tokenizer"))


def preprocess(folder: Path, *words: Any) -> int:
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    return main(["--sft", *kind, *map(str, words)])


def check_pair(store: SftStore, rows: list[dict[str, Any]]) -> None:
    assert len(store) == len(rows)
    tokenizer = tiny.tokenizer("chatml")
    for number, row in enumerate(rows):
        wanted = tokenize_conversation(tokenizer, read_conversation(row, Place("f", number)))
        ids, mask = store.conversation(number)
        assert ids.tolist() == wanted.ids
        assert mask.tolist() == wanted.mask
        assert 0 < sum(wanted.mask) < len(wanted.mask)


@pytest.mark.parametrize("workers", [1, 3])
def test_files_of_every_kind_keep_their_order(workers: int, folder: Path, tmp_path: Path) -> None:
    rows = tiny.chats(40)
    plain = tiny.write_jsonl(tmp_path / "a.jsonl", rows[:20])
    packed, other, table = (tmp_path / name for name in ("b.jsonl.gz", "c.jsonl.zst", "d.parquet"))
    packed.write_bytes(gzip.compress(tiny.write_jsonl(tmp_path / "b", rows[20:25]).read_bytes()))
    text = tiny.write_jsonl(tmp_path / "c", rows[25:30]).read_bytes()
    other.write_bytes(zstandard.compress(text))
    parquet.write_table(pyarrow.Table.from_pylist(rows[30:]), table)
    words = ["--part-megabytes", 0.001, "--workers", workers]
    prefix = tmp_path / "out"
    inputs = ["--input", plain, packed, other, table]
    assert preprocess(folder, *inputs, "--output-prefix", prefix, *words) == 0
    store = SftStore(str(prefix))
    check_pair(store, rows)
    sources = [Path(store.source_of(number)[0]).name for number in (0, 19, 20, 25, 30, 39)]
    assert sources == ["a.jsonl"] * 2 + ["b.jsonl.gz", "c.jsonl.zst"] + ["d.parquet"] * 2
    assert not list(tmp_path.glob("*.parts"))


def test_tools_of_a_parquet_file_have_no_keys_of_other_rows(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "x", "args": {"a": 1}}], "tools": None},
        {"messages": [{"role": "user", "content": "y", "args": {"b": [2]}}], "tools": "[]"},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "f.parquet")
    path = str(tmp_path / "f.parquet")
    pieces = list(blocks(Part(path, path, 0, 1, "parquet", os.path.getsize(path))))
    lines = b"".join(piece for piece, _ in pieces).splitlines()
    assert [json.loads(line) for line in lines] == rows
    assert sum(read for _, read in pieces) == (tmp_path / "f.parquet").stat().st_size


CALL = {"name": "w", "arguments": {"city": "Oslo", "to": None, "days": [1, None]}}
CALLED = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "y"},
    {"role": "assistant", "content": "z"},
]
SCHEMAS = [{"name": "w", "parameters": {"city": {"type": "string", "default": None}}}]


def table(path: Path, column: pyarrow.Array, tools: pyarrow.Array) -> Path:
    made = pyarrow.table({"messages": column, "tools": tools})
    if path.suffix == ".parquet":
        parquet.write_table(made, path)
    else:
        with pyarrow.ipc.new_stream(path, made.schema) as writer:
            writer.write_table(made)
    return path


def as_json(value: Any) -> pyarrow.Array:
    return pyarrow.array([json.dumps(value)], pyarrow.string()).cast(pyarrow.json_())


def test_json_columns_and_maps_of_tables_are_what_jsonl_holds(tmp_path: Path) -> None:
    """The datasets library writes objects of unlike keys, in parquet and saved to disk."""
    folder = tiny.save(tmp_path / "tokenizer", "hermes")
    list_of_json = pyarrow.ExtensionArray.from_storage
    items = pyarrow.array([json.dumps(message) for message in CALLED], pyarrow.string())
    column = pyarrow.ListArray.from_arrays([0, 4], list_of_json(pyarrow.json_(), items))
    text = pyarrow.array([json.dumps(CALLED)])
    strings = pyarrow.map_(pyarrow.string(), pyarrow.string())
    kind = pyarrow.struct(
        [("name", pyarrow.string()), ("parameters", pyarrow.map_(pyarrow.string(), strings))]
    )
    pairs = [{"name": "w", "parameters": [("city", [("type", "string"), ("default", None)])]}]
    maps = pyarrow.array([pairs], pyarrow.list_(kind))
    row = {"messages": CALLED, "tools": SCHEMAS}
    inputs = [tiny.write_jsonl(tmp_path / "a.jsonl", [row])]
    for ending in ("parquet", "arrow"):
        for number, columns in enumerate(
            [(column, as_json(SCHEMAS)), (as_json(CALLED), maps), (text, as_json(SCHEMAS))]
        ):
            inputs.append(table(tmp_path / f"{number}.{ending}", *columns))
    words = ["--input", *inputs, "--output-prefix", tmp_path / "o"]
    assert preprocess(folder, *words) == 0
    store = SftStore(str(tmp_path / "o"))
    assert len(store) == 7
    first = store.conversation(0)
    shown = tiny.tokenizer("hermes").decode(first[0].tolist())
    assert '"arguments": {"city": "Oslo", "days": [1, null]}' in shown
    assert '"parameters": {"city": {"type": "string"}}' in shown
    for number in range(1, 7):
        for mine, theirs in zip(store.conversation(number), first, strict=True):
            assert mine.tolist() == theirs.tolist()


def test_a_json_column_that_holds_none_is_refused(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    storage = pyarrow.array(["{"], pyarrow.string())
    bad = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), storage)
    path = table(tmp_path / "f.parquet", bad, pyarrow.array(["[]"]))
    assert preprocess(folder, "--input", path, "--output-prefix", tmp_path / "o") == 1
    assert "f.parquet line 1 is not valid JSON" in capfd.readouterr().err


def test_what_trains_nothing_is_dropped_and_the_report_is_stored(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = tiny.chats(3)
    masked = [{**message, "weight": 0} for message in rows[1]["messages"]]
    path = tiny.write_jsonl(tmp_path / "f.jsonl", [rows[0], {"messages": masked, "id": 3}, rows[2]])
    words = ["--output-prefix", tmp_path / "o", "--input"]
    assert preprocess(folder, *words, path) == 0
    said = capfd.readouterr().err
    assert "the input: 3 rows, " in said and "2 conversations, " in said
    assert "dropped: conversations without a trained token, by their loss masks (1)" in said
    assert "column `id` (1)" in said
    store = SftStore(str(tmp_path / "o"))
    check_pair(store, [rows[0], rows[2]])
    assert store.intake is not None and store.intake.ignored == {"column `id`": 1}
    trained = sum(int(store.conversation(number)[1].sum()) for number in range(2))
    assert store.intake.counts["trained tokens"] == trained
    assert preprocess(folder, *words, tiny.write_jsonl(path, [{"messages": masked}])) == 1
    assert "f.jsonl holds no conversation with a trained token (1 rows," in capfd.readouterr().err


DATED = "{{ strftime_now('%d %b %Y') }}" + (tiny.TEMPLATES / "chatml.jinja").read_text("utf-8")


def test_a_run_keeps_the_date_of_its_stores(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text(DATED)
    settings = TokenizerConfig("HuggingFaceTokenizer", str(folder))

    def chat_on(day: str, given: str | None = None, **more: Any) -> Chat:
        class Clock(datetime.date):
            @classmethod
            def today(cls) -> "Clock":
                return cls.fromisoformat(day)

        monkeypatch.setattr(datetime, "date", Clock)
        sft = SftConfig(sft=True, sft_chat_template=str(template), sft_date=given, **more)
        return build_chat(build_tokenizer(settings), settings, sft)

    path = str(tiny.write_jsonl(tmp_path / "f.jsonl", tiny.chats(2)))

    def text_of(chat: Chat) -> str:
        chat = with_date_of_stores(chat, [path], None)
        (store,) = open_stores("--data-path", [path], chat=chat, cache=None, vocab_size=1000)
        assert store.about["date"] == chat.date
        ids = store.conversation(0)[0].tolist()
        return str(tiny.tokenizer("chatml").decode(ids))[:11]

    assert text_of(chat_on("2026-03-09")) == "09 Mar 2026"
    # The next day continues with the same texts, unless another day is asked for.
    assert text_of(chat_on("2026-03-10")) == "09 Mar 2026"
    assert text_of(chat_on("2026-03-10", "2024-07-26")) == "26 Jul 2024"
    # Of several dates that the stores have, the latest counts.
    assert text_of(chat_on("2026-03-11")) == "09 Mar 2026"
    # Those of stores with other settings do not count, however late they are.
    later = chat_on("2026-04-01", sft_tool_arguments="string")
    open_stores("--data-path", [path], chat=later, cache=None, vocab_size=1000)
    assert text_of(chat_on("2026-04-02")) == "09 Mar 2026"
    old = open_stores("--data-path", [path], chat=chat_on("2026-03-09"), cache=None, vocab_size=999)
    with pytest.raises(
        DataError, match=r"the date 2026-03-09, but `--sft-date` \(2024-07-26\) is an"
    ):
        old[0].check(chat_on("2026-03-10", "2024-07-26").identity, 1000, date_is_given=True)


def test_a_template_without_a_date_has_none_in_its_identity(folder: Path) -> None:
    settings = TokenizerConfig("HuggingFaceTokenizer", str(folder))
    for given in (None, "2024-07-26"):
        sft = SftConfig(sft=True, sft_date=given, sft_template_kwargs='{"a": 1}')
        chat = build_chat(build_tokenizer(settings), settings, sft)
        assert "date" not in chat.identity and chat.unread == ("a",)
        notes = chat_notes(chat)
        assert notes[-1] == "`--sft-template-kwargs` (a): the chat template reads no such name"
        assert len(notes) == 1 + (given is not None)


def test_a_store_of_an_earlier_version_is_made_again(
    run: tuple[RunConfig, Chat], tmp_path: Path
) -> None:
    path = tiny.write_jsonl(tmp_path / "f.jsonl", tiny.chats(3))
    (store,), _ = opened(run, path)
    about = json.loads(about_path(store.prefix).read_bytes())
    del about["intake"]
    about_path(store.prefix).write_text(json.dumps(about))
    (again,), said = opened(run, path)
    assert again.intake is not None and said == [f"> tokenizing {path} into {tmp_path / 'cache'}"]


def test_files_of_no_use(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f.parquet").write_bytes(b"PAR1 and no more")
    assert preprocess(folder, "--input", tmp_path / "f.parquet", "--output-prefix", "o") == 1
    assert "f.parquet is not a whole parquet file (" in capfd.readouterr().err
    (tmp_path / "f.jsonl").write_text("")
    words = ["--input", tmp_path / "f.jsonl", "--output-prefix", tmp_path / "o"]
    assert preprocess(folder, *words) == 1
    assert "f.jsonl holds no conversation; give files that do." in capfd.readouterr().err


def messages(*texts: str) -> str:
    turns = zip(("user", "assistant"), texts, strict=False)
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]})


BAD = [
    ("{", "is not valid JSON (unexpected end of data: line 1 column 2 (char 1))"),
    ("[]", "is not a JSON object"),
    ("", "is blank"),
    ('{"text": "x"}', "is refused: `messages` is not a column of this row (it has text); na"),
    (messages("x"), "is refused: `messages` has no message of role assist"),
    (
        messages("x", "y").replace('"content": "y"', '"content": "z", "content": "y"'),
        "has the key 'content' twice in one object",
    ),
    (messages("\ud800", "x"), "is refused: `messages[0].content` holds half a surrogate pair, wh"),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_a_bad_row_stops_the_run_or_is_set_aside(
    line: str, reason: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = tiny.chats(9)
    path = tiny.write_jsonl(tmp_path / "f.jsonl", rows)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], line, *lines[4:]]) + "\n")
    words = ["--input", path, "--output-prefix", tmp_path / "o", "--part-megabytes", 0.0005]
    assert preprocess(folder, *words) == 1
    assert f"f.jsonl line 5 {reason}" in capfd.readouterr().err
    assert not about_path(tmp_path / "o").exists()
    assert preprocess(folder, *words, "--on-bad-line", "quarantine", "--workers", 2) == 0
    check_pair(SftStore(str(tmp_path / "o")), rows)
    rejected = json.loads((tmp_path / "o.rejected.jsonl").read_text())
    assert rejected["line"] == 5
    assert rejected["text"] == line
    assert rejected["reason"].startswith(reason)


def test_other_columns_and_template(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ mark }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    path = tiny.write_jsonl(tmp_path / "f.jsonl", [{"q": "xy", "r": "zzz"}])
    words = "--sft-row-format prompt-response --sft-prompt-key q --sft-response-key r".split()
    kwargs = ["--sft-chat-template", template, "--sft-template-kwargs", '{"mark": "!"}']
    files = ["--input", path, "--output-prefix", tmp_path / "o"]
    assert preprocess(folder, *files, *words, *kwargs) == 0
    ids, mask = SftStore(str(tmp_path / "o")).conversation(0)
    assert tiny.tokenizer("chatml").decode(ids.tolist()) == "uxy!azzz!"
    assert mask.tolist() == [0] * 5 + [1] * 4


def test_an_integer_of_more_than_64_bits_stays_exact(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role[0] }}{{ m.number }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    row = json.loads(messages("x", "y"))
    row["messages"][0]["number"] = 2**70 + 1
    path = tiny.write_jsonl(tmp_path / "f.jsonl", [row])
    files = ["--input", path, "--output-prefix", tmp_path / "o"]
    assert preprocess(folder, *files, "--sft-chat-template", template) == 0
    ids, _ = SftStore(str(tmp_path / "o")).conversation(0)
    assert tiny.tokenizer("chatml").decode(ids.tolist()) == "u1180591620717411303425xay"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--append-eod", "`--append-eod` does not go with `--sft`: the chat template ends"),
        ("--partitions 2", "`--partitions` does not go with `--sft`: all conversations"),
        ("--json-keys a", "`--json-keys` does not go with `--sft`, whose columns have flags"),
        ("--engine native", "`--engine` does not go with `--sft`: the chat template"),
        (
            "--sft-date 26.7.2024",
            "`--sft-date` (26.7.2024) must be a day as YYYY-MM-DD; use 2024-07",
        ),
        ("--sft-template-kwargs 3", "`--sft-template-kwargs` (3) must be a JSON object; use"),
    ],
)
def test_flags_without_a_meaning_are_refused(
    words: str, sentence: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert preprocess(folder, "--input", "f", "--output-prefix", "o", *words.split()) == 2
    assert sentence in capfd.readouterr().err


def test_flags_of_conversations_need_sft(capfd: pytest.CaptureFixture[str]) -> None:
    words = "--input f --output-prefix o --tokenizer-type NullTokenizer --sft-tools-key t".split()
    assert main(words) == 2
    sentence = "`--sft-tools-key` has an effect only with `--sft`; add it, or leave this out."
    assert sentence in capfd.readouterr().err


@pytest.fixture
def store(folder: Path, tmp_path: Path) -> SftStore:
    path = tiny.write_jsonl(tmp_path / "f.jsonl", tiny.chats(5))
    assert preprocess(folder, "--input", path, "--output-prefix", tmp_path / "o") == 0
    return SftStore(str(tmp_path / "o"))


def identity(folder: Path, **flags: Any) -> dict[str, Any]:
    settings = TokenizerConfig("HuggingFaceTokenizer", str(folder))
    return build_chat(build_tokenizer(settings), settings, SftConfig(sft=True, **flags)).identity


def test_stores_know_tokenizer_and_template(store: SftStore, folder: Path, tmp_path: Path) -> None:
    store.check(identity(folder), 1000)
    store.check(identity(tiny.save(tmp_path / "moved")), 1000)
    with pytest.raises(DataError, match="o_sft.json was made with another tokenizer than this run"):
        store.check(identity(tiny.save(tmp_path / "hermes", "hermes")), 1000)
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    with pytest.raises(DataError, match="with another template than this run's; give the one of"):
        store.check(identity(folder, sft_chat_template=str(template)), 1000)
    with pytest.raises(DataError, match=r"`--sft-template-kwargs` \(\{\}\), but this run has"):
        store.check(identity(folder, sft_template_kwargs='{"a": 1}'), 1000)
    with pytest.raises(DataError, match=r"holds the token id \d+, but the vocabulary has 9 entr"):
        store.check(identity(folder), 9)


def test_a_store_that_is_not_whole_is_refused(store: SftStore) -> None:
    prefix = store.prefix
    about = json.loads(about_path(prefix).read_bytes())
    about_path(prefix).write_text(json.dumps({**about, "format": 9}))
    with pytest.raises(DataError, match="has format 9, but 1 is read here; make it with tools/"):
        SftStore(prefix)
    about_path(prefix).write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        SftStore(prefix)
    about_path(prefix).unlink()
    with pytest.raises(DataError, match="does not exist, so the store is not whole; make it"):
        SftStore(prefix)


def test_masks_of_other_conversations_are_refused(store: SftStore, tmp_path: Path) -> None:
    for kind in ("bin", "idx"):
        other = Path(f"{store.prefix}_sft_document.{kind}").read_bytes()
        Path(f"{store.prefix}_sft_mask.{kind}").write_bytes(other)
    index = Path(f"{store.prefix}_sft_mask.idx")
    lengths = np.frombuffer(index.read_bytes(), "<i4", 5, 34).copy()
    lengths[:2] += [1, -1]
    raw = bytearray(index.read_bytes())
    raw[34 : 34 + 20] = lengths.tobytes()
    raw[62:70] = (int(lengths[0]) * 2).to_bytes(8, "little")
    index.write_bytes(raw)
    with pytest.raises(DataError, match="do not hold the same conversations; make both again"):
        SftStore(store.prefix)


def test_tokenizers_without_templates_are_refused(tmp_path: Path) -> None:
    settings = TokenizerConfig("NullTokenizer", vocab_size=9)
    with pytest.raises(ConfigError, match=r"`--tokenizer-type` \(NullTokenizer\) has no chat temp"):
        build_chat(build_tokenizer(settings), settings, SftConfig(sft=True))
    folder = tiny.save(tmp_path / "t")
    for path in folder.glob("chat_template*"):
        path.unlink()
    settings = TokenizerConfig("HuggingFaceTokenizer", str(folder))
    with pytest.raises(ConfigError, match="has no chat template, so conversations cannot be tok"):
        build_chat(build_tokenizer(settings), settings, SftConfig(sft=True))
    missing = SftConfig(sft=True, sft_chat_template="none")
    with pytest.raises(DataError, match=r"`--sft-chat-template` \(none\) cannot be read"):
        build_chat(build_tokenizer(settings), settings, missing)


def test_further_special_tokens_have_the_ids_of_the_trainer(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "t")
    special = {"tokenizer_special_tokens": ["<|one|>", "<|two|>"]}
    settings = TokenizerConfig("HuggingFaceTokenizer", str(folder), **special)
    tokenizer = build_tokenizer(settings)
    chat = build_chat(tokenizer, settings, SftConfig(sft=True))
    asked, answer = {"role": "user", "content": "<|two|>"}, {"role": "assistant", "content": "x"}
    row = {"messages": [asked, answer]}
    ids = tokenize_conversation(chat.tokenizer, read_conversation(row, Place("f", 1))).ids
    assert tokenizer.vocab_size - 1 in ids
    assert tokenizer.tokenize("<|two|>") == [tokenizer.vocab_size - 1]


FORK = multiprocessing.get_context("fork")


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunConfig, Chat]:
    tokenizer = TokenizerConfig("HuggingFaceTokenizer", str(tiny.save(tmp_path / "tokenizer")))
    config = RunConfig(sections=(DataConfig(), SftConfig(sft=True), tokenizer))
    return config, build_chat(build_tokenizer(tokenizer), tokenizer, config.section(SftConfig))


def opened(run: tuple[RunConfig, Chat], *names: Any, said: list[str] | None = None) -> Any:
    """Return the stores of files, and what was said."""
    (config, chat), said = run, [] if said is None else said
    how = {"chat": chat, "cache": config.section(DataConfig).data_cache_path, "say": said.append}
    found = [str(name) for name in names]
    return open_stores("--data-path", found, vocab_size=chat.vocab_size, **how), said


def test_unchanged_files_are_tokenized_once(run: tuple[RunConfig, Chat], tmp_path: Path) -> None:
    one = tiny.write_jsonl(tmp_path / "one.jsonl", tiny.chats(3))
    two = tiny.write_jsonl(tmp_path / "two.jsonl", tiny.chats(4))
    stores, said = opened(run, one, two)
    assert [len(store) for store in stores] == [3, 4]
    cache = tmp_path / "cache"
    assert said == [f"> tokenizing {path} into {cache}" for path in (one, two)]
    again, said = opened(run, two, one, stores[0].prefix)
    assert [len(store) for store in again] == [4, 3, 3]
    assert said == []
    tiny.write_jsonl(two, tiny.chats(5))
    assert [len(store) for store in opened(run, two)[0]] == [5]
    kinds = {"".join(path.suffixes[-1:]) for path in cache.iterdir()}
    assert kinds <= {".bin", ".idx", ".json", ".lock"}


def test_a_dataset_saved_to_disk_is_a_file_too(run: tuple[RunConfig, Chat], tmp_path: Path) -> None:
    rows = tiny.chats(3)
    folder = tmp_path / "saved"
    folder.mkdir()
    made = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(folder / "data.arrow", made.schema) as writer:
        writer.write_table(made)
    state = {"_data_files": [{"filename": "data.arrow"}], "_indices_data_files": None}
    (folder / "state.json").write_text(json.dumps(state))
    (store,), _ = opened(run, folder)
    check_pair(store, rows)


def test_other_options_make_another_store(run: tuple[RunConfig, Chat], tmp_path: Path) -> None:
    path = tiny.write_jsonl(tmp_path / "f.jsonl", tiny.chats(3))
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if "
                        "add_generation_prompt %}a{% endif %}")  # fmt: skip
    config, _ = run
    settings = config.section(TokenizerConfig)
    sft = SftConfig(sft=True, sft_chat_template=str(template))
    chat = build_chat(build_tokenizer(settings), settings, sft)
    first, second = opened(run, path)[0][0], opened((config, chat), path)[0][0]
    assert first.prefix != second.prefix
    assert first.num_tokens > second.num_tokens


def test_the_cache_lies_where_it_is_asked_for(run: tuple[RunConfig, Chat], tmp_path: Path) -> None:
    path = tiny.write_jsonl(tmp_path / "f.jsonl", tiny.chats(3))

    def cached_in(folder: Path) -> SftStore:
        config = run[0].with_section(DataConfig(data_cache_path=str(folder)))
        (store,), _ = opened((config, run[1]), path)
        return store

    assert Path(cached_in(tmp_path / "a" / "b").prefix).parent == tmp_path / "a" / "b"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/c\) cannot be written \(Not a directory\); give"):
        cached_in(tmp_path / "file" / "c")


def _open_and_count(run: tuple[RunConfig, Chat], path: Path, results: Any) -> None:
    stores, said = opened(run, path)
    results.put((len(stores[0]), sum(line.startswith("> tokenizing") for line in said)))


def test_one_of_several_processes_tokenizes(run: tuple[RunConfig, Chat], tmp_path: Path) -> None:
    path = tiny.write_jsonl(tmp_path / "f.jsonl", tiny.chats(200))
    results = FORK.Queue()
    processes = [FORK.Process(target=_open_and_count, args=(run, path, results)) for _ in range(4)]
    for process in processes:
        process.start()
    counts = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert [count for count, _ in counts] == [200] * 4
    assert sum(worked for _, worked in counts) == 1


def test_a_killed_run_leaves_nothing_half_valid(
    run: tuple[RunConfig, Chat], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.write_jsonl(tmp_path / "f.jsonl", tiny.chats(20))
    real = ConversationEncoder.encode

    def slow(*arguments: Any) -> int:
        time.sleep(30)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ConversationEncoder, "encode", slow)
        process = FORK.Process(target=_open_and_count, args=(run, path, FORK.Queue()))
        process.start()
        end = time.monotonic() + 30
        while not list((tmp_path / "cache").glob("*.parts/p*")) and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    assert list((tmp_path / "cache").glob("*.parts/p*"))
    assert not list((tmp_path / "cache").glob("*.idx"))
    (store,), said = opened(run, path)
    assert len(store) == 20
    assert said[0].startswith("> tokenizing")
    assert not list((tmp_path / "cache").glob("*.parts"))


def test_a_bad_row_is_shown_by_the_rank_that_found_it(
    run: tuple[RunConfig, Chat], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.write_jsonl(tmp_path / "f.jsonl", [*tiny.chats(3), {"text": "x"}])
    said: list[str] = []
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(DataError, match=r"f.jsonl line 4 is refused: `messages` is not a column"):
        opened(run, path, said=said)
    assert said[-1].startswith("error: ")
    assert "f.jsonl line 4 is refused" in said[-1]


def test_a_first_token_is_never_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [
        TokenizedConversation([1, 2, 3], [1, 0, 0]),
        TokenizedConversation([4, 5], [1, 1]),
        TokenizedConversation([6, 7, 8], [0, 0, 1]),
        TokenizedConversation([9, 9], [0, 0]),
    ]
    monkeypatch.setattr(ConversationEncoder, "tokenize", lambda *_: (list(samples), Intake()))
    written: dict[int, list[int]] = {}
    counts: list[Any] = []

    def write(key: int, stream: int, encoded: Any) -> None:
        assert encoded.lengths.tolist() == [2, 3] and encoded.documents.tolist() == [1, 1]
        written[key] = encoded.tokens.tolist()

    encoder = ConversationEncoder(None)  # type: ignore[arg-type]
    assert encoder.encode([b"{}"], 0, lambda *_: None, write, counts.append) == 2
    assert written == {0: [4, 5, 6, 7, 8], 1: [1, 1, 0, 0, 1]}
    assert counts[0]["counts"] == {"conversations": 2, "tokens": 5, "trained tokens": 2}
    assert list(counts[0]["dropped"].values()) == [2]


@pytest.mark.parametrize("length", [1, 2])
def test_a_conversation_has_at_least_two_tokens(
    length: int, run: tuple[RunConfig, Chat], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = TokenizedConversation([5] * length, [1] * length)
    longer = TokenizedConversation([5, 6, 7], [0, 1, 1])
    monkeypatch.setattr(preprocess_module, "tokenize_samples", lambda *_: [longer, tokens])
    line = json.dumps(tiny.chats(1)[0]).encode()
    if length == 1:
        with pytest.raises(BadLine, match="gives 1 tokens, but at least 2 are needed"):
            ConversationEncoder(run[1]).tokenize(line, 0)
    else:
        assert ConversationEncoder(run[1]).tokenize(line, 0)[0] == [longer, tokens]


def test_a_store_that_is_being_replaced_is_not_whole(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--output-prefix", tmp_path / "o", "--input"]
    path = tiny.write_jsonl(tmp_path / "f.jsonl", tiny.chats(3))
    assert preprocess(folder, *words, path) == 0

    def full(*_: Any, **__: Any) -> None:
        raise DataError("The disk is full.")

    monkeypatch.setattr(preprocess_module, "publish_job", full)
    assert preprocess(folder, *words, tiny.write_jsonl(path, tiny.chats(4))) == 1
    with pytest.raises(DataError, match="does not exist, so the store is not whole"):
        SftStore(str(tmp_path / "o"))


def test_everything_that_determines_tokens_is_in_the_identity(folder: Path) -> None:
    """Other options, such as those of lengths and batches, are not."""
    plain = identity(folder)
    alike: list[dict[str, Any]] = [
        {"sft_max_length": 9}, {"sft_truncation": "left"}, {"sft_batching": "padded"},
        {"sft_date": "2024-07-26"},
    ]  # fmt: skip
    assert all(identity(folder, **flags) == plain for flags in alike)
    others: list[dict[str, Any]] = [
        {"sft_on_mismatch": "realign"}, {"sft_messages_key": "m"}, {"sft_tools_key": "t"},
        {"sft_system_key": "s"}, {"sft_enable_thinking_key": "e"}, {"sft_row_format": "sharegpt"},
        {"sft_row_format": "sharegpt", "sft_conversations_key": "c"},
        {"sft_row_format": "alpaca"}, {"sft_row_format": "alpaca", "sft_input_key": "i"},
        {"sft_row_format": "alpaca", "sft_history_key": "h"},
        {"sft_row_format": "prompt-response"},
        {"sft_row_format": "prompt-response", "sft_prompt_key": "p"},
        {"sft_row_format": "prompt-response", "sft_response_key": "r"},
        {"sft_split_turns": True}, {"sft_tool_arguments": "string"}, {"sft_on_unrendered": "note"},
        {"sft_template_kwargs": '{"a": 1}'},
    ]  # fmt: skip
    keys = {key_of(identity(folder, **flags)) for flags in [{}, *others]}
    assert len(keys) == 1 + len(others)


def test_a_model_writes_the_date_of_its_training_or_today() -> None:
    dated = tiny.tokenizer("chatml", template=DATED)
    for trained, wanted in (
        ("2024-07-26", "26 Jul 2024"),
        (None, f"{datetime.date.today():%d %b %Y}"),
    ):
        made, sentence = with_known_date(dated, trained)
        text = made.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
        assert text.startswith(wanted) and sentence is not None
        assert sentence.startswith("the chat template writes the date 20")
        assert dated.chat_template == DATED
    dated.chat_template = {"default": DATED}
    one, _ = with_known_date(dated, "2024-07-26")
    assert one.chat_template == {"default": with_date(DATED, datetime.date(2024, 7, 26))}
    dated.chat_template = {"default": DATED, "tool_use": "{{ tools }}"}
    several, _ = with_known_date(dated, "2024-07-26")
    assert several.chat_template == {
        "default": with_date(DATED, datetime.date(2024, 7, 26)), "tool_use": "{{ tools }}",
    }  # fmt: skip
    plain = tiny.tokenizer("chatml")
    assert with_known_date(plain, "2024-07-26") == (plain, None)


@pytest.mark.parametrize("more", [-1, 1])
def test_transformers_must_have_the_ids_of_the_trainer(
    more: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TokenizerConfig("HuggingFaceTokenizer", str(folder))
    ours = build_tokenizer(settings)
    ours.vocab_size += more
    with pytest.raises(DataError, match=rf"has {ours.vocab_size} ids in tokenizer.json, but "):
        build_chat(ours, settings, SftConfig(sft=True))


def test_a_store_with_keywords_serves_a_run_that_gives_none(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = tiny.chats(5)
    paths = [
        tiny.write_jsonl(tmp_path / f"{n}.jsonl", part)
        for n, part in enumerate((rows[:3], rows[3:]))
    ]
    words = ["--output-prefix", tmp_path / "o", "--sft-template-kwargs", '{"a": 1}', "--input"]
    assert preprocess(folder, *words, *paths) == 0
    store = SftStore(str(tmp_path / "o"))
    assert f"documents, {store.num_tokens} tokens, " in capfd.readouterr().err
    store.check(identity(folder), 1000)
    store.check(identity(folder, sft_template_kwargs='{"a": 1}'), 1000)
    with pytest.raises(DataError, match=r"`--sft-template-kwargs` \(\{\"a\": 1\}\), but this run"):
        store.check(identity(folder, sft_template_kwargs='{"a": 2}'), 1000)
    found = [(Path(path).name, number) for path, number in map(store.source_of, range(5))]
    assert found == [("0.jsonl", 1), ("0.jsonl", 2), ("0.jsonl", 3), ("1.jsonl", 1), ("1.jsonl", 2)]
    with pytest.raises(IndexError):
        store.source_of(5)


def test_a_merged_store_has_the_counts_of_all_its_parts_or_none(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, rows in (("a", tiny.chats(2)), ("b", tiny.chats(3))):
        path = tiny.write_jsonl(tmp_path / f"{name}.jsonl", rows)
        assert preprocess(folder, "--output-prefix", tmp_path / name, "--input", path) == 0
    prefixes = [str(tmp_path / name) for name in "ab"]
    assert merge_stores(prefixes, str(tmp_path / "both")) == 5
    whole = SftStore(str(tmp_path / "both"))
    assert whole.intake is not None and whole.intake.counts["conversations"] == 5
    about = json.loads(about_path(prefixes[0]).read_bytes())
    del about["intake"]
    about_path(prefixes[0]).write_text(json.dumps(about))
    merge_stores(prefixes, str(tmp_path / "both"))
    assert SftStore(str(tmp_path / "both")).intake is None

    def full(*_: Any) -> None:
        raise DataError("The disk is full.")

    monkeypatch.setattr(store_module, "merge_indexed", full)
    with pytest.raises(DataError, match="The disk is full"):
        merge_stores(prefixes, str(tmp_path / "both"))
    # Its datasets may be those of before or of now, so nobody may take them for a whole store.
    assert not about_path(tmp_path / "both").exists()


def test_the_day_of_a_template_can_be_set_again() -> None:
    source = "{{ strftime_now('%d %b %Y|%-d|%H:%M|100%%') }}{{ messages[0].role }}"
    first, second = (datetime.date(2024, 7, 6), datetime.date(2026, 12, 31))
    made = with_date(source, second)
    assert with_date(with_date(source, first), second) == made
    assert with_date("{{ messages }}", first) == "{{ messages }}"
    for day, wanted in ((first, "06 Jul 2024|6|00:00|100%"), (second, "31 Dec 2026|31|00:00|100%")):
        chat = tiny.tokenizer("chatml", template=with_date(source, day))
        text = chat.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
        assert text == f"{wanted}user"


def test_keywords_that_some_template_reads_are_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template among the keywords replaces those of the tokenizer, and may write the date."""
    settings = TokenizerConfig("HuggingFaceTokenizer", str(folder))
    made = tiny.tokenizer("chatml")
    made.chat_template = {"default": "{{ a }}{{ messages }}", "tool_use": "{{ b }}{{ tools }}"}
    monkeypatch.setattr(chat_module, "load_chat_tokenizer", lambda *_: made)

    def chat_with(**kwargs: str) -> Chat:
        sft = SftConfig(sft=True, sft_template_kwargs=json.dumps(kwargs), sft_date="2024-07-26")
        return build_chat(build_tokenizer(settings), settings, sft)

    found = chat_with(a="1", b="2", c="3")
    assert (found.unread, found.date) == (("c",), None)
    found = chat_with(chat_template=DATED, a="1")
    assert (found.unread, found.date) == (("a",), "2024-07-26")


def test_parts_of_one_file_are_one_file_of_a_store() -> None:
    """The parts of a table begin with groups 0, 1, 2, and those of a text with bytes."""
    starts = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 900), ("a", 0)]
    parts = [Part("/x", source, start, start + 1, "parquet", 1) for source, start in starts]
    done: Any = {n: SimpleNamespace(documents=10**n) for n in range(len(parts))}
    found = preprocess_module._conversations_of(parts, done)
    assert found == [
        (os.path.abspath("a"), 111), (os.path.abspath("b"), 11_000), (os.path.abspath("a"), 10**5)
    ]  # fmt: skip


def test_a_file_may_have_a_number_for_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"`--data-path` \(0.5\) is a weight, but `--sft`"):
        preprocess_module.check_name("--data-path", "0.5")
    (tmp_path / "0.5").touch()
    preprocess_module.check_name("--data-path", "0.5")


def test_both_datasets_of_a_store_are_known_by_their_names(store: SftStore) -> None:
    prefix = store.prefix
    names = [f"{prefix}_sft_mask", f"{prefix}_sft_document", "x_sft_document", "y_sft_mask", "z"]
    assert store_prefixes(names) == [prefix]
    assert [is_part_of_store(name) for name in (*names, prefix)] == [True, True] + [False] * 4


def test_a_conversation_of_a_store_is_one_sequence(store: SftStore) -> None:
    ids, mask = store.conversation(0)
    for key, values in (("document", ids), ("mask", mask)):
        with IndexedWriter(f"{store.prefix}_sft_{key}", values.dtype) as writer:
            writer.add_document(np.asarray(values), [len(values) - 1, 1])
    with pytest.raises(DataError, match="do not hold the same conversations; make both again"):
        SftStore(store.prefix)


def test_the_script_of_an_array_has_the_date_of_its_making(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The tasks of a run may run on other days."""
    (tmp_path / "dated.jinja").write_text(DATED)
    path = tiny.write_jsonl(tmp_path / "f.jsonl", tiny.chats(2))
    words = ["--input", path, "--output-prefix", tmp_path / "o", "--executor", "slurm"]
    words += ["--slurm-script", tmp_path / "job.sh"]
    assert preprocess(folder, *words, "--sft-chat-template", tmp_path / "dated.jinja") == 0
    saved = json.loads((tmp_path / "o.parts" / "job.json").read_bytes())
    assert saved["options"]["sft"]["sft_date"] == datetime.date.today().isoformat()


def test_ids_beyond_those_that_are_looked_at_first_are_refused_when_they_are_read(
    store: SftStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = int(store.conversation(0)[0].max())
    monkeypatch.setattr(store_module, "id_range", lambda *_: None)
    store.check(identity(folder), largest + 1)
    store.conversation(0)
    store.check(identity(folder), largest)
    with pytest.raises(DataError, match=rf"o_sft_document.bin holds the token id {largest}, but"):
        store.conversation(0)
