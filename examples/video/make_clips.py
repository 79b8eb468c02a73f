#!/usr/bin/env python3
"""Renders small clips of moving shapes, with captions such as "a red square moves left"."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

Caption = tuple[str, str, str]
"""Colour, shape and direction."""
Grid = NDArray[np.float64]

COLOURS = {
    "red": (230, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 80, 235),
    "yellow": (235, 215, 40),
}
SHAPES = ("square", "circle", "triangle")
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
BACKGROUND = 16
"""The grey value of the background; it is not 0, since videos use a limited range of values."""
FINER = 4
"""Each pixel is divided into this many parts along a side, to render smooth edges."""


def captions() -> list[Caption]:
    """Return every combination of colour, shape and direction."""
    return list(itertools.product(COLOURS, SHAPES, DIRECTIONS))


def caption_of(colour: str, shape: str, direction: str) -> str:
    return f"a {colour} {shape} moves {direction}"


def held_out_captions(number: int, seed: int) -> list[Caption]:
    """Return captions to hold out of training, the same for the same seed.

    They are drawn one after another, so that pairs of colour and direction are drawn equally often,
    and then single words: 16 of the 48 captions have each of the 16 pairs once.

    Raises:
        SystemExit: a colour, shape or direction would be left without a clip.
    """
    rng = random.Random(seed)
    left = captions()
    rng.shuffle(left)
    used: Counter[object] = Counter()
    drawn = []
    for _ in range(min(number, len(left))):
        best = min(left, key=lambda c: (used[c[0], c[2]], sum(used[word] for word in c)))
        left.remove(best)
        drawn.append(best)
        used.update([(best[0], best[2]), *best])
    words = {word for caption in left for word in caption}
    if missing := [w for w in (*COLOURS, *SHAPES, *DIRECTIONS) if w not in words]:
        raise SystemExit(
            f"`--held-out` ({number}) must leave a caption for every word, but none is left for "
            f"{', '.join(missing)}; hold out fewer."
        )
    return drawn


def inside(shape: str, y: Grid, x: Grid, radius: float) -> NDArray[np.bool_]:
    """Tell for each point whether a shape covers it; y and x are its offsets from the centre."""
    if shape == "square":
        return (np.abs(y) <= radius) & (np.abs(x) <= radius)
    if shape == "circle":
        return y**2 + x**2 <= radius**2 * 1.2
    return (np.abs(y) <= radius) & (np.abs(x) <= (y + radius) * 0.55)


def render(caption: Caption, size: int, num_frames: int, rng: random.Random) -> NDArray[np.uint8]:
    """Draw frames ``[f, size, size, 3]`` of a shape that crosses half of the picture.

    Edges are smooth, so that even a motion by a part of a pixel is visible.
    """
    colour, shape, direction = caption
    radius = size * rng.uniform(0.18, 0.24)
    travel = size * rng.uniform(0.4, 0.5)
    across = rng.uniform(radius, size - radius)
    dy, dx = DIRECTIONS[direction]
    grid_y, grid_x = (np.mgrid[: size * FINER, : size * FINER] + 0.5) / FINER
    frames = []
    for i in range(num_frames):
        along = travel * (i / max(1, num_frames - 1) - 0.5)
        y = size / 2 + dy * along if dy else across
        x = size / 2 + dx * along if dx else across
        fine = inside(shape, grid_y - y, grid_x - x, radius)
        cover = fine.reshape(size, FINER, size, FINER).mean(axis=(1, 3))[..., None]
        frames.append(BACKGROUND + cover * (np.array(COLOURS[colour]) - BACKGROUND))
    pictures: NDArray[np.uint8] = np.stack(frames).round().astype(np.uint8)
    return pictures


def write_mp4(path: Path, frames: NDArray[np.uint8], fps: int) -> None:
    """Write frames ``[f, h, w, 3]`` uint8 as H.264 of high quality."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps), options={"crf": "10"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for picture in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def write_folder(args: argparse.Namespace) -> None:
    """Render clips of all captions except those held out; write the lists of clips and held out."""
    args.output.mkdir(parents=True, exist_ok=True)
    held_out = held_out_captions(args.held_out, args.seed)
    trained = [caption for caption in captions() if caption not in held_out]
    rng = random.Random(args.seed)
    rows = []
    for caption in trained:
        for i in range(args.per_caption):
            name = f"{'_'.join(caption)}_{i}.mp4"
            write_mp4(args.output / name, render(caption, args.size, args.frames, rng), args.fps)
            rows.append({"path": name, "text": caption_of(*caption)})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (args.output / "clips.jsonl").write_text(lines, encoding="utf-8")
    unseen = "".join(f"{caption_of(*caption)}\n" for caption in held_out)
    (args.output / "held_out.txt").write_text(unseen, encoding="utf-8")
    print(
        f"{len(rows)} clips of {len(trained)} captions in {args.output}, "
        f"{len(held_out)} captions held out"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder of clips, clips.jsonl and held_out.txt")
    parser.add_argument("--per-caption", type=int, default=4, help="clips of each caption (4)")
    parser.add_argument("--held-out", type=int, default=0, help="captions without clips (0)")
    parser.add_argument("--size", type=int, default=32, help="pixels of a side (32)")
    parser.add_argument("--frames", type=int, default=9, help="frames (9)")
    parser.add_argument("--fps", type=int, default=8, help="frames per second (8)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of sizes, places and held-out (0)"
    )
    write_folder(parser.parse_args())


if __name__ == "__main__":
    main()
