"""Decisions that all ranks share, and noise that replicas do not."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.train.run import Run
from megatron_ext.video.data.randomness import sample_numbers
from megatron_ext.video.streaming import decisions
from megatron_ext.video.streaming.rollout import StreamClip
from tests.video.streaming.network import PAPER
from tests.video.streaming.runs import after_each_step, on_each_clip, run, runner_of

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


STEPS = 5
DRAWN = (
    f"--train-iters {STEPS} --max-new-frames 9 --sequence-lengths 21 27 "
    "--no-same-exit-across-blocks"
)
"""Growth, lengths, switches and exit steps are drawn."""


def _record(run: Run, folder: Path) -> None:
    """Write down a file for each rank: decisions, and the noise that clips and blocks get."""
    sequence, context = runner_of(run).sequence, run.context
    generator = sequence.generator
    made: list[tuple[Any, ...]] = []
    noises: list[Tensor] = []
    generate = type(generator).generate

    def note(clip: StreamClip, trains_generator: bool) -> None:
        state = sequence.state
        assert state is not None
        numbers = clip.sequence, clip.number, clip.end
        switch = state.switch_frame, state.has_switched
        made.append((trains_generator, *numbers, state.max_length, *switch))
        content = {
            "replica": context.dp_rank,
            "decisions": made,
            "noise": torch.stack(noises),
            "latents": clip.latents,
            "text": clip.text,
        }
        torch.save(content, folder / f"{context.rank}.pt")

    def log(result: Any) -> None:
        losses = {name: float(value) for name, value in result.losses.items()}
        torch.save(losses, folder / f"losses_{context.rank}.pt")

    def counted(self: Any, first_frame: int, text: Tensor, noise: Any, **options: Any) -> Any:
        made.append((first_frame, options["exit_step"]))
        noises.append(noise(first_frame, 0))
        return generate(self, first_frame, text, noise, **options)

    after_each_step(run, log)
    on_each_clip(run, note)
    type(generator).generate = counted  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("ranks", "batch", "layout"),
    [
        (2, 2, ""),
        pytest.param(2, 1, "--context-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(4, 2, "--tensor-model-parallel-size 2", marks=pytest.mark.slow),
    ],
)
def test_ranks_agree_on_control_flow_and_replicas_differ_in_noise(
    tmp_path: Path, ranks: int, batch: int, layout: str
) -> None:
    record = partial(_record, folder=tmp_path)
    run(tmp_path, f"{DRAWN} {layout}", ranks=ranks, batch=batch, prepare=record)
    seen = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    first = seen[0]["decisions"]
    assert len({x[4] for x in first if len(x) > 2}) == 2 and any(x[-1] for x in first)
    for found in seen:
        assert found["decisions"] == first
        for name in ("noise", "text", "latents"):
            same = torch.equal(found[name], seen[0][name])
            assert same == (found["replica"] == seen[0]["replica"]), name
    assert len({found["replica"] for found in seen}) == batch
    # All ranks log alike.
    losses = [torch.load(tmp_path / f"losses_{rank}.pt") for rank in range(ranks)]
    assert losses == losses[:1] * ranks and "generator grad norm" in losses[0]
