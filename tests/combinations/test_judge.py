"""The judge tells kinds of failures apart; every documented flag is combined or has a reason."""

import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.checkpoint.files import folder_of
from megatron_ext.disk import events
from megatron_ext.disk import host_folder as host
from megatron_ext.extras.chaos import inject
from megatron_ext.extras.chaos.plan import MOMENTS
from megatron_ext.train.reporting.start import STARTED
from tests.combinations import kills, layouts, programs
from tests.combinations.draw import Case, Draws
from tests.combinations.exceptions import report_of_fewer_steps
from tests.combinations.judge import judge
from tests.combinations.options import (
    FIXED,
    NEEDS,
    VALUES,
    every_flag,
    joined,
    name_of,
    settings_of,
    values_of,
    words_of,
)
from tests.combinations.programs import GPT, PROGRAMS
from tests.combinations.run import replay_text, replayed
from tests.combinations.shrink import shrink

Main = Callable[[list[str]], int]


def _train(words: list[str], loss: float = 1.0) -> int:
    print(STARTED)
    folder = Path(words[words.index("--save") + 1])
    folder.mkdir()
    row = {"kind": "train", "iteration": 1, "lm loss": loss, "grad_norm": 1.0}
    row["seconds_per_iteration"] = 0.1
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return 0


def _refuse(words: list[str]) -> int:
    print("error: `--x` (1) must be 2; give 2.", file=sys.stderr)
    return 2


def _raise(words: list[str]) -> int:
    raise RuntimeError("broken")


def _sleep(words: list[str]) -> int:
    time.sleep(60)
    return 0


def _leave_a_process(words: list[str]) -> int:
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    return _train(words)


@pytest.mark.parametrize(
    ("main", "kind", "text"),
    [
        (_train, "trained", ""),
        (_refuse, "refused", "give 2"),
        (lambda words: print(STARTED) or _refuse(words), "refused late", "give 2"),
        (lambda words: print("no", file=sys.stderr) or 2, "refused without a sentence", "no"),
        (_raise, "traceback", "RuntimeError: broken"),
        (_sleep, "hang", "in _sleep"),
        (lambda words: tempfile.mkdtemp("", "mine_") and _train(words), "left behind", "mine_"),
        (_leave_a_process, "left behind", "processes"),
        (
            lambda words: host._make(None, None) and _train(words),
            "left behind",
            "/dev/shm/megatron_ext_",
        ),
        (lambda words: _train(words, float("nan")), "not finite", "lm loss is nan"),
        (lambda words: 3, "exit code 3", ""),
    ],
)
def test_each_end_has_a_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, main: Main, kind: str, text: str
) -> None:
    fake = dataclasses.replace(programs.GPT, main=main)
    monkeypatch.setitem(programs.PROGRAMS, "gpt", fake)
    verdict = judge(Case(1, "gpt"), tmp_path, tmp_path, limit=1.0)
    assert verdict.kind == kind and text in verdict.text


def _killed(
    *,
    loss: float = 1.0,
    rank: int = 1,
    kind: str = "fault",
    left: str = "faults.jsonl",
) -> Main:
    """Return a program that behaves like a run whose rank 1 is killed where a fault is injected."""

    def main(words: list[str]) -> int:
        if inject.VARIABLE not in os.environ:
            return _train(words)
        code, folder = _train(words, loss), Path(words[words.index("--save") + 1])
        (folder / left).touch()
        events.append_event(folder, kind, rank=rank, cause="SIGKILL")
        events.append_event(folder, "restart", restored_from="memory", restored_iteration=0)
        records = Path(json.loads(os.environ[inject.VARIABLE])["folder"])
        inject.record_file(records, 0).write_text('{"rank": 1}')
        return code

    return main


@pytest.mark.parametrize(
    ("main", "kind", "text"),
    [
        (_killed(), "trained", ""),
        (_killed(loss=2.0), "kill differs", "step 1: lm loss is 2.0 for 1.0"),
        (_killed(rank=0), "kill untold or unfinished", "rank 1 was killed, but (rank, cause)"),
        (_killed(kind="slow_rank"), "kill untold or unfinished", "of the events are []"),
        (_killed(left="iter_0000002.tmp"), "kill untold or unfinished", "iter_0000002.tmp is left"),
    ],
)
def test_a_run_that_is_killed_tells_it_and_ends_alike(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, main: Main, kind: str, text: str
) -> None:
    fake = dataclasses.replace(programs.GPT, main=main)
    monkeypatch.setitem(programs.PROGRAMS, "gpt", fake)
    verdict = judge(Case(1, "gpt", judges=("kill",)), tmp_path, tmp_path, limit=5.0)
    assert verdict.kind == kind and text in verdict.text
    assert verdict.compared == (["kill, restarted from memory"] if kind == "trained" else [])


@pytest.mark.parametrize(
    ("undisturbed", "killed", "source", "left"),
    [
        ((2, 4), (3, 4), "memory", []),
        ((2, 4), (3, 4), "peer", []),
        ((2, 4), (2, 3, 4), "memory", [3]),
        ((4,), (3, 4), "memory", [3]),
        ((2, 4), (1, 4), "memory", [1]),
        ((2, 4), (3, 4), "checkpoint", [3]),
    ],
)
def test_only_a_save_that_makes_up_for_a_lost_one_may_be_of_another_step(
    tmp_path: Path,
    undisturbed: tuple[int, ...],
    killed: tuple[int, ...],
    source: str,
    left: list[int],
) -> None:
    folders = [tmp_path / name for name in ("faults", "a", "k")]
    for folder, saved in zip(folders, ((), undisturbed, killed), strict=True):
        folder.mkdir()
        for iteration in saved:
            folder_of(folder, iteration).mkdir()
    inject.record_file(folders[0], 0).write_text('{"rank": 0}')
    events.append_event(folders[2], "fault", rank=0, cause="SIGKILL")
    events.append_event(folders[2], "restart", restored_from=source, restored_iteration=3)
    told = [f"iter_{iteration:07d} is left in the save folder" for iteration in left]
    assert kills.problems(*folders) == told


@pytest.mark.parametrize(
    ("interval", "restored", "report"),
    [(1, 0, None), (1, 1, 2), (1, 2, None), (2, 0, None), (2, 1, 2), (2, 2, None), (2, 3, 4)],
)
def test_the_report_after_a_restart_within_its_interval_averages_fewer_steps(
    interval: int, restored: int, report: int | None
) -> None:
    words = ["--log-interval", str(interval)]
    assert report_of_fewer_steps(words, restored) == report


def test_kills_strike_at_every_moment_of_a_run() -> None:
    rows = [{"iteration": step, "seconds_per_iteration": 0.1} for step in (1, 2, 3, 4)]
    drawn = [kills.draw(seed, rows) for seed in range(300)]
    assert {fault.at for fault in drawn} == {"start", "save", "end of save", *MOMENTS}
    assert {fault.iteration for fault in drawn} == {0, 1, 2, 3, 4}
    assert kills.draw(7, rows) == drawn[7]


def test_a_failure_shrinks_to_its_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_every_flag_is_an_option_of_a_program_or_has_a_reason() -> None:
    options = [option for program in PROGRAMS.values() for option in program.options]
    combined = {name for option in options for name in option.settings}
    sections = {s for program in PROGRAMS.values() for s in (*program.sections, *program.others)}
    left_out = [f for f in every_flag() if f.section in sections and f.field not in combined]
    assert [flag.positive[0] for flag in left_out if name_of(flag) not in FIXED] == []


def test_every_boolean_is_on_and_off_and_every_choice_is_taken() -> None:
    texts = " ".join(f"{option.text} " for option in GPT.options)
    for flag in every_flag():
        if flag.section not in GPT.sections or name_of(flag) in FIXED:
            continue
        for value in values_of(flag) or []:
            assert value.split()[0] in texts, value


def test_tables_name_flags_that_exist() -> None:
    names = {name_of(flag) for flag in every_flag()}
    assert [name for name in (*VALUES, *NEEDS, *FIXED) if name not in names] == []


def test_a_later_flag_wins_over_an_earlier_one_by_any_of_its_spellings() -> None:
    words = joined([["--lr", "1", "--disable-bias-linear"], ["--add-bias-linear", "--lr", "2"]])
    assert words == ["--lr", "2", "--add-bias-linear"]
    assert settings_of(words)["add_bias_linear"] == (True, ())


def test_a_seed_decides_the_cases_and_options_do_not_contradict_each_other() -> None:
    def cases() -> list[Case]:
        draws = Draws(GPT, random.Random(3))
        return [draws.case(number) for number in range(40)]

    assert cases() == cases()
    for case in cases():
        words = case.words("/data")
        fields = [name for text in case.options for name in settings_of(text.split())]
        assert set(fields) <= set(settings_of(words))


def test_layouts_take_their_ranks() -> None:
    dice = random.Random(0)
    for _ in range(200):
        layout = layouts.draw(dice, experts=dice.random() < 0.5)
        settings = settings_of(layout.words)
        sizes = [
            int(settings.get(f"{name}_parallel_size", (True, ("1",)))[1][0])
            for name in ("tensor_model", "pipeline_model", "context")
        ]
        product = sizes[0] * sizes[1] * sizes[2]
        assert layout.ranks % product == 0 and layout.ranks <= 8
