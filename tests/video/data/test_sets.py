"""Several sets of clips in one run: weights, repeats, and what sets must have in common."""

import re
from collections import Counter
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import CodecConfig
from megatron_ext.video.data.blend import blend_of
from megatron_ext.video.data.dataset import ShardedVideos
from megatron_ext.video.data.geometry import parse_plan
from megatron_ext.video.data.register import Entry, Register, write_register
from megatron_ext.video.data.sampler import BucketSteps, Members
from megatron_ext.video.data.sets import JoinedVideos, check_not_empty
from tests.video import clips as tiny


def test_blends_are_spelled_as_in_megatron() -> None:
    alone, named = blend_of(["2024"]), blend_of(["a", "b", "b"])
    assert (alone.paths, alone.weights, alone.repeats) == (("2024",), None, (1,))
    assert (named.paths, named.weights, named.repeats) == (("a", "b"), None, (1, 2))
    assert named.passes([5, 7]) == [1, 2]
    weighted = blend_of("0.5 a 1 b 0.5 a 0 c".split())
    assert weighted.paths == ("a", "b", "c") and weighted.weights == (1.0, 1.0, 0.0)
    assert weighted.passes([6, 4, 9]) == [1, 1.5, 0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "0.3 a b",
            r"`--video-data-path` \(0.3 a b\) mixes weights and paths; give only paths, or",
        ),
        ("a 0.3 b 0.7", r"mixes weights and paths"),
        ("0.3 a 0.7 0.8", r"mixes weights and paths"),
        ("0.3 a 0.7", r"mixes weights and paths"),
        (
            "-1 a 2 b",
            r"has the weights \[-1.0, 2.0\], which must be finite, at least 0 and not all",
        ),
        ("0 a 0 b", r"has the weights \[0.0, 0.0\]"),
        ("inf a 1 b", r"has the weights \[inf, 1.0\]"),
        ("nan a 1 b", r"has the weights \[nan, 1.0\]"),
    ],
)
def test_bad_blends(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        blend_of(words.split())


def test_a_blend_in_one_word_is_told() -> None:
    with pytest.raises(ConfigError, match=r"\(1 a 2 b\) is one word, but each weight and each"):
        blend_of(["1 a 2 b"])
    assert blend_of(["my clips/2024 a"]).paths == ("my clips/2024 a",)


def joined(root: Path, words: str, plan: str | None = None) -> JoinedVideos:
    blend = blend_of([x if x[0].isdigit() else str(root / x) for x in words.split()])
    parsed = None if plan is None else parse_plan(plan)
    sets = [ShardedVideos(path, parsed) for path in blend.paths]
    check_not_empty(blend, sets, "--video-data-path")
    return JoinedVideos(blend, sets, parsed, "--video-data-path")


def test_epochs_take_the_shares_of_sets_and_each_clip_as_often(tmp_path: Path) -> None:
    tiny.write_clips(tmp_path / "a", {tiny.SHORT: 6})
    tiny.write_clips(tmp_path / "b", {tiny.IMAGE: 3, tiny.SHORT: 4})
    videos = joined(tmp_path, "1 a 1 b")
    assert len(videos) == 13 and videos.latent_shape(6) == (4, 1, 8, 8)
    # The numbers of b's clips follow those of a's; in b the pictures come first.
    assert videos[9].caption == "clip 3" and videos[5].caption == "clip 5"
    # The seven clips of b shall give as many samples as the six of a.
    members = videos.members(1)
    assert videos.passes == [Fraction(7, 6), 1]
    assert [count for _, count in members[tiny.SHORT].shares] == [7, 4]
    assert [count for _, count in members[tiny.IMAGE].shares] == [0, 3]
    steps = BucketSteps(members, num_ranks=1, num_microbatches=1, seed=5)
    assert steps.steps_per_epoch == 14
    taken = Counter(
        clip for step in range(6 * 14) for _, clips in steps.microbatches(step, 0) for clip in clips
    )
    # In six epochs, each clip of a is taken seven times, and each of b six times.
    assert taken == {**dict.fromkeys(range(6), 7), **dict.fromkeys(range(6, 13), 6)}
    again = BucketSteps(members, num_ranks=1, num_microbatches=1, seed=5)
    assert again.microbatches(40, 0) == steps.microbatches(40, 0)
    table = videos.table().splitlines()
    assert table[1].endswith("a: 6 clips, 1.17 times an epoch, 50.0% of the samples")
    table = joined(tmp_path, "3 a 1 b").table().splitlines()
    assert table[1].endswith("a: 6 clips, 3.5 times an epoch, 75.0% of the samples")
    assert table[2].endswith("b: 7 clips, 1 times an epoch, 25.0% of the samples")
    # Half a clip more or less is rounded.
    members = joined(tmp_path, "8 a 7 b").members(1)
    assert [count for _, count in members[tiny.SHORT].shares] == [8, 4]
    # What decides about the samples decides about the fingerprint.
    words = ("1 a 1 b", "3 a 1 b", "a b", "a b b", "a a b", "b a")
    prints = [joined(tmp_path, x).manifest["fingerprint"] for x in words]
    assert len(set(prints)) == len(words)
    assert joined(tmp_path, "a b").manifest["fingerprint"] == prints[2]


def test_files_are_those_of_the_clips_of_each_set(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = tiny.write_clips(tmp_path / name, {tiny.SHORT: 3})
        entries = [Entry(f"{name}{i}", i, f"/{name}/{i}", "shard_00000") for i in range(3)]
        write_register(folder, Register({}, [], entries))
    videos = joined(tmp_path, "a b")
    assert [videos.file_of(number) for number in range(6)] == [
        "/a/0", "/a/1", "/a/2", "/b/0", "/b/1", "/b/2",
    ]  # fmt: skip


def test_epochs_that_take_a_part_of_a_set_take_all_its_clips_in_turn() -> None:
    """Three epochs of four clips out of six take each clip twice."""
    members = Members.of_shares([(range(10, 16), 4), (range(3), 5)], micro_batch_size=1)
    epochs = [members.of_epoch(epoch).tolist() for epoch in range(3)]
    assert [len(clips) for clips in epochs] == [9, 9, 9]
    taken = Counter(clip for clips in epochs for clip in clips)
    assert taken == {**dict.fromkeys(range(10, 16), 2), **dict.fromkeys(range(3), 5)}


def test_sets_that_do_not_belong_together(tmp_path: Path) -> None:
    tiny.write_clips(tmp_path / "a", {tiny.SHORT: 2}, {tiny.SHORT: 2})
    codec = asdict(CodecConfig(codec_channels=tiny.CHANNELS, codec_scale=2.0))
    changes: dict[str, dict[str, Any]] = {
        "codec": {"codec": codec}, "storage": {"storage": "bfloat16"}, "lengths": {"lengths": ()},
    }  # fmt: skip
    for name, change in changes.items():
        tiny.write_clips(tmp_path / name, {tiny.SHORT: 2}, **change)
        entry = "references" if name == "lengths" else name
        with pytest.raises(
            ConfigError, match=rf"{name}\) has `{entry}` .*, but .*a has .*; prepro"
        ):
            joined(tmp_path, f"a {name}")
    numbers = {"temporal": 4, "spatial": 8, "mean": [0.0], "std": [1.0]}
    tiny.write_clips(tmp_path / "told", {tiny.SHORT: 2}, {tiny.SHORT: 2}, latents=numbers)
    other = {**numbers, "std": [2.0]}
    tiny.write_clips(tmp_path / "scaled", {tiny.SHORT: 2}, {tiny.SHORT: 2}, latents=other)
    with pytest.raises(ConfigError, match=r"scaled\) has `latents` .*, but .*told has .*; prepro"):
        joined(tmp_path, "told scaled")
    assert len(joined(tmp_path, "a told")) == 4  # Earlier versions do not store the numbers.
    tiny.write_clips(tmp_path / "sizes", {tiny.SHORT: 2}, {tiny.SHORT: 1})
    with pytest.raises(
        ConfigError, match=r"sizes\) has micro-batches of 1 for 64px .* has 2; give"
    ):
        joined(tmp_path, "a sizes")
    tiny.write_clips(tmp_path / "unsized", {tiny.SHORT: 2})
    for words, size, other in (("a unsized", None, 2), ("unsized a", 2, None)):
        with pytest.raises(ConfigError, match=rf"batches of {size} for .* another set has {other}"):
            joined(tmp_path, words)
    own = joined(tmp_path, "a sizes", '{"64px": {"9": [1, 3]}}')
    assert own.members(1)[tiny.SHORT].micro_batch_size == 3
    tiny.write_clips(
        tmp_path / "crop", {tiny.SHORT: 2}, {tiny.SHORT: 2}, encode={"fps_cap": 12, "clip_seed": 3}
    )
    other = (
        r"crop was encoded with other `fps_cap`, `reference_lengths`, `clip_seed` than .*a, which s"
    )
    assert any(map(re.compile(other).search, joined(tmp_path, "a crop").table().splitlines()))
    tiny.write_clips(tmp_path / "none", {tiny.SHORT: 0})
    with pytest.raises(
        DataError, match=r"none holds no clips; leave it out of `--video-data-path`"
    ):
        joined(tmp_path, "a none")


def test_a_run_of_two_sets_goes_on_in_another_layout(tmp_path: Path) -> None:
    data = tiny.write_clips(tmp_path / "a", {tiny.SHORT: 8})
    other = tiny.write_clips(tmp_path / "b", {tiny.SHORT: 4, tiny.IMAGE: 8})
    words = f"{other} {other} --train-iters 6 --save-interval 3"
    whole = tiny.steps(data, tmp_path / "whole", words)
    assert len(whole) == 6
    tiny.steps(data, tmp_path / "parts", f"{words} --exit-interval 3")
    rest = tiny.steps(data, tmp_path / "parts", f"{words} --resume-mode auto", ranks=2)
    losses = [row["loss"] for row in rest]
    assert losses[-3:] == pytest.approx([row["loss"] for row in whole[3:]], rel=1e-5)
    assert losses[-1] != losses[-2]
