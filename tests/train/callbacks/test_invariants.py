"""A violation of what ranks must share names the parameter and the ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.train.callbacks.invariants import InvariantError, check_replicas, check_zeroed
from megatron_ext.train.run import Run
from tests.training_runs import TINY, mock_data, train_on_ranks

Change = Callable[[Run], None]
TIED = "--no-untie-embeddings-and-output-weights"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"


def spoil(run: Run, name: str, rank: int) -> None:
    """Change one parameter on one rank."""
    if run.context.rank == rank:
        parameters = dict(run.chunks[0].named_parameters())
        key = next(key for key in parameters if name in key)
        with torch.no_grad():
            parameters[key].view(-1)[3] += 1e-3


def spoil_history(run: Run, name: str, rank: int) -> None:
    """Change the history of one layer's scales on one rank."""
    if run.context.rank == rank:
        modules = run.chunks[0].named_modules()
        scaling: Any = next(module for key, module in modules if key.endswith(f"{name}.fp8"))
        scaling.amax_history[0, 1] = 3.0


def message_of(words: str, ranks: int, change: Change, folder: Path) -> str:
    """Return the message of the check on some rank, after ``change`` has been made."""

    def prepare(run: Run) -> None:
        check_replicas(run.chunks, run.context, 0)
        change(run)
        try:
            check_replicas(run.chunks, run.context, 7)
        except InvariantError as error:
            (folder / f"{run.context.rank}").write_text(str(error))

    flags = [*TINY, *mock_data(), "--train-iters", "1", *words.split()]
    assert train_on_ranks(flags, ranks=ranks, save=folder / "save", prepare=prepare)[0] == 0
    texts = {path.read_text() for path in folder.iterdir() if path.is_file()}
    return "\n".join(sorted(texts))


@pytest.mark.parametrize(
    ("words", "ranks", "name", "rank", "pattern"),
    [
        ("", 4, "linear_proj.weight", 2, r"linear_proj.weight` differs between data-parallel "
         r"replicas: ranks \[2\] do not hold what rank 0 holds"),
        ("--context-parallel-size 2", 2, "final_layernorm", 1, r"final_layernorm.weight` differs "
         r"between data-parallel replicas: ranks \[1\] do not hold what rank 0"),
        ("--tensor-model-parallel-size 2", 2, "final_layernorm", 1, r"final_layernorm.weight` "
         r"differs between tensor-parallel ranks: ranks \[1\]"),
        (f"--pipeline-model-parallel-size 2 {TIED}", 2, "output_layer", 1, r"the tied embedding` "
         r"differs between pipeline stages: ranks \[1\] do not hold what rank 0"),
        (f"--expert-model-parallel-size 2 {EXPERTS}", 4, "local_experts.1.linear_fc1", 3,
         r"experts.1.linear_fc1.weight` differs between replicas of the experts: ranks \[3\] do "
         r"not hold what rank 1 holds"),
        (f"--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
         f"{EXPERTS}", 2, "local_experts.1.linear_fc1", 1, r"experts.1.linear_fc1.weight` differs "
         r"between replicas of the experts: ranks \[1\] do not hold what rank 0 holds"),
    ],
)  # fmt: skip
def test_a_violation_names_the_parameter_and_the_ranks(
    words: str, ranks: int, name: str, rank: int, pattern: str, tmp_path: Path
) -> None:
    text = message_of(words, ranks, partial(spoil, name=name, rank=rank), tmp_path)
    assert re.search(r"After iteration 7 the parameter `.*" + pattern, text), text


FP8 = "--bf16 --ffn-hidden-size 192 --fp8-format hybrid"


@pytest.mark.parametrize(
    ("words", "name", "apart", "first"),
    [
        ("--tensor-model-parallel-size 2", "linear_proj", r"\[1\]", 0),
        (EXPERTS, "experts.local_experts.2.linear_fc1", r"\[1\]", 0),
    ],
)
def test_histories_of_8_bit_scales_are_compared(
    words: str, name: str, apart: str, first: int, tmp_path: Path
) -> None:
    change = partial(spoil_history, name=name, rank=1)
    text = message_of(f"{FP8} {words}", 2, change, tmp_path)
    pattern = (
        rf"the history `.*{name}.fp8.amax_history` differs between ranks with parts of its layer: "
        rf"ranks {apart} do not hold what rank {first} holds; the largest magnitudes"
    )
    assert re.search(pattern, text), text


def test_tensor_parallel_parts_may_differ(tmp_path: Path) -> None:
    """Ranks hold different parts of a cut weight; that is no violation."""
    change = partial(spoil, name="linear_proj.weight", rank=1)
    assert message_of("--tensor-model-parallel-size 2", 2, change, tmp_path) == ""


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", 4),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 4),
        (f"--expert-model-parallel-size 2 {EXPERTS}", 4),
        ("--overlap-grad-reduce --overlap-param-gather", 2),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-v", 4),
        ("--tensor-model-parallel-size 2 --hidden-dropout 0.3", 2),
        (f"{FP8} --expert-model-parallel-size 2 {EXPERTS}", 2),
    ],
)
def test_training_keeps_the_invariants(words: str, ranks: int, tmp_path: Path) -> None:
    flags = [*TINY, *mock_data(), *"--train-iters 4 --check-invariants 2".split(), *words.split()]
    assert train_on_ranks(flags, ranks=ranks, save=tmp_path / "run")[0] == 0


def test_a_stale_gradient_is_found(tmp_path: Path) -> None:
    """A buffer that is not zero before a step would be added to it."""

    def prepare(run: Run) -> None:
        (chunk,) = run.chunks
        check_zeroed([chunk], 4)
        parameter = dict(chunk.named_parameters())["module.decoder.final_layernorm.weight"]
        parameter.main_grad[2] = 1.0  # type: ignore[attr-defined]
        with pytest.raises(
            InvariantError,
            match=r"Before iteration 5 the gradient of `module.decoder.final_layernorm.weight` on "
            "rank 0 is not zero",
        ):
            check_zeroed([chunk], 5)

    flags = [*TINY, *mock_data(), "--train-iters", "1"]
    assert train_on_ranks(flags, save=tmp_path, prepare=prepare)[0] == 0
