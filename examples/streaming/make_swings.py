#!/usr/bin/env python3
"""Renders clips of swinging shapes, and writes prompts that switch to another colour.

The motion is periodic and looks the same at any time, so a video of it can be continued forever.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "video"))

from make_clips import BACKGROUND, COLOURS, FINER, inside, write_mp4

Caption = tuple[str, str, str]
"""Colour, shape and motion."""

SHAPES = ("square", "circle")
MOTIONS = {"sways": (0, 1), "bobs": (1, 0)}
"""Whether a motion has a vertical and a horizontal part."""
PERIOD = 12
"""The number of frames of one swing."""


def captions() -> list[Caption]:
    """Return every combination of colour, shape and motion."""
    return list(itertools.product(COLOURS, SHAPES, MOTIONS))


def render(caption: Caption, size: int, num_frames: int, rng: random.Random) -> NDArray[np.uint8]:
    """Draw frames ``[f, size, size, 3]`` of a shape that swings across half of the picture."""
    colour, shape, motion = caption
    radius = size * rng.uniform(0.18, 0.24)
    across = rng.uniform(radius, size - radius)
    swing, phase = size * rng.uniform(0.2, 0.26), rng.random()
    dy, dx = MOTIONS[motion]
    grid_y, grid_x = (np.mgrid[: size * FINER, : size * FINER] + 0.5) / FINER
    frames = []
    for i in range(num_frames):
        along = size / 2 + swing * math.sin(2 * math.pi * (i / PERIOD + phase))
        y, x = (along if dy else across), (along if dx else across)
        fine = inside(shape, grid_y - y, grid_x - x, radius)
        cover = fine.reshape(size, FINER, size, FINER).mean(axis=(1, 3))[..., None]
        frames.append(BACKGROUND + cover * (np.array(COLOURS[colour]) - BACKGROUND))
    pictures: NDArray[np.uint8] = np.stack(frames).round().astype(np.uint8)
    return pictures


def switches(seed: int) -> tuple[list[tuple[Caption, Caption]], list[tuple[Caption, Caption]]]:
    """Return pairs of captions that differ in colour: those for training, and those held out."""
    rng = random.Random(seed)
    pairs = [
        (before, (colour, *before[1:]))
        for before in captions()
        for colour in COLOURS
        if colour != before[0]
    ]
    rng.shuffle(pairs)
    held_out = {(before[0], after[0]): (before, after) for before, after in pairs}
    kept = list(held_out.values())
    return [pair for pair in pairs if pair not in kept], kept


def spoken(caption: Caption, fps: int) -> str:
    """Return a caption as the text that the text encoder gets in training, with the frame rate."""
    colour, shape, motion = caption
    return f"a {colour} {shape} {motion} {fps} FPS."


def write_prompts(args: argparse.Namespace) -> None:
    """Write the prompts for tuning, and the prompts of videos to sample afterwards."""
    trained, held_out = switches(args.seed)
    for name, side in (("prompts", 0), ("second_prompts", 1)):
        lines = "".join(f"{spoken(pair[side], args.fps)}\n" for pair in trained)
        (args.output / f"{name}.txt").write_text(lines, encoding="utf-8")
    rows = [
        {
            "text": spoken(before, args.fps),
            "switches": [{"frame": args.switch_frame, "text": spoken(after, args.fps)}],
        }
        for before, after in held_out
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (args.output / "held_out.jsonl").write_text(lines, encoding="utf-8")
    print(f"{len(trained)} pairs of prompts, {len(held_out)} pairs held out")


def write_clips(args: argparse.Namespace) -> None:
    """Write clips of every caption, and a list of the clips."""
    rng, rows = random.Random(args.seed), []
    for caption in captions():
        for i in range(args.per_caption):
            name = f"{'_'.join(caption)}_{i}.mp4"
            write_mp4(args.output / name, render(caption, args.size, args.frames, rng), args.fps)
            rows.append({"path": name, "text": "a {} {} {}".format(*caption)})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (args.output / "clips.jsonl").write_text(lines, encoding="utf-8")
    print(f"{len(rows)} clips of {len(captions())} captions in {args.output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder of clips, clips.jsonl and prompts")
    parser.add_argument("--per-caption", type=int, default=4, help="clips of each caption (4)")
    parser.add_argument("--size", type=int, default=32, help="pixels of a side (32)")
    parser.add_argument("--frames", type=int, default=8, help="frames (8)")
    parser.add_argument("--fps", type=int, default=8, help="frames per second (8)")
    parser.add_argument(
        "--switch-frame", type=int, default=24, help="switch frame of held-out videos (24)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of sizes, places and held-out (0)"
    )
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    write_clips(args)
    write_prompts(args)


if __name__ == "__main__":
    main()
