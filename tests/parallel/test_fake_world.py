"""Counts what the start, a step and a save cost one rank in a world of up to 16,384 ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ext.extras.resilience.peers import linked
from megatron_ext.parallel.context import ParallelContext
from tests.ranks import ranks

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fake_world.py"


def _rows(text: str) -> dict[tuple[str, int], list[float]]:
    """Return the numbers of the script's table, by part and number of ranks."""
    rows = {}
    for line in text.splitlines():
        part, *cells = [cell.strip() for cell in line.split("|")[1:-1]] or [""]
        world, *costs = [cell.replace(",", "") for cell in cells] or [""]
        if world.isdigit():
            rows[part, int(world)] = [float(cost) for cost in costs]
    return rows


@pytest.mark.slow
def test_what_a_rank_exchanges_does_not_grow_with_the_world() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = _rows(done.stdout)
    worlds = (64, 1024, 16384)
    assert len(rows) == 5 * len(worlds)
    for world in worlds:
        # Each of twenty kinds of groups has at most one group for each rank.
        assert rows["groups", world][1] < 7 * world
        for part in ("model, data", "first step", "plan, save", "save again"):
            assert rows[part, world][1] == 0
        assert rows["first step", world][2] == 0
        # megatron-core's optimizer exchanges 46 bytes of each rank, twice.
        assert rows["model, data", world][3] < 0.1 * world
        assert rows["plan, save", world][3] < 15 and rows["save again", world][3] < 0.5
    for part in ("groups", "model, data", "first step", "plan, save", "save again"):
        small, large = (rows[part, world][0] for world in (1024, 16384))
        assert large < 40 * small + 1


@ranks(dp=5)
def test_rings_of_odd_length_are_connected_without_a_deadlock(context: ParallelContext) -> None:
    for step in (1, 2):
        to_right, from_left = linked(step)
        sent, received = torch.tensor([context.rank]), torch.zeros(1, dtype=torch.int64)
        for work in (to_right.send(sent), from_left.receive(received)):
            work.wait()
        assert int(received) == (context.rank - step) % 5
