"""Runs on several nodes under torchrun go on after a node has died."""

from pathlib import Path

import pytest

from megatron_ext.train.reporting.files import read_metrics
from tests.train.nodes import Nodes, steps_done, until
from tests.training_runs import SAME_WEIGHTS, mock_data, train_steps, training_rows

FLAGS = [*SAME_WEIGHTS, *mock_data(), *"--train-iters 14 --save-interval 2".split()]
LAYOUT = "--tensor-model-parallel-size 2".split()


@pytest.mark.slow
def test_a_node_that_dies_and_comes_back_leaves_no_trace_in_the_curve(tmp_path: Path) -> None:
    wanted = train_steps([*FLAGS, *LAYOUT], tmp_path / "whole", ranks=4)
    save = tmp_path / "broken"
    words = [*FLAGS, *LAYOUT, "--save", str(save)]
    with Nodes(tmp_path / "nodes", "2", words, restarts=3) as nodes:
        nodes.start(0)
        nodes.start(1)
        until(lambda: steps_done(save) >= 5)
        nodes.kill(1)
        nodes.start(1)
        assert nodes.wait() == [0, 0], nodes.log()
    rows = training_rows(read_metrics(save / "metrics.jsonl"))
    for key in ("iteration", "lm loss", "grad_norm", "learning_rate"):
        assert [row[key] for row in rows] == [row[key] for row in wanted], key
