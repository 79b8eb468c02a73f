#!/usr/bin/env python3
"""Measures the colour of the shape in long videos before and after their prompt switches.

By array arithmetic alone, as in examples/video/measure_clips.py. The frames right after the switch
may still show the old colour, so that some are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "video"))

from make_clips import COLOURS
from measure_clips import Pixels, colour_of, read_frames

HALF = 0.5


def share_of(frames: Pixels, colour: str) -> float:
    """Share of the frames ``[f, h, w, 3]`` whose shape has a colour."""
    return sum(colour_of(frame[None]) == colour for frame in frames) / len(frames)


def named(prompt: str) -> str:
    """The colour that a prompt names.

    Raises:
        SystemExit: it names none, or several.
    """
    colours = [word for word in prompt.split() if word in COLOURS]
    if len(colours) != 1:
        raise SystemExit(f"The prompt `{prompt}` must name one colour.")
    return colours[0]


def measure(folder: Path, skipped: int) -> tuple[float, float, int, int]:
    """Prints a row for each video.

    Returns:
        Mean share of frames with the first colour before the switch, of those with the second
        after it, videos with the second colour in more than half of the latter, and videos.

    Raises:
        SystemExit: the folder has no list of videos with a switch each.
    """
    listed = folder / "samples.jsonl"
    if not listed.is_file():
        raise SystemExit(f"{listed} does not exist; give a folder that sample_video.py wrote.")
    rows = [json.loads(line) for line in listed.read_text(encoding="utf-8").splitlines()]
    shares = []
    print(f"{'colours':18} {'before':>8} {'after':>8}")
    for row in rows:
        if len(row.get("switches", ())) != 1:
            raise SystemExit(f"{row['path']} must have one prompt switch.")
        switch = row["switches"][0]
        first, second = named(row["text"]), named(switch["text"])
        frames = read_frames(folder / row["path"])
        before = share_of(frames[: switch["frame"]], first)
        after = share_of(frames[switch["frame"] + skipped :], second)
        shares.append((before, after))
        print(f"{first + ' > ' + second:18} {before:8.0%} {after:8.0%}")
    befores, afters = zip(*shares, strict=True)
    following = sum(share > HALF for share in afters)
    return sum(befores) / len(rows), sum(afters) / len(rows), following, len(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of mp4s and samples.jsonl, a pixel frame a "
                        "latent frame")  # fmt: skip
    parser.add_argument("--skip", type=int, default=8, help="frames after the switch (8)")
    parser.add_argument("--at-least", type=int, default=0, help="exit 1 below so many videos (0)")
    args = parser.parse_args()
    before, after, following, total = measure(args.folder, args.skip)
    print(
        f"first colour before the switch in {before:.0%} of the frames, second colour after it in "
        f"{after:.0%}; {following} of {total} videos follow their second prompt"
    )
    return int(following < args.at_least)


if __name__ == "__main__":
    sys.exit(main())
