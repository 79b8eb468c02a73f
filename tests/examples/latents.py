"""Latents of a few rendered clips, for runs that train on them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron_ext.video.data.preprocess import main

CLIPS = Path(__file__).resolve().parents[2] / "examples" / "video" / "make_clips.py"


def make_latents(folder: Path) -> Path:
    """Write a folder as tools/preprocess_video.py does: 48 clips of 4 x 3 x 4 x 4 latents."""
    subprocess.run([sys.executable, CLIPS, folder, "--per-caption", "1"], check=True, timeout=60)
    output = folder / "latents"
    flags = "--codec-channels 4 --codec-scale 0.0625 --text-length 8 --text-width 32"
    words = ["--input", folder / "clips.jsonl", "--output", output, "--pooled-width", 16]
    words += ["--buckets", '{"32px": {"9": [1.0, 2]}}', *flags.split()]
    assert main([str(word) for word in words]) == 0
    return output
