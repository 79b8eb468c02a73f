"""Campaigns, verdicts and their tables at their edges, with runs that tests make up."""

import argparse
import os
import signal
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from megatron_ext.errors import ConfigError
from megatron_ext.extras.chaos import campaign as campaign_module
from megatron_ext.extras.chaos import inject as inject_module
from megatron_ext.extras.chaos import outcome as outcome_module
from megatron_ext.extras.chaos import run as run_module
from megatron_ext.extras.chaos import strikes as strikes_module
from megatron_ext.extras.chaos import tool as tool_module
from megatron_ext.extras.chaos.campaign import Campaign, seconds_of_a_step
from megatron_ext.extras.chaos.goodput import Costs, simulated
from megatron_ext.extras.chaos.inject import SLOW, Fault, Injector
from megatron_ext.extras.chaos.outcome import Outcome, Result, Truth, _outcome, _steps_lost
from megatron_ext.extras.chaos.plan import Case, completed, draw, draw_by_time
from megatron_ext.extras.chaos.run import Ended, run_program
from megatron_ext.extras.chaos.strikes import STRIKES, Target
from megatron_ext.extras.chaos.table import as_rows, outcomes, summary
from megatron_ext.extras.resilience.process import GONE, process_states
from megatron_ext.inspect.layouts import parse_layout
from megatron_ext.text.task import TEXT
from tests.extras.chaos.test_outcome import AFTER, BEFORE, ENDED, RESTARTED, STRUCK, TOLD, step
from tests.extras.chaos.test_plan import DAMAGE, KILL, SAVE, refused

LAYOUT = parse_layout("tp2")


def case_of(*faults: Fault, steps: int = 5) -> Case:
    return Case(LAYOUT, 0, faults, steps)


def verdict(
    kind: str = "SIGKILL",
    events: Any = (TOLD, RESTARTED),
    begun: Any = (*BEFORE, *AFTER),
    until: float = 1e9,
    **struck: Any,
) -> Outcome:
    fault = Fault(kind, iteration=3, rank=1, steps=struck.pop("steps", 3))
    return _outcome(fault, {**STRUCK, **struck}, list(events), list(begun), until, 1)


def test_words_of_a_cause_and_ranks_of_a_report() -> None:
    stopped = {**TOLD, "cause": "hang: rank 1 is stopped"}
    assert verdict("SIGSTOP", (stopped, RESTARTED)).problems == ()
    unknown = {key: value for key, value in TOLD.items() if key != "rank"}
    assert verdict(events=(unknown, RESTARTED)).problems == ("it was told as SIGKILL",)
    lost = {**unknown, "cause": "lost contact"}
    assert verdict("lost socket", (lost, RESTARTED)).problems == ()
    later = {**TOLD, "time": 200.0}
    assert verdict(events=(later, RESTARTED), until=150.0).problems == ("it was not told",)


def test_a_damaged_checkpoint_must_be_refused_and_may_cost_more() -> None:
    refusal = {"kind": "checkpoint_refused", "time": 104.0}
    again = [step(105.0, 1, 1), step(106.0, 1, 2), step(107.0, 1, 3), step(108.0, 1, 4)]
    events = (TOLD, refusal, RESTARTED)
    found = verdict("corrupt checkpoint", events, [*BEFORE, *again])
    assert found.problems == () and found.steps_lost == 2
    assert verdict("corrupt checkpoint", begun=[*BEFORE, *again]).problems == (
        "the damaged checkpoint was not told",
    )


def test_steps_are_lost_up_to_the_last_that_any_rank_had_begun() -> None:
    late = [*BEFORE, step(103.6, 0, 4), step(105.0, 1, 3), step(106.0, 1, 4), step(107.5, 1, 5)]
    assert _steps_lost(STRUCK, late, 1e9) == (1, pytest.approx(4.0))
    assert _steps_lost(STRUCK, late, 104.0) == (None, None)
    assert _steps_lost(STRUCK, late, 106.5) == (1, None)
    assert _steps_lost(STRUCK, [*BEFORE, *AFTER], 1e9) == (0, pytest.approx(2.5))


def test_a_slow_rank_is_slow_until_its_last_slow_step() -> None:
    slow = [*BEFORE, step(150.0, 0, 6), step(170.0, 0, 7)]
    for steps, told in ((3, ()), (4, ("it was not told",))):
        assert verdict(SLOW, (), slow, steps=steps).problems == told


def test_checkpoints_and_losses_must_be_those_of_the_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {1: {"lm loss": 2.0, "grad_norm": 1.0}, 2: {"lm loss": 1.5}}
    truth = Truth({"a": "1", "b": "2"}, rows, 1.0, 5.0)
    done = replace(ENDED, code=0)

    def judged(digests: dict[str, str], found: Any = rows, ended: Ended = done) -> Result:
        monkeypatch.setattr(outcome_module, "digests", lambda save: digests)
        monkeypatch.setattr(outcome_module, "steps_of", lambda save: found)
        return outcome_module.judge(case_of(), ended, tmp_path / "save", tmp_path, truth)

    assert judged({"a": "1", "b": "2"}).weights_equal
    for digests, name in (({"a": "1"}, "b"), ({"a": "1", "b": "2", "c": "3"}, "c"),
                          ({"a": "0", "b": "2"}, "a")):  # fmt: skip
        result = judged(digests)
        assert result.different == name and not result.weights_equal
        assert result.problems == (f"`{name}` differs from the undisturbed run's",)
    for other, said in (
        ({1: rows[1]}, "metrics.jsonl has no row of step 2"),
        ({1: {"lm loss": 2.0}, 2: rows[2]}, "the grad_norm of step 1 is None, not 1.0"),
        ({**rows, 2: {"lm loss": 1.25}}, "the lm loss of step 2 is 1.25, not 1.5"),
    ):
        assert judged({"a": "1", "b": "2"}, other).problems == (said,)
    monkeypatch.undo()
    # A run that ends with an older checkpoint has other digests, whatever is in it.
    monkeypatch.setattr(outcome_module, "read_tracker", lambda save: 4)
    for name in ("stored_entries", "read_tensors"):
        monkeypatch.setattr(outcome_module, name, lambda *_: {})
    assert list(outcome_module.digests(tmp_path)) == ["iteration 4"]
    failed = judged({}, ended=replace(ENDED, code=1))
    assert failed.different is None and not failed.weights_equal


def results_of() -> list[Result]:
    kill, stop = Fault("SIGKILL", 3, 1), Fault("SIGSTOP", 8, 0)
    good = replace(ENDED, code=0)
    first = (Outcome(kill, "x", "y", 0.1, 1.0, 1), Outcome(stop, "x", "y", 0.2, 2.0, 0))
    second = (Outcome(kill, "x", "y", 0.4, 6.0, 2, problems=("late",)),)
    third = (Outcome(kill, "x", "y", 0.6, 4.0, 0),)
    return [
        Result(case_of(kill, stop), good, first, None),
        Result(case_of(kill), good, second, None),
        Result(case_of(kill), good, third, "w", ("`w` differs",)),
    ]


def test_the_summary_counts_medians_and_what_was_lost_at_most() -> None:
    headings, kills, stops = summary(results_of())
    assert dict(zip(headings, kills, strict=True)) == {
        "fault": "SIGKILL", "cases": "3", "survived": "1", "told rightly": "2",
        "weights equal": "2", "steps lost at most": "2", "seen after (s)": "0.40 / 0.60",
        "new step after (s)": "4.00 / 6.00",
    }  # fmt: skip
    assert stops[1:3] == ["1", "1"]
    assert summary([Result(case_of(), ENDED, (Outcome(KILL),), None)])[1][-1] == "-"
    rows = as_rows(results_of())
    assert [row["problems"] for row in rows] == [[], [], ["late"], ["`w` differs"]]
    assert (rows[0]["seen_after"], rows[0]["new_step_after"]) == (0.1, 1.0)
    table = outcomes(results_of())
    cells = [list(column.cells) for column in table.columns]
    assert cells[-1] == ["PASS", "PASS", "FAIL", "FAIL"]
    assert cells[-2] == ["equal", "equal", "equal", "DIFFER"]


def test_what_just_fits_into_a_run_is_accepted() -> None:
    for words, fault in (
        ("--train-iters 6", KILL),
        ("--train-iters 8 --save-interval 4", SAVE),
        ("--save-interval 7", DAMAGE),
        ("--max-restarts 1", KILL),
        ("", replace(KILL, rank=3)),
        ("--train-iters 8 --eval-interval 8", replace(KILL, at="evaluate")),
    ):
        assert refused(words.split(), fault) == [], words
    (said,) = refused(["--max-restarts", "0"], DAMAGE)
    assert "less than the 1 faults that end a rank" in said
    _, added = completed(TEXT, [], case_of(KILL, KILL), Path("save"))
    assert added[added.index("--max-restarts") + 1] == "8"


def test_moments_within_a_step_need_its_length() -> None:
    plain = draw(["SIGKILL"] * 20, LAYOUT, 0)
    assert not [fault for fault in plain.faults if fault.seconds]
    assert len({fault.at for fault in plain.faults}) > 3
    close = draw_by_time(["SIGKILL"], LAYOUT, 0, 1.0, 600.0, step_seconds=0.1)
    moments = [fault.iteration for fault in close.faults]
    assert moments == sorted(moments) and min(b - a for a, b in pairwise(moments)) >= 5


def test_seconds_of_a_step_leave_out_the_first_block() -> None:
    times = [9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 1.0, 1.0]
    rows = {i: {"seconds_per_iteration": seconds} for i, seconds in enumerate(times)}
    assert seconds_of_a_step(rows, 2) == 1.5


def made_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """Return a campaign whose runs are made up, and the lengths of the runs that it made."""
    made = Campaign(TEXT, words, tmp_path)
    ran: list[int] = []

    def undisturbed(case: Case, *, bare: bool = False) -> Truth:
        ran.append(case.steps)
        seconds = 1.0 if bare else 1.25
        rows = {i: {"seconds_per_iteration": seconds} for i in range(1, case.steps + 1)}
        return Truth({}, rows, seconds, 5.0, save_seconds=0.5)

    monkeypatch.setattr(made, "_undisturbed", undisturbed)
    return made, ran


def test_costs_are_measured_with_and_without_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, ran = made_campaign(tmp_path, monkeypatch, "--peer-checkpoint-interval", "4")
    costs = made.costs(LAYOUT, [1.0, 9.0, 2.0])
    assert costs == Costs(step=1.0, snapshot=0.25, save=0.5, restart=2.0, copied_every=4)
    assert ran == [40, 40]
    for steps in (7, 9, 7):
        made.truth(case_of(steps=steps))
    assert ran[2:] == [7, 9]


def test_a_campaign_judges_with_its_interval_and_needs_a_truth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = made_campaign(tmp_path, monkeypatch, "--peer-checkpoint-interval", "3")
    asked: list[Any] = []
    monkeypatch.setattr(
        campaign_module, "run_program", lambda *_, **how: asked.append(how) or ENDED
    )
    monkeypatch.setattr(campaign_module, "judge", lambda *_, most_lost: most_lost)
    monkeypatch.setattr(made, "check", lambda case: None)
    assert made.run(case_of(KILL, KILL)) == 3
    assert asked[0]["deadline"] == 60 + 4 * 5.0 + 2 * 20
    plain = Campaign(TEXT, [], tmp_path / "plain")
    for code, why in ((3, "ended with exit code 3"), (None, "hung")):

        def run(*_: Any, log: Path, code: int | None = code, **__: Any) -> Ended:
            log.write_text("the end")
            return replace(ENDED, code=code)

        monkeypatch.setattr(campaign_module, "run_program", run)
        with pytest.raises(ConfigError, match=f"{why}, so there is nothing to.*"):
            plain.truth(case_of(steps=code or 7))
    account = SimpleNamespace(wall=1800.0, share=0.75)
    monkeypatch.setattr(
        campaign_module.extras, "needed", lambda *_: SimpleNamespace(account=lambda *_: account)
    )
    result = Result(case_of(KILL, KILL, KILL), ENDED, (), None, folder=tmp_path)
    point = made.point(result)
    assert (point.faults_per_hour, point.goodput) == (6.0, 0.75)


def test_saves_keep_their_steps_and_faults_may_strike_restarts() -> None:
    costs = Costs(step=1.0, snapshot=0.0, save=1.0, restart=0.0, copied_every=None)
    # A save after each step: 1 of 2 seconds counts, though faults come twice a minute.
    found = simulated(costs, 120, save_interval=1, hours=20)
    assert found == pytest.approx(0.5 * 2 / 2.03, abs=0.02)
    none = simulated(replace(costs, copied_every=10), 0, save_interval=5, hours=1)
    assert none == pytest.approx(5 / 6, abs=1e-3)
    slow = Costs(step=1.0, snapshot=1.0, save=0.0, restart=60.0)
    # Restarts of a minute under a fault a minute succeed once in e times.
    assert simulated(slow, 60, save_interval=10**9, hours=300) == pytest.approx(
        0.5 / 2.718, abs=0.03
    )


def test_a_plot_has_the_seconds_from_each_fault_to_the_first_new_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(tool_module, "plot_goodput", lambda *given: drawn.append(given))
    campaign: Any = SimpleNamespace(costs=lambda layout, restarts: (layout.name, restarts))
    unseen = Result(case_of(KILL), ENDED, (Outcome(KILL, seen_after=7.0),), None)
    asked = argparse.Namespace(minutes=None, json=None, plot=tmp_path / "x.png")
    tool_module.report(campaign, [*results_of(), unseen], asked)
    assert drawn == [(("tp2", [1.0, 2.0, 6.0, 4.0]), [], tmp_path / "x.png")]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs the tool with results that are made up, and what it ran."""
    ran: list[Any] = []

    class Made:
        def __init__(self, program: Any, words: Any, folder: Path) -> None:
            self.program, self.words, self.folder, self.added = program, words, folder, ["--x"]
            ran.append(folder)

        def check(self, case: Case) -> None:
            pass

        def truth(self, case: Case) -> Truth:
            return Truth({}, {}, 0.5, 1.0)

        def run(self, case: Case) -> Result:
            ran.append(case)
            problems = ("bad",) if "--bad" in self.words else ()
            return Result(case, replace(ENDED, code=0), (), None, problems)

    monkeypatch.setattr(tool_module, "campaign_of", Made)
    monkeypatch.setattr(tool_module, "report", lambda campaign, results, args: None)

    def call(*words: str) -> tuple[int, Path, list[Case]]:
        ran.clear()
        code = tool_module.main([*words], "")
        return code, ran[0], ran[1:]

    return call


def test_the_tool_runs_what_its_flags_ask_for(tool: Any, tmp_path: Path) -> None:
    code, folder, cases = tool("--kills", "3", "--layouts", "tp2,pp2", "--seeds", "2", "--", "--a")
    assert code == 0 and not folder.exists()
    assert [(case.layout.name, case.seed) for case in cases] == [
        ("tp2", 0), ("tp2", 1), ("pp2", 0), ("pp2", 1),
    ]  # fmt: skip
    assert {fault.kind for case in cases for fault in case.faults} == {"SIGKILL"}
    assert all(len(case.faults) == 3 for case in cases)
    code, folder, cases = tool("--faults", "SIGSTOP,bit flip", "--apart", "--layouts", "tp2")
    assert [[fault.kind for fault in case.faults] for case in cases] == [["SIGSTOP"], ["bit flip"]]
    code, folder, _ = tool("--kills", "1", "--layouts", "tp2", "--", "--bad")
    assert code == 1 and folder.exists()
    kept = tmp_path / "kept"
    kept.mkdir()
    assert tool("--kills", "1", "--layouts", "tp2", "--folder", str(kept))[:2] == (0, kept)
    assert kept.exists()
    assert tool_module.main(["--faults", "flood"], "") == 2
    words = ("--kills", "1", "--layouts", "tp2", "--minutes", "20", "--per-minute", "0.5")
    code, _, (case,) = tool(*words)
    # Steps of half a second.
    assert code == 0 and case.steps == 20 * 60 * 2 and 3 < len(case.faults) < 25


def program(monkeypatch: pytest.MonkeyPatch, body: Any, tmp_path: Path, **how: Any) -> Ended:
    monkeypatch.setattr(run_module, "main", lambda *_: body())
    given = {"log": tmp_path / "log", "environment": {}, "deadline": 20.0, **how}
    return run_program(TEXT, [], **given)


def test_a_program_ends_with_its_code_and_leaves_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave() -> int:
        if os.fork() == 0:
            os.setpgid(0, 0)  # A group of its own, in the same session.
            time.sleep(60)
        os.write(1, f"hello {os.environ['MARK']}".encode())
        return 3

    ended = program(monkeypatch, leave, tmp_path, environment={"MARK": "mark"})
    assert ended.code == 3 and len(ended.left) == 1
    pid = int(ended.left[0].split()[1])
    end = time.monotonic() + 10
    while process_states([pid])[pid] != GONE:
        assert time.monotonic() < end
    assert "hello mark" in (tmp_path / "log").read_text()

    def talk() -> int:
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(writer)
            os.read(reader, 1)  # until the program has ended
            os.write(1, b"x" * 300_000)
            os._exit(0)
        return 0

    monkeypatch.setattr(run_module, "_session", lambda pid: [])
    program(monkeypatch, talk, tmp_path, log=tmp_path / "last")
    assert len((tmp_path / "last").read_text()) == 300_000
    monkeypatch.undo()
    for text, code in (("a text", 1), (5, 5), (None, 1)):
        assert program(monkeypatch, lambda x=text: sys.exit(x), tmp_path).code == code
    begun = time.monotonic()
    ended = program(monkeypatch, lambda: time.sleep(60), tmp_path, deadline=0.3)
    assert ended.code is None and len(ended.processes) == 1
    assert time.monotonic() - begun < 3


def target(**options: Any) -> Target:
    return Target(lambda text: None, Random(1), **options)


def test_strikes_hit_any_part_of_what_they_may() -> None:
    for kind in ("bit flip", "NaN gradient"):
        places = set()
        for seed in range(12):
            chunk = torch.nn.Linear(8, 8, bias=False)
            chunk.weight.main_grad = torch.zeros(8, 8)  # type: ignore[attr-defined]
            before = chunk.weight.detach().clone()
            STRIKES[kind](replace(target(chunks=[chunk]), random=Random(seed)))
            changed = chunk.weight.detach().view(torch.int32) != before.view(torch.int32)
            struck = changed if kind == "bit flip" else chunk.weight.main_grad.isnan()  # type: ignore[attr-defined]
            places.add(int(struck.view(-1).nonzero()))
        assert len(places) > 6
    frozen = torch.nn.Linear(4, 4)
    frozen.bias.requires_grad_(False)
    for parameter in frozen.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    for seed in range(8):
        STRIKES["NaN gradient"](replace(target(chunks=[frozen]), random=Random(seed)))
    assert not frozen.bias.main_grad.isnan().any()  # type: ignore[attr-defined]
    plain = torch.nn.Linear(2, 2, bias=False)
    plain.weight.grad = torch.zeros(2, 2)
    STRIKES["NaN gradient"](target(chunks=[plain]))
    assert int(plain.weight.grad.isnan().sum()) == 1


def test_the_middle_of_a_checkpoint_is_damaged_and_only_a_small_limit_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "iter_0000004"
    folder.mkdir()
    path = folder / "__0_0.distcp"
    path.write_bytes(bytes(100))
    snapshots = tmp_path / "host" / "snapshots"
    snapshots.mkdir(parents=True)
    pid = os.fork()
    if pid == 0:
        try:
            STRIKES["corrupt checkpoint"](target(save=tmp_path, host=snapshots.parent))
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert path.read_bytes() == bytes(50) + b"\xff" + bytes(49)
    assert snapshots.parent.is_dir() and not snapshots.exists()
    total = psutil.virtual_memory().total
    for limit, small in ((None, False), (total // 2, True), (total, False)):
        monkeypatch.setattr(strikes_module, "memory_limit", lambda limit=limit: limit)
        assert strikes_module.has_small_memory_limit() is small


@pytest.fixture
def injector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(os, "fsync", os.fsync)

    def make(*faults: Fault) -> Injector:
        return Injector(faults, rank=0, world_size=1, folder=tmp_path)

    return make


def test_a_fault_waits_for_its_event_and_ends_after_its_steps(
    injector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setitem(
        inject_module.STRIKES,
        "full disk",
        lambda target: (done.append("full"), target.undo.append(lambda: done.append("room"))),
    )
    made = injector(Fault("full disk", 3, 0, at="save", steps=2))
    seen = []
    for iteration in range(1, 10):
        made("step", iteration)
        if iteration in (4, 8):
            made("save", iteration)
        seen.append(len(done))
    assert seen == [0, 0, 0, 1, 1, 2, 2, 2, 2] and done == ["full", "room"]
    times: list[float] = []
    monkeypatch.setattr(inject_module.time, "sleep", times.append)
    slow = injector(Fault(SLOW, 1, 0, steps=1))
    forward: Any = SimpleNamespace(kind=SimpleNamespace(name="FORWARD"), microbatch=0)
    for iteration in (1, 2):
        slow("step", iteration)
        slow("F", iteration, forward)
    assert times == [0.05]


def test_actions_are_named_by_what_they_compute() -> None:
    for kind, name in (
        ("INPUT", "backward of micro-batch 2"), ("WEIGHT", "backward of micro-batch 2"),
        ("FORWARD", "forward of micro-batch 2"), ("SEND_OUTPUT", "send output of micro-batch 2"),
    ):  # fmt: skip
        detail = SimpleNamespace(kind=SimpleNamespace(name=kind), microbatch=2)
        assert inject_module.name_of_event("x", detail) == name
    assert inject_module.name_of_event("W", "end") == "end of backward"
    assert isinstance(tool_module._parser(""), argparse.ArgumentParser)
