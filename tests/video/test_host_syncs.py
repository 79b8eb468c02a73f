"""Video runs ask their device for nothing within a step."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from tests.host_syncs import READ, record_steps
from tests.video.clips import steps


def test_a_step_asks_for_the_update_before_it_alone(clips: Path, tmp_path: Path) -> None:
    note = tmp_path / "places.json"
    words = "--bf16 --ema-decay 0.9"
    steps(clips, tmp_path, f"{words} --log-interval 9", prepare=partial(record_steps, path=note))
    assert json.loads(note.read_text()) == [READ]
