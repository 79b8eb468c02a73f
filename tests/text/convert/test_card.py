"""A model card says what a model was trained on, and publishes no path, address or name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file

from megatron_ext import extras
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.text.convert.card import MARK, Training, model_card
from megatron_ext.text.convert.config import read_model
from megatron_ext.text.convert.huggingface import Export, export_model
from megatron_ext.text.convert.training import ids_of, other_tokens
from tests.text.convert.models import in_child, make
from tests.text.tiny import hf_folder
from tests.training_runs import config_of, train

RUN = (
    "--seq-length 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-3 "
    "--num-workers 0 --eval-iters 0 --log-interval 1 --data-order direct --split 100,0,0 "
    "--tokenizer-type NullTokenizer --vocab-size 299 --save-hf-shard-size 60KB"
).split()


def data(prefix: Path, documents: int) -> Path:
    prefix.parent.mkdir(exist_ok=True)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for number in range(documents):
            writer.add_document(np.full(40, number, np.uint16), [40])
    return prefix


def front_matter(card: str) -> dict[str, Any]:
    assert card.startswith("---\n")
    found: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return found


def test_the_card_of_a_run_has_the_table_of_its_ledger(tmp_path: Path) -> None:
    """The tool writes the same card; a card of the user's own is kept when a folder is replaced."""
    source = make("llama", tmp_path / "hf")
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Their card\n")
    web, books = data(tmp_path / "secret" / "web", 30), data(tmp_path / "secret" / "books", 10)
    words = ["--load-hf", str(source), *RUN, "--data-path", "0.75", str(web), "0.25", str(books)]
    written = tmp_path / "written"
    kept = written / "iter_0000002"
    kept.mkdir(parents=True)
    (kept / "README.md").write_text("# My own card\n")
    more = ["--save-hf", str(written), "--save-hf-interval", "1"]
    train([*words, *more], tmp_path / "run")
    assert (kept / "README.md").read_text() == "# My own card\n"
    assert (kept / "model.safetensors.index.json").is_file()
    card = (written / "iter_0000003" / "README.md").read_text()
    assert MARK in card
    assert front_matter(card)["license"] == "apache-2.0"
    assert "- It began with the weights of hf.\n- It saw 12 samples, at most 192 tokens." in card
    assert "| web | 9 | 144 | 75.0% | 0.12 |\n| books | 3 | 48 | 25.0% | 0.12 |" in card
    assert "--lr 0.001\n" in card and "--global-batch-size 4\n" in card
    assert "secret" not in card and str(tmp_path) not in card
    order = Export(tmp_path / "run", tmp_path / "back")
    in_child(lambda: export_model(order), tmp_path / "notes")
    # A checkpoint keeps the config.json of the first weights, but not where they were.
    other = (tmp_path / "back" / "README.md").read_text()
    for mine, theirs in (
        ("license: apache-2.0\n", ""),
        ("# written/iter_0000003", "# back"),
        ("the weights of hf", "the weights of a public model"),
    ):
        card = card.replace(mine, theirs)
    assert other == card
    # The index is that of transformers, which only puts tensors into files in another order.
    make("llama", tmp_path / "again", max_shard_size="60KB")
    ours, theirs = (
        json.loads((folder / "model.safetensors.index.json").read_text())
        for folder in (written / "iter_0000003", tmp_path / "again")
    )
    assert ours["metadata"] == theirs["metadata"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    files = set(ours["weight_map"].values())
    assert all(load_file(written / "iter_0000003" / file) for file in files)


def test_a_card_publishes_numbers_and_choices_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    like = read_model(make("llama", tmp_path / "base"))
    like.raw["_name_or_path"] = "someone/base-7b"
    words = ["--load-hf", str(tmp_path / "base"), *RUN, *(
        "--bf16 --clip-grad 0.5 --optimizer sgd --lora-rank 4 --mlflow-tracking-uri http://host "
        "--save-hf /home/me/hf --data-path 1 /home/me/web 2 s3://key:password@bucket/books"
    ).split()]  # fmt: skip
    config = config_of(words)
    training = Training(config.to_dict(), 5, 20, tmp_path / "nowhere", like)
    card = model_card("m", "llama", training, "fp8")
    assert front_matter(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "someone/base-7b",
        "tags": ["llama", "megatron_ext"],
    }
    assert "written by megatron_ext after 5 steps.\nIts linear layers are stored in fp8.\n" in card
    assert "- Its data: books, web. The run kept no ledger of what it read." in card
    for word in ("--bf16", "--clip-grad 0.5", "--optimizer sgd", "--lora-rank 4"):
        assert f"{word}\n" in card
    for word in ("password", "/home", "http", "s3:", "mlflow"):
        assert word not in card
    converted = model_card("m", "llama", replace(training, iteration=0, samples=0), None)
    assert "written by megatron_ext.\n" in converted and "## Settings" not in converted
    assert "- It was converted, and not trained here." in converted
    monkeypatch.setattr(extras, "part", lambda *names: None)
    assert model_card("m", "llama", training, "fp8") == card


def test_special_tokens_are_those_of_the_tokenizer_that_the_run_used(tmp_path: Path) -> None:
    source = make("llama", tmp_path / "hf")
    raw = {"bos_token_id": 1, "eos_token_id": [2, 7]}
    tokens = {"bos_token_id": 4, "eos_token_id": 7, "pad_token_id": 0}
    words = ["--load-hf", str(source), "--seq-length", "16", "--micro-batch-size", "1"]
    words += ["--skip-train", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    other = config_of([*words, str(hf_folder())])
    assert other_tokens(other, raw, tokens) == {"bos_token_id": 4, "pad_token_id": 0}
    own = config_of([*words, str(source)])
    assert other_tokens(own, raw, tokens) == {}
    assert ids_of({**raw, "pad_token_id": None, "vocab_size": 3}) == raw
    assert ids_of({"text_config": raw, "bos_token_id": 3}) == {**raw, "bos_token_id": 3}
