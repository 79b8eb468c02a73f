"""Steps of all schedules end on a network whose sends block, and hold few messages.

The ranks are threads of one process. A send there returns when the receiver has taken the message,
and so does a receive: what ends there ends with every library that lets more happen at a time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_ext.config.parallel import V_SHAPED
from megatron_ext.device import cuda_shim
from megatron_ext.parallel.grid import Placement
from megatron_ext.parallel.recorder import Recorder
from megatron_ext.schedules.communication import Channels
from megatron_ext.schedules.plan import Action, Kind, Plan
from tests.schedules.test_plan import changed, first_two
from tests.schedules.test_runtime import engine_of, step, truth


class Stuck(AssertionError):
    """Raised on all ranks where each waits for another one."""


class Sent:
    """The work of a message that has arrived."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Network:
    """Passes messages between ranks.

    Attributes:
        offers: for each group, sender and receiver, the message that its sender waits with.
        waiting: for each rank that waits, what it does and whether it can go on.
        held: for each rank, the messages that it has sent; they live as long as it keeps them.
        most: for each rank, the largest number of sent bytes that it has kept.
    """

    def __init__(self, size: int) -> None:
        self.changes = threading.Condition()
        self.offers: dict[tuple[str, int, int], Tensor] = {}
        self.waiting: dict[int, tuple[str, Callable[[], bool]]] = {}
        self.stuck = ""
        self.running = size
        self.here = threading.local()
        self.held: list[list[weakref.ref[Tensor]]] = [[] for _ in range(size)]
        self.most = [0] * size

    def send(self, tensor: Tensor, *, group: str, group_dst: int) -> Sent:
        rank: int = self.here.rank
        channel = group, rank, group_dst
        with self.changes:
            self.offers[channel] = tensor
            self._wait(f"sends to {group_dst}", lambda: channel not in self.offers)
        self.held[rank].append(weakref.ref(tensor))
        kept = [message for entry in self.held[rank] if (message := entry()) is not None]
        self.most[rank] = max(self.most[rank], sum(message.nbytes for message in kept))
        return Sent()

    def receive(self, tensor: Tensor, *, group: str, group_src: int) -> Sent:
        channel = group, group_src, self.here.rank
        with self.changes:
            self._wait(f"receives from {group_src}", lambda: channel in self.offers)
            tensor.copy_(self.offers.pop(channel))
            self.changes.notify_all()
        return Sent()

    def _wait(self, doing: str, ready: Callable[[], bool]) -> None:
        self.waiting[self.here.rank] = doing, ready
        self.changes.notify_all()
        while not ready():
            self._check()
            self.changes.wait(timeout=60)
        del self.waiting[self.here.rank]

    def _check(self) -> None:
        idle = len(self.waiting) == self.running
        if idle and not any(ready() for _, ready in self.waiting.values()):
            ranks = sorted(self.waiting.items())
            self.stuck = "; ".join(f"rank {rank} {doing}" for rank, (doing, _) in ranks)
            self.changes.notify_all()
        if self.stuck:
            raise Stuck(self.stuck)

    def leave(self) -> None:
        with self.changes:
            self.running -= 1
            self.changes.notify_all()


def on_threads(size: int, body: Callable[[int], None]) -> Network:
    """Run ``body(rank)`` on all ranks of a network; raise the first rank's error, if any."""
    network, errors = Network(size), dict[int, BaseException]()

    def run(rank: int) -> None:
        network.here.rank = rank
        try:
            body(rank)
        except BaseException as error:
            errors[rank] = error
        finally:
            network.leave()

    names = {"isend": network.send, "irecv": network.receive, "recv": network.receive}
    with mock.patch.multiple("torch.distributed", **names):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[min(errors)]
    assert not network.offers
    return network


@pytest.fixture(autouse=True)
def _on_a_cpu() -> None:
    cuda_shim.install()


def context_of(schedule: str, size: int, rank: int) -> Any:
    placement = Placement(size, CHUNKS.get(schedule, 1), v_shape=schedule in V_SHAPED)
    last = placement.rank_of(placement.num_stages - 1)
    return SimpleNamespace(
        placement=placement,
        pp_rank=rank,
        is_last_stage=rank == last,
        layout=SimpleNamespace(pipeline_model_parallel_size=size),
        pgs=SimpleNamespace(cp=SimpleNamespace(size=lambda: 1)),
        pipeline_channels=("to higher ranks", "to lower ranks"),
        pipeline_ranks=range(size),
        recorder=Recorder(),
    )


CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}
SHAPE = (3, 1, 2)


def run_step(
    schedule: str,
    size: int,
    num_microbatches: int,
    *,
    length: int = SHAPE[0],
    change: Callable[[Plan], Plan] = lambda plan: plan,
) -> Network:
    """Run a step on all ranks; compare its losses and gradients with plain torch."""
    losses, gradients = truth(size * CHUNKS.get(schedule, 1), num_microbatches, length)

    def body(rank: int) -> None:
        context = context_of(schedule, size, rank)
        varies = {"variable_seq_lengths": length < 0}
        engine, chunks = engine_of(schedule, context, length=length, **varies)
        plan = change(engine.plan(num_microbatches, forward_only=False))
        with mock.patch.object(engine, "plan", return_value=plan):
            reports = engine.run(
                step, range(num_microbatches), num_microbatches, (length, *SHAPE[1:])
            )
        found = [float(report["sum"][0]) for report in reports]
        assert found == pytest.approx(losses if context.is_last_stage else [], rel=1e-5)
        for index, chunk in enumerate(chunks):
            stage = context.placement.stage_of(rank, index)
            assert float(chunk.weight.grad) == pytest.approx(gradients[stage], rel=1e-5)

    return on_threads(size, body)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_steps_end_with_blocking_sends(schedule: str, size: int) -> None:
    for num_microbatches in (1, 2, 3, 5, 8, 13, 32):
        run_step(schedule, size, num_microbatches)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_messages_that_tell_their_shapes_end_with_blocking_sends(schedule: str) -> None:
    run_step(schedule, 3, 5, length=-9)


def test_a_planted_deadlock_is_found() -> None:
    """Both ranks send first, which a network that keeps messages would forgive."""

    def receive_late(plan: Plan) -> Plan:
        order = list(plan.ranks[1])
        late = order.pop(first_two(order, Kind.RECEIVE_INPUT)[1])
        use = first_two(order, Kind.FORWARD)[1]
        return changed(plan, 1, [*order[:use], late, *order[use:]])

    with pytest.raises(Stuck, match="rank 0 sends to 1; rank 1 sends to 0"):
        run_step("1f1b", 2, 3, change=receive_late)


def test_a_planted_exchange_of_messages_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank sends the second micro-batch's output before the first one's."""
    send, late = Channels.send, list[tuple[Action, Tensor]]()

    def exchanged(channels: Channels, action: Action, tensor: Tensor) -> None:
        outputs = action.kind is Kind.SEND_OUTPUT
        if outputs and action.microbatch == 0:
            late.append((action, tensor.detach().clone()))
            return
        send(channels, action, tensor)
        if outputs and action.microbatch == 1:
            send(channels, *late.pop())

    monkeypatch.setattr(Channels, "send", exchanged)
    with pytest.raises(AssertionError, match="approx"):
        run_step("1f1b", 2, 3)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_a_rank_keeps_only_the_message_in_flight(schedule: str) -> None:
    """A message that has arrived is given up before the next is sent, where the library tells."""
    message = SHAPE[0] * SHAPE[1] * SHAPE[2] * torch.float32.itemsize
    assert run_step(schedule, 4, 32).most == [message] * 4


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_a_rank_keeps_few_messages_where_only_who_waits_is_told(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sent, "is_completed", lambda work: False)
    message = SHAPE[0] * SHAPE[1] * SHAPE[2] * torch.float32.itemsize
    # With 32 micro-batches and 4 ranks, no more than with 8.
    most = max(run_step(schedule, 4, 32).most)
    assert most <= 8 * CHUNKS.get(schedule, 1) * message
