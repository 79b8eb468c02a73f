#!/usr/bin/env python3
"""Measures colour, motion and shape in long videos before and after their prompt switches.

Like examples/video/measure_clips.py it uses only array arithmetic. Frames right after a switch may
still show the old colour, so some are skipped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "video"))

from make_clips import BACKGROUND, COLOURS, inside
from make_swings import MOTIONS, SHAPES
from measure_clips import Pixels, colour_of, coloured, read_frames

HALF = 0.5
RADII = (0.18, 0.2, 0.22, 0.24)
"""The radii of rendered shapes to compare with, as shares of a frame's side."""
FINER = 2
"""Each pixel is divided into this many parts along a side, to render smooth edges."""


@dataclass(frozen=True)
class Piece:
    """The measures of a video under one prompt.

    Attributes:
        colour: share of its frames that have the colour of the prompt.
        error: mean difference of its frames from the closest rendered shape, 0 to 255.
        swings: whether the shape moves more in the prompt's direction than across it.
    """

    colour: float
    error: float
    swings: bool


def word_of(prompt: str, words: Iterable[str]) -> str:
    """Return the one of ``words`` that a prompt contains.

    Raises:
        SystemExit: the prompt contains none of them, or several.
    """
    contained = set(prompt.split()) & set(words)
    if len(contained) != 1:
        raise SystemExit(f"The prompt `{prompt}` must name one colour, one shape and one motion.")
    return contained.pop()


def centre_of(frame: Pixels) -> tuple[float, float]:
    """Return (row, column) of the centre of the coloured pixels, or of the frame without any."""
    weight = coloured(frame[None])[0]
    height, width = weight.shape
    if not weight.any():
        return height / 2, width / 2
    rows, columns = np.arange(height) + HALF, np.arange(width) + HALF
    return float(weight.sum(1) @ rows / weight.sum()), float(weight.sum(0) @ columns / weight.sum())


def error_of(frame: Pixels, colour: str, shape: str) -> float:
    """Return the mean absolute difference of a frame from the closest rendered shape.

    The shape is rendered at the same centre with each of `RADII`.
    """
    height, width, _ = frame.shape
    y, x = centre_of(frame)
    grid_y, grid_x = (np.mgrid[: height * FINER, : width * FINER] + HALF) / FINER
    painted = np.array(COLOURS[colour], np.float64) - BACKGROUND
    steps = (-1.0, -HALF, 0.0, HALF, 1.0)
    best = np.inf
    for dy, dx, radius in itertools.product(steps, steps, RADII):
        fine = inside(shape, grid_y - y - dy, grid_x - x - dx, radius * width)
        cover = fine.reshape(height, FINER, width, FINER).mean(axis=(1, 3))[..., None]
        best = min(best, float(np.abs(BACKGROUND + cover * painted - frame).mean()))
    return best


def piece_of(frames: Pixels, prompt: str) -> Piece:
    """Measure how well frames ``[f, h, w, 3]`` follow a prompt."""
    colour, shape = word_of(prompt, COLOURS), word_of(prompt, SHAPES)
    down, _ = MOTIONS[word_of(prompt, MOTIONS)]
    spread = np.std([centre_of(frame) for frame in frames], axis=0)
    along, across = (spread[0], spread[1]) if down else (spread[1], spread[0])
    return Piece(
        colour=float(np.mean([colour_of(frame[None]) == colour for frame in frames])),
        error=float(np.mean([error_of(frame, colour, shape) for frame in frames])),
        swings=bool(along > across),
    )


def pieces_of(row: dict[str, object], folder: Path, skipped: int) -> tuple[Piece, Piece]:
    """Measure a video before and after its switch.

    Raises:
        SystemExit: it has no switch, or several.
    """
    switches = row.get("switches")
    if not isinstance(switches, list) or len(switches) != 1:
        raise SystemExit(f"{row['path']} must have one prompt switch.")
    frames, switch = read_frames(folder / str(row["path"])), int(switches[0]["frame"])
    after = frames[switch + skipped :]
    if not len(after):
        raise SystemExit(
            f"{row['path']} ends at frame {len(frames)}, {skipped} or fewer after its switch at "
            f"{switch}; sample longer videos, or give a smaller `--skip`."
        )
    return piece_of(frames[:switch], str(row["text"])), piece_of(after, str(switches[0]["text"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of mp4s and samples.jsonl, "
                        "with one pixel frame for each latent frame")  # fmt: skip
    parser.add_argument("--skip", type=int, default=8, help="frames after the switch (8)")
    parser.add_argument("--at-least", type=int, default=0, help="exit 1 if fewer videos follow (0)")
    args = parser.parse_args()
    listed = args.folder / "samples.jsonl"
    if not listed.is_file():
        raise SystemExit(f"{listed} does not exist; give a folder that sample_video.py wrote.")
    rows = [json.loads(line) for line in listed.read_text(encoding="utf-8").splitlines()]
    pairs = [pieces_of(row, args.folder, args.skip) for row in rows]
    print(f"{'':15} {'right colour':>13} {'right motion':>13} {'error of a pixel':>17}")
    for name, pieces in zip(("before a switch", "after it"), zip(*pairs, strict=True), strict=True):
        motion = f"{sum(piece.swings for piece in pieces)} of {len(pieces)}"
        colour = np.mean([piece.colour for piece in pieces])
        error = np.mean([piece.error for piece in pieces])
        print(f"{name:15} {colour:13.0%} {motion:>13} {error:17.2f}")
    following = sum(after.colour > HALF for _, after in pairs)
    print(f"{following} of {len(pairs)} videos follow their second prompt")
    return int(following < args.at_least)


if __name__ == "__main__":
    sys.exit(main())
