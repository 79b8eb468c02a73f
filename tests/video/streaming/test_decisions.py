"""Decisions that all ranks share, and noise that replicas do not."""

from __future__ import annotations

import dataclasses
from collections import Counter

import torch
import torch.distributed as dist

from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.data.randomness import sample_numbers
from megatron_ext.video.streaming import decisions
from megatron_ext.video.streaming.sequence import Replica
from tests.ranks import ranks
from tests.video.streaming.network import PAPER, build

OPTIONS = dataclasses.replace(PAPER, max_new_frames=21, sequence_lengths=(99, 120, 240))
LIKE = torch.empty(0)


def drawn_for(seed: int, sequence: int) -> tuple[object, ...]:
    return (
        decisions.sequence_length(OPTIONS, seed, sequence),
        decisions.switch_frame(OPTIONS, seed, sequence),
        decisions.new_frames(OPTIONS, seed, sequence, 3, remaining=100),
        decisions.exit_steps(OPTIONS, seed, sequence, 3, blocks=6, steps=4),
    )


def test_decisions_depend_on_nothing_but_their_numbers() -> None:
    first = [drawn_for(7, n) for n in range(30)]
    torch.rand(5)
    assert first == [drawn_for(7, n) for n in range(30)]
    assert first != [drawn_for(8, n) for n in range(30)]


def test_all_choices_are_drawn_alike() -> None:
    n = 2000
    lengths = Counter(decisions.sequence_length(OPTIONS, 0, i) for i in range(n))
    growth = Counter(decisions.new_frames(OPTIONS, 0, i, 1, remaining=99) for i in range(n))
    exits = Counter(decisions.exit_steps(OPTIONS, 0, 0, i, blocks=2, steps=4)[0] for i in range(n))
    for counts, choices in ((lengths, (99, 120, 240)), (growth, (18, 21)), (exits, range(4))):
        assert set(counts) == set(choices)
        assert all(abs(c / n - 1 / len(choices)) < 0.04 for c in counts.values())
    switches = {decisions.switch_frame(PAPER, 0, i) for i in range(200)}
    assert switches == set(range(21, 202, 18))


def test_growth_ends_at_the_end_of_the_sequence() -> None:
    drawn = {decisions.new_frames(OPTIONS, 0, i, 1, remaining=20) for i in range(50)}
    assert drawn == {18}


def test_exit_steps_of_blocks() -> None:
    each = dataclasses.replace(OPTIONS, same_exit_across_blocks=False)
    drawn = [decisions.exit_steps(each, 0, 0, i, blocks=6, steps=4) for i in range(50)]
    assert {x for exits in drawn for x in exits} == set(range(4))
    assert any(len(set(exits)) > 1 for exits in drawn)
    same = [decisions.exit_steps(OPTIONS, 0, 0, i, blocks=6, steps=4) for i in range(50)]
    assert all(exits == (first[0],) * 6 for exits, first in zip(same, drawn, strict=True))
    last = dataclasses.replace(each, last_step_only=True)
    assert decisions.exit_steps(last, 0, 0, 1, blocks=3, steps=4) == (3, 3, 3)


def test_noise_of_a_sample_is_the_same_in_any_layout() -> None:
    whole = decisions.block_noise(1, range(4), (3, 2, 2, 2), 6, 1, like=LIKE)
    parts = [
        decisions.block_noise(1, sample_numbers(0, 0, 2, r, 2), (3, 2, 2, 2), 6, 1, like=LIKE)
        for r in range(2)
    ]
    assert torch.equal(whole, torch.cat(parts))
    assert whole.unique().numel() == whole.numel()


def test_noise_of_all_uses_differs() -> None:
    uses = [decisions.block_noise(1, [0], (3, 1, 1, 1), f, s, like=LIKE)
            for f in (0, 3, 12) for s in (-1, 0, 1, 2, 3)]  # fmt: skip
    uses += [decisions.noise(1, [0], (3, 1, 1, 1), f"{kind} chunk {i} noise")
             for kind in ("generator", "critic") for i in (0, 1)]  # fmt: skip
    together = torch.stack(uses)
    assert together.unique().numel() == together.numel()


@ranks(tp=2, dp=2)
def test_ranks_agree_on_control_flow_and_replicas_differ_in_noise(
    context: ParallelContext,
) -> None:
    torch.manual_seed(dist.get_rank())  # as in the original, seeds of ranks differ
    size, rank = context.pgs.dp.size(), context.dp_rank
    sequence = build(replica=Replica(seed=5, batch=1, dp_rank=rank, dp_size=size))
    seen = []
    for number in range(5):
        clip = sequence.next_clip(trains_generator=number % 2 == 0)
        assert sequence.state is not None
        flow = (clip.sequence, clip.number, clip.end, sequence.state.switch_frame)
        exits = [b.step.timestep for b in clip.blocks]
        seen.append(((flow, exits, sequence.state.max_length), clip.latents))
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (rank, seen))
    for other_rank, other in everyone:  # type: ignore[misc]
        for (flow, mine), (other_flow, latents) in zip(seen, other, strict=True):
            assert flow == other_flow
            assert torch.equal(mine, latents) == (rank == other_rank)
