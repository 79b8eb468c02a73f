"""Two functions that run in turns, on two threads, with the order and the errors of one."""

import gc
import threading
from collections.abc import Callable

import pytest
import torch

from megatron_ext.device import select
from megatron_ext.parallel.turns import Turns


@pytest.fixture(autouse=True)
def _device() -> None:
    select().activate(0)


def steps(turns: Turns, name: str, count: int, said: list[str]) -> Callable[[], None]:
    """Return a function that says its name and number, and gives way after each but the last."""

    def function() -> None:
        for number in range(count):
            said.append(f"{name}{number}")
            if number < count - 1:
                turns.give_way()

    return function


@pytest.mark.parametrize(
    ("other", "own", "order"),
    [
        (3, 3, "b0 f0 b1 f1 b2 f2"),
        (1, 3, "b0 f0 f1 f2"),
        (4, 2, "b0 f0 b1 f1 b2 b3"),
        (1, 1, "b0 f0"),
    ],
)
def test_each_goes_on_where_the_other_gives_way_or_ends(other: int, own: int, order: str) -> None:
    turns = Turns()
    for _ in range(3):
        said: list[str] = []
        taken: list[bool] = []
        turns.run(
            steps(turns, "b", other, said), steps(turns, "f", own, said), took_turn=taken.append
        )
        assert " ".join(said) == order
        assert taken[:2] == [False, True]
    turns.give_way()  # outside a pair, there is nobody to give way to


def test_all_pairs_share_one_thread_which_ends_with_them() -> None:
    turns = Turns()
    threads = []
    for _ in range(3):
        turns.run(lambda: threads.append(threading.current_thread()), lambda: None)
    [thread] = set(threads)
    assert thread is not threading.current_thread()
    del turns
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_an_error_of_either_ends_both_and_the_next_pair_runs() -> None:
    turns = Turns()
    said: list[str] = []

    def fails() -> None:
        turns.give_way()
        raise ValueError("lost")

    ended = threading.Event()

    def goes_on() -> None:
        try:
            steps(turns, "x", 5, said)()
        finally:
            ended.set()

    for other, own in ((fails, goes_on), (goes_on, fails)):
        said.clear()
        ended.clear()
        with pytest.raises(ValueError, match="lost"):
            turns.run(other, own)
        assert ended.wait(10)
        assert len(said) < 5
        said.clear()
        turns.run(steps(turns, "b", 2, said), steps(turns, "f", 2, said))
        assert said == ["b0", "f0", "b1", "f1"]


@pytest.mark.parametrize("keeps", [True, False])
def test_random_numbers_are_those_of_each_alone(keeps: bool) -> None:
    """The other function sets states of its own, as a recomputation does, and restores them."""
    turns = Turns(keeps_random_states=keeps)
    drawn: dict[str, list[float]] = {"own": [], "other": []}

    def own() -> None:
        for _ in range(3):
            drawn["own"].append(torch.rand(()).item())
            turns.give_way()

    def other() -> None:
        before = torch.get_rng_state()
        torch.manual_seed(7)
        for _ in range(3):
            drawn["other"].append(torch.rand(()).item())
            turns.give_way()
        torch.set_rng_state(before)

    torch.manual_seed(5)
    want = [torch.rand(()).item() for _ in range(4)]
    torch.manual_seed(7)
    others = [torch.rand(()).item() for _ in range(3)]
    torch.manual_seed(5)
    turns.run(other, own)
    after = torch.rand(()).item()
    assert ([*drawn["own"], after] == want and drawn["other"] == others) is keeps
