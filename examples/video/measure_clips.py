#!/usr/bin/env python3
"""Measures colour and motion of the shape in sampled clips, and compares them with the captions.

It uses only array arithmetic. Pixels that differ from grey are the shape. Its colour is the palette
colour that is nearest in direction, and its motion is the path of its centre over the frames.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import av
import numpy as np
from make_clips import COLOURS, DIRECTIONS
from numpy.typing import NDArray

Pixels = NDArray[np.float64]
NOTHING = "nothing"
MIN_CHROMA = 50.0
"""A pixel belongs to the shape if the range of its red, green and blue is at least this."""
MIN_AREA = 0.01
"""A frame shows a shape only if it covers at least this share of the frame."""
MIN_TRAVEL = 0.15
"""A shape moves only if it travels at least this share of a side; make_clips.py moves it by 0.4 or
more."""


def read_frames(path: Path) -> Pixels:
    """Read the frames ``[f, h, w, 3]`` of a video, 0 to 255."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.stack(frames).astype(np.float64)


def coloured(frames: Pixels) -> Pixels:
    """Return the distance from grey of each pixel of the shape, and 0 elsewhere: ``[f, h, w]``."""
    chroma = frames.max(axis=-1) - frames.min(axis=-1)
    return np.where(chroma >= MIN_CHROMA, chroma, 0.0)


def colour_of(frames: Pixels) -> str:
    """Return the palette colour that is most similar to the shape's, regardless of brightness."""
    weight = coloured(frames)
    if np.count_nonzero(weight) < MIN_AREA * weight.size:
        return NOTHING
    mean = (frames * weight[..., None]).sum(axis=(0, 1, 2)) / weight.sum()
    return max(COLOURS, key=lambda name: _alike(mean, np.array(COLOURS[name], np.float64)))


def _alike(one: Pixels, other: Pixels) -> float:
    """Return the cosine similarity of two colours after subtracting their grey values."""
    one, other = one - one.mean(), other - other.mean()
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


def direction_of(frames: Pixels) -> str:
    """Return the direction of the shape's motion, from a straight line fitted to its centres."""
    weight = coloured(frames)
    num_frames, height, width = weight.shape
    shown = np.count_nonzero(weight, axis=(1, 2)) >= MIN_AREA * height * width
    if shown.sum() < 2:
        return NOTHING
    mass = weight[shown].sum(axis=(1, 2))
    y = weight[shown].sum(axis=2) @ (np.arange(height) / height) / mass
    x = weight[shown].sum(axis=1) @ (np.arange(width) / width) / mass
    rate = np.polyfit(np.flatnonzero(shown), np.stack([y, x], axis=1), 1)[0]
    travel = rate * (num_frames - 1)
    if np.abs(travel).max() < MIN_TRAVEL:
        return NOTHING
    return max(DIRECTIONS, key=lambda name: float(travel @ np.array(DIRECTIONS[name])))


def wanted(caption: str) -> tuple[str, str]:
    """Return the colour and direction that a caption names.

    Raises:
        SystemExit: the caption does not name exactly one of each.
    """
    words = caption.split()
    colour = [word for word in words if word in COLOURS]
    direction = [word for word in words if word in DIRECTIONS]
    if len(colour) != 1 or len(direction) != 1:
        raise SystemExit(f"The caption `{caption}` must name one colour and one direction.")
    return colour[0], direction[0]


def measure(folder: Path) -> tuple[int, int]:
    """Print a row for each clip; return (number that follow their caption, number of clips).

    Raises:
        SystemExit: the folder has no list of samples, or a caption is unusable (`wanted`).
    """
    listed = folder / "samples.jsonl"
    if not listed.is_file():
        raise SystemExit(f"{listed} does not exist; give a folder that sample_video.py wrote.")
    rows = [json.loads(line) for line in listed.read_text(encoding="utf-8").splitlines()]
    following = 0
    print(f"{'caption':32} {'colour':8} {'motion':8}")
    for row in rows:
        frames = read_frames(folder / row["path"])
        colour, direction = colour_of(frames), direction_of(frames)
        follows = (colour, direction) == wanted(row["text"])
        following += follows
        print(f"{row['text']:32} {colour:8} {direction:8} {'' if follows else 'does not follow'}")
    return following, len(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", type=Path, help="folder of mp4s and samples.jsonl (path and text)"
    )
    parser.add_argument("--at-least", type=int, default=0, help="exit 1 if fewer follow (0)")
    args = parser.parse_args()
    following, total = measure(args.folder)
    print(f"{following} of {total} follow their caption")
    return int(following < args.at_least)


if __name__ == "__main__":
    sys.exit(main())
