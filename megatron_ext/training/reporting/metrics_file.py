"""``metrics.jsonl``: one line for each report, always, without any server."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.training.reporting.records import EvaluationRecord, IterationRecord

_NOT_FINITE = {word: float(word) for word in ("NaN", "Infinity", "-Infinity")}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a last line that a kill cut short is left out.

    Numbers that are not finite come back as such, see `MetricsFile`.
    """
    rows: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                break
            rows.append({name: _number(value) for name, value in row.items()})
    return rows


def _number(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _as_json(row: Mapping[str, Any]) -> str:
    """One line of JSON, which knows no numbers that are not finite: they become words."""
    words = {name: _word(value) for name, value in row.items()}
    return json.dumps(words, allow_nan=False) + "\n"


def _word(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class MetricsFile:
    """Appends to ``metrics.jsonl``; a resumed run first removes what it will do again.

    Each line is strict JSON: a number that is not finite, such as the gradient norm of a skipped
    step, is the word ``NaN``, ``Infinity`` or ``-Infinity``, as in Protocol Buffers' JSON.
    """

    def __init__(self, folder: Path, resumed_at: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        kept = [row for row in read_metrics(self.path) if row["iteration"] <= resumed_at]
        kept = [row for row in kept if not row.get("final")]
        temporary = self.path.with_suffix(".jsonl.tmp")
        temporary.write_text("".join(map(_as_json, kept)), encoding="utf-8")
        os.replace(temporary, self.path)
        self._file = self.path.open("a", encoding="utf-8")
        if resumed_at and kept:
            self._write({"kind": "resumed", "iteration": resumed_at})

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(_as_json(row))
        self._file.flush()

    def on_iteration(self, record: IterationRecord) -> None:
        row: dict[str, Any] = {
            "kind": "train",
            "iteration": record.iteration,
            "consumed_samples": record.consumed_samples,
            **record.losses,
            "learning_rate": record.learning_rate,
            "grad_norm": record.grad_norm,
            "loss_scale": record.loss_scale,
            "global_batch_size": record.global_batch_size,
            "seconds_per_iteration": record.seconds,
            "tokens_per_second": record.tokens_per_second,
            "skipped_iterations": record.skipped,
            "nan_iterations": record.nans,
            "total_skipped_iterations": record.total_skipped,
            **record.common,
        }
        if record.num_zeros is not None:
            row["num_zeros"] = record.num_zeros
        if record.params_norm is not None:
            row["params_norm"] = record.params_norm
        self._write(row)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._write(
            {
                "kind": "evaluation",
                "split": record.split,
                "iteration": record.iteration,
                "consumed_samples": record.consumed_samples,
                "final": record.final,
                **record.losses,
                **record.common,
            }
        )

    def close(self) -> None:
        self._file.close()
