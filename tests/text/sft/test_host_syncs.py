"""Fine-tuning asks its device for nothing within a step, as pre-training does."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.host_syncs import READ, record_steps
from tests.text.sft import tiny
from tests.text.sft.test_runs import MODEL, batching
from tests.training_runs import train_on_ranks


@pytest.mark.slow
def test_a_step_asks_for_the_update_before_it_alone(tmp_path: Path) -> None:
    chats = tiny.write_jsonl(tmp_path / "train.jsonl", tiny.chats(12, turns=2, words=3))
    tokenizer = str(tiny.save(tmp_path / "tokenizer"))
    words = f"{batching('packed')} --train-epochs 3 --mtp-num-layers 1 --eval-iters 0".split()
    words += ["--sft", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer]
    flags = [*MODEL, *words, "--train-data-path", str(chats), "--log-interval", "9"]
    note = tmp_path / "places.json"
    code, _ = train_on_ranks(flags, save=tmp_path / "run", prepare=partial(record_steps, path=note))
    assert code == 0
    assert json.loads(note.read_text()) == [READ]
