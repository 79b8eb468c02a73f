"""Proof that a plan can be trusted: complete, in order, and without deadlock on any network."""

from __future__ import annotations

from collections import Counter, deque

from megatron_ext.schedules.plan import COMPUTE, RECEIVES, SENDS, Action, Kind, Plan, gives, needs


def errors(plan: Plan, *, capacity: int | None = None) -> list[str]:
    """Return what is wrong with a plan; nothing if it can be trusted.

    Checks that each computation happens once and in the order of the micro-batches, after what it
    needs is there, that sends and receives match one to one in the order of each channel, and that
    the ranks come to their end on a network whose channels hold ``capacity`` messages: 0 blocks a
    sender until the receiver takes the message, None never blocks it.
    """
    return [*_wrong_computations(plan), *_wrong_messages(plan), *_stuck(plan, capacity)]


def _wrong_computations(plan: Plan) -> list[str]:
    found = []
    seen = Counter(gives(a) for rank in plan.ranks for a in rank if a.kind in COMPUTE)
    halves = any(a.kind is Kind.WEIGHT for rank in plan.ranks for a in rank)
    trains = any(a.kind is not Kind.FORWARD for rank in plan.ranks for a in rank if a.peer is None)
    kinds = [Kind.FORWARD, *([Kind.INPUT] if trains else []), *([Kind.WEIGHT] if halves else [])]
    for kind in kinds:
        for stage in range(plan.placement.num_stages):
            counts = [seen.pop((kind, i, stage), 0) for i in range(plan.num_microbatches)]
            if counts != [1] * plan.num_microbatches:
                found.append(f"{kind} of stage {stage} happens {counts} times")
    found += [f"{key} is not asked for" for key in seen]
    for rank, actions in enumerate(plan.ranks):
        last: dict[tuple[Kind, int], int] = {}
        for a in actions:
            if a.kind in COMPUTE and plan.placement.rank_of(a.stage) != rank:
                found.append(f"rank {rank} computes {a}, which is another rank's")
            if last.get((a.kind, a.stage), -1) >= a.microbatch:
                found.append(f"rank {rank} runs {a} out of order")
            last[a.kind, a.stage] = a.microbatch
    return found


def _wrong_messages(plan: Plan) -> list[str]:
    channels: dict[tuple[int, int], tuple[list[object], list[object]]] = {}
    for rank, actions in enumerate(plan.ranks):
        for a in actions:
            forward = a.kind in (Kind.SEND_OUTPUT, Kind.RECEIVE_INPUT)
            if a.kind in SENDS and a.peer is not None:
                reaches = a.stage + 1 if forward else a.stage - 1
                channel = channels.setdefault((rank, a.peer), ([], []))
                channel[0].append((forward, a.microbatch, reaches))
            elif a.kind in RECEIVES and a.peer is not None:
                channel = channels.setdefault((a.peer, rank), ([], []))
                channel[1].append((forward, a.microbatch, a.stage))
    return [
        f"the messages from rank {sender} to rank {receiver} do not match"
        for (sender, receiver), (sent, received) in channels.items()
        if sent != received
    ]


def _stuck(plan: Plan, capacity: int | None) -> list[str]:
    """Run the lists against channels; a rank that cannot go on waits for its turn."""
    position = [0] * len(plan.ranks)
    full: dict[tuple[int, int], deque[Action]] = {}
    have: list[set[tuple[Kind, int, int]]] = [set() for _ in plan.ranks]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(plan.ranks):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if not _step(plan, rank, action, position, full, have, capacity):
                    break
                position[rank] += 1
                moved = True
    return [
        f"rank {rank} is stuck at {actions[position[rank]]}"
        for rank, actions in enumerate(plan.ranks)
        if position[rank] < len(actions)
    ]


def _step(
    plan: Plan,
    rank: int,
    action: Action,
    position: list[int],
    full: dict[tuple[int, int], deque[Action]],
    have: list[set[tuple[Kind, int, int]]],
    capacity: int | None,
) -> bool:
    """Do one action if it can be done now."""
    if action.kind in COMPUTE:
        if not all(key in have[rank] for key in needs(action, plan.placement)):
            return False
        have[rank].add(gives(action))
        return True
    assert action.peer is not None
    if action.kind in SENDS:
        channel = full.setdefault((rank, action.peer), deque())
        if capacity is not None and len(channel) >= capacity:
            # Room, or the receiver is taking right now.
            theirs = plan.ranks[action.peer]
            at = position[action.peer]
            taking = at < len(theirs) and theirs[at].kind in RECEIVES and theirs[at].peer == rank
            if not taking or len(channel) > capacity:
                return False
        channel.append(action)
        return True
    channel = full.setdefault((action.peer, rank), deque())
    if not channel:
        return False
    sent = channel.popleft()
    kind = Kind.FORWARD if action.kind is Kind.RECEIVE_INPUT else Kind.INPUT
    have[rank].add((kind, sent.microbatch, sent.stage))
    return True
