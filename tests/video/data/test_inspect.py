"""tools/inspect_dataset.py counts and judges folders of encoded clips."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.programs.inspect_dataset import main
from megatron_ext.video.data.dataset import ShardedVideos
from megatron_ext.video.data.encode import VideoSample
from megatron_ext.video.data.geometry import Bucket
from tests.video import clips as tiny


def test_figures_of_a_set_and_what_is_wrong_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts, sizes = {tiny.IMAGE: 3, tiny.SHORT: 8}, {tiny.SHORT: 2}
    # Of eleven clips the last two are the first two again, but they are of another bucket.
    folder = tiny.write_clips(tmp_path / "a", counts, sizes, distinct=9, dropped={"is bad": 2})
    batches = ["--micro-batch-size=1", "--global-batch-size=4"]
    assert main([str(folder), *batches]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].startswith(f"{folder}: 11 samples in 1 shards, ")
    assert "dropped    2 is bad (each in " in said.out
    assert any("64px 1x64x64" in x and "3 clips (27.3%), latents 1x8x8, 3 mic" in x for x in lines)
    assert any("64px 9x64x64" in x and "8 clips (72.7%), latents 3x8x8, 4 mic" in x for x in lines)
    assert "rates      frames per second (samples): 24 (8), pictures (3)" in lines
    assert "words      of a caption: 2 to 2, half have 2 or more" in lines
    assert "repeated   0 samples have the latents of another one" in lines
    assert said.err.splitlines() == [
        "warning: 64px 1x64x64 has 3 clips, but a step of its own takes 4; give it more clips, mix "
        "buckets (`--mixed-buckets`), or use a smaller --global-batch-size."
    ]
    folder = tiny.write_clips(tmp_path / "b", {tiny.SHORT: 4}, distinct=3)
    latents = folder / "shard_00000_latents.bin"
    values = np.fromfile(latents, np.float32)
    values[values.size // 4] = np.nan
    values.tofile(latents)
    assert main([str(folder)]) == 0
    said = capsys.readouterr()
    assert "repeated   1 samples have the latents of another one" in said.out
    assert "warning: 1 samples have the latents of another one. First: 3: 'clip 0'" in said.err
    assert (
        "1 samples have numbers that are not finite, so that a run would end. First: 1: 'cli"
        in (said.err)
    )
    assert main([str(folder), "--no-scan"]) == 0
    assert "repeated" not in capsys.readouterr().out
    latents.unlink()
    assert main([str(folder)]) == 1
    assert "error: " in capsys.readouterr().err


def test_captions_numbers_and_copies_are_counted_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clips 4 and 5 are clip 1 again; clip 2 is clip 0, a little brighter; clip 3 stands alone."""
    captions = ["a b c d e f", "a", "", "a b", "", "a b c"]
    own = tiny.clip

    def clip(bucket: Bucket, number: int, lengths: Sequence[int], **given: int) -> VideoSample:
        original = {2: 0, 4: 1, 5: 1}.get(number, number)
        sample = own(bucket, original, lengths, **given)
        latents = (sample.latents + original) * (1.01 if number == 2 else 1)
        fps = (24, 8, 8, 24, 8, 8)[number]
        return replace(sample, latents=latents, caption=captions[number], fps=fps)

    monkeypatch.setattr(tiny, "clip", clip)
    folder = tiny.write_clips(tmp_path / "a", {tiny.SHORT: 6}, {tiny.SHORT: 2})
    assert main([str(folder), "--micro-batch-size=1", "--global-batch-size=4"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    size = sum(path.stat().st_size for path in folder.glob("shard_*"))
    assert lines[0].endswith(f": 6 samples in 1 shards, {size / 1e6:.1f} MB as float32")
    assert "rates      frames per second (samples): 8 (4), 24 (2)" in lines
    assert "words      of a caption: 0 to 6, half have 2 or more" in lines
    latents = torch.stack([sample.latents for sample in ShardedVideos(folder)]).double()
    mean, deviation = float(latents.mean()), float(latents.std(correction=0))
    assert f"numbers    of latents: mean {mean:.4g}, deviation {deviation:.4g}" in lines
    assert "repeated   2 samples have the latents of another one" in lines
    assert "alike      1 more look like another one" in lines
    # A step takes four micro-batches, of two clips each.
    few, alike, twice, bare = said.err.splitlines()
    assert few.startswith("warning: 64px 9x64x64 has 6 clips, but a step of its own takes 8; give")
    assert alike == "warning: 1 samples look like another one. First: 2 as 0: ''"
    assert twice == "warning: 1 samples have the latents of another one. First: 4: ''"
    assert bare == "warning: 2 samples have no caption. First: 2: ''; 4: ''"


def test_a_set_of_bad_numbers_alone_is_told_and_five_samples_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spoil all of seven clips, of which three micro-batches of two are whole."""
    folder = tiny.write_clips(tmp_path / "a", {tiny.SHORT: 7}, {tiny.SHORT: 2})
    values = np.fromfile(folder / "shard_00000_text.bin", np.float32)
    np.full_like(values, np.inf).tofile(folder / "shard_00000_text.bin")
    assert main([str(folder)]) == 0
    said = capsys.readouterr()
    assert "7 clips (100.0%), latents 3x8x8, 3 micro-batches of 2" in said.out
    assert "numbers    of latents" not in said.out and "alike      0 more" in said.out
    named = "; ".join(f"{number}: 'clip {number}'" for number in range(5))
    assert said.err == (
        "warning: 7 samples have numbers that are not finite, so that a run would end. First: "
        f"{named}\n"
    )


def test_a_damaged_set_is_told_by_the_exit_code_wherever_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tiny.write_clips(tmp_path / "a", {tiny.SHORT: 1})
    damaged = tiny.write_clips(tmp_path / "b", {tiny.SHORT: 1})
    next(damaged.glob("shard_*_text.bin")).unlink()
    for order in ([whole, damaged], [damaged, whole]):
        assert main([*map(str, order), "--no-scan"]) == 1
        said = capsys.readouterr()
        assert f"{whole}: 1 samples" in said.out and "_text.bin is missing" in said.err
