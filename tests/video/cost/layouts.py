"""Runs of video models whose memory is measured."""

from __future__ import annotations

from pathlib import Path

from megatron_ext.train.task import TaskChoice
from megatron_ext.video.task import VIDEO

COMMON = (
    "--train-iters 1 --lr 1e-3 --lr-warmup-iters 0 --micro-batch-size 2 --global-batch-size 8 "
    "--log-interval 1 --num-workers 0"
)
MMDIT = DIT = VIDEO
NO_RECOMPUTATION = "--recompute-double-blocks 0 --recompute-single-blocks 0"
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
CAUSAL = "--video-model causal-video-dit --frame-block 1 --window-frames 3 --sink-frames 1"

LAYOUTS: dict[str, tuple[TaskChoice, str]] = {
    "mmdit": (MMDIT, NO_RECOMPUTATION),
    "mmdit recomputed": (MMDIT, ""),
    "mmdit tp2 sp": (
        MMDIT,
        f"{NO_RECOMPUTATION} --tensor-model-parallel-size 2 --sequence-parallel --nproc-per-node 2",
    ),
    "mmdit pp2": (MMDIT, f"{NO_RECOMPUTATION} --pipeline-model-parallel-size 2 --nproc-per-node 2"),
    "mmdit cp2": (MMDIT, f"{NO_RECOMPUTATION} --context-parallel-size 2 --nproc-per-node 2"),
    "mmdit t2v bf16 dp2": (
        MMDIT,
        f"{NO_RECOMPUTATION} --bf16 --use-distributed-optimizer --nproc-per-node 2 "
        "--i2v-head-weight 0 --i2v-tail-weight 0 --i2v-loop-weight 0",
    ),
    "mmdit fp8": (MMDIT, f"{NO_RECOMPUTATION} {FP8}"),
    "dit": (DIT, "--video-model video-dit"),
    "dit fp8": (DIT, f"--video-model video-dit {FP8}"),
    "dit recomputed": (DIT, "--video-model video-dit --recompute-blocks 2"),
    "dit tp2 sp": (
        DIT,
        "--video-model video-dit --tensor-model-parallel-size 2 --sequence-parallel "
        "--nproc-per-node 2",
    ),
    "dit pp2": (DIT, "--video-model video-dit --pipeline-model-parallel-size 2 --nproc-per-node 2"),
    "causal": (DIT, CAUSAL),
    "causal cp2": (DIT, f"{CAUSAL} --context-parallel-size 2 --nproc-per-node 2"),
}


def flags_of(name: str, clips: Path) -> list[str]:
    """Return the flags of a layout on a folder of clips."""
    return [*COMMON.split(), *LAYOUTS[name][1].split(), "--video-data-path", str(clips)]
