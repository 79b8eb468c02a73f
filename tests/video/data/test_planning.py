from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.encoding import CodecConfig, EncodeConfig
from megatron_ext.video.data.clips import Clip, read_list
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.data.encode import check_codec, plan_clips, report
from megatron_ext.video.data.geometry import BucketRule, Drop, parse_plan
from tests.video.data.making import PLAN, pictures, write_folder, write_gif, write_video


def make_clips(folder: Path) -> list[Clip]:
    """One clip for each bucket and for each reason to drop one."""
    write_folder(folder / "pictures", pictures(6))
    write_gif(folder / "still.gif", pictures(1))
    write_video(folder / "short.mp4", pictures(3))
    write_gif(folder / "small.gif", pictures(6, 16, 16))
    (folder / "broken.mp4").write_bytes(b"no video")
    names = "pictures still.gif short.mp4 small.gif broken.mp4 missing.mp4".split()
    return [*(Clip(str(folder / n), "a bar") for n in names), Clip(str(folder / "pictures"), "")]


def test_every_clip_is_planned_or_dropped_with_its_reason(tmp_path: Path) -> None:
    clips, seen = make_clips(tmp_path), []
    planned, dropped = plan_clips(clips, PLAN, EncodeConfig(), workers=3, tick=seen.append)
    assert [(p.number, str(p.bucket)) for p in planned] == [
        (0, "32px 5x32x32"),
        (1, "32px 1x32x32"),
    ]
    assert [(d.number, d.reason) for d in dropped] == [
        (2, Drop.TOO_SHORT),
        (3, Drop.TOO_SMALL),
        (4, Drop.UNREADABLE),
        (5, Drop.UNREADABLE),
        (6, Drop.NO_CAPTION),
    ]
    assert sorted([*(p.number for p in planned), *(d.number for d in dropped)]) == list(range(7))
    assert seen == list(range(1, 8))
    lines = report(dropped, len(clips))
    assert lines[0].startswith("2 of 7 clips dropped: the clip cannot be read. First: The clip ")
    assert "broken.mp4 cannot be read (" in lines[0] and lines[0].endswith("take its row out.")
    assert f"has no caption. First: {clips[6].path}" in "\n".join(lines)
    assert sum(int(line.split()[0]) for line in lines) == len(dropped)
    assert report([], 7) == []


def test_the_number_of_threads_changes_nothing(tmp_path: Path) -> None:
    clips = make_clips(tmp_path)
    assert plan_clips(clips, PLAN, EncodeConfig(), workers=1) == plan_clips(
        clips, PLAN, EncodeConfig(), workers=4
    )


def test_no_clip_in_any_bucket_is_explained(tmp_path: Path) -> None:
    clips = make_clips(tmp_path)
    with pytest.raises(DataError, match=r"^None of the 7 clips has a bucket in the plan") as error:
        plan_clips(clips, parse_plan({"512px": {"5": 1}}), EncodeConfig())
    assert len(error.value.messages) == 4
    assert "4 of 7 clips dropped: the clip has too few pixels for ev" in error.value.messages[1]


def test_plans_that_the_codec_cannot_encode() -> None:
    codec = build_codec(CodecConfig(codec_spatial=4))
    check_codec(PLAN, codec, (1,))
    with pytest.raises(ConfigError, match=r"frames \(6\) must be a multiple .* choose 5"):
        check_codec(parse_plan({"32px": {"1": 1, "6": 1}}), codec)
    # A bucket that is closed needs no codec.
    check_codec(parse_plan({"32px": {"1": 1, "6": 0}}), codec)
    with pytest.raises(ConfigError, match=r"height \(32\) must be a multiple .* \(24\)"):
        check_codec(PLAN, build_codec(CodecConfig(codec_spatial=24, codec_channels=8)))


def test_references_that_no_bucket_has_are_refused() -> None:
    codec = build_codec(CodecConfig(codec_spatial=4))
    check_codec(parse_plan({"32px": {"1": 1}}), codec, (1,))
    check_codec(parse_plan({"32px": {"37": 1}}), codec, (1, 9))
    with pytest.raises(ConfigError, match=r"`reference_lengths` \(9\) .* \(9\), .* least 37 fra"):
        check_codec(parse_plan({"32px": {"33": 1}}), codec, (1, 9))


@pytest.mark.parametrize("rule", [0.5, [0.5], [0.5, None]])
def test_rules_without_a_micro_batch_size(rule: Any) -> None:
    for given in ({"32px": {"5": rule}}, json.dumps({"32px": {"5": rule}})):
        plan = parse_plan(given)
        assert plan.rules["32px"][5] == BucketRule(0.5) == BucketRule(0.5, None)
        assert plan.as_dict() == {"32px": {"5": [0.5, None]}}
        assert parse_plan(plan.as_json()) == plan


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ([1, 0], r"micro-batch size of a bucket \(0\) must be at least 1; set the probability"),
        ([1.5, 2], r"probability of a bucket \(1.5\) must lie between 0 and 1; 1 takes every"),
        ([1, 2.5], r"\(2.5 is no whole number\); correct it"),
        ([1, True], r"\(True is no whole number\)"),
        ([1, float("inf")], r"Infinity is no number|cannot convert float infinity"),
        ([1, 2, 3], r"\(\[1, 2, 3\] holds more than a probability and a micro-batch size\)"),
        ([], r"must be JSON such as"),
        ("1.0", r"the probability '1.0' is no number"),
        (None, r"must be JSON such as"),
    ],
)
def test_rules_of_another_form(rule: Any, sentence: str) -> None:
    for given in ({"32px": {"5": rule}}, json.dumps({"32px": {"5": rule}})):
        with pytest.raises(ConfigError, match=sentence):
            parse_plan(given)


@pytest.mark.parametrize("frames", ["0", "-4", "1.5", "many"])
def test_lengths_of_another_form(frames: str) -> None:
    with pytest.raises(ConfigError, match=r"must have at least 1|must be JSON such as"):
        parse_plan({"32px": {frames: 1}})


def test_lists_feed_the_plan(tmp_path: Path) -> None:
    make_clips(tmp_path)
    rows = [{"path": "pictures", "text": "a bar", "fps": 48}, {"path": "still.gif", "text": "b"}]
    (tmp_path / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    planned, dropped = plan_clips(read_list(tmp_path / "l.jsonl"), PLAN, EncodeConfig())
    # At 48 frames per second every other frame is left out, and 3 of 6 fill no bucket.
    assert [d.reason for d in dropped] == [Drop.TOO_SHORT] and planned[0].number == 1
