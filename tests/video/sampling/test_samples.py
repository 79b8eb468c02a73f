"""Clips that a run samples while it trains, from requests that differ in all that rows may say."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.video.config.run import SampleConfig
from megatron_ext.video.sampling import samples
from megatron_ext.video.sampling.generate import decoded
from megatron_ext.video.sampling.groups import SampleShape, groups_of
from megatron_ext.video.sampling.prompts import EncodedPrompts
from megatron_ext.video.sampling.requests import ClipRequest, requests_of
from megatron_ext.video.sampling.samples import ClipSampler, SampleWhileTraining, velocity_of
from megatron_ext.video.task import VIDEO
from tests.training_runs import errors_of, prepared
from tests.video.clips import FLAGS, train
from tests.video.sampling.test_clips import read
from tests.video.wan_run import FLAGS as WAN_FLAGS
from tests.video.wan_run import KINDS


def picture(folder: Path) -> Path:
    path = folder / "start.png"
    Image.fromarray(np.full((64, 64, 3), (200, 50, 120), np.uint8)).save(path)
    return path


def test_rows_decide_for_themselves(clips: Path, tmp_path: Path) -> None:
    """Sample clips of two sizes in two numbers of steps; a row with a seed may stand anywhere."""
    seeded = {"text": "two", "seed": 9}
    rows = [
        {"text": "one"},
        seeded,
        {"text": "three", "size": [32, 64], "steps": 1},
        {"text": "four", "image": picture(tmp_path).name, "negative_prompt": "blur"},
        seeded,
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        f"--train-iters 1 --lr-warmup-iters 0 --sample-interval 1 --sample-prompts {path} "
        "--sample-steps 2 --sample-size 64 64 --sample-frames 9 --sample-fps 7.5"
    )
    train(clips, tmp_path / "run", words, ranks=2)
    folder = tmp_path / "run" / "samples" / "iter_0000001"
    written = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    names = ("text", "seed", "steps", "height", "width", "negative_prompt", "mode", "fps")
    assert [[row[name] for name in names] for row in written] == [
        ["one", 42, 2, 64, 64, None, "t2v", 7.5],
        ["two", 9, 2, 64, 64, None, "t2v", 7.5],
        ["three", 42, 1, 32, 64, None, "t2v", 7.5],
        ["four", 42, 2, 64, 64, "blur", "i2v_head", 7.5],
        ["two", 9, 2, 64, 64, None, "t2v", 7.5],
    ]
    made = [read(folder / f"sample_00{number}.mp4") for number in range(5)]
    assert [frames.shape[1:3] for frames, _ in made] == [(r["height"], r["width"]) for r in written]
    assert {fps for _, fps in made} == {7.5}
    assert np.array_equal(made[1][0], made[4][0]) and not np.array_equal(made[0][0], made[1][0])


def test_requests_are_sampled_in_groups() -> None:
    requests = [
        ClipRequest("a"),
        ClipRequest("b", seed=0),
        ClipRequest("c", steps=4),
        ClipRequest("d", size=(8, 16), negative_prompt="own"),
        ClipRequest("e"),
    ]
    groups = groups_of(requests, SampleShape(9, 32, 48), SampleConfig(sample_steps=7))
    found = [(x.numbers, x.sampling.sample_steps, (x.shape.height, x.shape.width)) for x in groups]
    assert found == [([0, 1, 4], 7, (32, 48)), ([2], 4, (32, 48)), ([3], 7, (8, 16))]
    assert [x.draws for x in groups] == [[(42, 0), (0, 0), (42, 4)], [(42, 2)], [(42, 3)]]


def test_a_decoder_gets_as_many_clips_as_were_sampled_at_once() -> None:
    asked: list[int] = []

    def decode(latents: Tensor) -> Tensor:
        asked.append(len(latents))
        return 10 * latents

    codec: Any = SimpleNamespace(decode=decode)
    latents = torch.arange(5.0).view(5, 1, 1, 1, 1)
    assert torch.equal(decoded(codec, latents, 2), 10 * latents) and asked == [2, 2, 1]


def rows_of(folder: Path, *rows: dict[str, str]) -> list[ClipRequest]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return requests_of(SampleConfig(sample_prompts=str(path), sample_negative_prompt="blur"))


def test_flags_stand_for_all_texts(tmp_path: Path) -> None:
    flags = {"sample_texts": ["a", "b"], "sample_negative_prompt": "blur"}
    one = requests_of(SampleConfig(**flags, sample_image=["x.png"]))  # type: ignore[arg-type]
    wanted = [ClipRequest(text, "x.png", "i2v_head", negative_prompt="blur") for text in "ab"]
    assert one == wanted
    # A row may say that nothing leads its clip away.
    (row,) = rows_of(tmp_path, {"text": "a", "negative_prompt": ""})
    assert row.negative_prompt == ""
    each = requests_of(SampleConfig(**flags, sample_video=["x", "y"]))  # type: ignore[arg-type]
    assert [(x.reference, x.mode) for x in each] == [("x", "v2v_head"), ("y", "v2v_head")]


class Average:
    """Averaged weights that note when they take the place of the last ones."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    @contextmanager
    def swapped_in(self, chunks: Any) -> Iterator[None]:
        self.events.append("averaged")
        yield
        self.events.append("last")


@pytest.mark.parametrize(("kept", "wanted"), [(True, True), (True, False), (False, True)])
def test_clips_are_written_in_the_order_of_their_requests(
    kept: bool, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let requests of two sizes alternate, and make each clip of its own number."""
    requests = [
        ClipRequest(text, size=size, steps=steps)
        for text, size, steps in (("a", (8, 8), None), ("b", (8, 16), 9), ("c", (8, 8), None))
    ]
    sample = SampleConfig(sample_seed=3, sample_steps=4, sample_ema=wanted, sample_batch_size=1)
    events, said, written = list[str](), list[str](), list[Any]()

    @contextmanager
    def paused() -> Iterator[None]:
        events.append("gathered")
        yield
        events.append("goes on")

    found = ClipSampler.__new__(ClipSampler)
    found._sample, found._frees_model = sample, False
    shape = SampleShape(9, 32, 48, fps=7.5)
    groups = groups_of(requests, shape, sample)
    encoded: Any = [f"of {i}" for i, _ in enumerate(groups)]
    codec: Any = object()
    found._prompts = EncodedPrompts(requests, shape, groups, encoded, lambda: codec)
    found._velocity = "velocity"  # type: ignore[assignment]
    progress = SimpleNamespace(iteration=12, average_start=0.25, average_note="a quarter is old")
    found._run = SimpleNamespace(  # type: ignore[assignment]
        ema=Average(events) if kept else None, chunks=[], progress=progress, context="context",
        parameter_gather=SimpleNamespace(paused=paused),
        reporters=SimpleNamespace(say=said.append),
        config=SimpleNamespace(section=lambda kind: kind.__name__),
    )  # fmt: skip

    given = list[Any]()

    class Sampler:
        def __init__(self, velocity: Any, encoded: Any, *, schedule: int, **how: Any) -> None:
            self._made = torch.tensor([float(number) for _, number in how.pop("draws")])
            given.append((velocity, encoded, schedule, how))

        def latents(self) -> Tensor:
            events.append("sampled")
            return self._made

    monkeypatch.setattr(samples, "GroupSampler", Sampler)
    monkeypatch.setattr(samples, "schedule_of", lambda config, sampling: sampling.sample_steps)
    monkeypatch.setattr(samples, "decoded", lambda codec, made, size: made)
    monkeypatch.setattr(samples, "on_reporting_rank", lambda work, what, context: work())
    monkeypatch.setattr(samples, "write_clips", lambda *x, **options: written.append((x, options)))
    found(tmp_path)
    how = {"context": "context", "boundary": None}
    assert given == [("velocity", "of 0", 4, how), ("velocity", "of 1", 9, how)]
    ((folder, clips, asked), options) = written[0]
    assert folder == tmp_path and [float(clip) for clip in clips] == [0.0, 1.0, 2.0]
    assert asked == requests
    averaged = kept and wanted
    facts: dict[str, Any] = {"iteration": 12, "averaged_weights": averaged, "steps": 4}
    facts |= {"share_of_start": 0.25} if averaged else {}
    assert options == {"fps": 7.5, "seed": 3, "facts": facts}
    made = ["sampled", "sampled"]
    made = ["averaged", *made, "last"] if averaged else made
    assert events == ["gathered", *made, "goes on"]
    notes = ["a quarter is old; `--no-sample-ema` samples with the last weights"] * averaged
    assert said == [*notes, f"sampled 3 clips into {tmp_path}"]
    # An average that has nothing left of its start is not spoken of; clips must be finite.
    progress.average_note = None
    monkeypatch.setattr(samples, "decoded", lambda codec, made, size: made / 0.0)
    found(tmp_path)
    assert said[len(notes) + 1 :] == ["the sampled clips are not finite and are not written"]
    assert len(written) == 1


@pytest.mark.parametrize("engine", [None, "engine of training"])
def test_all_chunks_of_a_rank_predict_with_the_engine_of_training(
    engine: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without such an engine, as where no pipeline is needed, take one for the forward pass."""
    network = SimpleNamespace(sampled=lambda *given: given)
    monkeypatch.setattr(samples, "network_of", lambda config: network)
    monkeypatch.setattr(samples, "forward_engine", lambda *given: ("forward", *given))
    runner = SimpleNamespace(engine=engine, transformer_config="transformer config")
    chunks = ["first", "last"]
    run: Any = SimpleNamespace(runner=runner, chunks=chunks, context="context", config="config")
    made = engine or ("forward", chunks, "transformer config", "context")
    assert velocity_of(run) == (made, chunks, "context")


@pytest.mark.parametrize("folder", [None, "own"])
def test_clips_are_sampled_at_whole_intervals(folder: str | None) -> None:
    made: list[Path] = []
    sample = SampleConfig(sample_interval=3, sample_dir=folder)
    config = SimpleNamespace(
        section=lambda _: sample, checkpoint=SimpleNamespace(save=None if folder else "save")
    )
    run: Any = SimpleNamespace(config=config, progress=SimpleNamespace(iteration=0))
    callback = SampleWhileTraining.of_run(run, build=lambda _: made.append)
    assert callback is not None
    for run.progress.iteration in range(1, 8):
        callback.after_step()
    root = Path(folder or "save/samples")
    assert made == [root / "iter_0000003", root / "iter_0000006"]
    sample = SampleConfig()
    assert SampleWhileTraining.of_run(run, build=lambda _: made.append) is None


INTERVAL = "--sample-interval 1 --sample-dir out"
REFUSED = {
    "--sample-texts a b --sample-image x y z": "`--sample-image` has 3 paths, but must have 1 or "
    "2, one for each of `--sample-texts`.",
    "--sample-texts a --sample-image x --sample-video y": "`--sample-image` and `--sample-video` "
    "exclude each other; give one, or rows with `image` or `video` in a jsonl as "
    "`--sample-prompts`.",
    "--sample-prompts p.jsonl --sample-video y": "`--sample-video` needs `--sample-texts`; rows of "
    "a jsonl as `--sample-prompts` have `video`.",
    "--sample-texts a --sample-fps 0": "`--sample-fps` (0.0) must be above 0",
}


@pytest.mark.parametrize("words", REFUSED)
def test_flags_that_do_not_fit_are_refused(words: str) -> None:
    flags = [*FLAGS, "--video-data-path", "unread", *INTERVAL.split(), *words.split()]
    (said,) = errors_of(flags, VIDEO)
    assert said.startswith(REFUSED[words])


def test_a_video_dit_refuses_a_reference(clips: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "right"}\n{"text": "left", "image": "start.png"}\n')
    words = f"{KINDS['video-dit']} {INTERVAL} --sample-prompts {path}"
    flags = [*WAN_FLAGS, "--video-data-path", str(clips), *words.split()]
    with pytest.raises(ConfigError, match=r"The prompt 'left' has a reference \(.*is given no ref"):
        prepared(flags, VIDEO)
