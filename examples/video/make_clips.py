#!/usr/bin/env python3
"""Renders small clips of moving shapes, with captions such as "a red square moves left"."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

COLOURS = {
    "red": (230, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 80, 235),
    "yellow": (235, 215, 40),
}
SHAPES = ("square", "circle", "triangle")
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
BACKGROUND = 16
"""Not black, so that the codec of the mp4 has no trouble with its range."""


def captions() -> list[tuple[str, str, str]]:
    """Colour, shape and direction of every combination."""
    return list(itertools.product(COLOURS, SHAPES, DIRECTIONS))


def caption_of(colour: str, shape: str, direction: str) -> str:
    return f"a {colour} {shape} moves {direction}"


def inside(shape: str, y: np.ndarray, x: np.ndarray, radius: float) -> np.ndarray:
    """Where a shape covers a grid of offsets from its centre."""
    if shape == "square":
        return (np.abs(y) <= radius) & (np.abs(x) <= radius)
    if shape == "circle":
        return y**2 + x**2 <= radius**2 * 1.2
    return (y <= radius) & (y >= -radius) & (np.abs(x) <= (y + radius) / 2 + 0.5)


def render(
    colour: str, shape: str, direction: str, size: int, num_frames: int, rng: random.Random
) -> np.ndarray:
    """Frames ``[f, size, size, 3]`` uint8 of a shape that crosses half of the picture."""
    radius = size * rng.uniform(0.16, 0.2)
    travel = size * rng.uniform(0.4, 0.5)
    across = rng.uniform(radius, size - radius)
    dy, dx = DIRECTIONS[direction]
    grid_y, grid_x = np.mgrid[:size, :size] + 0.5
    frames = np.full((num_frames, size, size, 3), BACKGROUND, np.uint8)
    for i in range(num_frames):
        along = travel * (i / max(1, num_frames - 1) - 0.5)
        y = size / 2 + dy * along if dy else across
        x = size / 2 + dx * along if dx else across
        frames[i][inside(shape, grid_y - y, grid_x - x, radius)] = COLOURS[colour]
    return frames


def write_mp4(path: Path, frames: np.ndarray, fps: int) -> None:
    """Frames ``[f, h, w, 3]`` uint8 as H.264 of high quality."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps), options={"crf": "10"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for picture in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder of the clips and of clips.jsonl")
    parser.add_argument("--per-caption", type=int, default=4, help="clips of each caption (4)")
    parser.add_argument("--size", type=int, default=32, help="pixels of a side (32)")
    parser.add_argument("--frames", type=int, default=9, help="frames (9)")
    parser.add_argument("--fps", type=int, default=8, help="frames per second (8)")
    parser.add_argument("--seed", type=int, default=0, help="of sizes and places (0)")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    rng = random.Random(args.seed)
    rows = []
    for colour, shape, direction in captions():
        for i in range(args.per_caption):
            name = f"{colour}_{shape}_{direction}_{i}.mp4"
            frames = render(colour, shape, direction, args.size, args.frames, rng)
            write_mp4(args.output / name, frames, args.fps)
            rows.append({"path": name, "text": caption_of(colour, shape, direction)})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (args.output / "clips.jsonl").write_text(lines, encoding="utf-8")
    print(f"{len(rows)} clips of {len(captions())} captions in {args.output}")


if __name__ == "__main__":
    main()
