#!/usr/bin/env python3
"""Samples clips from a checkpoint of pretrain_video.py, in any layout, as mp4.

    python tools/sample_video.py --load RUN --sample-dir CLIPS --sample-texts "a red square"

takes the flags of pretrain_video.py; the model is the checkpoint's, with its averaged weights where
it has some (``--no-sample-ema``). Captions may come from a file, with references for image to
video: ``--sample-prompts``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.training.video.sample_tool import sample_video
from pretrain_video import task_of

if __name__ == "__main__":
    sys.exit(sample_video(task_of, sys.argv[1:]))
