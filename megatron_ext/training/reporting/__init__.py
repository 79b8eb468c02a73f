"""What a run tells: iteration lines, metrics.jsonl and loss.png, TensorBoard, Weights & Biases."""

from __future__ import annotations

from megatron_ext.training.reporting.build import Reporters, build_reporters
from megatron_ext.training.reporting.records import (
    AVERAGED,
    EvaluationRecord,
    IterationRecord,
)

__all__ = ["AVERAGED", "EvaluationRecord", "IterationRecord", "Reporters", "build_reporters"]
