"""Long videos: block by block as without any cache, and without any effect on a training."""

import copy
import dataclasses
import functools
import json
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from PIL import Image
from torch import Tensor

from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.run import Run
from megatron_ext.video.sampling.clips import CONTACT_SHEET, LIST
from megatron_ext.video.streaming import decisions
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.noise_schedule import NoiseSchedule
from megatron_ext.video.streaming.rollout import (
    BlockNoise,
    Generator,
    generate_blocks,
    num_sinks,
)
from megatron_ext.video.streaming.sequence import Replica
from tests.checkpoint.tiny import whole_tensors
from tests.ranks import ranks
from tests.video.networks.harness import largest, one
from tests.video.networks.wan.problem import ALONE, CAUSAL, Problem, new_cache, plain_of
from tests.video.sampling.test_clips import read
from tests.video.streaming import network as harness
from tests.video.streaming.runs import observed, run, runner_of

WINDOW = harness.Window()
LENGTH = 27
SHAPE = (3, 2, 2, 2)
SEED = 1


def noise_of(alone: bool = False) -> BlockNoise:
    like = torch.empty(0, dtype=torch.float64)

    def noise(frame: int, step: int) -> Tensor:
        shape = (1, *SHAPE[1:]) if alone and frame == 0 else SHAPE
        return decisions.block_noise(SEED, (0, 1), shape, frame, step, like=like)

    return noise


def tiny(window: harness.Window = WINDOW, context_noise: float = 0.0) -> Generator:
    model = harness.network(window)
    cache = harness.Cache(window, window.window, len(model.layers))
    schedule = NoiseSchedule(StreamingConfig(context_noise=context_noise))
    return Generator(model, cache, schedule, harness.recache)


def video(
    scenes: Sequence[tuple[int, str]], *, sink: str = "rebuild", window: harness.Window = WINDOW,
    shift: float = 0.0, context_noise: float = 0.0,
) -> Tensor:  # fmt: skip
    texts = [torch.stack([harness.text_of(s, which) for s in (0, 1)]) for _, which in scenes]
    texts[-1] = texts[-1] + shift
    asked = {frame: text for (frame, _), text in zip(scenes, texts, strict=True)}
    generator, keep = tiny(window, context_noise), sink == "keep"
    alone, noise = window.first_alone, noise_of(window.first_alone)
    length = LENGTH + alone
    made = list(generate_blocks(generator, asked, noise, num_frames=length, keep_sink=keep))
    assert [block.size(1) for block in made] == [1] * alone + [3] * (LENGTH // 3)
    return torch.cat(made, dim=1)


@pytest.mark.parametrize("starts", [range(0, 30, 3), [0, *range(1, 31, 3)]], ids=["", "alone"])
@ranks()
def test_blocks_are_those_of_dense_masked_passes(
    context: ParallelContext, starts: Sequence[int]
) -> None:
    """Compare with a plain network that sees all frames so far in one masked pass."""
    length = starts[-1] + 3
    problem = Problem(options=CAUSAL if starts[1] == 3 else ALONE, frames=length, batch=2)
    clip, window = one(problem, context, torch.float64), problem.options.window
    plain, cache = plain_of(clip), new_cache(clip, problem)
    schedule = NoiseSchedule(StreamingConfig())
    assert window is not None and cache.capacity_frames == window.window < problem.frames
    text = problem.inputs(dtype=torch.float64)["text"]
    shape = (problem.sizes.channels, problem.height, problem.width)

    def noise(frame: int, step: int) -> Tensor:
        block = (starts[1] if frame == 0 else 3, *shape)
        return decisions.block_noise(SEED, (4, 9), block, frame, step, like=text)

    past = text.new_empty(2, 0, *shape)
    generator = Generator(clip, cache, schedule)
    blocks = generate_blocks(generator, {0: text}, noise, num_frames=length, keep_sink=False)
    for frame, latents in zip(starts, blocks, strict=True):
        x = noise(frame, 0)
        for step, t in enumerate(schedule.denoising_timesteps):
            times = torch.tensor([0.0] * frame + [t] * x.size(1)).expand(2, -1)
            with torch.no_grad():
                flow = plain(torch.cat([past, x], dim=1), times, text, problem.rule)
            sigma = float(schedule.sigma(torch.tensor(t)))
            x0 = x - sigma * flow[:, frame:]
            if step < 3:
                after = torch.tensor(schedule.denoising_timesteps[step + 1])
                sigma = float(schedule.sigma(after))
                x = (1 - sigma) * x0 + sigma * noise(frame, step + 1)
        assert largest(latents, x0) < 1e-9, frame
        past = torch.cat([past, latents], dim=1)


@pytest.mark.parametrize("sink", ["rebuild", "keep"])
@pytest.mark.parametrize("context_noise", [0.0, 100.0])
@pytest.mark.parametrize("switch", [None, 3, 15])
@pytest.mark.parametrize("alone", [0, 1])
def test_blocks_are_those_of_a_rollout(
    switch: int | None, context_noise: float, sink: str, alone: int
) -> None:
    """Let training encode as many frames anew as the window holds, also after a switch."""
    window = harness.Window(first_alone=bool(alone))
    frame = None if switch is None else switch + alone
    base = harness.OPTIONS if not alone else harness.ALONE
    options = dataclasses.replace(base, switches=False)
    if frame is not None:
        options = harness.switching_at(frame, base)
    options = dataclasses.replace(
        options, last_step_only=True, recache_frames=WINDOW.window, sink_at_switch=sink,
        context_noise=context_noise,
    )  # fmt: skip
    sequence = harness.build(options, replica=Replica(seed=SEED, batch=2), window=window)
    want = torch.cat([harness.new_of(clip) for clip in harness.clips_of(sequence, 4)], dim=1)
    scenes = [(0, "text")] if frame is None else [(0, "text"), (frame, "after")]
    got = video(scenes, context_noise=context_noise, sink=sink, window=window)
    assert got.shape == want.shape == (2, LENGTH + alone, 2, 2, 2)
    assert largest(got, want) < 1e-12


def test_a_prompt_acts_from_its_frame_on() -> None:
    scenes = [(0, "text"), (9, "after"), (18, "text")]
    base, moved = video(scenes), video(scenes, shift=1.0)
    assert torch.equal(base[:, :18], moved[:, :18])
    assert all(largest(base[:, i : i + 3], moved[:, i : i + 3]) > 1e-3 for i in (18, 21, 24))
    once = video(scenes[:2])
    assert torch.equal(once[:, :18], base[:, :18]) and not torch.equal(once[:, 18:], base[:, 18:])
    assert torch.equal(video(scenes[:1])[:, :9], base[:, :9])


@pytest.mark.parametrize("window", [harness.Window(3, 7, 1), harness.Window(3, 6, 0)])
def test_windows_and_sinks_need_not_be_whole_blocks(window: harness.Window) -> None:
    """Check that a later prompt changes no block before it."""
    scenes = [(0, "text"), (12, "after")]
    got = video(scenes, window=window)
    assert torch.isfinite(got).all()
    assert num_sinks(window) % window.block == 0 and num_sinks(window) >= window.sink
    assert torch.equal(got[:, :12], video(scenes[:1], window=window)[:, :12])


def test_a_given_first_block_is_the_start_of_the_video() -> None:
    """Given the block that it would generate, a video goes on as it would have."""
    text = torch.stack([harness.text_of(s, "first") for s in (0, 1)])
    make = functools.partial(generate_blocks, num_frames=LENGTH, keep_sink=False)
    wanted = list(make(tiny(), {0: text}, noise_of()))
    found = list(make(tiny(), {0: text}, noise_of(), start=wanted[0]))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    other = list(make(tiny(), {0: text}, noise_of(), start=wanted[0] + 1))
    assert torch.equal(other[0], wanted[0] + 1) and not torch.equal(other[1], wanted[1])
    window = harness.Window(first_alone=True)
    make = functools.partial(make, num_frames=LENGTH + 1)
    wanted = list(make(tiny(window), {0: text}, noise_of(alone=True)))
    found = list(make(tiny(window), {0: text}, noise_of(alone=True), start=wanted[0]))
    assert [block.size(1) for block in found] == [1] + [3] * 9
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_what_is_held_does_not_grow_with_the_length() -> None:
    generator, text = tiny(), harness.prompts((0, 1)).text
    texts = {0: text, 30: text + 1}
    blocks = generate_blocks(generator, texts, noise_of(), num_frames=90, keep_sink=False)
    alive: list[weakref.ref[Tensor]] = []
    for latents in blocks:
        alive.append(weakref.ref(latents))
        del latents
        # The window and the sinks, in whole blocks.
        assert sum(one() is not None for one in alive) <= 3
        assert len(generator.cache.held) <= WINDOW.window
    assert len(alive) == 30


STEPS = 3
VIEWED = (
    "--sample-interval 1 --sample-texts disc square --sample-second-texts bar wheel "
    "--sample-latent-frames 12 --sample-switch-frame 5"
)


def _before_steps(run: Run) -> list[dict[str, Any]]:
    """Note all that each step depends on and that belongs to this rank, when it begins."""
    runner, train, seen = runner_of(run), run.runner.train, list[dict[str, Any]]()
    assert run.ema is not None
    networks = (runner.generator.network, runner.critic.network, runner.teacher)
    bare = [unwrap_model([network])[0] for network in networks]

    def recorded(*args: Any) -> Any:
        now = {
            "sequence": runner.sequence.state_dict(),
            "weights": [list(network.parameters()) for network in bare],
            "gradients": [clip.buffers[0].grad_data for clip in networks[:2]],
            "averages": [average for _, average in run.ema.gathered()],
            "modes": [[m.training for m in network.modules()] for network in bare],
            "random": [torch.get_rng_state(), *get_cuda_rng_tracker().get_states().values()],
            "numpy": np.random.get_state(legacy=False)["state"]["key"],
            "grad": torch.is_grad_enabled(),
            "steps": runner.extra_state.steps,
            "progress": run.progress.to_dict(),
        }
        seen.append(copy.deepcopy(now))
        return train(*args)

    run.runner.train = recorded  # type: ignore[method-assign, assignment]
    return seen


def _flat(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _flat(inner, f"{where}.{key}")
    else:
        yield where, value.tolist() if isinstance(value, Tensor | np.ndarray) else value


@pytest.mark.parametrize(
    ("ranks", "batch", "layout"),
    [
        (1, 1, ""),
        pytest.param(2, 1, "--tensor-model-parallel-size 2", marks=pytest.mark.slow),
        (2, 2, "--use-distributed-optimizer"),
    ],
)
def test_visualisation_changes_nothing(tmp_path: Path, ranks: int, batch: int, layout: str) -> None:
    words = f"--train-iters {STEPS} --save-interval {STEPS} {layout}"
    found = []
    for name, more in (("without", ""), ("with", VIEWED)):
        sizes = {"ranks": ranks, "batch": batch, "save": name}
        rows, seen = observed(tmp_path, f"{words} {more}", _before_steps, **sizes)
        names = ("loss", "norm", "learning")
        kept = [{k: v for k, v in row.items() if any(n in k for n in names)} for row in rows]
        whole = whole_tensors(tmp_path / name / f"iter_{STEPS:07}", tmp_path / f"{name}.whole")
        found.append(dict(_flat([kept, [set(row) for row in rows], seen, whole])))
    assert found[0] == found[1]
    assert len(kept[0]) > 4 and len(seen) == ranks
    # After a step of the critic alone, the memo of the text is still in use.
    assert len(seen[0]) == STEPS and seen[0][2]["sequence"]["cache"]["memo"]["key_values"]
    root = tmp_path / "with" / "samples"
    assert sorted(x.name for x in root.iterdir()) == [f"iter_{i:07}" for i in range(1, STEPS + 1)]


def test_videos_are_files_with_their_switches(tmp_path: Path) -> None:
    words = VIEWED.replace("--sample-interval 1", "--sample-interval 2")
    codec = "--no-encode-first-frame --codec-spatial 2 --codec-channels 4"
    run(tmp_path, f"--train-iters 2 {words} --sample-fps 5 --no-sample-ema {codec}")
    folder = tmp_path / "save" / "samples" / "iter_0000002"
    names = {path.name for path in folder.iterdir()}
    assert names == {"sample_000.mp4", "sample_001.mp4", CONTACT_SHEET, LIST}
    for i in range(2):
        frames, fps = read(folder / f"sample_00{i}.mp4")
        assert frames.shape == (4 * 11 + 1, 8, 8, 3) and fps == 5
    rows = [json.loads(line) for line in (folder / LIST).read_text().splitlines()]
    assert [row["text"] for row in rows] == ["disc", "square"]
    # Frame 5 lies in the block from frame 3 on, which is made under one caption.
    switches = [row["switches"] for row in rows]
    assert switches == [[{"frame": 6, "text": text}] for text in ("bar", "wheel")]
    for row in rows:
        assert (row["num_frames"], row["latent_frames"], row["iteration"]) == (45, 12, 2)
        assert row["averaged_weights"] is False


def test_videos_begin_with_a_picture_and_have_seeds(tmp_path: Path) -> None:
    """Let the first of three videos begin with a picture; the others have one seed of their own."""
    Image.fromarray(np.full((8, 8, 3), 128, np.uint8)).save(tmp_path / "start.png")
    rows = [{"text": "disc", "image": "start.png"}, *[{"text": "square", "seed": 7}] * 2]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        f"--sample-interval 2 --sample-prompts {path} --sample-latent-frames 6 --sample-fps 7.5 "
        "--no-encode-first-frame --codec-spatial 2 --codec-channels 4"
    )
    run(tmp_path, f"--train-iters 2 {words}")
    folder = tmp_path / "save" / "samples" / "iter_0000002"
    written = [json.loads(line) for line in (folder / LIST).read_text().splitlines()]
    found = [(row["text"], row["seed"], row["start"]) for row in written]
    start = str(tmp_path / "start.png")
    assert found == [("disc", 42, start), ("square", 7, None), ("square", 7, None)]
    (given, fps), (one, _), (two, _) = (read(folder / f"sample_00{i}.mp4") for i in range(3))
    # A sum may be rounded otherwise in another place of memory, and the codec makes 4 of 1 in 255.
    assert fps == 7.5 and np.abs(one.astype(int) - two).max() <= 4
    assert np.abs(given[0].astype(int) - 128).max() <= 4
    assert np.abs(one[0].astype(int) - 128).max() > 20


def test_infinite_videos_end_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def spoil(run: Run) -> None:
        assert run.ema is not None
        average = next(iter(run.ema._parts)).average
        update = run.ema.update

        def updated(step: int, **options: Any) -> None:
            update(step, **options)
            average.fill_(torch.nan)

        run.ema.update = updated  # type: ignore[method-assign]

    rows = run(tmp_path, f"--train-iters 2 {VIEWED}", prepare=spoil)
    assert [row["iteration"] for row in rows][-1] == 2
    assert "the sampled videos are not finite and are not written" in capfd.readouterr().out
    assert not list((tmp_path / "save").glob("samples/*"))
