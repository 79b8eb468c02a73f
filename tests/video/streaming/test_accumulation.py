"""Several clips in a step."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model

from megatron_ext.train.run import Run
from tests.video.streaming.runs import run, runner_of
from tests.video.streaming.test_layouts import check_same, trained

STILL = "--optimizer sgd --sgd-momentum 0 --lr 1e-30 --critic-lr 1e-30 --ema-decay 0"
"""Weights that do not move, so that all clips meet the same ones."""


def _record(run: Run, path: Path) -> None:
    """Write down the reduced gradients of both networks in each step, and its counted frames."""
    runner = runner_of(run)
    networks = {"generator": runner.generator.network, "critic": runner.critic.network}
    seen: list[dict[str, Any]] = []
    frames: dict[str, list[int]] = {"generator": [], "critic": []}
    next_clip = runner.sequence.next_clip

    def counted(*, trains_generator: bool) -> Any:
        clip = next_clip(trains_generator=trains_generator)
        frames["generator" if trains_generator else "critic"].append(int(clip.mask.sum()))
        return clip

    def observe() -> None:
        grads = {
            (role, name): p.main_grad.clone()
            for role, network in networks.items()
            for name, p in unwrap_model([network])[0].named_parameters()
        }
        seen.append({"grads": grads, "frames": copy.deepcopy(frames)})
        for counts in frames.values():
            counts.clear()
        torch.save(seen, path)

    runner.sequence.next_clip = counted  # type: ignore[method-assign]
    runner.observer = observe


def gradients(folder: Path, words: str, *, batch: int, steps: int) -> list[dict[str, Any]]:
    """Of each step of a run."""
    folder.mkdir()
    record = partial(_record, path=folder / "seen.pt")
    words = f"--train-iters {steps} {STILL} {words}"
    run(folder, words, batch=batch, interval=1, start=1, prepare=record)
    seen: list[dict[str, Any]] = torch.load(folder / "seen.pt")
    return seen


@pytest.mark.parametrize("per_frame", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_frames_of_accumulated_clips_count_alike_or_clips_do(
    tmp_path: Path, per_frame: bool
) -> None:
    """Generator and critic take two clips each, as they do in two steps."""
    words = "" if per_frame else "--no-calculate-per-token-loss"
    (both,) = gradients(tmp_path / "both", words, batch=2, steps=1)
    first, second = gradients(tmp_path / "single", words, batch=1, steps=2)
    # The first frame of clips but the first is an image; those before a switch are of the past.
    shares = {}
    for role, (a, b) in both["frames"].items():
        assert [a] == first["frames"][role] and [b] == second["frames"][role]
        shares[role] = a / (a + b) if per_frame else 0.5
    assert both["frames"]["generator"][0] != both["frames"]["generator"][1]
    for key, grad in both["grads"].items():
        weight = shares[key[0]]
        want = weight * first["grads"][key] + (1 - weight) * second["grads"][key]
        scale = float(want.abs().max())
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-5 * scale, msg=str(key))
    assert any(float(x.abs().max()) > 0 for k, x in both["grads"].items() if k[0] == "generator")


@pytest.mark.slow
def test_accumulation_over_two_replicas_is_that_of_two_videos_on_one(tmp_path: Path) -> None:
    wanted = trained(tmp_path / "one", "", micro=2, batch=4)
    check_same(trained(tmp_path / "two", "", ranks=2, micro=1, batch=4), wanted)
