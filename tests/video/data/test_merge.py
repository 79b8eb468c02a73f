"""Datasets of encoded clips joined to one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.programs.merge_datasets import video_sets_in
from megatron_ext.video.data.dataset import ShardedVideos
from megatron_ext.video.data.encode import VideoSample
from megatron_ext.video.data.merge import merge_videos
from megatron_ext.video.data.shards import ShardWriter
from tests.text.tiny import ROOT
from tests.video.clips import IMAGE, LONG, SHORT, write_clips


def test_a_joined_dataset_holds_the_clips_of_all(tmp_path: Path) -> None:
    # A bucket has another number in each: IMAGE comes before SHORT, and SHORT before LONG.
    a = write_clips(tmp_path / "sets" / "a", {SHORT: 3, LONG: 2}, storage="bfloat16")
    b = write_clips(tmp_path / "sets" / "b", {IMAGE: 2, LONG: 1}, storage="bfloat16")
    tool = [sys.executable, str(ROOT / "tools" / "merge_datasets.py")]
    words = ["--input", str(tmp_path / "sets"), "--output-prefix", str(tmp_path / "all")]
    done = subprocess.run([*tool, *words], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"2 datasets, 8 clips -> {tmp_path / 'all'}\n", done.stderr
    merged = ShardedVideos(tmp_path / "all")
    assert merged.of_buckets == {SHORT: [0, 1, 2], LONG: [3, 4, 7], IMAGE: [5, 6]}
    for sample, truth in zip(merged, [*ShardedVideos(a), *ShardedVideos(b)], strict=True):
        for name in ("latents", "text", "pooled"):
            assert torch.equal(getattr(sample, name), getattr(truth, name))
        assert sample.references.keys() == truth.references.keys()
        assert all(torch.equal(sample.references[n], truth.references[n]) for n in truth.references)
        assert (sample.fps, sample.caption) == (truth.fps, truth.caption)
    assert [sample.number for sample in merged] == list(range(8))
    assert all(map(torch.equal, merged.null_text, ShardedVideos(a).null_text))
    # A set of several shards is joined too; clips that were left out were so of other lists.
    c = write_clips(tmp_path / "c", {LONG: 2}, storage="bfloat16", dropped={"is bad": 2})
    assert merge_videos([c, tmp_path / "all"], tmp_path / "more") == 10
    more = ShardedVideos(tmp_path / "more")
    assert [len(shard) for shard in more.shards] == [2, 5, 3]
    assert more.of_buckets == {LONG: [0, 1, 5, 6, 9], SHORT: [2, 3, 4], IMAGE: [7, 8]}
    for sample, truth in zip(more, [*ShardedVideos(c), *merged], strict=True):
        assert torch.equal(sample.latents, truth.latents) and sample.caption == truth.caption
    assert "dropped" not in more.manifest


def test_datasets_of_a_folder_are_joined_in_sorted_order(tmp_path: Path) -> None:
    """Other folders and files beside them are passed over, but no datasets of another kind."""
    for name in ("c", "a", "b"):
        write_clips(tmp_path / name, {SHORT: 1})
    (tmp_path / "b" / "manifest.json").unlink()
    (tmp_path / "notes.txt").write_text("no dataset")
    assert video_sets_in(tmp_path) == [tmp_path / "a", tmp_path / "c"]
    assert video_sets_in(tmp_path / "notes.txt") == video_sets_in(tmp_path / "b") == []
    (tmp_path / "text.idx").write_bytes(b"")
    for name in ("a", "c"):
        said = rf"holds datasets of clips \({name}\) and others \(text.idx\);"
        with pytest.raises(DataError, match=said):
            video_sets_in(tmp_path)
        (tmp_path / name / "manifest.json").unlink()
    assert video_sets_in(tmp_path) == []


def test_datasets_that_cannot_be_joined(tmp_path: Path) -> None:
    a, out = write_clips(tmp_path / "a", {SHORT: 1}), tmp_path / "out"
    other = write_clips(tmp_path / "other", {SHORT: 1}, codec={"codec": "/vae"})
    with pytest.raises(ConfigError, match=rf"`--input` \({other}\) has `codec` .* preprocess both"):
        merge_videos([a, other], out)
    assert not out.exists()
    cut = write_clips(tmp_path / "cut", {SHORT: 1})
    (text,) = cut.glob("shard_*_text.bin")
    videos = merge_videos([cut], tmp_path / "whole")
    assert videos == 1
    text.write_bytes(text.read_bytes()[:-4])
    with pytest.raises(DataError):
        merge_videos([a, cut], out)
    assert not out.exists()
    with pytest.raises(DataError, match=r"exists already; give another folder"):
        merge_videos([a], tmp_path / "whole")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_a_merge_that_ends_early_leaves_nothing_in_the_way(
    stop: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End it in the second shard, when the first one is finished."""
    sets = [write_clips(tmp_path / name, {SHORT: 2}) for name in "ab"]
    add, out = ShardWriter.add, tmp_path / "out"

    def interrupt(writer: ShardWriter, sample: VideoSample, bucket: int) -> None:
        if sample.number == 3:
            raise stop
        add(writer, sample, bucket)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "add", interrupt)
        with pytest.raises(stop):
            merge_videos(sets, out)
    assert not out.exists()
    assert merge_videos(sets, out) == 4
