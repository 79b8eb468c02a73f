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


PARTS = ("groups", "model, data", "first step", "plan, save", "save again", "load")


def _measured(*words: str) -> dict[tuple[str, str, int], list[float]]:
    """Run the script; return the numbers of its table, by layout, part and number of ranks.

    They are CPU seconds, calls of ``new_group``, exchanges of objects, and KiB in them.
    """
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {}
    for line in done.stdout.splitlines():
        layout, part, *cells = [cell.strip() for cell in line.split("|")[1:-1]] or ["", ""]
        world, *costs = [cell.replace(",", "") for cell in cells] or [""]
        if world.isdigit():
            rows[layout, part, int(world)] = [float(cost) for cost in costs]
    return rows


@pytest.mark.slow
def test_what_a_rank_exchanges_does_not_grow_with_the_world() -> None:
    rows = _measured("--worlds", "64", "1024")
    layouts = {layout for layout, _, _ in rows}
    assert layouts == {"tensor", "pipeline", "experts", "pairs", "gradient shards", "weight shards"}
    assert len(rows) == len(layouts) * len(PARTS) * 2
    for layout in layouts:
        for part in PARTS:
            few, many = (rows[layout, part, world] for world in (64, 1024))
            assert many[0] < 20 * few[0] + 1
            # Every rank calls `new_group` for the groups of all ranks.
            creates = part == "groups" or (layout, part) == ("pairs", "model, data")
            assert many[1] <= 16 * few[1] if creates else many[1] == 0
            # A step of messages that never came may not be finite, which is told in one exchange.
            assert abs(many[2] - few[2]) <= (part == "first step")
            # megatron-core's optimizer exchanges 46 bytes of each rank, twice.
            assert many[3] < 110 if part == "model, data" else many[3] <= few[3] + 1


@pytest.mark.slow
def test_a_rank_of_16384_starts_trains_saves_and_loads() -> None:
    rows = _measured("--worlds", "16384", "--layouts", "pipeline")
    assert [part for _, part, _ in rows] == list(PARTS)
    seconds, groups, calls, kibibytes = zip(*rows.values(), strict=True)
    assert max(seconds) < 40 and max(groups) < 6 * 16384
    assert max(calls) < 15 and sorted(kibibytes)[-2] < 50


@ranks(dp=5)
def test_rings_of_odd_length_are_connected_without_a_deadlock(context: ParallelContext) -> None:
    for step in (1, 2):
        to_right, from_left = linked(step)
        sent, received = torch.tensor([context.rank]), torch.zeros(1, dtype=torch.int64)
        for work in (to_right.send(sent), from_left.receive(received)):
            work.wait()
        assert int(received) == (context.rank - step) % 5
