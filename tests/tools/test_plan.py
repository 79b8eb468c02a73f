"""tools/plan.py --video plans runs on clips, and takes no options of text models."""

import pytest

from tests.video.clips import FLAGS
from tools.plan import main

SHAPE = ["--dry-run-shape", "64x64x17", "--codec-spatial", "8", "--text-length", "8"]


def planned(own: str, *more: str) -> int:
    return main([*own.split(), "--video", "--", *FLAGS, *SHAPE, *more])


def test_a_video_run_is_planned_for_all_its_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert planned("--world-size 4 --gpu H200") == 0
    shown = capfd.readouterr().out
    assert "4 ranks (dp 4)" in shown and "fits: " in shown
    assert planned("--world-size 1 --gpu H100", "--mmdit-size", "11b") == 1
    assert "DOES NOT FIT" in capfd.readouterr().out


def test_options_of_text_models_are_refused_together(capfd: pytest.CaptureFixture[str]) -> None:
    for own, names in (
        ("--search", ["search"]), ("--png x.png", ["png"]), ("--search --png x", ["search", "png"]),
    ):  # fmt: skip
        assert planned(f"--world-size 4 {own}") == 2
        assert capfd.readouterr().err.splitlines() == [
            f"error: `--{name}` is there for text models alone; leave it out with `--video`."
            for name in names
        ]
