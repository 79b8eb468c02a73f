"""Files tokenized when a run starts: once, whatever happens to the processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.config import DataConfig, SftConfig, TokenizerConfig
from megatron_ext.text.sft import preprocess as online
from megatron_ext.text.sft.chat import Chat, build_chat
from megatron_ext.text.sft.rows import ConversationEncoder
from megatron_ext.text.sft.store import SftStore
from megatron_ext.text.tokenizers import build_tokenizer
from tests.text.sft import tiny

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunConfig, Chat]:
    tokenizer = TokenizerConfig("HuggingFaceTokenizer", str(tiny.save(tmp_path / "tokenizer")))
    config = RunConfig(sections=(DataConfig(), SftConfig(sft=True), tokenizer))
    return config, build_chat(build_tokenizer(tokenizer), tokenizer, config.section(SftConfig))


def opened(run: tuple[RunConfig, Chat], *names: Any) -> tuple[list[SftStore], list[str]]:
    """Open the stores of files; return them and what was said."""
    said: list[str] = []
    stores = online.open_stores("--data-path", [str(n) for n in names], *run, said.append)
    return stores, said


def test_files_are_tokenized_once_until_they_change(
    run: tuple[RunConfig, Chat], tmp_path: Path
) -> None:
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


def test_other_options_make_another_store(run: tuple[RunConfig, Chat], tmp_path: Path) -> None:
    path = tiny.write_jsonl(tmp_path / "f.jsonl", tiny.chats(3))
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if "
                        "add_generation_prompt %}a{% endif %}")  # fmt: skip
    config, _ = run
    sft = SftConfig(sft=True, sft_chat_template=str(template))
    chat = build_chat(
        build_tokenizer(config.section(TokenizerConfig)), config.section(TokenizerConfig), sft
    )
    first, second = opened(run, path)[0][0], opened((config, chat), path)[0][0]
    assert first.prefix != second.prefix
    assert first.num_tokens > second.num_tokens


def test_the_cache_lies_where_it_is_asked_for(run: tuple[RunConfig, Chat], tmp_path: Path) -> None:
    path = tiny.write_jsonl(tmp_path / "f.jsonl", tiny.chats(3))
    data = DataConfig(data_cache_path=str(tmp_path / "a" / "b"))
    config = run[0].with_section(data)
    (store,), _ = opened((config, run[1]), path)
    assert Path(store.prefix).parent == tmp_path / "a" / "b"
    blocked = tmp_path / "file"
    blocked.write_text("")
    data = DataConfig(data_cache_path=str(blocked / "c"))
    config = run[0].with_section(data)
    with pytest.raises(ConfigError, match=r"file/c\) cannot be written \(Not a directory\); give"):
        opened((config, run[1]), path)


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
        online.open_stores("--data-path", [str(path)], *run, said.append)
    assert said[-1].startswith("error: ")
    assert "f.jsonl line 4 is refused" in said[-1]
