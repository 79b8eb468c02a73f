"""Clips of a video run's steps as tools/preview_batch.py shows them."""

import base64
import io
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from megatron_ext.errors import ConfigError
from megatron_ext.inspect.preview import videos
from megatron_ext.inspect.preview.main import Options
from megatron_ext.inspect.preview.videos import (
    ShownClip,
    _clips_of,
    _frames_of_file,
    _never_whole,
    _notes,
    _page,
    _section,
)
from megatron_ext.programs.preview_batch import main
from megatron_ext.video.config.run import MODES, ConditionConfig
from megatron_ext.video.data.cli import main as preprocess
from megatron_ext.video.data.conditions import draw_modes, frame_masks
from megatron_ext.video.data.dataset import ShardedVideos
from megatron_ext.video.data.geometry import Bucket
from megatron_ext.video.data.randomness import draw_uniforms
from megatron_ext.video.data.sampler import BucketSteps, Members
from megatron_ext.video.data.setup import open_split
from megatron_ext.video.task import VIDEO
from tests.training_runs import prepared
from tests.video.clips import FLAGS, IMAGE, LONG, SHORT, write_clips
from tests.video.clips import clip as clip_of
from tests.video.data import making


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Encode nine clips and a picture with the lossless patch codec."""
    root = tmp_path_factory.mktemp("preview")
    rows = []
    for i in range(10):
        making.write_gif(root / f"{i}.gif", making.pictures(1 if i == 9 else 5, first=i))
        rows.append({"path": f"{i}.gif", "text": f"a <bar> {'of many words ' * (i % 2)}{i}"})
    (root / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = '{"32px": {"1": 1, "5": 1}}'
    words = f"--input {root}/l.jsonl --output {root}/out --codec-spatial 4 --text-length 6"
    assert preprocess([*words.split(), "--buckets", plan]) == 0
    return root / "out"


def words_of(data: Path, *more: str) -> list[str]:
    return ["--", *FLAGS, "--video-data-path", str(data), "--patch-size", "1", *more]


def test_the_page_shows_what_is_trained(data: Path, tmp_path: Path) -> None:
    html = tmp_path / "page.html"
    flags = ["--html", str(html), "--max-rows", "8"]
    own = words_of(data, "--t2v-weight", "0", "--i2v-loop-weight", "1", "--i2v-head-weight", "0")
    assert main([*flags, *own]) == 0
    page = html.read_text()
    sections = page.split('<section class="clip">')[1:]
    assert len(sections) == 8
    videos = ShardedVideos(data)
    for section in sections:
        number = int(re.search(r"clip (\d+), sample", section)[1])
        pictures = [
            np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))
            for content in re.findall(r"base64,([^\"]+)", section)
        ]
        caption = videos[number].caption
        first = int(re.search(r"(\d+)( 10 FPS\.)?$", caption)[1])
        truth = making.pictures(5, first=first)[[0, 2, 4]]
        assert len(pictures) == 3 and pictures[0].shape == (32, 32, 3)
        # A gif has a palette, and nothing else is lost.
        assert (
            max(np.abs(a.astype(int) - b).max() for a, b in zip(pictures, truth, strict=True)) < 3
        )
        assert caption.replace("<", "&lt;").replace(">", "&gt;") in section
        assert ("so that the end of the caption may be cut" in section) == ("many" in caption)
        assert "5x32x32, 10 FPS, latents 192x2x8x8, i2v_" in section
        # Of two latent frames the given ones do not count in the loss.
        strips = {
            "i2v_loop": ["given", "given"], "i2v_tail": ["counts", "given"],
        }  # fmt: skip
        mode = re.search(r"i2v_\w+", section)[0]
        assert re.findall(r'<span class="(\w+)">', section) == strips[mode]
    assert "1 of 1 clips of 32px 1x32x32 are left out of an epoch, all of them in each" in page


def test_frames_of_the_files_where_the_codec_is_missing(data: Path, tmp_path: Path) -> None:
    """A VAE's folder is not given, so that nothing decodes the latents."""
    copied = shutil.copytree(data, tmp_path / "data")
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["codec"] = {"codec": "AutoencoderKLWan"}
    (copied / "manifest.json").write_text(json.dumps(manifest))
    html = tmp_path / "page.html"
    assert main(["--html", str(html), "--max-rows", "2", *words_of(copied)]) == 0
    page = html.read_text()
    assert "frames are those of the clips&#x27; files, not of the latents: " in page
    (section, _) = page.split('<section class="clip">')[1:]
    number = int(re.search(r"(\d+)( 10 FPS\.)?</p>", section)[1])
    shown = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))
        for content in re.findall(r"base64,([^\"]+)", section)
    ]
    for picture, truth in zip(shown, making.pictures(5, first=number)[[0, 2, 4]], strict=True):
        assert np.abs(picture.astype(int) - truth).max() < 3
    assert main(["--html", str(html), "--codec", "/none", *words_of(copied)]) == 0
    assert "of the latents: `--codec` (/none) must be `patch` or a local folder" in html.read_text()
    other = shutil.copytree(copied, tmp_path / "other")
    (other / "clips.jsonl").unlink()
    main(["--html", str(html), *words_of(other)])
    assert "the dataset does not say which file the clip was" in html.read_text()


def test_samples_are_numbered_and_conditioned_as_in_the_run(tmp_path: Path) -> None:
    """Steps of pictures take 4 clips and those of videos 8, shared by two ranks."""
    folder = write_clips(tmp_path / "clips", {IMAGE: 8, SHORT: 16}, {IMAGE: 1})
    words = "--nproc-per-node 2 --reference-loss all --i2v-loop-weight 5 --text-dropout 0.7"
    flags = [*FLAGS, *words.split(), "--video-data-path", str(folder)]
    config = prepared(flags, VIDEO)[1]
    split = open_split(config)
    conditions = config.section(ConditionConfig)
    consumed, modes, notes = 0, Counter[str](), Counter[str]()
    for step in range(split.plan.steps_per_epoch + 2):
        shown = [
            list(_clips_of(config, split, None, Options(rank=rank, max_rows=9), step))
            for rank in range(2)
        ]
        count = split.plan.steps.num_samples(step)
        numbers = sorted(clip.sample_number for of_rank in shown for clip in of_rank)
        assert numbers == list(range(consumed, consumed + count))
        consumed += count
        for rank, of_rank in enumerate(shown):
            planned = split.plan.steps.microbatches(step, rank)
            assert [clip.number for clip in of_rank] == [x for _, clips in planned for x in clips]
            for clip in of_rank:
                t = clip.sample.latents.size(1)
                samples = [clip.sample_number]
                drawn = draw_modes(conditions, t, draw_uniforms(1234, samples, "condition"))
                assert clip.mode == MODES[int(drawn)]
                given = frame_masks(drawn, t, conditions)[0].tolist()
                assert clip.strip == "".join("r" if x else "." for x in given)
                dropped = draw_uniforms(1234, samples, "text dropout") < 0.7
                assert any("(words" in note for note in clip.notes) is bool(dropped)
                modes[clip.mode] += 1
                notes[str(clip).split(": ")[1].partition(", latents")[0]] += 1
    assert len(modes) > 2 and set(notes) == {
        "64px 1x64x64, a picture", "64px 9x64x64, 24 FPS",
    }  # fmt: skip
    # Micro-batches have two clips, which need not all be shown.
    for step in range(2):
        of_rank = split.plan.steps.num_samples(step) // 2
        for most in range(5):
            few = list(_clips_of(config, split, None, Options(max_rows=most), step))
            assert len(few) == min(most, of_rank)


def test_letters_and_words_of_a_clip() -> None:
    sample = clip_of(SHORT, 3)
    shown = ShownClip(7, 9, "b", "t2v", sample, None, [True, True, False, False], [False, True] * 2)
    assert shown.strip == "Rr-."
    squares = re.findall(r'<span class="([^"]*)"></span>', _section(shown))
    assert squares == ["given", "given counts", "left", "counts"]
    page = _page([(4, [shown]), (5, [])], ["a <warning>"], Options(step=5, rank=1))
    assert re.findall(r"<h2>(Step \d+)</h2>", page) == ["Step 5", "Step 6"]
    assert "Clips of step 5, data-parallel rank 1" in page and "⚠ a &lt;warning&gt;" in page
    assert str(shown) == "clip 7, sample 9: b, 24 FPS, latents 4x3x8x8, t2v"
    empty = "the empty caption takes the place of this one"
    for words, pooled, said in (
        (True, False, f"{empty} (words)"), (False, True, f"{empty} (pooled)"),
        (True, True, f"{empty} (words and pooled)"),
    ):  # fmt: skip
        assert _notes(sample, words, pooled)[1:] == [said]
    assert _notes(sample, False, False) == [
        "8 of 8 rows of text are filled, so that the end of the caption may be cut"
    ]
    sample.text[5:] = 0
    assert _notes(sample, False, False) == ["5 of 8 rows of text are filled"]
    members = {IMAGE: Members(range(3), 4), SHORT: Members(range(7), 2), LONG: Members(range(4), 2)}
    assert list(_never_whole(BucketSteps(members, 1, 1, 0))) == [
        "3 of 3 clips of 64px 1x64x64 are left out of an epoch, all of them in each",
        "1 of 7 clips of 64px 9x64x64 are left out of an epoch, other ones in each",
    ]


def test_frames_of_a_file_are_its_first_middle_and_last(tmp_path: Path) -> None:
    made = making.pictures(9)
    folder = making.write_folder(tmp_path / "frames", made)
    gif = making.write_gif(tmp_path / "a.gif", made)
    still = making.write_gif(tmp_path / "b.gif", made[:1])
    bucket = Bucket("32px", 5, 32, 32)
    for path, places in ((folder, [0, 4, 8]), (gif, [0, 4, 8]), (still, [0])):
        frames, why = _frames_of_file(str(path), bucket)
        assert why is None and frames is not None
        assert np.abs(frames.astype(int) - made[places]).max() <= 1
    (tmp_path / "c.mp4").write_bytes(b"")
    for name, said in ((None, "does not say which file"), ("none.gif", "not on this machine"),
                       ("c.mp4", "cannot be read (")):  # fmt: skip
        frames, why = _frames_of_file(name and str(tmp_path / name), bucket)
        assert frames is None and why is not None and said in why


def test_a_later_step_is_shown_alone(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--step", "2", "--max-rows", "2", *words_of(data)]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^step (\d+)$", shown, re.MULTILINE) == ["2"]
    assert shown.count("    frames ") == 2


def test_a_warning_fails_if_strict_however_the_data_is_given(data: Path) -> None:
    """Without steps that leave clips out there is no warning."""
    path = str(data)
    flags = [word for word in words_of(data) if word not in ("--video-data-path", path)]
    for given in ([f"--video-data-path={path}"], ["--video_data_path", path]):
        assert main(["--strict", *flags, *given]) == 1
    whole = ["--micro-batch-size", "1", "--global-batch-size", "1"]
    assert main(["--strict", "--max-rows", "1", *words_of(data, *whole)]) == 0


def test_a_task_that_trains_on_prompts_has_no_clips_to_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SimpleNamespace(section=lambda _: SimpleNamespace(streams=True))
    parsed = SimpleNamespace(config=config, task=None)
    monkeypatch.setattr(videos, "parse_run", lambda *_: parsed)
    with pytest.raises(ConfigError, match=r"^`--task` \(streaming\) trains on prompts, which hold"):
        videos.preview_videos([], Options(), Console())


def test_a_rank_and_a_task_without_clips_are_refused(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--rank", "3", *words_of(data)]) == 2
    assert (
        "`--rank` (3) must be one of the 1 data-parallel ranks of the la" in capsys.readouterr().err
    )
    assert main(["--html", "/none/page.html", *words_of(data)]) == 2
    assert "`--html` (/none/page.html) cannot be written (" in capsys.readouterr().err
