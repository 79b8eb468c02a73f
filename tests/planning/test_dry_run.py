"""``--dry-run`` and tools/plan.py: every error in one run, else a plan, and no rank is started."""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.planning.hardware import size
from megatron_ext.train.launch import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from pretrain_gpt import GPT
from tests.text.cost.layouts import MODEL

TOOL = Path(__file__).parents[2] / "tools" / "plan.py"

TP2 = "--tensor-model-parallel-size 2 --nproc-per-node 2"
PP4 = "--pipeline-model-parallel-size 4 --nproc-per-node 4"
FULL = "--recompute-granularity full --recompute-method uniform"
SELECTIVE = "--recompute-granularity selective"

SEPARATE = {
    "--global-batch-size 7": "`--global-batch-size` (7) must be divisible",
    "--hidden-dropout 1.5": "`--hidden-dropout` (1.5) must be at least 0",
    "--recompute-method block": "`--recompute-method` (block) needs",
    "--bf16 --fp16": "`--bf16` and `--fp16` exclude each other",
    "--tensor-parallel-sizes 2": "`--tensor-parallel-sizes` is not a flag",
    "--max-position-embeddings 64": "`--max-position-embeddings` (64)",
    "--num-experts 4 --moe-router-topk 5": "`--moe-router-topk` (5) must be between",
    "--num-experts 4 --moe-pad-expert-input-to-capacity": "`--moe-expert-capacity-factor`",
    "--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss": (
        "`--moe-aux-loss-coeff` has 1 value(s)"
    ),
    "--dry-run-nodes 0": "`--dry-run-nodes` (0) must be at least 1",
    "--dry-run-gpu V100": "`--dry-run-gpu` (V100) must be one of A100-40GB",
    "--num-query-groups 3": "divisible by `--num-query-groups` (3)",
    "--lora-rank 0": "`--lora-rank` (0) must be at least 1",
    "--fp8-margin 1": "`--fp8-margin` needs `--fp8-format`",
}
"""Flags with one fault each on top of a good run, of which any may come together."""

DENSE = {
    "--tensor-model-parallel-size 3": "`--num-attention-heads` (4) must be divisible",
    "--tensor-model-parallel-size 4 --nproc-per-node 2": "number of ranks (2)",
    "--pipeline-model-parallel-size 3 --nproc-per-node 3": "`--num-layers` (4) must be",
    "--hidden-size 66": "`--hidden-size` (66) must be divisible",
    f"--ffn-hidden-size 191 {TP2}": "`--ffn-hidden-size` (191) must be divisible by `--tensor-",
    f"--padded-vocab-size 513 {TP2}": "`--padded-vocab-size` (513) must be divisible",
    "--context-parallel-size 8 --cp-comm-type a2a --nproc-per-node 8": (
        "`--cp-comm-type a2a` needs the attention heads"
    ),
    "--seq-length 126 --context-parallel-size 4 --nproc-per-node 4": (
        "`--seq-length` (126) must be divisible by 2 × `--context-parallel-size`"
    ),
    f"--decoder-first-pipeline-num-layers 2 {PP4}": "leaves 2 of 4 layers for 3 stages",
    "--decoder-last-pipeline-num-layers 2": (
        "`--decoder-last-pipeline-num-layers` (2) needs `--pipeline-model-parallel-size`"
    ),
    f"--decoder-first-pipeline-num-layers 1 --account-for-loss-in-pipeline-split {PP4}": (
        "does not go with `--account-for-embedding-in-pipeline-split`"
    ),
    f"{SELECTIVE} --recompute-modules attention": "(attention) must be names among",
    f"{SELECTIVE} --recompute-modules layernorm": "(layernorm) needs Transformer Engine",
    f"{SELECTIVE} --recompute-num-layers 1": "goes with `--recompute-granularity full`",
    f"{FULL} --recompute-num-layers 0": "`--recompute-num-layers` (0) must be at least 1",
    "--expert-model-parallel-size 2 --nproc-per-node 2": "needs `--num-experts`",
    "--bf16 --fp8-format hybrid --ffn-hidden-size 200": "needs layers whose sides divide",
    "--ffn-hidden-size 0": "`--ffn-hidden-size` (0) must be at least 1",
    "--transformer-impl transformer_engine": "needs Transformer Engine and a GPU",
}
EXPERTS = {
    "--expert-model-parallel-size 3 --nproc-per-node 3": "`--num-experts` (4)",
    "--moe-layer-freq [0,1]": "`--moe-layer-freq` has 2 entries",
    "--moe-router-topk 1": "give `--moe-router-pre-softmax`",
    "--moe-router-enable-expert-bias": "needs `--moe-router-score-function sigmoid`",
    "--moe-router-num-groups 3 --moe-router-group-topk 1": "`--moe-router-num-groups` (3)",
    TP2: "needs `--sequence-parallel`",
    "--add-bias-linear --moe-shared-expert-intermediate-size 64": (
        "Experts with biases do not go with a shared expert"
    ),
    "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1": (
        "`--moe-aux-loss-coeff` (0.1) must be 0"
    ),
    "--moe-apply-probs-on-input": "`--moe-apply-probs-on-input` needs",
}
FAULTS = SEPARATE | DENSE | {f"--num-experts 4 {flags}": said for flags, said in EXPERTS.items()}


def _errors(flags: str, capfd: pytest.CaptureFixture[str]) -> list[str]:
    assert main(GPT, [*MODEL, *flags.split(), "--dry-run"]) == EXIT_CODE_USER_ERROR
    lines = capfd.readouterr().err.strip().splitlines()
    assert all(line.startswith("error: ") for line in lines), lines
    return lines


@pytest.mark.parametrize("flags", FAULTS)
def test_a_fault_is_told(flags: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert any(FAULTS[flags] in line for line in _errors(flags, capfd))


@pytest.mark.parametrize("seed", range(10))
def test_several_faults_are_told_in_one_run(seed: int, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = random.Random(seed).sample(sorted(SEPARATE), 4)
    lines = _errors(" ".join(chosen), capfd)
    for flags in chosen:
        assert any(SEPARATE[flags] in line for line in lines), (flags, lines)


def test_a_dry_run_prints_the_plan_and_starts_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object, **_kwargs: object) -> int:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("megatron_ext.train.main.launch", refuse)
    flags = "--pipeline-model-parallel-size 4 --nproc-per-node 4 --dry-run-nodes 2 --dry-run"
    assert main(GPT, [*MODEL, *flags.split()]) == 0
    shown = capfd.readouterr().out
    assert "8 ranks (pp 4 × dp 2)" in shown
    assert "schedule 1f1b: bubble" in shown
    assert "estimated on" not in shown
    assert main(GPT, [*MODEL, *flags.split(), "--dry-run-gpu", "H200"]) == 0
    assert "estimated on H200" in capfd.readouterr().out


def test_the_exit_code_says_whether_it_fits(capfd: pytest.CaptureFixture[str]) -> None:
    large = "--num-layers 64 --hidden-size 16384 --ffn-hidden-size 65536 --num-attention-heads 128"
    flags = [*MODEL, *large.split(), "--dry-run", "--dry-run-gpu", "H200"]
    assert main(GPT, flags) == 1
    assert "DOES NOT FIT" in capfd.readouterr().out


def test_planning_flags_need_a_dry_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(GPT, [*MODEL, "--dry-run-nodes", "2"]) == EXIT_CODE_USER_ERROR
    assert "`--dry-run-nodes` (2) needs `--dry-run`" in capfd.readouterr().err


@pytest.fixture(scope="module")
def tool() -> Callable[[list[str]], int]:
    return runpy.run_path(str(TOOL))["main"]  # type: ignore[no-any-return]


def test_the_tool_plans_for_many_gpus(
    tool: Callable[[list[str]], int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.png"
    own = ["--world-size", "16", "--gpu", "H200", "--png", str(picture), "--"]
    more = "--pipeline-model-parallel-size 4 --global-batch-size 32".split()
    assert tool([*own, *MODEL, *more]) == 0
    shown = capfd.readouterr().out
    assert "16 ranks (pp 4 × dp 4)" in shown
    assert "fits: " in shown
    for path in (picture, tmp_path / "plan_memory.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plan_may_ask_for_layers_that_this_machine_lacks(
    tool: Callable[[list[str]], int], capfd: pytest.CaptureFixture[str]
) -> None:
    eight = "--bf16 --fp8-format hybrid --fp8-recipe blockwise --num-attention-heads 4".split()
    asked = ["--transformer-impl", "transformer_engine", *eight]
    assert tool(["--world-size", "4", "--gpu", "H100", "--", *MODEL, *asked]) == 0
    shown = capfd.readouterr().out
    assert "Transformer Engine's layers priced as the torch layers" in " ".join(shown.split())


def test_the_tool_searches(
    tool: Callable[[list[str]], int], capfd: pytest.CaptureFixture[str]
) -> None:
    own = "--world-size 4 --search --count 3 --".split()
    assert tool([*own, *MODEL, "--bf16"]) == 0
    assert "layouts that fit" in capfd.readouterr().out


def test_recomputation_is_not_advised_beside_graphs(
    tool: Callable[[list[str]], int], capfd: pytest.CaptureFixture[str]
) -> None:
    large = "--num-layers 64 --hidden-size 4096 --num-attention-heads 32 --seq-length 16384".split()
    graphs = "--cuda-graph-impl local --max-position-embeddings 16384".split()
    flags = [*MODEL, *large, *graphs, "--bf16", "--use-distributed-optimizer"]
    flags += ["--global-batch-size", "128"]
    assert tool(["--world-size", "64", "--gpu", "H200", "--", *flags]) == 1
    assert "it would fit with full recomputation in place of" in capfd.readouterr().out
    assert tool(["--world-size", "1", "--search", "--", *MODEL, *graphs]) == 0
    assert not {"full", "selective"} & set(capfd.readouterr().out.split())


def test_the_tool_reports_errors(
    tool: Callable[[list[str]], int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert tool(["--world-size", "3", "--", *MODEL, "--tensor-model-parallel-size", "2"]) == 2
    assert "error: The number of ranks (3)" in capfd.readouterr().err


def test_sizes_are_shown_in_units() -> None:
    assert size(2.5e9) == "2.50 GB"
    assert size(1234567) == "1.23 MB"
    assert size(0) == "–"
