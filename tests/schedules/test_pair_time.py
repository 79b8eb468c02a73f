"""The price of a pair against two functions that really run in turns, on a made-up clock."""

import random
from collections.abc import Callable

import pytest

from megatron_ext.device import select
from megatron_ext.parallel.turns import Turns
from megatron_ext.schedules.pair_time import Piece, hidden_time, pair_time


class Clock:
    """The time of a rank, and the time at which its network is free again."""

    now = network = 0.0

    def run(self, turns: Turns, pieces: list[Piece]) -> Callable[[], None]:
        """Return a pass that gives way after each piece while the piece's exchange is under way."""

        def function() -> None:
            for computing, exchange in pieces:
                self.now += computing
                if exchange:
                    self.network = max(self.network, self.now) + exchange
                    arrives = self.network
                    turns.give_way()
                    self.now = max(self.now, arrives)

        return function


@pytest.mark.parametrize("seed", range(20))
def test_a_pair_takes_as_long_as_it_runs(seed: int) -> None:
    select().activate(0)
    draw = random.Random(seed)
    passes = [
        [
            *((draw.uniform(0, 2), draw.uniform(0.1, 2)) for _ in range(draw.randrange(6))),
            (draw.uniform(0, 2), 0.0),
        ]
        for _ in range(2)
    ]
    turns = Turns()
    clock = Clock()
    turns.run(*(clock.run(turns, pieces) for pieces in passes))
    assert pair_time(*passes) == pytest.approx(clock.now)


def test_what_a_pair_hides() -> None:
    # Much computing hides all exchanges: each pass begins and ends with another's exchange.
    assert hidden_time(40.0, 80.0, 8.0, 4, 0.5) == pytest.approx(8.0)
    # Little computing is hidden behind exchanges that follow one another without a gap.
    assert hidden_time(4.0, 8.0, 160.0, 4, 0.5) == pytest.approx(12.0)
    assert hidden_time(4.0, 8.0, 0.0, 0, 0.0) == 0


def test_recomputed_layers_exchange_four_times_in_the_backward_pass() -> None:
    # Ten layers with six short exchanges of 0.1 each. The forward pass, which has two a layer, ends
    # when the backward pass is halfway; nothing hides the other half's twenty exchanges.
    hidden = hidden_time(40.0, 120.0, 6.0, 10, 0.5, again=10)
    assert 3.4 < hidden < 4.0
    assert hidden_time(40.0, 120.0, 6.0, 10, 0.5) == pytest.approx(6.0)
    # Between the two, if only the first layers are recomputed.
    assert hidden < hidden_time(40.0, 120.0, 6.0, 10, 0.5, again=4) < 6.0
