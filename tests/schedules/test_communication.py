"""How long messages are kept in memory, in plans of all schedules and in a step of Gloo ranks."""

from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.recorder import Recorder
from megatron_ext.schedules.communication import Channels
from megatron_ext.schedules.orders import build_plan
from megatron_ext.schedules.plan import SENDS, Action, Key, Kind, Plan, settled_messages
from tests.ranks import run_on_ranks
from tests.schedules.test_runtime import engine_of, layout_of, step

USES = {
    Kind.FORWARD: (Kind.RECEIVE_INPUT, Kind.SEND_OUTPUT, -1),
    Kind.BACKWARD: (Kind.RECEIVE_GRADIENT, Kind.SEND_GRADIENT, 1),
    Kind.INPUT: (Kind.RECEIVE_GRADIENT, Kind.SEND_GRADIENT, 1),
}
"""For each computation, the receive of its input, the send of this input, and the way to it."""


class Replay:
    """Runs all lists of a plan at once; a message arrives as soon as it is sent."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.settled = [settled_messages(plan, rank) for rank in range(len(plan.ranks))]
        self.kept: list[set[Key]] = [set() for _ in plan.ranks]
        self.sent: set[Key] = set()
        self.used: set[Key] = set()
        self.peak = 0
        at, moved = [0] * len(plan.ranks), True
        while moved:
            moved = False
            for rank, actions in enumerate(plan.ranks):
                while at[rank] < len(actions) and self.act(rank, actions[at[rank]]):
                    at[rank] += 1
                    moved = True
        assert at == [len(actions) for actions in plan.ranks]

    def act(self, rank: int, action: Action) -> bool:
        """Run an action of a rank, unless it waits for a message; tell whether it ran."""
        kind, microbatch, stage = action.kind, action.microbatch, action.stage
        if kind in SENDS:
            self.sent.add((kind, microbatch, stage))
            self.kept[rank].add((kind, microbatch, stage))
            self.peak = max(self.peak, len(self.kept[rank]))
            return True
        if kind not in USES:
            return True
        receive, send, way = USES[kind]
        source, placement = stage + way, self.plan.placement
        if not 0 <= source < placement.num_stages or placement.rank_of(source) == rank:
            return True
        message = send, microbatch, source
        if message not in self.sent:
            return False
        for key in self.settled[rank].get((receive, microbatch, stage), ()):
            assert key in self.used, f"{key} is given up before its peer used it"
            self.kept[rank].remove(key)
        self.used.add(message)
        return True


def plan_of(schedule: str, size: int, num_microbatches: int) -> Plan:
    chunks = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}.get(schedule, 1)
    return build_plan(
        schedule, pipeline_size=size, num_microbatches=num_microbatches, num_chunks=chunks
    )


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_messages_are_given_up_after_use_and_their_number_does_not_grow(
    schedule: str, size: int
) -> None:
    few, many = (Replay(plan_of(schedule, size, count * size)).peak for count in (4, 16))
    assert many == few <= 4 * size


class Measured(Channels):
    """Channels that note the most bytes they kept."""

    peak = 0

    def send(self, action: Action, tensor: Tensor) -> None:
        super().send(action, tensor)
        parts = [part for works in self.sent.values() for _, part in works]
        Measured.peak = max(Measured.peak, sum(part.nbytes for part in parts))


def check_bytes(context: ParallelContext, schedule: str, num_microbatches: int) -> None:
    engine, chunks = engine_of(schedule, context)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_ext.schedules.communication.Channels", Measured)
        engine.run(step, range(num_microbatches), num_microbatches, (3, 1, 2))
    message = torch.zeros(3, 1, 2).nbytes
    size = context.layout.pipeline_model_parallel_size
    assert message <= Measured.peak <= 2 * size * len(chunks) * message


def test_steps_after_the_first_look_at_no_list_of_actions() -> None:
    """Looking at all lists takes 0.1 s of a step with 16 ranks and 256 micro-batches."""

    def settled() -> dict[Key, list[Key]]:
        plan = build_plan("interleaved", pipeline_size=2, num_microbatches=4, num_chunks=2)
        return settled_messages(plan, 1)

    first = settled()
    assert first and settled() is first


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-v", 2)])
def test_bytes_of_messages_do_not_grow_with_micro_batches(schedule: str, chunks: int) -> None:
    arguments = {"schedule": schedule, "num_microbatches": 48}
    run_on_ranks(check_bytes, layout_of(schedule, 2, chunks), arguments)


class Slow:
    """A send that ends only when it is waited for."""

    def __init__(self) -> None:
        self.waited = False

    def is_completed(self) -> bool:
        return self.waited

    def wait(self) -> None:
        self.waited = True


def test_a_limited_number_of_messages_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("megatron_ext.schedules.communication._PENDING", 2)
    started: list[Slow] = []

    def isend(tensor: Tensor, **ends: Any) -> Slow:
        started.append(Slow())
        return started[-1]

    monkeypatch.setattr(torch.distributed, "isend", isend)
    flags = {"variable_seq_lengths": False, "mtp_standalone": False, "pipeline_dtype": None}
    context: Any = SimpleNamespace(
        pp_rank=0, pipeline_ranks=[0, 1], recorder=Recorder(), pipeline_channels=(None, None)
    )
    given: Any = SimpleNamespace(**flags)
    channels = Channels(given, context, plan_of("1f1b", 2, 4), (3, 1, 2))
    for microbatch in range(4):
        channels.send(Action(Kind.SEND_OUTPUT, microbatch, 0, peer=1), torch.zeros(3, 1, 2))
        assert len(channels.sent) == min(microbatch + 1, 2)
    assert [work.waited for work in started] == [True, True, False, False]
    channels.finish()
    assert all(work.waited for work in started) and not channels.sent


def length_of(microbatch: int) -> int:
    return 9 - microbatch


def check_lengths(context: ParallelContext, schedule: str) -> None:
    """The sizes of messages are known ahead here; every wait names the other end's global rank."""
    engine, _ = engine_of(schedule, context, length=-9)
    waits: list[tuple[str, int]] = []
    recorder = context.recorder
    waiting = recorder.waiting

    def noted(kind: str, microbatch: int, stage: int, peer: int) -> AbstractContextManager[None]:
        waits.append((kind, peer))
        return waiting(kind, microbatch, stage, peer)

    recorder.waiting = noted  # type: ignore[method-assign]
    engine.run(step, range(5), 5, [(length_of(i), 1, 2) for i in range(5)])
    other = (context.rank + 2) % 4
    assert waits and {peer for _, peer in waits} == {other}
    assert {kind for kind, _ in waits} >= {"receive input" if context.pp_rank else "send output"}


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb-v", 2)])
def test_each_micro_batch_has_messages_of_its_own_shape(schedule: str, chunks: int) -> None:
    """There are two pipelines, of the ranks 0 and 2, and of 1 and 3."""
    layout = replace(layout_of(schedule, 2, chunks), world_size=4)
    run_on_ranks(check_lengths, layout, {"schedule": schedule})


@pytest.mark.parametrize("name", ["variable_seq_lengths", "mtp_standalone", ""])
def test_messages_whose_size_the_receiver_cannot_know_tell_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage with nothing but multi-token prediction sends the states of all depths."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    flags = {"variable_seq_lengths": False, "mtp_standalone": False, "pipeline_dtype": None}
    config: Any = SimpleNamespace(**{**flags, name: True})
    context: Any = SimpleNamespace(
        pp_rank=0, pipeline_ranks=[0, 1], recorder=None, pipeline_channels=()
    )
    channels = Channels(config, context, plan_of("1f1b", 2, 2), (3, 1, 2))
    assert channels.shape == (None if name else (3, 1, 2))
