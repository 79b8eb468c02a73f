"""Captions of long videos and where they switch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.streaming.video_prompts import (
    Switch,
    VideoPrompt,
    at_block_starts,
    read_video_prompts,
)


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_text_file_has_a_caption_in_each_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a cat\n\n  a dog \n")
    assert read_video_prompts(path) == [VideoPrompt("a cat"), VideoPrompt("a dog")]


def test_rows_of_a_jsonl_may_switch_often(tmp_path: Path) -> None:
    switches = [{"frame": 60, "text": "a dog "}, {"frame": 120, "text": "a bird"}]
    found = read_video_prompts(
        written(tmp_path, {"text": "a cat", "switches": switches}, {"text": "a fish"})
    )
    assert found[0] == VideoPrompt("a cat", (Switch(60, "a dog"), Switch(120, "a bird")))
    assert found[0].title == "a cat > a dog > a bird" and found[0].frames == (60, 120)
    assert found[1] == VideoPrompt("a fish")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"switches": []}, r"line 1 has no `text`; mend the row"),
        ({"text": "a", "reference": "a.png"}, r"has \['reference'\], but may have \['text', 's"),
        ({"text": "a", "switches": {"frame": 3}}, r"is refused \(`switches` .* is no list\)"),
        ({"text": "a", "switches": [{"frame": 3}]}, r"a switch must have `frame` and `text`, but"),
        ({"text": "a", "switches": [{"frame": "3", "text": "b"}]}, r"needs an integer and a text"),
        ({"text": "a", "switches": [{"frame": True, "text": "b"}]}, r"needs an integer and a"),
        ({"text": "a", "switches": [{"frame": 0, "text": "b"}]}, r"at frames 0, but must be above"),
        (
            {"text": "a", "switches": [{"frame": 6, "text": "b"}, {"frame": 3, "text": "c"}]},
            r"are at frames 6, 3, but must be above 0 and rising; sort them",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_video_prompts(written(tmp_path, row))


def test_switches_move_to_the_next_block() -> None:
    asked = [VideoPrompt("a", (Switch(1, "b"), Switch(6, "c"), Switch(7, "d")))]
    (moved,) = at_block_starts(asked, block=3, num_frames=12)
    assert moved.frames == (3, 6, 9) and moved.title == asked[0].title
    with pytest.raises(DataError, match=r"'a' switches at latent frame 7, but the last .* at 6"):
        at_block_starts(asked, block=3, num_frames=9)
    twice = [VideoPrompt("a", (Switch(4, "b"), Switch(5, "c")))]
    with pytest.raises(DataError, match=r"frames 4, 5, two of them in one block of 3 frames"):
        at_block_starts(twice, block=3, num_frames=12)


def test_order_is_checked_wherever_requests_come_from() -> None:
    with pytest.raises(ConfigError, match="above 0 and rising"):
        VideoPrompt("a", (Switch(3, "b"), Switch(3, "c")))
