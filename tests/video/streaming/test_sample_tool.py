"""tools/sample_video.py --streaming: long videos from a checkpoint, in any layout."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_ext.train.launch import EXIT_CODE_USER_ERROR, fork_ranks
from megatron_ext.video.sampling.clips import CONTACT_SHEET, LIST
from megatron_ext.video.sampling.tool import sample_video
from megatron_ext.video.streaming.tool import sample_streaming
from megatron_ext.video.streaming.video_files import LongVideoWriter
from megatron_ext.video.task import FLOW
from tests.video.sampling.test_clips import read
from tests.video.streaming.runs import run
from tests.video.streaming.tuned import Tuned

BLOCKS = 4
ASKED = (
    '{"text": "disc"}\n'
    '{"text": "square", "switches": [{"frame": 3, "text": "bar"}, {"frame": 9, "text": "hut"}]}\n'
    '{"text": "wheel"}\n'
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of a run that switches prompts and keeps averages."""
    folder = tmp_path_factory.mktemp("trained")
    run(folder, "--train-iters 3")
    for path in folder.glob("*.txt"):
        path.unlink()  # prompts of training are not needed
    return folder / "save"


Sample = Callable[..., int]


@pytest.fixture
def sample(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sample:
    """Return a function that runs the program in forked ranks, and keeps its latents in files."""

    def launch(main: Callable[[], int | None], *, nproc_per_node: int, **_: object) -> int:
        return fork_ranks(main, nproc_per_node)

    append = LongVideoWriter.append

    def kept(self: LongVideoWriter, latents: Tensor) -> None:
        for number, one in zip(self._numbers, latents, strict=True):
            torch.save(one, tmp_path / f"latents_{number}_{self.num_frames:03}.pt")
        append(self, latents)

    monkeypatch.setattr("megatron_ext.train.main.launch", launch)
    monkeypatch.setattr(LongVideoWriter, "append", kept)

    def call(words: str, name: str = "videos") -> int:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text(ASKED)
        flags = f"--load {checkpoint} --sample-prompts {prompts} --sample-latent-frames 12"
        return sample_streaming([*f"{flags} --sample-dir {tmp_path / name} {words}".split()])

    return call


def videos_of(folder: Path) -> list[Tensor]:
    """Return the latents of the three videos, ``[t, c, h, w]``."""
    found = []
    for number in range(3):
        paths = sorted(folder.glob(f"latents_{number}_*.pt"))
        assert len(paths) == BLOCKS
        found.append(torch.cat([torch.load(path) for path in paths]))
        for path in paths:
            path.unlink()
    return found


def test_videos_are_the_same_in_every_layout(
    sample: Sample, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sample("") == 0
    base, said = videos_of(tmp_path), capfd.readouterr().out
    folder = tmp_path / "videos"
    assert {path.name for path in folder.iterdir()} == {
        *(f"sample_00{i}.mp4" for i in range(3)), CONTACT_SHEET, LIST
    }  # fmt: skip
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
        assert sample(f"--nproc-per-node 2 {layout}", "parallel") == 0
        for got, want in zip(videos_of(tmp_path), base, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        assert (tmp_path / "parallel" / LIST).read_text() == (folder / LIST).read_text()


def test_a_switch_acts_from_its_frame_on_and_only_on_its_video(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sample("") == 0
    base = videos_of(tmp_path)
    monkeypatch.setattr(f"{__name__}.ASKED", ASKED.replace("hut", "palace"))
    assert sample("") == 0
    moved = videos_of(tmp_path)
    assert torch.equal(moved[0], base[0]) and torch.equal(moved[2], base[2])
    assert torch.equal(moved[1][:9], base[1][:9]) and not torch.equal(moved[1][9:], base[1][9:])


def test_weights_seed_and_sinks_are_followed(sample: Sample, tmp_path: Path) -> None:
    found = []
    for words in ("", "--no-sample-ema", "--sample-seed 5", "--sink-at-switch keep"):
        assert sample(words) == 0
        found.append(videos_of(tmp_path))
    base, latest, seeded, kept = found
    assert not torch.equal(base[0], latest[0]) and not torch.equal(base[0], seeded[0])
    assert torch.equal(base[0], kept[0])
    # The sinks are all the past at the first switch.
    assert not torch.equal(base[1], kept[1]) and torch.equal(base[1][:3], kept[1][:3])


def test_captions_on_the_command_line_switch_in_the_middle(
    checkpoint: Path, sample: Sample, tmp_path: Path
) -> None:
    words = f"--load {checkpoint} --sample-dir {tmp_path / 'out'} --sample-texts a b "
    words += "--sample-second-texts c d --sample-batch-size 1"
    assert sample_streaming(words.split()) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / LIST).read_text().splitlines()]
    # As long as the longest sequence of the training.
    assert [row["latent_frames"] for row in rows] == [27, 27]
    assert [row["switches"] for row in rows] == [
        [{"frame": 15, "text": "c"}], [{"frame": 15, "text": "d"}]
    ]  # fmt: skip


@pytest.mark.parametrize("layout", ["", "--nproc-per-node 2 --tensor-model-parallel-size 2",
                                    "--nproc-per-node 2"])  # fmt: skip
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
    assert sample(layout) == EXIT_CODE_USER_ERROR
    said = capfd.readouterr().err
    assert re.search(r"Writing into \S+/\.videos\.writing failed \(OSError\('disk full'\)\)", said)
    assert not (tmp_path / "videos").exists() and not (tmp_path / ".videos.writing").exists()


def test_adapters_are_loaded_on_the_weights_that_their_checkpoint_names(
    tuned: Tuned, sample: Sample, tmp_path: Path
) -> None:
    found = []
    for checkpoint in (tuned.base, tuned.saved):
        words = f"--load {checkpoint} --sample-dir {tmp_path / 'out'} --sample-texts a b c"
        assert sample_streaming(f"{words} --sample-latent-frames 12".split()) == 0
        found.append(videos_of(tmp_path))
    assert all(not torch.equal(base, adapted) for base, adapted in zip(*found, strict=True))


def refused(
    argv: str, capfd: pytest.CaptureFixture[str], program: Callable[[list[str]], int]
) -> str:
    assert program(argv.split()) == EXIT_CODE_USER_ERROR
    return capfd.readouterr().err


def test_what_is_missing_is_named_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    said = refused("", capfd, sample_streaming)
    assert said == (
        "error: `--load` is missing; give the --save folder of a run of pretrain_video.py.\n"
        "error: Captions are missing; give `--sample-prompts` or `--sample-texts`.\n"
        "error: `--sample-dir` is missing; give the folder for the clips.\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--sample-texts a b --sample-second-texts c",
            "`--sample-second-texts` has 1 captions, but must have 2, one for each of",
        ),
        (
            "--sample-texts a --sample-second-texts c --sample-switch-frame 27",
            "`--sample-switch-frame` (27) must lie between 1 and the start of the last frame block "
            "(24)",
        ),
        (
            "--sample-texts a --sample-second-texts c --sample-switch-frame 0",
            "`--sample-switch-frame` (0) must be at least 1; use 1.",
        ),
        (
            "--sample-texts a --sample-second-texts c --sample-latent-frames 3",
            "`--sample-switch-frame` (3) must lie between 1 and the start of the last frame block "
            "(0); sample longer videos",
        ),
        (
            "--sample-texts a --sample-switch-frame 3",
            "`--sample-switch-frame` (3) needs `--sample-second-texts`; give the captions",
        ),
        (
            "--sample-texts a --sample-latent-frames 10",
            "`--sample-latent-frames` (10) must be a positive multiple of `--frame-block` (3)",
        ),
        ("--sample-texts a --sample-fps 0", "`--sample-fps` (0) must be at least 1; use 1."),
        (
            "--sample-texts a --sample-steps 3",
            "`--sample-steps` has no effect with `--task streaming`, whose videos follow the flags",
        ),
        (
            "--sample-texts a --codec-channels 8",
            "`--codec` has 8 latent channels, but `--generator-size tiny` has 4; give "
            "`--codec-channels 4` or another codec, or, with `--no-encode-first-frame`, sample no",
        ),
        (
            "--sample-texts a --pipeline-model-parallel-size 2 --nproc-per-node 2",
            "`--pipeline-model-parallel-size` (2) does not go with `--task streaming`",
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    checkpoint: Path, tmp_path: Path, words: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = f"--load {checkpoint} --sample-dir {tmp_path / 'out'} {words}"
    assert message in refused(argv, capfd, sample_streaming)
    assert not (tmp_path / "out").exists()


def test_a_switch_of_a_file_beyond_the_end_is_refused(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "a", "switches": [{"frame": 25, "text": "b"}]}\n')
    argv = f"--load {checkpoint} --sample-dir {tmp_path / 'out'} --sample-prompts {prompts}"
    said = refused(argv, capfd, sample_streaming)
    assert "'a' switches at latent frame 25, but the last frame block begins at 24; switch" in said


def test_checkpoints_of_the_other_task_are_refused(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    argv = f"--load {checkpoint} --sample-dir {tmp_path / 'out'} --sample-texts a"
    said = refused(argv, capfd, lambda words: sample_video(FLOW, words))
    assert said == (
        f"error: `--load` ({checkpoint}) is a checkpoint of `--task streaming`, whose videos are "
        "made block by block; give `--streaming`.\n"
    )
    monkeypatch.setattr(
        "megatron_ext.video.sampling.tool.read_run_config",
        lambda *_: {"video": {"video": True, "task": "flow"}},
    )
    assert refused(argv, capfd, sample_streaming) == (
        f"error: `--load` ({checkpoint}) must be a checkpoint of `--task streaming`, but is of a "
        "flow-matching run; leave out `--streaming`.\n"
    )
