"""The clips of the video example: the captions held out, and the measures of a clip."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

VIDEO = Path(__file__).resolve().parents[2] / "examples" / "video"


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, VIDEO / script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Render two clips of each of 32 captions."""
    folder = tmp_path_factory.mktemp("clips")
    done = run("make_clips.py", folder, "--per-caption=2", "--held-out=16")
    assert done.returncode == 0, done.stderr
    assert "64 clips of 32 captions" in done.stdout and "16 captions held out" in done.stdout
    return folder


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the two scripts as modules."""
    monkeypatch.syspath_prepend(VIDEO)
    import make_clips
    import measure_clips

    return make_clips, measure_clips


def rows_of(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "clips.jsonl").read_text().splitlines()]


def test_held_out_captions_have_no_clip_and_their_words_do(clips: Path) -> None:
    held_out = (clips / "held_out.txt").read_text().splitlines()
    trained = {row["text"] for row in rows_of(clips)}
    assert len(set(held_out)) == 16 and len(trained) == 32
    assert not trained & set(held_out)
    assert {w for text in held_out for w in text.split()} <= {w for t in trained for w in t.split()}


def test_held_out_captions_are_balanced_and_follow_the_seed(modules: Any) -> None:
    make, _ = modules
    drawn = [make.held_out_captions(16, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    for captions in drawn:
        # One of each pair of colour and direction, and shapes as evenly as 16 can be.
        assert set(Counter((colour, to) for colour, _, to in captions).values()) == {1}
        assert sorted(Counter(shape for _, shape, _ in captions).values()) == [5, 5, 6]


def test_a_word_without_a_clip_is_refused(tmp_path: Path) -> None:
    done = run("make_clips.py", tmp_path, "--held-out=99")
    assert done.returncode == 1
    assert "`--held-out` (99) must leave a caption for every word" in done.stderr
    assert not list(tmp_path.iterdir())


def test_rendered_clips_follow_their_captions(clips: Path) -> None:
    (clips / "samples.jsonl").write_text((clips / "clips.jsonl").read_text())
    done = run("measure_clips.py", clips, "--at-least=64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "64 of 64 follow their caption"


def test_other_captions_are_not_followed(clips: Path) -> None:
    """Each clip with the caption of another direction, or of another colour."""
    turn = {"left": "right", "right": "up", "up": "down", "down": "left"}
    paint = {"red": "green", "green": "blue", "blue": "yellow", "yellow": "red"}
    lines = []
    for i, row in enumerate(rows_of(clips)):
        swap = turn if i % 2 else paint
        text = " ".join(swap.get(word, word) for word in row["text"].split())
        lines.append(json.dumps({"path": row["path"], "text": text}) + "\n")
    (clips / "samples.jsonl").write_text("".join(lines))
    done = run("measure_clips.py", clips, "--at-least=1")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "0 of 64 follow their caption"


def test_nothing_is_seen_where_nothing_moves_or_is(modules: Any) -> None:
    make, measure = modules
    background = np.full((9, 32, 32, 3), float(make.BACKGROUND))
    assert measure.colour_of(background) == measure.NOTHING
    assert measure.direction_of(background) == measure.NOTHING
    noise = background + np.random.default_rng(0).normal(0, 8, background.shape)
    assert measure.colour_of(noise) == measure.NOTHING
    still = background.copy()
    still[:, 10:20, 10:20] = make.COLOURS["red"]
    assert measure.colour_of(still) == "red"
    assert measure.direction_of(still) == measure.NOTHING


def test_a_shape_that_moves_slowly_or_aslant_goes_where_it_goes_furthest(modules: Any) -> None:
    make, measure = modules
    for name, (dy, dx) in make.DIRECTIONS.items():
        frames = np.full((9, 32, 32, 3), float(make.BACKGROUND))
        for i in range(9):
            y, x = 12 + dy * i + i // 4, 12 + dx * i + i // 4
            frames[i, y : y + 8, x : x + 8] = make.COLOURS["yellow"]
        assert (measure.colour_of(frames), measure.direction_of(frames)) == ("yellow", name)


def test_a_caption_without_colour_is_refused(modules: Any) -> None:
    _, measure = modules
    with pytest.raises(SystemExit, match="`a cat moves left` must name one colour"):
        measure.wanted("a cat moves left")


def test_a_folder_without_samples_is_refused(tmp_path: Path) -> None:
    done = run("measure_clips.py", tmp_path)
    assert done.returncode == 1
    assert "samples.jsonl does not exist; give a folder that sample_video.py wrote" in done.stderr
