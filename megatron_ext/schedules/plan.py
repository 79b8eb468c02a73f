"""Pipeline schedules as data: a list of actions for each pipeline rank, and when each runs.

An `Order` lists the forward and backward passes of a rank (`orders`). `with_messages` adds the
sends and receives, so that all ranks' lists agree with one common sequence of events, in which a
send and its receive are one event. Such lists cannot deadlock: the first event of the sequence that
is still pending can always happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from megatron_ext.parallel.grid import Placement

Shape = Sequence[int] | Sequence[Sequence[int]]
"""The shape of all messages of a step, or a list with the shape of each micro-batch."""


class Kind(Enum):
    """The kinds of actions of a pipeline rank: computations, sends and receives.

    BACKWARD computes the gradients of a chunk's input and of its weights together. INPUT computes
    only the gradient of the input, WEIGHT only the gradients of the weights (B and W in
    arXiv:2401.10241). PAIR runs a FORWARD of one micro-batch and a BACKWARD of another in turns, so
    that one computes while the other's experts exchange tokens.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    PAIR = "FB"
    SEND_OUTPUT = "send output"
    RECEIVE_INPUT = "receive input"
    SEND_GRADIENT = "send gradient"
    RECEIVE_GRADIENT = "receive gradient"

    # Enum hashes a member's name, in Python, which takes most of the time of a long schedule.
    __hash__ = object.__hash__


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT, Kind.PAIR})
SENDS = frozenset({Kind.SEND_OUTPUT, Kind.SEND_GRADIENT})
RECEIVES = frozenset({Kind.RECEIVE_INPUT, Kind.RECEIVE_GRADIENT})


@dataclass(frozen=True, slots=True)
class Action:
    """One computation, send or receive of a pipeline rank.

    Attributes:
        microbatch: index of the micro-batch; in a pair, that of its forward pass.
        stage: index of the stage among all stages of the model; in a pair, that of its forward
            pass.
        peer: pipeline rank at the other end of a message, None for computation.
        forward, backward: the passes of a pair, None for other actions.
    """

    kind: Kind
    microbatch: int
    stage: int
    peer: int | None = None
    forward: Action | None = None
    backward: Action | None = None

    def beside(self, backward: Action) -> Action:
        """Return the pair of this forward pass and a backward pass."""
        return Action(Kind.PAIR, self.microbatch, self.stage, None, self, backward)

    @property
    def passes(self) -> tuple[Action, ...]:
        """Return the forward and the backward pass of a pair; the action itself if it is none."""
        if self.forward is None or self.backward is None:
            return (self,)
        return self.forward, self.backward

    def __str__(self) -> str:
        if self.backward is not None:
            return f"{self.forward} beside {self.backward}"
        end = "" if self.peer is None else f" with rank {self.peer}"
        return f"{self.kind.value}{self.microbatch} of stage {self.stage}{end}"


Order = list[Action]


@dataclass(frozen=True, slots=True)
class Durations:
    """Times of one stage's computations, in any unit; all stages are taken to be equal.

    A full backward pass takes ``input_gradient + weight_gradient``. A pair takes the time of its
    two passes without ``hidden``, the time of communication that each hides behind the other.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    hidden: float = 0.0

    @property
    def passes(self) -> float:
        """Return the time of a forward and a backward pass that do not overlap."""
        return self.forward + self.input_gradient + self.weight_gradient

    def of(self, kind: Kind) -> float:
        """Return the time of a computation of this kind."""
        if kind is Kind.PAIR:
            return self.passes - self.hidden
        if kind is Kind.BACKWARD:
            return self.input_gradient + self.weight_gradient
        if kind is Kind.FORWARD:
            return self.forward
        return self.input_gradient if kind is Kind.INPUT else self.weight_gradient


EVEN = Durations()


class CyclicOrder(ValueError):
    """Raised if computations of the ranks wait for each other in a cycle."""


def needs(action: Action, placement: Placement) -> Iterator[tuple[Kind, int, int]]:
    """Yield the keys ``(kind, microbatch, stage)`` of the computations that ``action`` waits for.

    The kind in a key is `Kind.INPUT` also for a full backward pass, since others wait only for its
    input gradient.
    """
    for part in action.passes:
        kind = part.kind
        microbatch = part.microbatch
        stage = part.stage
        if kind is Kind.FORWARD and stage > 0:
            yield Kind.FORWARD, microbatch, stage - 1
        elif kind in (Kind.BACKWARD, Kind.INPUT):
            yield Kind.FORWARD, microbatch, stage
            if stage < placement.num_stages - 1:
                yield Kind.INPUT, microbatch, stage + 1
        elif kind is Kind.WEIGHT:
            yield Kind.INPUT, microbatch, stage


def gives(action: Action) -> tuple[Kind, int, int]:
    """Return the key ``(kind, microbatch, stage)`` under which other actions wait for this result.

    ``action`` is no pair. The kind in the key is `Kind.INPUT` also for a full backward pass, since
    others wait only for its input gradient.
    """
    kind = Kind.INPUT if action.kind is Kind.BACKWARD else action.kind
    return kind, action.microbatch, action.stage


@dataclass(frozen=True, slots=True)
class Timed:
    """A computation with the times of its start and end."""

    action: Action
    start: float
    end: float


def timeline(
    orders: Sequence[Sequence[Action]],
    placement: Placement,
    durations: Durations = EVEN,
    latency: float = 0.0,
) -> list[list[Timed]]:
    """Return the times of each rank's computations, each started as early as possible.

    Sends and receives in the orders are ignored. A result is available on another rank after
    ``latency``.

    Raises:
        CyclicOrder: a computation waits for one that never runs.
    """
    lists = [[a for a in order if a.kind in COMPUTE] for order in orders]
    waits = [[list(needs(action, placement)) for action in actions] for actions in lists]
    ends: dict[Key, float] = {}
    timed: list[list[Timed]] = [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            ready = timed[rank][-1].end if timed[rank] else 0.0
            for place in range(len(timed[rank]), len(actions)):
                action = actions[place]
                for key in waits[rank][place]:
                    if key not in ends:
                        break
                    arrival = ends[key]
                    if latency and placement.rank_of(key[2]) != rank:
                        arrival += latency
                    if arrival > ready:
                        ready = arrival
                else:
                    end = ready + durations.of(action.kind)
                    timed[rank].append(Timed(action, ready, end))
                    for part in action.passes:
                        ends[gives(part)] = end
                    ready = end
                    moved = True
                    continue
                break
    for rank, actions in enumerate(lists):
        if len(timed[rank]) < len(actions):
            raise CyclicOrder(f"rank {rank} waits at {actions[len(timed[rank])]}")
    return timed


def _message(action: Action, placement: Placement) -> tuple[Action, Action] | None:
    """Return the send and the receive of a computation's result; None if it stays on the rank."""
    sender = placement.rank_of(action.stage)
    if action.kind is Kind.FORWARD:
        kinds = (Kind.SEND_OUTPUT, Kind.RECEIVE_INPUT)
        stage = action.stage + 1
    elif action.kind in (Kind.BACKWARD, Kind.INPUT):
        kinds = (Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT)
        stage = action.stage - 1
    else:
        return None
    if not 0 <= stage < placement.num_stages or placement.rank_of(stage) == sender:
        return None
    send = replace(action, kind=kinds[0], peer=placement.rank_of(stage))
    return send, Action(kinds[1], action.microbatch, stage, peer=sender)


def with_messages(
    orders: Sequence[Order], placement: Placement, durations: Durations = EVEN
) -> list[Order]:
    """Return each rank's computations with the sends and receives of their results added.

    A send directly follows the computation whose result it sends. The receiving rank posts the
    receive after its computations that end before the sender's computation does, and before all
    others, and therefore before the message is used.

    Args:
        durations: expected times of the computations, from which their ends are computed.

    Raises:
        CyclicOrder: computations wait for each other in a cycle.
    """
    computed = sorted(
        (timed for rank in timeline(orders, placement, durations) for timed in rank),
        key=lambda timed: (timed.end, timed.start, timed.action.stage),
    )
    lists: list[Order] = [[] for _ in orders]
    for timed in computed:
        rank = placement.rank_of(timed.action.stage)
        lists[rank].append(timed.action)
        for part in timed.action.passes:
            message = _message(part, placement)
            if message is not None:
                send, receive = message
                lists[rank].append(send)
                lists[placement.rank_of(receive.stage)].append(receive)
    return lists


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """The actions of each pipeline rank for one step, messages included.

    Two plans are equal only if they are the same object, since comparing or hashing up to 100,000
    actions would be slow.
    """

    schedule: str
    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]


Key = tuple[Kind, int, int]
"""Kind, micro-batch and stage of an action."""


def passes_of(actions: Iterable[Action]) -> Iterator[Action]:
    """Yield the actions, with the forward and then the backward pass of each pair in its place."""
    for action in actions:
        yield from action.passes


@lru_cache(maxsize=64)
def settled_messages(plan: Plan, rank: int) -> dict[Key, list[Key]]:
    """Map each message that ``rank`` receives to messages from ``rank`` that must have arrived.

    These are the messages that the sender of the received one had used in computations before it
    sent it. Each is listed only under the first received message that proves its arrival. Messages
    are given as (kind, micro-batch, stage) of the send or receive on ``rank``.
    """
    last = plan.placement.num_stages - 1
    settled = {}
    for peer, actions in enumerate(plan.ranks):
        used: list[Key] = []
        for action in passes_of(actions) if peer != rank else ():
            kind = action.kind
            microbatch = action.microbatch
            stage = action.stage
            if action.peer == rank and kind in SENDS:
                forwards = kind is Kind.SEND_OUTPUT
                received = Kind.RECEIVE_INPUT if forwards else Kind.RECEIVE_GRADIENT
                settled[received, microbatch, stage + 1 if forwards else stage - 1] = used
                used = []
            elif kind is Kind.FORWARD and stage > 0:
                if plan.placement.rank_of(stage - 1) == rank:
                    used.append((Kind.SEND_OUTPUT, microbatch, stage - 1))
            elif kind in (Kind.BACKWARD, Kind.INPUT) and stage < last:
                if plan.placement.rank_of(stage + 1) == rank:
                    used.append((Kind.SEND_GRADIENT, microbatch, stage + 1))
    return settled


@lru_cache(maxsize=256)
def recomputed_whole(actions: tuple[Action, ...], count: int) -> frozenset[tuple[int, int]]:
    """Return the micro-batches and stages for which a rank recomputes all layers of the stage.

    In each window of its forward passes, the first ``count`` recompute fewer layers. A window is as
    long as the most micro-batches that the rank holds.
    """
    window = max(1, most_held(actions))
    forwards = [action for action in passes_of(actions) if action.kind is Kind.FORWARD]
    return frozenset(
        (action.microbatch, action.stage)
        for index, action in enumerate(forwards)
        if index % window >= count
    )


def most_held(actions: Sequence[Action]) -> int:
    """Return the peak number of activations that a rank holds, one for each micro-batch and stage.

    Without backward passes, activations are held only during their own forward pass.
    """
    trains = any(action.kind is not Kind.FORWARD for action in actions if action.kind in COMPUTE)
    in_flight = peak = 0
    for action in passes_of(actions):
        if action.kind is Kind.FORWARD:
            peak = max(peak, in_flight + 1)
            in_flight += trains
        elif action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            in_flight -= 1
    return peak
