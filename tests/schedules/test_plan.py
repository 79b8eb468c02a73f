"""Plans of many shapes are complete, in order, free of deadlock and within memory."""

import random
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from megatron_ext.config.parallel import PAIRED_SCHEDULES, V_SHAPED
from megatron_ext.errors import ConfigError
from megatron_ext.parallel.grid import Placement
from megatron_ext.schedules import picture
from megatron_ext.schedules.__main__ import main
from megatron_ext.schedules.orders import SCHEDULES, build_plan
from megatron_ext.schedules.picture import text
from megatron_ext.schedules.plan import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    CyclicOrder,
    Durations,
    Kind,
    Plan,
    gives,
    needs,
    passes_of,
    timeline,
    with_messages,
)
from megatron_ext.schedules.price import price

NUM_PLANS = 700


def random_plan(generator: random.Random) -> tuple[Plan, int]:
    schedule = generator.choice(SCHEDULES)
    size = 1 if schedule == "no-pipelining" else generator.randint(1, 8)
    chunks = {"interleaved": generator.randint(2, 4), **dict.fromkeys(V_SHAPED, 2)}.get(schedule, 1)
    forward_only = generator.random() < 0.15
    group = size + generator.choice((0, 0, 1, 3)) if schedule == "interleaved" else size
    plan = build_plan(
        schedule,
        pipeline_size=size,
        num_microbatches=generator.randint(1, 32),
        num_chunks=chunks,
        group_size=group,
        forward_only=forward_only,
        durations=Durations(*(generator.choice((0.5, 1.0, 1.3, 2.0)) for _ in range(3))),
        pairs=schedule in PAIRED_SCHEDULES and not forward_only and generator.random() < 0.5,
    )
    return plan, group


def activation_limit(plan: Plan, rank: int, group: int) -> int:
    """Return how many stage activations a rank may hold, by the papers."""
    size, chunks = plan.placement.pipeline_size, plan.placement.num_chunks
    if not any(action.kind is not Kind.FORWARD for action in plan.ranks[0] if action.peer is None):
        return 1
    # A pair adds a forward pass to the warm-up, and in 1F1B one for each later stage.
    pairs = any(a.kind is Kind.PAIR for rank in plan.ranks for a in rank)
    if plan.schedule == "interleaved":
        # Left-over micro-batches join the last group, which is then smaller than two groups.
        rest = plan.num_microbatches % group
        largest = group + rest if rest < size and plan.num_microbatches > group else group
        return (size - rank - 1) * 2 + (chunks - 1) * largest + 1 + pairs
    if plan.schedule in ("zb-h1", "zb-v"):
        return size * chunks
    if plan.schedule == "dualpipe-v":
        return 2 * size + 1
    return 2 * (size - rank) if pairs else size - rank


@pytest.mark.slow
def test_random_plans_are_complete_and_free_of_deadlock_and_within_memory() -> None:
    generator = random.Random(3)
    for _ in range(NUM_PLANS):
        plan, group = random_plan(generator)
        case = (plan.schedule, plan.placement, plan.num_microbatches, group)
        for capacity in (0, generator.randint(1, 3), None):
            assert errors(plan, capacity=capacity) == [], case
        for rank, peak in enumerate(price(plan).peak_activations):
            assert peak <= activation_limit(plan, rank, group), (case, rank)


CASES = [*((x, False) for x in SCHEDULES), *((x, True) for x in PAIRED_SCHEDULES)]


@pytest.mark.parametrize(("schedule", "pairs"), CASES)
def test_small_plans_are_complete_and_free_of_deadlock_and_within_memory(
    schedule: str, pairs: bool
) -> None:
    """The number of micro-batches is below, at and above the sizes of the pipeline and groups."""
    for size in (1,) if schedule == "no-pipelining" else (1, 2, 3, 4):
        for chunks in {"interleaved": (2, 3), **dict.fromkeys(V_SHAPED, (2,))}.get(schedule, (1,)):
            for group in (size, size + 1) if schedule == "interleaved" else (None,):
                for number in (1, 2, 3, 4, 5, 6):
                    plan = build_plan(
                        schedule,
                        pipeline_size=size,
                        num_microbatches=number,
                        num_chunks=chunks,
                        group_size=group,
                        pairs=pairs,
                    )
                    case = (size, chunks, group, number)
                    for capacity in (0, None):
                        assert errors(plan, capacity=capacity) == [], case
                    for rank, peak in enumerate(price(plan).peak_activations):
                        assert peak <= activation_limit(plan, rank, group or size), (case, rank)


def computed(plan: Plan, rank: int) -> str:
    """Return a rank's computations such as ``F0 B0``; later chunks have small letters."""
    words = []
    for action in plan.ranks[rank]:
        if action.kind in COMPUTE:
            word = f"{action.kind.value}{action.microbatch}"
            words.append(word.lower() if plan.placement.chunk_of(action.stage) else word)
    return " ".join(words)


def test_micro_batches_that_fill_no_group_join_the_last_one() -> None:
    """Only if they are fewer than the ranks: here groups of 2, with 5, and of 4, with 6."""

    def interleaved(number: int, group: int) -> list[str]:
        plan = build_plan(
            "interleaved",
            pipeline_size=2,
            num_microbatches=number,
            num_chunks=2,
            group_size=group,
        )
        return [computed(plan, rank) for rank in range(2)]

    first, second = interleaved(5, 2)
    assert [word for word in first.split() if word[0] in "fF"] == (
        "F0 F1 f0 f1 F2 F3 F4 f2 f3 f4".split()
    )
    # Rank 0 warms up with two passes for the later rank, and with the largest group of chunk 0.
    assert first.startswith("F0 F1 f0 f1 F2 F3 b0 ")
    assert second.startswith("F0 F1 f0 f1 b0 ")
    first, _ = interleaved(6, 4)
    assert [word for word in first.split() if word[0] in "fF"] == (
        "F0 F1 F2 F3 f0 f1 f2 f3 F4 F5 f4 f5".split()
    )


def test_an_evaluation_runs_as_many_micro_batches_through_a_chunk_as_there_are_ranks() -> None:
    plan = build_plan(
        "interleaved", pipeline_size=2, num_microbatches=3, num_chunks=2, forward_only=True
    )
    assert [computed(plan, rank) for rank in range(2)] == ["F0 F1 f0 f1 F2 f2"] * 2
    # Without a backward pass, nothing is kept for one.
    assert price(plan).peak_activations == [1, 1]


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (3.0, 1.0, 1.0), (1.0, 4.0, 2.0)])
def test_receives_come_before_what_ends_after_the_message_is_ready(
    times: tuple[float, float, float],
) -> None:
    durations = Durations(*times)
    for schedule, chunks in (
        ("1f1b", 1),
        ("zb-h1", 1),
        ("interleaved", 2),
        ("zb-v", 2),
        ("dualpipe-v", 2),
    ):
        plan = build_plan(
            schedule,
            pipeline_size=3,
            num_microbatches=6,
            num_chunks=chunks,
            durations=durations,
        )
        timed = price(plan, durations).timeline
        ends = {gives(entry.action): entry.end for rank in timed for entry in rank}
        for actions in plan.ranks:
            for place, action in enumerate(actions):
                if action.kind not in RECEIVES:
                    continue
                forward = action.kind is Kind.RECEIVE_INPUT
                source = action.stage - 1 if forward else action.stage + 1
                kind = Kind.FORWARD if forward else Kind.INPUT
                ready = ends[kind, action.microbatch, source]
                before = [ends[gives(a)] for a in actions[:place] if a.kind in COMPUTE]
                after = [ends[gives(a)] for a in actions[place:] if a.kind in COMPUTE]
                assert max(before, default=0) <= ready <= min(after), (schedule, action)


def test_orders_of_zb_v_follow_the_given_times() -> None:
    times = Durations(1.0, 3.0, 1.0)
    common = {"pipeline_size": 4, "num_microbatches": 8, "num_chunks": 2}
    tuned = build_plan("zb-v", durations=times, **common)  # type: ignore[arg-type]
    even = build_plan("zb-v", **common)  # type: ignore[arg-type]
    assert price(tuned, times).makespan < price(even, times).makespan


def test_what_a_computation_takes() -> None:
    times = Durations(1.0, 3.0, 5.0, hidden=2.0)
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT, Kind.PAIR)
    assert [times.of(kind) for kind in kinds] == [1.0, 8.0, 3.0, 5.0, 7.0]


def test_a_forward_pass_is_beside_the_backward_pass_of_an_earlier_micro_batch() -> None:
    def orders(schedule: str, number: int, *, size: int = 1, chunks: int = 1) -> list[str]:
        plan = build_plan(
            schedule,
            pipeline_size=size,
            num_microbatches=number,
            num_chunks=chunks,
            pairs=True,
        )
        return [
            " ".join(
                "".join(f"{part.kind.value}{part.microbatch}.{part.stage}" for part in a.passes)
                for a in plan.ranks[rank]
                if a.kind in COMPUTE
            )
            for rank in range(size)
        ]

    assert orders("no-pipelining", 3) == ["F0.0 F1.0B0.0 F2.0B1.0 B2.0"]
    assert orders("1f1b", 4, size=2) == [
        "F0.0 F1.0 F2.0 F3.0B0.0 B1.0 B2.0 B3.0",
        "F0.1 F1.1B0.1 F2.1B1.1 F3.1B2.1 B3.1",
    ]
    # Chunk 1 of rank 0 is stage 2. The warm-up is megatron-core's, which is one pass longer, too.
    assert orders("interleaved", 2, size=2, chunks=2) == [
        "F0.0 F1.0 F0.2 F1.2 B0.2 B1.2 B0.0 B1.0",
        "F0.1 F1.1 F0.3 F1.3B0.3 B1.3 B0.1 B1.1",
    ]


def test_hidden_communication_shortens_every_pair() -> None:
    shape = {"pipeline_size": 4, "num_microbatches": 16}
    plain = price(build_plan("1f1b", **shape))  # type: ignore[arg-type]
    paired = build_plan("1f1b", **shape, pairs=True)  # type: ignore[arg-type]
    assert price(paired).makespan == plain.makespan
    hidden = price(paired, Durations(hidden=0.5))
    # The last rank pairs all passes but its first and its last.
    assert hidden.makespan == plain.makespan - 0.5 * 15


def changed(plan: Plan, rank: int, actions: list[Action]) -> Plan:
    ranks = list(plan.ranks)
    ranks[rank] = tuple(actions)
    return replace(plan, ranks=tuple(ranks))


@pytest.fixture
def plan() -> Plan:
    return build_plan("1f1b", pipeline_size=2, num_microbatches=3)


def test_the_proof_finds_a_lost_computation(plan: Plan) -> None:
    actions = [a for a in plan.ranks[1] if (a.kind, a.microbatch) != (Kind.BACKWARD, 2)]
    assert "happens [1, 1, 0] times" in " ".join(errors(changed(plan, 1, actions)))


def first_two(order: list[Action], kind: Kind) -> list[int]:
    """Return the places of a kind of action of the first two micro-batches."""
    return [i for i, a in enumerate(order) if a.kind is kind and a.microbatch < 2]


@pytest.mark.parametrize(
    ("rank", "kind", "said"),
    [(0, Kind.FORWARD, "out of order"), (1, Kind.RECEIVE_INPUT, "do not match")],
)
def test_the_proof_finds_swapped_actions(plan: Plan, rank: int, kind: Kind, said: str) -> None:
    order = list(plan.ranks[rank])
    first, second = first_two(order, kind)
    order[first], order[second] = order[second], order[first]
    assert said in " ".join(errors(changed(plan, rank, order)))


def test_the_proof_finds_a_deadlock_that_only_blocking_channels_have(plan: Plan) -> None:
    """Both ranks send first, as a naive 1F1B does in its steady state."""
    order = list(plan.ranks[1])
    late = order.pop(first_two(order, Kind.RECEIVE_INPUT)[1])
    use = first_two(order, Kind.FORWARD)[1]
    broken = changed(plan, 1, [*order[:use], late, *order[use:]])
    assert errors(broken, capacity=None) == []
    assert "stuck" in " ".join(errors(broken, capacity=0))


def test_orders_that_wait_in_a_circle_are_refused() -> None:
    placement = Placement(2)
    backward_first = [Action(Kind.BACKWARD, 0, 0), Action(Kind.FORWARD, 0, 0)]
    other = [Action(Kind.FORWARD, 0, 1), Action(Kind.BACKWARD, 0, 1)]
    with pytest.raises(CyclicOrder, match="rank 0 waits at B0 of stage 0"):
        timeline([backward_first, other], placement)
    with pytest.raises(CyclicOrder):
        with_messages([backward_first, other], placement)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_every_stage_is_placed_once(size: int) -> None:
    for placement in (Placement(size), Placement(size, 3), Placement(size, 2, v_shape=True)):
        stages = range(placement.num_stages)
        places = [(placement.rank_of(stage), placement.chunk_of(stage)) for stage in stages]
        assert len(set(places)) == placement.num_stages
        assert [placement.stage_of(*place) for place in places] == list(stages)


@pytest.mark.parametrize(
    ("schedule", "arguments", "sentence"),
    [
        ("gpipe", {}, "The schedule `gpipe` must be one of no-pipelining, 1f1b, "),
        ("zb-v", {"num_chunks": 1}, "The schedule `zb-v` needs 2 chunks on each rank, not 1."),
        (
            "interleaved",
            {},
            "The schedule `interleaved` needs 2 or more chunks on each rank, not 1.",
        ),
        ("1f1b", {"num_chunks": 2}, "The schedule `1f1b` needs 1 chunks on each rank, not 2."),
        (
            "zb-h1",
            {"pairs": True},
            "The schedule `zb-h1` has no pairs of a forward and a backward pass; use one of "
            "no-pipelining, 1f1b, interleaved, dualpipe-v.",
        ),
        ("no-pipelining", {}, "The schedule `no-pipelining` is for 1 rank, not 4."),
        (
            "interleaved",
            {"num_chunks": 2, "group_size": 3},
            r"A group of micro-batches \(3\) must be at least as large as the pipeline; use 4.",
        ),
    ],
)
def test_shapes_without_a_schedule(schedule: str, arguments: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_plan(schedule, pipeline_size=4, num_microbatches=8, **arguments)  # type: ignore[arg-type]


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
    passes = [x for rank in plan.ranks for x in passes_of(rank) if x.kind in COMPUTE]
    seen = Counter(map(gives, passes))
    seen.update((Kind.WEIGHT, x.microbatch, x.stage) for x in passes if x.kind is Kind.BACKWARD)
    trains = any(a.kind is not Kind.FORWARD for rank in plan.ranks for a in rank if a.peer is None)
    kinds = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT) if trains else (Kind.FORWARD,)
    for kind in kinds:
        for stage in range(plan.placement.num_stages):
            counts = [seen.pop((kind, i, stage), 0) for i in range(plan.num_microbatches)]
            if counts != [1] * plan.num_microbatches:
                found.append(f"{kind} of stage {stage} happens {counts} times")
    found += [f"{key} is not asked for" for key in seen]
    for rank, actions in enumerate(plan.ranks):
        last: dict[tuple[Kind, int], int] = {}
        for a in passes_of(actions):
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
    if action.kind in COMPUTE:
        if not all(key in have[rank] for key in needs(action, plan.placement)):
            return False
        have[rank].update(gives(part) for part in action.passes)
        return True
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


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.9), (2.0, 1.5, 1.0)])
def test_bubbles_are_those_of_the_papers(size: int, times: tuple[float, float, float]) -> None:
    forward, input_gradient, weight_gradient = times

    def bubble(schedule: str, chunks: int = 1) -> float:
        shape = {"pipeline_size": size, "num_microbatches": 4 * size, "num_chunks": chunks}
        part = Durations(*(time / chunks for time in times))
        return price(build_plan(schedule, **shape), part).bubble / (size - 1)

    assert bubble("1f1b") == pytest.approx(sum(times))
    assert bubble("zb-h1") == pytest.approx(forward + input_gradient - weight_gradient)
    for chunks in (2, 4):
        assert bubble("interleaved", chunks) == pytest.approx(sum(times) / chunks)


@pytest.mark.parametrize(("size", "num_microbatches"), [(4, 8), (8, 16), (8, 32)])
def test_zb_v_leaves_little_of_the_bubble_of_1f1b(size: int, num_microbatches: int) -> None:
    half = Durations(0.5, 0.5, 0.5)
    common = {"pipeline_size": size, "num_microbatches": num_microbatches}
    plan = build_plan("zb-v", num_chunks=2, **common)  # type: ignore[arg-type]
    classic = price(build_plan("1f1b", **common))  # type: ignore[arg-type]
    assert price(plan, half).bubble <= 0.25 * classic.bubble


@pytest.mark.parametrize(("size", "num_microbatches"), [(2, 4), (4, 11), (8, 16)])
def test_dualpipe_v_has_the_bubble_of_its_paper(size: int, num_microbatches: int) -> None:
    shape = {"pipeline_size": size, "num_microbatches": num_microbatches, "num_chunks": 2}
    plan = build_plan("dualpipe-v", pairs=True, **shape)  # type: ignore[arg-type]
    for times in (Durations(), Durations(hidden=0.8), Durations(1.0, 1.2, 0.9, 0.5)):
        backward = times.of(Kind.BACKWARD)
        paper = (size - 1) * (times.of(Kind.PAIR) + backward - 3 * times.weight_gradient)
        cost = price(plan, times)
        assert cost.bubble <= paper + 1e-9
        assert max(cost.peak_activations) == 2 * size + 1
    assert price(plan).bubble == pytest.approx(2 * (size - 1))


def test_latency_of_messages_makes_a_step_longer() -> None:
    plan = build_plan("1f1b", pipeline_size=3, num_microbatches=1)
    # Two messages there and two back.
    assert price(plan, latency=0.5).makespan == price(plan).makespan + 4 * 0.5
    # In a V shape, the last rank hands its own output to itself.
    plan = build_plan("zb-v", pipeline_size=2, num_microbatches=1, num_chunks=2)
    assert price(plan, latency=0.5).makespan == price(plan).makespan + 4 * 0.5


def test_1f1b_as_text_and_second_chunks_in_small_letters() -> None:
    plan = build_plan("1f1b", pipeline_size=2, num_microbatches=2)
    assert text(plan, price(plan)).splitlines() == [
        "rank 0 |F0-F1-......B0----...B1----|",
        "rank 1 |...F0-B0----F1-B1----......|",
    ]
    plan = build_plan("zb-v", pipeline_size=2, num_microbatches=1, num_chunks=2)
    lines = text(plan, price(plan)).splitlines()
    assert lines[1].startswith("rank 1 |...F0-f0-...")
    assert "f0-i0-" in lines[0]


def test_the_shortest_computation_has_three_columns() -> None:
    times = Durations(1.0, 2.0, 1.0)
    plan = build_plan("no-pipelining", pipeline_size=1, num_microbatches=1)
    assert text(plan, price(plan, times)) == "rank 0 |F0-B0-------|"
    plan = build_plan("zb-h1", pipeline_size=1, num_microbatches=101)
    row = text(plan, price(plan))
    assert len(row) == len("rank 0 ||") + 3 * 101 * 3
    assert row.endswith("F10I10W10|")


def test_the_picture_has_a_box_for_each_computation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(picture, "write_figure", lambda figure, path: drawn.append(figure))
    plan = build_plan("zb-v", pipeline_size=2, num_microbatches=2, num_chunks=2)
    cost = price(plan, Durations(1.0, 2.0, 3.0))
    picture.save(plan, cost, tmp_path / "plan.png")
    (axes,) = drawn[0].axes
    boxes = [
        (x.get_x(), x.get_y() + 0.45, x.get_width(), bool(x.get_hatch())) for x in axes.patches
    ]
    wanted = [
        (entry.start, rank, entry.end - entry.start, entry.action.stage >= 2)
        for rank, entries in enumerate(cost.timeline)
        for entry in entries
    ]
    assert boxes == [pytest.approx(each) for each in wanted]
    assert [x.get_text() for x in axes.texts][:2] == ["0", "1"]
    places = [x.get_position() for x in axes.texts]
    middles = [(start + length / 2, row) for start, row, length, _ in wanted]
    assert places == [pytest.approx(each) for each in middles]
    assert axes.get_xlim() == (0, cost.makespan)
    names = [x.get_text() for x in axes.get_legend().get_texts()]
    assert names == ["forward", "input gradient", "weight gradient"]


def test_command_draws_and_prices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.png"
    words = f"--schedule zb-v --pipeline-size 4 --microbatches 16 --png {path}".split()
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert shown.count("rank ") >= 4
    assert "step time 50, bubble 2 (4.0%)" in shown
    assert "peak micro-batches in flight on each rank, of all its layers: 4, 4, 4, 4" in shown
    height, width, _ = imread(path).shape
    assert height > 100 and width > 1000
    assert main("--pipeline-size 2 --microbatches 4 --times 10 11 9".split()) == 0
    assert "step time 150, bubble 30 (20.0%)" in capsys.readouterr().out
    one = "--pipeline-size 3 --microbatches 1"
    assert main(f"{one} --latency 0.5".split()) == 0
    assert "step time 11, " in capsys.readouterr().out
    assert main(f"{one} --forward-only".split()) == 0
    assert "step time 3, " in capsys.readouterr().out
    groups = "--schedule interleaved --pipeline-size 2 --microbatches 8 --group-size 4"
    assert main(groups.split()) == 0
    assert "of all its layers: 3.5, 2.5" in capsys.readouterr().out
    words = "--schedule zb-v --pipeline-size 4 --microbatches 8 --times 2 6 2"
    assert main(words.split()) == 0
    tuned = price(
        build_plan(
            "zb-v",
            pipeline_size=4,
            num_microbatches=8,
            num_chunks=2,
            durations=Durations(1.0, 3.0, 1.0),
        ),
        Durations(1.0, 3.0, 1.0),
    )
    assert f"step time {tuned.makespan:g}, " in capsys.readouterr().out


def test_activations_stay_until_the_weight_gradients() -> None:
    """The last rank computes F0 I0 F1 I1 F2 I2 F3 I3 before W0: four micro-batches wait for W."""
    plan = build_plan("zb-h1", pipeline_size=4, num_microbatches=8)
    assert price(plan).peak_activations == [4, 4, 4, 4]
    plan = build_plan("1f1b", pipeline_size=4, num_microbatches=8)
    assert price(plan).peak_activations == [4, 3, 2, 1]


REFUSED = {
    "--schedule zb-v --chunks 3": "The schedule `zb-v` needs 2 chunks on each rank, not 3.",
    "--png /nowhere/plan.png": "`--png` (/nowhere/plan.png) cannot be written (No such file",
    "--png plan.tiger": "`--png` (plan.tiger) cannot be written (Format 'tiger' is not",
}


@pytest.mark.parametrize("words", REFUSED)
def test_command_refuses(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert REFUSED[words] in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--microbatches 0", "--times 1 nan 1", "--latency -1"])
def test_command_refuses_numbers_of_no_use(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert "must be" in capsys.readouterr().err.splitlines()[-1]
