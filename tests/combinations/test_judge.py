"""The judge tells a run, a refusal and each kind of failure apart."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.train.reporting.start import STARTED
from tests.combinations import programs
from tests.combinations.draw import Case
from tests.combinations.judge import Verdict, judge
from tests.combinations.run import replay_text, replayed
from tests.combinations.shrink import shrink
from tests.combinations.values import words_of

Main = Callable[[list[str]], int]


def _train(words: list[str], loss: float = 1.0) -> int:
    print(STARTED)
    folder = Path(words[words.index("--save") + 1])
    folder.mkdir()
    row = {"kind": "train", "iteration": 1, "lm loss": loss, "grad_norm": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return 0


def _refuse(words: list[str]) -> int:
    print("error: `--x` (1) must be 2; give 2.", file=sys.stderr)
    return 2


def _refuse_late(words: list[str]) -> int:
    print(STARTED)
    return _refuse(words)


def _refuse_without_sentence(words: list[str]) -> int:
    print("no", file=sys.stderr)
    return 2


def _raise(words: list[str]) -> int:
    raise RuntimeError("broken")


def _sleep(words: list[str]) -> int:
    time.sleep(60)
    return 0


def _leave_a_file(words: list[str]) -> int:
    tempfile.mkdtemp(prefix="mine_")
    return _train(words)


def _leave_a_process(words: list[str]) -> int:
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    return _train(words)


def _judge(monkeypatch: pytest.MonkeyPatch, folder: Path, main: Main, **more: object) -> Verdict:
    fake = dataclasses.replace(programs.GPT, main=main)
    monkeypatch.setitem(programs.PROGRAMS, "gpt", fake)
    return judge(Case(1, "gpt", **more), folder, folder, limit=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("main", "kind", "text"),
    [
        (_train, "trained", ""),
        (_refuse, "refused", "give 2"),
        (_refuse_late, "refused late", "give 2"),
        (_refuse_without_sentence, "refused without a sentence", "no"),
        (_raise, "traceback", "RuntimeError: broken"),
        (_sleep, "hang", "in _sleep"),
        (_leave_a_file, "left behind", "mine_"),
        (_leave_a_process, "left behind", "processes"),
        (lambda words: _train(words, float("nan")), "not finite", "lm loss is nan"),
        (lambda words: 3, "exit code 3", ""),
    ],
)
def test_each_end_has_a_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, main: Main, kind: str, text: str
) -> None:
    verdict = _judge(monkeypatch, tmp_path, main)
    assert verdict.kind == kind and text in verdict.text


def test_a_failure_shrinks_to_the_flags_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def main(words: list[str]) -> int:
        return _raise(words) if "--bf16" in words and "--swiglu" in words else _train(words)

    fake = dataclasses.replace(programs.GPT, main=main)
    monkeypatch.setitem(programs.PROGRAMS, "gpt", fake)
    options = ("--lr 1", "--bf16 --qk-layernorm", "--swiglu", "--clip-grad 0")
    case = Case(1, "gpt", options)
    verdict = judge(case, tmp_path, tmp_path)
    small, final = shrink(case, verdict, tmp_path, 5.0)
    assert small.options == ("--bf16", "--swiglu") and final.kind == "traceback"
    assert replayed(replay_text(small)) == small
    assert words_of(final.commands[0], "")[:2] == ["python", "pretrain_gpt.py"]
