"""Latents of a few rendered clips, for runs that train on them."""

from __future__ import annotations

import json
import random
from pathlib import Path

from examples.video.make_clips import caption_of, captions, render, write_mp4
from megatron_ext.data.video.preprocess import main

SIZE, FRAMES = 32, 9


def make_latents(folder: Path, num_clips: int = 16) -> Path:
    """A folder as tools/preprocess_video.py writes it: latents of 4 channels, 3 x 4 x 4."""
    rows, rng = [], random.Random(0)
    for i, caption in enumerate(captions()[:num_clips]):
        write_mp4(folder / f"{i}.mp4", render(*caption, SIZE, FRAMES, rng), 8)
        rows.append(json.dumps({"path": f"{i}.mp4", "text": caption_of(*caption)}))
    (folder / "clips.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    flags = "--codec-channels 4 --codec-scale 0.0625 --text-length 8 --text-width 32"
    output = folder / "latents"
    words = ["--input", folder / "clips.jsonl", "--output", output, "--pooled-width", 16]
    words += ["--buckets", '{"32px": {"9": [1.0, 2]}}', *flags.split()]
    assert main([str(word) for word in words]) == 0
    return output
