"""What all ranks decide alike, and what replicas draw apart."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.train.run import Run
from tests.video.streaming.runs import run, runner_of

STEPS = 5
DRAWN = (
    f"--train-iters {STEPS} --max-new-frames 9 --sequence-lengths 21 27 "
    "--no-same-exit-across-blocks"
)
"""Growth, lengths, switches and exit steps are drawn."""


def _record(run: Run, folder: Path) -> None:
    """Write down a file for each rank: decisions, and the noise that clips and blocks get."""
    runner, context = runner_of(run), run.context
    sequence, generator = runner.sequence, runner.sequence.generator
    decisions: list[tuple[Any, ...]] = []
    noises: list[Tensor] = []
    next_clip, generate, train = sequence.next_clip, type(generator).generate, runner.train

    def noted(*, trains_generator: bool) -> Any:
        clip = next_clip(trains_generator=trains_generator)
        state = sequence.state
        assert state is not None
        numbers = clip.sequence, clip.number, clip.end
        switch = state.switch_frame, state.has_switched
        decisions.append((trains_generator, *numbers, state.max_length, *switch))
        content = {
            "replica": context.dp_rank,
            "decisions": decisions,
            "noise": torch.stack(noises),
            "latents": clip.latents,
            "text": clip.text,
        }
        torch.save(content, folder / f"{context.rank}.pt")
        return clip

    def logged(*args: Any) -> Any:
        result = train(*args)
        losses = {name: float(value) for name, value in result.losses.items()}
        torch.save(losses, folder / f"losses_{context.rank}.pt")
        return result

    def counted(self: Any, first_frame: int, text: Tensor, noise: Any, **options: Any) -> Any:
        decisions.append((first_frame, options["exit_step"]))
        noises.append(noise(first_frame, 0))
        return generate(self, first_frame, text, noise, **options)

    runner.train = logged  # type: ignore[method-assign]
    sequence.next_clip = noted  # type: ignore[method-assign]
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
    decisions = seen[0]["decisions"]
    assert len({x[4] for x in decisions if len(x) > 2}) == 2 and any(x[-1] for x in decisions)
    for found in seen:
        assert found["decisions"] == decisions
        for name in ("noise", "text", "latents"):
            same = torch.equal(found[name], seen[0][name])
            assert same == (found["replica"] == seen[0]["replica"]), name
    assert len({found["replica"] for found in seen}) == batch
    # All ranks log alike.
    losses = [torch.load(tmp_path / f"losses_{rank}.pt") for rank in range(ranks)]
    assert losses == losses[:1] * ranks and "generator grad norm" in losses[0]
