r"""Sample clips from a checkpoint of pretrain_video.py, in any layout, and write them as mp4.

    python tools/sample_video.py --load RUN --sample-dir CLIPS --sample-texts "a red square"

takes the flags of pretrain_video.py. The model is that of the checkpoint, with its averaged weights
if it has them (``--no-sample-ema`` takes the last weights). Captions may also come from a file,
with references for image to video: ``--sample-prompts``.

    python tools/sample_video.py --load-weights FOLDER --sample-dir CLIPS --sample-texts "a cat"

takes published weights instead: the folder of a pipeline of diffusers, with its encoders and its
scheduler, or a folder or file of a network alone.

    python tools/sample_video.py --streaming --load RUN --sample-dir VIDEOS \
        --sample-texts "a cat" --sample-second-texts "a dog" --sample-latent-frames 240

makes long videos with a checkpoint of ``--task streaming``, block by block, and prints the
throughput. With a jsonl as ``--sample-prompts``, captions may switch several times: ``{"text":
"a cat", "switches": [{"frame": 60, "text": "a dog"}, {"frame": 120, "text": "a bird"}]}``.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.config.sections import help_question
from megatron_ext.video.sampling.tool import sample_video
from megatron_ext.video.streaming.tool import sample_streaming
from megatron_ext.video.task import VIDEO

STREAMING = "--streaming"


def main(argv: Sequence[str]) -> int:
    """Sample clips or, with ``--streaming``, long videos; return the exit code."""
    if help_question(argv) in ("", "all"):
        print(__doc__)
    words = [word for word in argv if word != STREAMING]
    return sample_streaming(words) if STREAMING in argv else sample_video(VIDEO, words)
