"""Clips to shards by tools/preprocess_video.py, its refusals, and runs that are cut short."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image

from megatron_ext.data.part_pool import PartPool
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import CodecConfig, EncodeConfig, TextEncoderConfig
from megatron_ext.video.data import encode as encode_module
from megatron_ext.video.data import preprocess as run_module
from megatron_ext.video.data.cli import main, parse_options
from megatron_ext.video.data.clips import Clip
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.data.dataset import ShardedVideos
from megatron_ext.video.data.encode import ClipEncoder, PlannedClip
from megatron_ext.video.data.geometry import Bucket, ClipShape, parse_plan
from megatron_ext.video.data.manifest import (
    make_manifest,
    sample_options,
    weights_stamp,
)
from megatron_ext.video.data.options import VideoPreprocessOptions
from megatron_ext.video.data.shards import ShardWriter
from megatron_ext.video.data.text_encoders import build_text_encoder
from tests.video.data import making

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "preprocess_video.py"


def make_clips(folder: Path, count: int = 6) -> Path:
    rows = []
    for i in range(count):
        making.write_gif(folder / f"{i}.gif", making.pictures(9, first=i % 7))
        rows.append({"path": f"{i}.gif", "text": f"a bar {i}"})
    (folder / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "l.jsonl"


def flags(source: Path, output: Path, *more: str) -> list[str]:
    return [
        *("--input", str(source), "--output", str(output), "--buckets", making.PLAN.as_json()),
        *making.FLAGS, *more,
    ]  # fmt: skip


def run(source: Path, output: Path, *more: str) -> int:
    return main(flags(source, output, *more))


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files of a dataset, which no run may leave different."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != ".lock"}


def test_clips_to_shards_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    making.write_video(tmp_path / "a.mp4", making.pictures(9))
    making.write_folder(tmp_path / "folder", making.pictures(6))
    making.write_gif(tmp_path / "still.gif", making.pictures(1))
    making.write_video(tmp_path / "short.mp4", making.pictures(3))
    making.write_gif(tmp_path / "small.gif", making.pictures(1, 16, 16))
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    names = "a.mp4 folder still.gif short.mp4 small.gif broken.mp4 missing.mp4".split()
    rows = [{"path": name, "text": "a red bar moves right"} for name in names]
    rows.append({"path": "a.mp4", "text": ""})
    source, output = tmp_path / "l.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(source, output, "--clips-per-shard=2") == 0
    said = capsys.readouterr().err
    assert "3 clips in 2 shards, 5 dropped" in said and "2 of 8 clips dropped" in said
    videos = ShardedVideos(output)
    assert len(videos) == 3 and videos.manifest["dropped"]["cannot be read"] == 2
    # Of the two rates, the first; that of the picture is none.
    assert videos.manifest["fps"] == 8
    assert videos[0].caption == "8 FPS. a red bar moves right"  # of seven words, six are kept
    assert videos[2].caption == "a red bar moves right" and not videos[2].references
    first = build_codec(making.CODEC).decode(videos[1].latents[None])[0]
    truth = torch.from_numpy(making.pictures(6)[:5]).permute(3, 0, 1, 2) / 127.5 - 1
    assert (first - truth).abs().mean() < 0.2
    text, pooled = videos.null_text
    assert text.shape == (6, 16) and not text.any() and not pooled.any()


def test_flags_that_change_frames_or_words_make_another_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "l.jsonl", tmp_path / "out"
    making.write_video(tmp_path / "a.mp4", making.pictures(9))
    source.write_text(json.dumps({"path": "a.mp4", "text": "a bar"}) + "\n")
    assert run(source, output, "--video-fps=7.5", "--video-background=#102030") == 0
    videos = ShardedVideos(output)
    assert videos[0].caption == "a bar 7.5 FPS." and videos.manifest["fps"] == 7.5
    assert videos.manifest["encode"]["video_background"] == "#102030"
    assert "slower" not in capsys.readouterr().err
    for other, named in (
        (
            "--video-fps=8",
            "(`encode.video_fps` 7.5 there, 8.0 here); give another folder, or remove",
        ),
        ("--video-fps=7.5 --video-blend", "(`encode.video_blend` False there, True here); give an"),
        ("--video-fps=7.5 --no-fps-words", "(`encode.fps_words` True there, False here); give ano"),
    ):
        assert run(source, output, "--video-background=#102030", *other.split()) == 1
        assert f"holds a dataset of other options {named}" in capsys.readouterr().err
    assert run(source, tmp_path / "other", "--video-fps=16", "--no-fps-words") == 0
    assert ShardedVideos(tmp_path / "other")[0].caption == "a bar"
    assert "1 of 1 clips are slower than `--video-fps` (16)" in capsys.readouterr().err


def test_the_number_of_processes_and_threads_changes_no_byte(tmp_path: Path) -> None:
    source = make_clips(tmp_path)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert run(source, tmp_path / "one", "--clips-per-shard=2") == 0
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(threads)
    assert run(source, tmp_path / "two", "--clips-per-shard=2", "--workers=2") == 0
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert one == two and len([name for name in one if name.endswith(".bin")]) == 3 * 7 + 2


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_killed_run_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_clips(tmp_path, 40)
    output, more = tmp_path / "killed", "--clips-per-shard=1"
    process = subprocess.Popen(
        [sys.executable, str(TOOL), *flags(source, output, more)], stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    wait_for(output / "shard_00002.json", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (output / "manifest.json").exists()
    with pytest.raises(DataError, match=r"manifest.json does not exist, so the data is not whole"):
        ShardedVideos(output)
    # What another killed run left behind.
    (output / "shard_00039_latents.writing.77.bin").write_bytes(b"of another killed run")
    assert run(source, output, more) == 0
    said = capsys.readouterr().err
    found = re.search(r"(\d+) of 40 clips were encoded before", said)
    assert found is not None and 3 <= int(found[1]) < 40
    assert run(source, tmp_path / "whole", more) == 0
    assert contents(output) == contents(tmp_path / "whole")


def test_a_part_that_was_cut_off_is_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failure of power may leave a file of the right size without its content."""
    source, output, add = make_clips(tmp_path, 10), tmp_path / "out", ShardWriter.add

    def interrupt(writer: ShardWriter, sample: Any, bucket: int) -> None:
        if sample.number == 7:
            raise KeyboardInterrupt
        add(writer, sample, bucket)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "add", interrupt)
        assert run(source, output) == 130
    latents = sorted((output / "parts").glob("*_latents.bin"))
    assert len(latents) == 2
    latents[0].write_bytes(bytes(latents[0].stat().st_size))
    assert run(source, output) == 0
    assert "3 of 10 clips were encoded before." in capsys.readouterr().err
    assert run(source, tmp_path / "whole") == 0 and contents(output) == contents(tmp_path / "whole")


def damage(kind: str, output: Path) -> None:
    victim, marker = output / "shard_00001_tail1.bin", output / "shard_00001.json"
    if kind == "cut":
        victim.write_bytes(victim.read_bytes()[:-8])
    elif kind in ("no clips", "other options"):
        found = json.loads(marker.read_text())
        if kind == "other options":
            found["fingerprint"] = "of a run with other options"
        else:
            del found["clips"]
        marker.write_text(json.dumps(found))
    else:
        (victim if kind == "missing" else marker).unlink()


@pytest.mark.parametrize("kind", ["cut", "missing", "marker", "no clips", "other options"])
def test_shards_are_remade(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = make_clips(tmp_path), tmp_path / "out"
    assert run(source, output, "--clips-per-shard=2") == 0
    before = contents(output)
    damage(kind, output)
    assert run(source, output, "--clips-per-shard=2") == 0
    assert "4 of 6 clips were encoded before." in capsys.readouterr().err
    assert contents(output) == before


def test_a_dataset_of_other_options_stays_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = make_clips(tmp_path), tmp_path / "out"
    assert run(source, output, "--clips-per-shard=2") == 0
    (output / "manifest.json").unlink()
    before = contents(output)
    for more in ("--clip-seed=7", "--storage=bfloat16", "--codec-scale=2", "--text-length=7"):
        assert run(source, output, "--clips-per-shard=2", more) == 1
        said = capsys.readouterr().err
        assert "holds a dataset of other options (`" in said and "here); give another fold" in said
    assert contents(output) == before
    (output / "clips.jsonl").write_text('{"format": 1, "options": {}}\n{"key": 3}\n')
    assert run(source, output) == 1
    assert "cannot be read (its first line is damaged: KeyError" in capsys.readouterr().err
    (output / "clips.jsonl").unlink()
    assert run(source, output) == 1
    assert "holds a dataset without clips.jsonl, which says what its" in capsys.readouterr().err


def rows_of(source: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in source.read_text().splitlines()]


def write_rows(source: Path, rows: list[dict[str, str]]) -> None:
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_set_grows_by_what_is_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows may come before others: old clips keep their numbers, and with these their crops."""
    source, output = make_clips(tmp_path, 8), tmp_path / "out"
    rows = rows_of(source)
    missing = {"path": "none.gif", "text": "x"}
    write_rows(source, [*rows[2:7], missing])
    assert run(source, output, "--clips-per-shard=2") == 0
    before, manifest = contents(output), ShardedVideos(output).manifest
    assert [shard["clips"] for shard in manifest["shards"]] == [2, 2, 1]
    making.write_gif(tmp_path / "still.gif", making.pictures(1))
    write_rows(source, [*rows, rows[3], missing, {"path": "still.gif", "text": "a still"}])
    assert run(source, output, "--clips-per-shard=3", "--workers=2") == 0
    said = capsys.readouterr().err
    assert "5 of 11 clips were encoded before." in said
    grown = ShardedVideos(output)
    assert [shard["clips"] for shard in grown.manifest["shards"]] == [2, 2, 1, 3, 2]
    captions = [grown[i].caption.removesuffix(" 10 FPS.") for i in range(10)]
    named = [f"a bar {i}" for i in (2, 3, 4, 5, 6, 0, 1, 7, 3)]
    assert captions == [*named, "a still"]
    # The number 5 was given to the clip that could not be read, and to no other since.
    assert [grown[i].number for i in range(10)] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert grown.manifest["buckets"][0] == manifest["buckets"][0]
    assert grown.of_buckets[Bucket("32px", 1, 32, 32)] == [9]
    assert grown.manifest["fingerprint"] != manifest["fingerprint"]
    shards = {k: v for k, v in before.items() if k.startswith(("shard_", "null_"))}
    after = contents(output)
    assert {name: after[name] for name in shards} == shards
    # The same list once more: nothing to do, and nothing changes.
    assert run(source, output, "--clips-per-shard=3") == 0
    assert "nothing to encode" in capsys.readouterr().err and contents(output) == after
    # A row that was never encoded leaves no trace when it leaves the list.
    write_rows(source, [row for row in rows_of(source) if row != missing])
    assert run(source, output, "--clips-per-shard=3") == 0
    assert ShardedVideos(output).manifest["fingerprint"] == grown.manifest["fingerprint"]
    assert "none.gif" in (before_of := after["clips.jsonl"].decode())
    entries = (output / "clips.jsonl").read_text().splitlines()
    assert [row for row in before_of.splitlines() if "none.gif" not in row] == entries


def test_rows_that_went_are_named_and_taken_out_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = make_clips(tmp_path), tmp_path / "out"
    rows = rows_of(source)
    assert run(source, output, "--clips-per-shard=2") == 0
    samples = {video.caption: video for video in ShardedVideos(output)}
    write_rows(source, [{**rows[0], "text": "a bar that moves"}, *rows[1:3], *rows[4:]])
    assert run(source, output) == 0
    said = capsys.readouterr().err
    assert (
        "2 samples of rows that are not in the list any more stay (`--drop-missing` takes them "
        "out); of 1 the file is in the list, but file or row has changed. First: "
    ) in said
    assert len(ShardedVideos(output)) == 7
    assert run(source, output, "--drop-missing") == 0
    said = capsys.readouterr().err
    assert "2 samples of rows that are not in the list any more are taken out; of 1" in said
    assert "nothing to encode" in said
    videos = ShardedVideos(output)
    left = [video.caption.removesuffix(" 10 FPS.") for video in videos]
    assert sorted(left) == ["a bar 1", "a bar 2", "a bar 4", "a bar 5", "a bar that moves"]
    assert not list(output.glob("shard_00000*")) and not list(output.glob("shard_00001*"))
    for video in videos:
        old = samples.get(video.caption)
        assert old is None or (old.number == video.number and old.latents.equal(video.latents))
    # A new row gets the number after the last one, not that of a row that was taken out.
    moving = {**rows[0], "text": "a bar that moves"}
    write_rows(source, [moving, *rows[1:3], *rows[4:], {**rows[3], "text": "a new bar"}])
    assert run(source, output) == 0
    numbers = sorted(video.number for video in ShardedVideos(output))
    assert numbers == [1, 2, 4, 5, 6, 7]
    write_rows(source, [{**row, "text": "other"} for row in rows])
    assert run(source, output) == 1
    said = capsys.readouterr().err
    assert (
        "samples of clips that are not in `--input` (" in said and "or `--drop-missing` to" in said
    )
    assert run(source, output, "--drop-missing") == 0 and len(ShardedVideos(output)) == 6


def test_windows_are_samples_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed or damaged set goes on with the windows that lack, and encodes no other again."""
    making.write_gif(tmp_path / "long.gif", making.pictures(23, 32, 96))
    source, more = make_clips(tmp_path, 2), ["--video-windows=all", "--clips-per-shard=2"]
    long = {"path": "long.gif", "text": "a long bar"}
    write_rows(source, [rows_of(source)[0], long])
    assert run(source, tmp_path / "out", *more) == 0
    videos = ShardedVideos(tmp_path / "out")
    assert [videos[i].number for i in range(5)] == [0, 1, 1, 1, 1]
    assert not videos[1].latents.equal(videos[2].latents)
    before = contents(tmp_path / "out")
    (tmp_path / "out" / "shard_00001_text.bin").unlink()
    assert run(source, tmp_path / "out", *more) == 0
    assert "1 of 2 clips were encoded before." in capsys.readouterr().err
    assert contents(tmp_path / "out") == before
    write_rows(source, [rows_of(source)[0], long, {"path": "1.gif", "text": "a bar 1"}])
    assert run(source, tmp_path / "out", *more) == 0
    assert len(ShardedVideos(tmp_path / "out")) == 6
    write_rows(source, [rows_of(source)[0]])
    assert run(source, tmp_path / "out", *more, "--drop-missing") == 0
    assert len(ShardedVideos(tmp_path / "out")) == 1


def test_folders_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = make_clips(tmp_path, 1), tmp_path / "out"
    output.mkdir()
    with FileLock(output / ".lock"):
        assert run(source, output) == 1
    assert "is being written by another run; wait for it, or give anot" in capsys.readouterr().err
    assert run(source, output) == 0
    (tmp_path / "file").write_text("in the way")
    assert run(source, tmp_path / "file") == 1
    assert re.search(r"`--output` \(.*file\) cannot be written \(", capsys.readouterr().err)


def cut_png(path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:60])


def test_damaged_clips_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_clips(tmp_path, 3)
    folder = making.write_folder(tmp_path / "cut", making.pictures(5))
    cut_png(folder / "003.png")
    (tmp_path / "none.mp4").write_bytes(b"")
    with open(source, "a") as stream:
        stream.write('{"path": "cut", "text": "x"}\n{"path": "none.mp4", "text": "y"}\n')
        stream.write('{"path": "0.gif"}\n')
    output = tmp_path / "out"
    assert run(source, output, "--temporal-crop=start") == 0
    said = capsys.readouterr().err
    assert "2 of 6 clips dropped: the clip cannot be read. First: The clip " in said
    assert "1 of 6 clips dropped: the clip has no caption." in said
    assert "3 clips in 1 shards, 3 dropped" in said
    videos = ShardedVideos(output)
    assert [videos[i].number for i in range(len(videos))] == [0, 1, 2]
    assert videos.manifest["dropped"] == {"cannot be read": 2, "has no caption": 1}
    dropped = [json.loads(line) for line in (output / "dropped.jsonl").read_text().splitlines()]
    assert [d["number"] for d in dropped] == [3, 4, 5]
    assert "cut cannot be read (" in dropped[0]["detail"]
    # They are tried once: the same command encodes nothing and tells the same.
    before = contents(output)
    assert run(source, output, "--temporal-crop=start") == 0
    said = capsys.readouterr().err
    assert "4 of 6 clips were encoded before." in said and "3 dropped" in said
    assert "nothing to encode" in said and contents(output) == before


def test_no_decodable_clip_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut_png(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("noise")
    assert run(tmp_path, tmp_path.with_name("out")) == 1
    said = capsys.readouterr().err
    assert re.search(r"None of the 1 planned clips could be decoded; the first: The .*a.png", said)
    assert not (tmp_path.with_name("out") / "manifest.json").exists()


def test_one_shard_is_encoded_by_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    processes = tmp_path / "processes"
    processes.mkdir()

    def encode(*given: Any) -> None:
        (processes / str(os.getpid())).touch()
        time.sleep(0.2)
        return real(*given)

    real = run_module._encode_part
    monkeypatch.setattr(run_module, "_encode_part", encode)
    forked = partial(PartPool, method="fork")
    monkeypatch.setattr(run_module, "PartPool", lambda method, **given: forked(**given))
    source = make_clips(tmp_path, 8)
    assert run(source, tmp_path / "many", "--workers=3") == 0
    assert len(list(processes.iterdir())) == 3
    assert re.search(
        r"8 clips in 1 shards, 0 dropped, in .* s, \d+\.\d clips/s", capsys.readouterr().err
    )
    monkeypatch.setattr(run_module, "_encode_part", real)
    assert run(source, tmp_path / "one") == 0
    assert contents(tmp_path / "many") == contents(tmp_path / "one")


def test_parts_may_be_finished_in_any_order_and_progress_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encode six clips of three shards in parts of one, of all shards in turn; then two more."""
    source = make_clips(tmp_path, 8)
    rows = rows_of(source)
    bars: list[tuple[int, int]] = []
    seen: list[tuple[int, int]] = []

    class Bar(run_module.Progress):
        def __init__(self, total: int, earlier: int, *words: Any, **named: Any) -> None:
            bars.append((total, earlier))
            super().__init__(total, earlier, *words, **named)

    def in_turn(work: Any, todo: Any, progress: Any) -> None:
        shards = sorted({part.shard for part in todo.parts})
        seen.append((len(shards), len(todo.parts)))
        for number in (*range(0, len(todo.parts), 2), *range(1, len(todo.parts), 2)):
            work(todo.parts[number], lambda *_: None)
            todo.finish(number)

    monkeypatch.setattr(run_module, "_MOST_CLIPS_OF_A_PART", 1)
    monkeypatch.setattr(run_module, "Progress", Bar)
    monkeypatch.setattr(run_module, "_encode_here", in_turn)
    for count in (6, 8):
        write_rows(source, rows[:count])
        assert run(source, tmp_path / "out", "--clips-per-shard=2") == 0
    assert seen == [(3, 6), (1, 2)]
    # Headers are read of new clips only.
    assert bars == [(6, 0), (6, 0), (2, 0), (8, 6)]
    assert [video.number for video in ShardedVideos(tmp_path / "out")] == list(range(8))


def test_an_interrupted_run_keeps_finished_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output, add = make_clips(tmp_path), tmp_path / "out", ShardWriter.add

    def interrupt(writer: ShardWriter, sample: Any, bucket: int) -> None:
        if sample.number == 4:
            raise KeyboardInterrupt
        add(writer, sample, bucket)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "add", interrupt)
        assert run(source, output, "--clips-per-shard=2") == 130
    assert "Interrupted; what is encoded is kept, so run the same co" in capsys.readouterr().err
    assert not list(output.rglob("*.writing.*")) and not (output / "shard_00002_text.idx").exists()
    assert run(source, output, "--clips-per-shard=2") == 0
    assert "4 of 6 clips were encoded before." in capsys.readouterr().err


def test_manifest_says_what_made_the_data(tmp_path: Path) -> None:
    source, output = make_clips(tmp_path), tmp_path / "out"
    (tmp_path / "plan.json").write_text('{"32px": {"5": 1.0}}')
    plan = f"--buckets={tmp_path / 'plan.json'}"
    assert run(source, output, plan, "--reference-lengths", "1", "--storage=bfloat16") == 0
    videos = ShardedVideos(output)
    manifest = videos.manifest
    assert manifest["plan"] == {"32px": {"5": [1.0, None]}}
    assert manifest["buckets"][0]["micro_batch_size"] is None
    assert manifest["references"] == ["head1", "tail1"] and manifest["storage"] == "bfloat16"
    assert manifest["encode"]["reference_lengths"] == [1]
    assert manifest["codec"]["codec_spatial"] == making.CODEC.codec_spatial
    assert manifest["text_encoder"]["length"] == making.TEXT.text_length == manifest["text_length"]
    assert videos[0].latents.dtype == torch.bfloat16 == videos.null_text[0].dtype


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--workers=0"], r"`--workers` \(0\) must be at least 1"),
        (["--clips-per-shard=0"], r"`--clips-per-shard` \(0\) must be at least 1"),
        (["--storage=int8"], r"`--storage` \(int8\) must be one of float32, bfloat16"),
        (["--buckets=/none.json"], r"`--buckets` \(/none.json\) must be JSON or a file with it"),
        (["--buckets={}"], r"is empty: it must hold a bucket with a probability above 0"),
        (["--codec=/none"], r"must be `patch` or a local folder|must be left out with `--codec"),
        (["--text-encoder=t5"], r"`--text-encoder` \(t5\) must be hashed, t5-clip, umt5 or llama"),
        (["--reference-lengths", "0"], r"`--reference-lengths` \(0\) must be at least 1"),
        (["--colour"], r"Unrecognized arguments: --colour; see --help"),
        (["--workers=many"], r"Argument --workers: invalid int value: 'many'; see --help"),
        (['--buckets={"32px": {"4": [1, 1]}}'], r"frames \(4\) must be a multiple"),
        (['--buckets={"512px": {"5": [1, 1]}}'], "None of the 1 clips has a bucket"),
        (["--reference-lengths", "9"], r"`reference_lengths` \(9\) must be less than the latent"),
    ],
)
def test_bad_flags_end_before_anything_is_written(
    more: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_clips(tmp_path, 1)
    assert run(source, tmp_path / "out", *more) == (1 if "None of" in sentence else 2)
    assert re.search(sentence, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


VAE = CodecConfig("/vae")
T5 = TextEncoderConfig("t5-clip", "/t5", "/clip")


@pytest.mark.parametrize(
    ("sections", "device", "method"),
    [
        ({}, "cpu", "fork"),
        ({}, "cuda", "spawn"),
        ({"codec": VAE}, "cpu", "spawn"),
        ({"text_encoder": T5}, "cpu", "spawn"),
        ({"codec": VAE, "text_encoder": T5}, "cpu", "spawn"),
    ],
)
def test_workers_are_forked_only_without_models_and_gpus(
    sections: dict[str, Any], device: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = VideoPreprocessOptions("in", "out", making.PLAN, device=device, **sections)
    assert run_module._method(options) == method


def test_workers_are_told_the_parts_and_their_clips_by_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    class Pool:
        def __init__(self, **given: Any) -> None:
            made.append(given)

        def run(self, *given: Any) -> None:
            made.append(given)

    monkeypatch.setattr(run_module, "PartPool", Pool)
    shape, bucket = ClipShape(9, 32, 32, 8.0), Bucket("32px", 5, 32, 32)
    clips = [PlannedClip(i, Clip(f"{i}.mp4", "x"), shape, bucket) for i in range(5)]
    parts = [
        run_module._Part(f"p{i}", "shard_00000", some, [0] * len(some), [])
        for i, some in enumerate((clips[:2], clips[2:]))
    ]
    todo: Any = SimpleNamespace(
        parts=parts, fingerprint="f", unfinished="unfinished", finish="finish"
    )
    options = VideoPreprocessOptions("in", "out", making.PLAN, workers=3)
    progress: Any = "progress"
    run_module._encode_in_workers(options, print, todo, progress)
    pool, ran = made
    names = [pool["name_of"](number) for number in range(2)]
    assert names == ["the clips from 0.mp4 to 1.mp4", "the clips from 2.mp4 to 4.mp4"]
    assert [pool["part_of"](number) for number in range(2)] == parts
    own = {name: pool[name] for name in ("workers", "place", "unfinished", "method")}
    assert own == {"workers": 3, "place": "out", "unfinished": "unfinished", "method": "fork"}
    assert pool["start"].args == (options, "f")
    assert ran == (range(2), "progress", print, "finish")


def test_workers_take_the_gpus_in_turn_and_the_seed_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("build_codec", "build_text_encoder"):
        monkeypatch.setattr(encode_module, name, lambda *given: built.append(given))
    encode = EncodeConfig(clip_seed=77)
    options = VideoPreprocessOptions(
        "in", "out", making.PLAN, VAE, T5, encode, device="cuda", workers=3
    )
    for worker in range(3):
        run_module._start_encoding(options, "f", worker)
    devices = [torch.device("cuda", number) for number in (0, 1, 0)]
    assert built == [x for device in devices for x in ((VAE, device, 77), (T5, device))]


@pytest.mark.parametrize("changed", ["vae", "t5", "clip"])
def test_other_weights_of_a_model_make_another_dataset(changed: str, tmp_path: Path) -> None:
    """The options of a dataset include sizes and times of these files."""
    for name in ("vae", "t5", "clip"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / "weights").write_bytes(b"abc")
    paths = [str(tmp_path / name) for name in ("vae", "t5", "clip")]
    codec, encoder = CodecConfig(paths[0]), TextEncoderConfig("t5-clip", *paths[1:])
    options = VideoPreprocessOptions("in", "out", making.PLAN, codec, encoder)
    before = weights_stamp(options)
    assert weights_stamp(options) == before
    os.utime(tmp_path / changed / "inner" / "weights", (3, 3))
    assert weights_stamp(options) != before


def test_the_rate_of_a_set_is_that_of_most_videos() -> None:
    """Pictures, which have none, do not count; without videos it is 24."""
    bucket = Bucket("32px", 5, 32, 32)
    for rates, wanted in (
        ([0, 0, 0, 12, 8, 8], 8), ([12, 8, 8, 0, 0, 0], 8), ([7.5], 7.5), ([0, 0], 24), ([], 24),
    ):  # fmt: skip
        keys = [f"key {i}" for i in range(len(rates))]
        assert make_manifest({}, making.PLAN, [bucket], rates, keys)["fps"] == wanted
    one, two = (make_manifest({}, making.PLAN, [bucket], [8], [key]) for key in ("a", "b"))
    assert one["fingerprint"] != two["fingerprint"]


def test_the_manifest_names_the_references_of_all_lengths() -> None:
    encode = EncodeConfig(reference_lengths=(1, 9))
    options = VideoPreprocessOptions("in", "out", making.PLAN, making.CODEC, encode=encode)
    text = build_text_encoder(TextEncoderConfig(text_length=3, text_width=5, pooled_width=7))
    encoder = ClipEncoder(encode, build_codec(making.CODEC), text)
    found = sample_options(options, encoder)
    assert found["references"] == ["head1", "tail1", "head9", "tail9"]
    sizes = ("latent_channels", "text_length", "text_width", "pooled_width")
    assert [found[name] for name in sizes] == [24, 3, 5, 7]


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"`--device` \(cuda\) needs a GPU that torch finds; use"):
        VideoPreprocessOptions("in", "out", making.PLAN, device="cuda")


def test_flags_that_are_left_out_have_the_defaults_of_the_options() -> None:
    """Let the plan begin with a blank, as in a script of several lines."""
    plan = ' {"32px": {"5": [0.5, 3]}}'
    found = parse_options(["--input", "in", "--output", "out", "--buckets", plan])
    assert found == VideoPreprocessOptions("in", "out", parse_plan(plan))
