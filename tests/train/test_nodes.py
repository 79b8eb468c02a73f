"""Runs on several nodes under torchrun go on after faults, with fewer nodes and with more."""

import os
import signal
from pathlib import Path

import pytest

from megatron_ext.disk.events import read_events
from megatron_ext.train.reporting.files import read_metrics
from tests.train.nodes import Nodes, steps_done, until
from tests.training_runs import SAME_WEIGHTS, Rows, mock_data, train_steps, training_rows

FLAGS = [*SAME_WEIGHTS, *mock_data(), *"--save-interval 4 --tensor-model-parallel-size 2".split()]
KEYS = "iteration", "lm loss", "grad_norm", "learning_rate"


def _curve(rows: Rows) -> list[dict[str, float]]:
    return [{key: row[key] for key in KEYS} for row in training_rows(rows)]


@pytest.mark.slow
def test_a_node_dies_and_comes_back_and_a_rank_hangs_without_a_trace(tmp_path: Path) -> None:
    words = [*FLAGS, "--train-iters", "16"]
    wanted = train_steps(words, tmp_path / "whole", ranks=4)
    save = tmp_path / "broken"
    with Nodes(tmp_path / "nodes", "2", [*words, "--save", str(save)], restarts=3) as nodes:
        nodes.start(0)
        nodes.start(1)
        until(lambda: steps_done(save) >= 5)
        nodes.kill(1)
        nodes.start(1)
        until(lambda: steps_done(save) >= 9)
        os.kill(nodes.ranks(0)[1].pid, signal.SIGSTOP)
        assert nodes.wait() == [0, 0], nodes.log()
    assert _curve(read_metrics(save / "metrics.jsonl")) == _curve(wanted)
    events = read_events(save)
    restarts = [event for event in events if event["kind"] == "restart"]
    assert [event["restored_from"] for event in restarts] == ["checkpoint"] * 2
    (hang,) = [event for event in events if event["kind"] == "fault"]
    assert hang["cause"] == "hang" and hang["rank"] in (1, 3)


@pytest.mark.slow
def test_a_run_goes_on_with_one_node_of_two_and_takes_the_other_back(tmp_path: Path) -> None:
    words = [*FLAGS, "--train-iters", "24"]
    wanted = train_steps(words, tmp_path / "whole", ranks=4)
    save = tmp_path / "elastic"
    words += ["--save", str(save), "--elastic-min-nodes", "1"]
    with Nodes(tmp_path / "nodes", "1:2", words, restarts=3) as nodes:
        nodes.start(0)
        nodes.start(1)
        until(lambda: steps_done(save) >= 4)
        nodes.kill(1)
        at = steps_done(save)
        until(lambda: steps_done(save) >= at + 3)
        nodes.start(1)
        assert nodes.wait() == [0, 0], nodes.log()
    events = [event for event in read_events(save) if event["kind"] == "restart"]
    assert [event["world_size"] for event in events] == [2, 4]
    for row, want in zip(_curve(read_metrics(save / "metrics.jsonl")), _curve(wanted), strict=True):
        assert row == pytest.approx(want, rel=1e-6)
