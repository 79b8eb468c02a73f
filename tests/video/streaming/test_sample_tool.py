"""tools/sample_video.py --streaming: long videos from a checkpoint, in any layout."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from megatron_ext.checkpoint.files import TRACKER
from megatron_ext.programs.lora import main
from megatron_ext.train.exit_codes import EXIT_CODE_USER_ERROR
from megatron_ext.train.forking import fork_ranks
from megatron_ext.video.config.encoding import CodecConfig
from megatron_ext.video.data.codec import PatchCodec
from megatron_ext.video.sampling.clips import CONTACT_SHEET, LIST
from megatron_ext.video.sampling.tool import sample_video
from megatron_ext.video.streaming.long_videos import LongVideoWriter
from megatron_ext.video.streaming.tool import sample_streaming
from megatron_ext.video.task import FLOW
from tests.video.sampling.test_clips import read
from tests.video.streaming.runs import ADAPTERS, FAST, STEPS, Tuned, attempt, run

ASKED = (
    '{"text": "disc"}\n'
    '{"text": "square", "switches": [{"frame": 3, "text": "bar"}, {"frame": 9, "text": "hut"}]}\n'
    '{"text": "wheel"}\n'
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run(folder, "--train-iters 3")
    for path in folder.glob("*.txt"):
        path.unlink()  # prompts of training are not needed
    return folder / "save"


Sample = Callable[..., list[Tensor]]
TP2 = "--nproc-per-node 2 --tensor-model-parallel-size 2"


@pytest.fixture
def sample(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sample:
    """Return a function that samples in forked ranks and returns each video's ``[t, c, h, w]``."""
    append = LongVideoWriter.append

    def kept(self: LongVideoWriter, latents: Tensor) -> None:
        for number, one in zip(self._numbers, latents, strict=True):
            torch.save(one, tmp_path / f"latents_{number}_{self.num_frames:03}.pt")
        append(self, latents)

    monkeypatch.setattr(
        "megatron_ext.train.main.launch",
        lambda main, *, nproc_per_node, **_: fork_ranks(main, nproc_per_node),
    )
    monkeypatch.setattr(LongVideoWriter, "append", kept)

    def call(
        words: str = "", name: str = "videos", *, load: Path = checkpoint, code: int = 0
    ) -> list[Tensor]:
        if "--sample-texts" not in words and "--sample-prompts" not in words:
            (tmp_path / "prompts.jsonl").write_text(ASKED)
            words += f" --sample-prompts {tmp_path}/prompts.jsonl --sample-latent-frames 12"
        flags = f"--load {load} --sample-dir {tmp_path / name} {words}"
        assert sample_streaming(flags.split()) == code
        videos: dict[str, list[Tensor]] = {}
        for path in sorted(tmp_path.glob("latents_*.pt")):
            videos.setdefault(path.name.split("_")[1], []).append(torch.load(path))
            path.unlink()
        return [torch.cat(blocks) for blocks in videos.values()] if code == 0 else []

    return call


def test_layouts_agree(sample: Sample, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base, said = sample(), capfd.readouterr().out
    assert [video.size(0) for video in base] == [12] * 3
    folder = tmp_path / "videos"
    videos = {f"sample_00{i}.mp4" for i in range(3)}
    assert {path.name for path in folder.iterdir()} == videos | {CONTACT_SHEET, LIST}
    rows = [json.loads(line) for line in (folder / LIST).read_text().splitlines()]
    assert [len(row["switches"]) for row in rows] == [0, 2, 0]
    assert all(row["iteration"] == 3 and row["averaged_weights"] for row in rows)
    frames, fps = read(folder / "sample_001.mp4")
    assert frames.shape == (45, 8, 8, 3) and fps == 16
    assert "> frame block 2 of 12 after" in said or "> frame block 1 of 12 after" in said
    assert re.search(
        r"> made 3 videos of 12 frame blocks \(36 latent frames, 135 frames\) in [\d.]+ s: [\d.]+ "
        r"blocks/s, [\d.]+ latent frames/s, [\d.]+ frames/s; first block after [\d.]+ s", said
    )  # fmt: skip
    assert all(not torch.equal(base[0], other) for other in base[1:])
    for layout in ("--tensor-model-parallel-size 2", "--context-parallel-size 2", ""):
        videos = sample(f"--nproc-per-node 2 {layout}", "parallel")
        torch.testing.assert_close(videos, base, atol=1e-5, rtol=1e-5)
        assert (tmp_path / "parallel" / LIST).read_text() == (folder / LIST).read_text()
    said = capfd.readouterr().out
    assert said.count("> made 3 videos of 12 frame blocks (36 latent frames, 135 frames) in") == 3
    # The first of two replicas, which makes two videos, prints its progress.
    progress = said.rpartition("> made")[0].rpartition("> made")[2]
    assert "of 8 after" in progress and "of 4 after" not in progress


def test_a_switch_acts_on_its_video_alone(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    base = sample()
    monkeypatch.setattr(f"{__name__}.ASKED", ASKED.replace("hut", "palace"))
    moved = sample()
    assert torch.equal(moved[0], base[0]) and torch.equal(moved[2], base[2])
    assert torch.equal(moved[1][:9], base[1][:9]) and not torch.equal(moved[1][9:], base[1][9:])


def test_weights_seed_and_sinks_are_followed(sample: Sample) -> None:
    flags = ("", "--no-sample-ema", "--sample-seed 5", "--sink-at-switch keep")
    base, latest, seeded, kept = (sample(words) for words in flags)
    assert not torch.equal(base[0], latest[0]) and not torch.equal(base[0], seeded[0])
    assert torch.equal(base[0], kept[0])
    # The sinks are all the past at the first switch.
    assert not torch.equal(base[1], kept[1]) and torch.equal(base[1][:3], kept[1][:3])


def test_captions_on_the_command_line_switch_in_the_middle(sample: Sample, tmp_path: Path) -> None:
    words = "--sample-second-texts d c --sample-batch-size 1 --sample-fps 8"
    sample(f"--sample-texts a b {words}")
    rows = [json.loads(line) for line in (tmp_path / "videos" / LIST).read_text().splitlines()]
    files = sorted((tmp_path / "videos").glob("*.mp4"))
    # As long as the longest sequence of the training.
    assert [row["latent_frames"] for row in rows] == [27, 27]
    assert [row["fps"] for row in rows] == [8, 8] == [read(x)[1] for x in files]
    assert [row["switches"] for row in rows] == [[{"frame": 15, "text": text}] for text in "dc"]


ALONE = "--independent-first-frame --chunk-frames 10"


@pytest.mark.parametrize("layout", ["", pytest.param(TP2, marks=pytest.mark.slow)])
def test_a_picture_is_the_first_frame_alone(
    sample: Sample, tmp_path: Path, layout: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Let one of two videos begin with a picture; blocks of both begin at frames 0, 1, 4 and 7."""
    Image.fromarray(np.full((8, 8, 3), 100, np.uint8)).save(tmp_path / "start.png")
    rows = [{"text": "disc", "image": "start.png"}, {"text": "disc"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"--sample-prompts {path} --sample-latent-frames 10 {ALONE}"
    begun, free = sample(f"{words} {layout}")
    assert begun.size(0) == free.size(0) == 10
    codec = PatchCodec(CodecConfig(codec_spatial=2, codec_channels=4))
    image = codec.encode(torch.full((1, 3, 1, 8, 8), 100 / 127.5 - 1)).transpose(1, 2)
    torch.testing.assert_close(begun[:1], image[0])
    assert not torch.allclose(begun[:1], free[:1]) and not torch.allclose(begun[1:], free[1:])
    said = capfd.readouterr().out
    assert "> made 2 videos of 8 frame blocks (20 latent frames, 74 frames) in" in said


@pytest.mark.parametrize("layout", ["", TP2, "--nproc-per-node 2"])
def test_a_file_that_cannot_be_written_ends_all_ranks(
    sample: Sample, tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    whole = LongVideoWriter.append

    def append(self: LongVideoWriter, latents: Tensor) -> None:
        if 0 in self._numbers:
            raise OSError("disk full")
        whole(self, latents)

    monkeypatch.setattr(LongVideoWriter, "append", append)
    sample(layout, code=EXIT_CODE_USER_ERROR)
    said = capfd.readouterr().err
    assert re.search(r"Writing into \S+/\.videos\.writing failed \(OSError\('disk full'\)\)", said)
    assert not (tmp_path / "videos").exists() and not (tmp_path / ".videos.writing").exists()


def refused(argv: str, capfd: pytest.CaptureFixture[str], program: Callable[..., int]) -> str:
    assert program(argv.split()) == EXIT_CODE_USER_ERROR
    return capfd.readouterr().err


SECOND, FIRST = "--sample-texts a --sample-second-texts c", "--sample-texts a"
REFUSED = {
    "--sample-texts a b --sample-second-texts c": "`--sample-second-texts` has 1 captions, but mu",
    f"{SECOND} --sample-switch-frame 27": "(27) must lie between 1 and the start of the last frame "
    "block (24)",
    f"{SECOND} --sample-switch-frame 0": "`--sample-switch-frame` (0) must be at least 1; use 1.",
    f"{SECOND} --sample-latent-frames 3": "last frame block (0); sample longer videos",
    f"{FIRST} --sample-switch-frame 3": "(3) needs `--sample-second-texts`; give the captions",
    f"{FIRST} --sample-latent-frames 10": "(10) must be a positive multiple of `--frame-block` (3)",
    f"{FIRST} {ALONE} --sample-latent-frames 12": "(12) must be 1 + a multiple of `--frame-block`",
    f"{SECOND} {ALONE} --sample-latent-frames 10 --sample-switch-frame 8": "(8) must lie between 1 "
    "and the start of the last frame block (7)",
    f"{FIRST} --sample-fps 0": "`--sample-fps` (0.0) must be above 0 and at most 1000;",
    f"{FIRST} --sample-steps 3": "`--sample-steps` has no effect with `--task streaming`, whose vi",
    f"{FIRST} --codec-channels 8": "`--codec` has 8 latent channels, but `--generator-size tiny` "
    "has 4; give `--codec-channels 4` or another codec, or, with `--no-encode-first-frame`, ",
    f"{FIRST} --pipeline-model-parallel-size 2 --nproc-per-node 2": "(2) does not go with `--task",
    "--sample-prompts {prompts}": "'a' switches at latent frame 25, but the last frame block begi",
}


@pytest.mark.parametrize("words", REFUSED)
def test_flags_that_do_not_fit_are_refused(
    checkpoint: Path, tmp_path: Path, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "a", "switches": [{"frame": 25, "text": "b"}]}\n')
    argv = f"--load {checkpoint} --sample-dir {tmp_path / 'out'} {words.format(prompts=prompts)}"
    assert REFUSED[words] in refused(argv, capfd, sample_streaming)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def adapted(sample: Sample) -> Callable[..., Tensor]:
    def call(load: Path, words: str = "", code: int = 0) -> Tensor:
        flags = f"--sample-texts disc --sample-latent-frames 9 --no-sample-ema {words}"
        (video,) = sample(flags, load=load, code=code) or [torch.empty(0)]
        return video

    return call


def merged(checkpoint: Path, folder: Path) -> Path:
    words = ["merge", "--load", str(checkpoint), "--save", str(folder)]
    assert fork_ranks(lambda: main(words), 1) == 0
    return folder


def check(found: Tensor, want: Tensor) -> None:
    assert (found - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.fixture
def moved(tuned: Tuned, tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "moved"
    tuned.base.rename(folder)
    yield folder
    folder.rename(tuned.base)


@pytest.mark.slow
def test_adapters_as_merged(tuned: Tuned, adapted: Callable[..., Tensor], tmp_path: Path) -> None:
    want = adapted(merged(tuned.saved, tmp_path / "merged"))
    found = adapted(tuned.saved)
    check(found, want)
    assert (found - adapted(tuned.base)).abs().max() > 0.01 * want.abs().max()
    check(adapted(tuned.saved, TP2), want)


def test_newer_weights_beside_those_under_the_adapters_are_let_alone(
    tuned: Tuned, adapted: Callable[..., Tensor], tmp_path: Path
) -> None:
    want = adapted(tuned.saved)
    newer, tracker = tuned.base / "iter_0000002", tuned.base / TRACKER
    before = tracker.read_text()
    shutil.copytree(tuned.checkpoint(), newer)
    tracker.write_text("2")
    try:
        assert torch.equal(adapted(tuned.saved), want)
        first = tuned.base / "iter_0000001"
        assert torch.equal(adapted(tuned.saved, f"--pretrained-checkpoint {first}"), want)
    finally:
        shutil.rmtree(newer)
        tracker.write_text(before)


def test_weights_that_were_moved_are_given(
    tuned: Tuned, moved: Path, adapted: Callable[..., Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    found = adapted(tuned.saved, f"--pretrained-checkpoint {moved}")
    capfd.readouterr()
    adapted(tuned.saved, code=EXIT_CODE_USER_ERROR)
    gone = f"holds adapters of the weights in {tuned.base}/iter_0000001, which are not there; give"
    assert gone in capfd.readouterr().err
    moved.rename(tuned.base)
    try:
        assert torch.equal(adapted(tuned.saved), found)
    finally:
        tuned.base.rename(moved)


def test_other_weights_are_refused(
    tuned: Tuned, adapted: Callable[..., Tensor], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = merged(tuned.saved, tmp_path / "merged")
    adapted(tuned.saved, f"--pretrained-checkpoint {other}", code=EXIT_CODE_USER_ERROR)
    under = f"must be the weights under the adapters in {tuned.checkpoint()}, which were those of"
    assert under in capfd.readouterr().err
    adapted(tuned.base, f"--pretrained-checkpoint {other}", code=EXIT_CODE_USER_ERROR)
    unused = f"`--pretrained-checkpoint` ({other}) has no effect: `--load` ({tuned.base}) holds"
    assert unused in capfd.readouterr().err


def test_random_weights_are_drawn_again(adapted: Callable[..., Tensor], tmp_path: Path) -> None:
    run(tmp_path, f"{ADAPTERS} {FAST} --train-iters 2")
    want = adapted(merged(tmp_path / "save", tmp_path / "merged"))
    check(adapted(tmp_path / "save"), want)


@pytest.mark.slow
def test_averaged_weights_under_adapters_are_taken_again(
    adapted: Callable[..., Tensor], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, f"{FAST} --train-iters 4", save="base", start=1)
    words = f"--pretrained-checkpoint {tmp_path / 'base'} {ADAPTERS} {FAST}"
    run(tmp_path, f"{words} --pretrained-average --train-iters 2")
    want = adapted(merged(tmp_path / "save", tmp_path / "merged"))
    check(adapted(tmp_path / "save"), want)
    # A run that goes on must not take the others.
    words += f" --load {tmp_path / 'save'} --train-iters {STEPS} --override-opt-param-scheduler"
    code, _ = attempt(tmp_path, words, save="again")
    assert code == EXIT_CODE_USER_ERROR
    assert "averaged); give these." in capfd.readouterr().err


def test_what_is_missing_and_checkpoints_of_the_other_task_are_named(
    capfd: pytest.CaptureFixture[str], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused("", capfd, sample_streaming).splitlines()
    missing = ("`--load` is missing; give", "Captions are missing; ", "`--sample-dir` is missing; ")
    for line, part in zip(said, missing, strict=True):
        assert line.startswith(f"error: {part}")
    argv = f"--load {checkpoint} --sample-dir out --sample-texts a"
    said = refused(argv, capfd, lambda words: sample_video(FLOW, words))
    assert "is a checkpoint of `--task streaming`, whose videos are made block by block;" in said
    flow = {"video": {"video": True, "task": "flow"}}
    monkeypatch.setattr("megatron_ext.video.sampling.tool.read_run_config", lambda *_: flow)
    said = refused(argv, capfd, sample_streaming)
    assert "but is of a flow-matching run; leave out `--streaming`.\n" in said
