"""Sizes, plans of buckets, and the bucket of each clip."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.video.data.clips import with_suffix
from megatron_ext.video.data.geometry import (
    Bucket,
    BucketRule,
    ClipShape,
    Drop,
    assign,
    first_frame,
    parse_plan,
    sizes,
    subsampling,
)

PLAN = parse_plan(
    {"256px": {"1": [1, 8], "5": [1, 4], "17": [1, 2]}, "768px": {"1": [0.5, 2], "17": [0.5, 1]}}
)


def test_sizes_without_the_adjustment_are_those_of_inference() -> None:
    assert (208, 304) in sizes("256px", adjust=False) and (208, 304) not in sizes("256px")
    assert (576, 1024) in sizes("768px")


def test_longest_bucket_that_a_clip_fills() -> None:
    clip = ClipShape(20, 240, 426, 24.0)
    assert assign(clip, PLAN, 3, seed=1) == Bucket("256px", 17, 192, 336)
    fast = ClipShape(20, 426, 240, 60.0)
    assert subsampling(60.0, 24) == (3, 20)
    assert assign(fast, PLAN, 3, seed=1) == Bucket("256px", 5, 336, 192)


def test_reasons() -> None:
    assert assign(ClipShape(20, 100, 100, 24), PLAN, 0, seed=1) is Drop.TOO_SMALL
    assert assign(ClipShape(4, 256, 256, 24), PLAN, 0, seed=1) is Drop.TOO_SHORT
    rare = parse_plan({"256px": {"5": [0.2, 1]}})
    drawn = [assign(ClipShape(9, 256, 256, 24), rare, i, seed=1) for i in range(2000)]
    assert abs(sum(isinstance(d, Bucket) for d in drawn) / 2000 - 0.2) < 0.03
    assert {d for d in drawn if isinstance(d, Drop)} == {Drop.NOT_DRAWN}
    assert drawn == [assign(ClipShape(9, 256, 256, 24), rare, i, seed=1) for i in range(2000)]


def test_falls_to_the_next_resolution() -> None:
    big = [assign(ClipShape(20, 800, 800, 24), PLAN, i, seed=1) for i in range(200)]
    assert {b.resolution for b in big if isinstance(b, Bucket)} == {"256px", "768px"}
    assert not any(isinstance(b, Drop) for b in big)


def test_crops_of_clips_differ() -> None:
    clip = ClipShape(200, 256, 256, 24)
    starts = {first_frame(clip, 17, i, seed=1, epoch=0, fps_cap=24) for i in range(50)}
    assert len(starts) > 30 and max(starts) <= 183


def test_suffix_of_training_and_inference() -> None:
    assert with_suffix("a cat", 24, 3.6) == "a cat 24 FPS, 4 motion score."
    assert with_suffix("a cat", 8) == "a cat 8 FPS."
    assert with_suffix("", None, 4) == " 4 motion score."
    assert with_suffix("a cat", 0) == "a cat"


@pytest.mark.parametrize("plan", ["{}", '{"256px": {}}', '{"256px": {"17": [0, 4]}}'])
def test_empty_plans_are_refused(plan: str) -> None:
    with pytest.raises(ConfigError, match=r"is empty: it must hold a bucket"):
        parse_plan(plan)


def test_plans_of_another_form_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be JSON such as"):
        parse_plan('{"256px": [1]}')
    with pytest.raises(ConfigError, match=r"resolution \(256\) must be a number"):
        parse_plan({"256": {"1": [1, 1]}})


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
