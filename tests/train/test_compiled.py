"""Runs whose layers are compiled follow the losses of runs whose layers are not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from megatron_ext.layers.compiled import compiled_on_cpu
from megatron_ext.train.run import Run
from tests.training_runs import TINY, mock_data, train_on_ranks

RUNS = {
    "recomputed": (1, "--recompute-granularity full --recompute-method uniform "
                      "--recompute-num-layers 1", 1e-5),
    "zero bubble": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1", 1e-5),
    "sequence parallel, one mask on all layouts": (
        2, "--tensor-model-parallel-size 2 --sequence-parallel --hidden-dropout 0.1 "
           "--deterministic-dropout", 1e-5),
    "adapters": (1, "--lora-rank 4", 1e-5),
    "8 bits": (1, "--bf16 --fp8-format hybrid --ffn-hidden-size 176", 1e-2),
    "bf16": (1, "--bf16", 1e-2),
}  # fmt: skip
"""Ranks, flags, and how far losses may be apart, relative: roundings grow with the steps."""

_open = ExitStack()


def compile_on_cpu(run: Run) -> None:
    """Compile for the rest of this rank's process; a file tells that a graph was made."""
    made = Path(run.config.checkpoint.save or "") / "graphs"

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        made.touch()
        return aot_eager(graph, example)

    _open.enter_context(compiled_on_cpu(backend))


def losses(folder: Path, ranks: int, flags: str, **changes: Any) -> list[float]:
    words = [*TINY, *mock_data(), *flags.split(), "--train-iters", "4"]
    code, rows = train_on_ranks(words, ranks=ranks, save=folder, **changes)
    assert code == 0
    return [row["lm loss"] for row in rows if row["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_same_losses(name: str, tmp_path: Path) -> None:
    ranks, flags, tolerance = RUNS[name]
    want = losses(tmp_path / "eager", ranks, flags)
    got = losses(tmp_path / "compiled", ranks, flags, prepare=compile_on_cpu)
    assert len(want) == 4 and (tmp_path / "compiled" / "graphs").exists()
    assert not (tmp_path / "eager" / "graphs").exists()
    assert got == pytest.approx(want, rel=tolerance)
