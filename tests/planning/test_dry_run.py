"""``--dry-run`` and tools/plan.py: every error in one run, else a plan, and no rank is started."""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.planning.hardware import size
from megatron_ext.planning.report import NO_COST, print_plan
from megatron_ext.programs import plan
from megatron_ext.text.task import GPT
from megatron_ext.train.exit_codes import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from tests.config.runs import refusals
from tests.planning.measure import configuration
from tests.text.cost.layouts import MODEL

PP4 = "--pipeline-model-parallel-size 4 --nproc-per-node 4"
SEPARATE = {words: said for _, words, said in refusals("dry run, one of several faults")}
FAULTS = SEPARATE | {words: said for _, words, said in refusals("dry run")}


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
    flags = [*MODEL, *PP4.split(), "--dry-run-nodes", "2", "--dry-run"]
    assert main(GPT, flags) == 0
    shown = capfd.readouterr().out
    assert "8 ranks (pp 4 × dp 2)" in shown
    assert "schedule 1f1b: bubble" in shown
    assert "estimated on" not in shown
    assert main(GPT, [*flags, "--dry-run-gpu", "H200"]) == 0
    assert "estimated on H200" in capfd.readouterr().out


def test_the_exit_code_says_whether_it_fits(capfd: pytest.CaptureFixture[str]) -> None:
    large = "--num-layers 64 --hidden-size 16384 --ffn-hidden-size 65536 --num-attention-heads 128"
    flags = [*MODEL, *large.split(), "--dry-run", "--dry-run-gpu", "H200"]
    assert main(GPT, flags) == 1
    assert "DOES NOT FIT" in capfd.readouterr().out


def test_planning_flags_need_a_dry_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(GPT, [*MODEL, "--dry-run-nodes", "2"]) == EXIT_CODE_USER_ERROR
    assert "`--dry-run-nodes` (2) needs `--dry-run`" in capfd.readouterr().err


@dataclass(frozen=True)
class Tool:
    """``tools/plan.py`` on the small model with further flags."""

    run: Callable[[list[str]], int]
    capfd: pytest.CaptureFixture[str]

    def __call__(self, own: str, flags: str = "", code: int = 0) -> str:
        assert self.run([*own.split(), "--", *MODEL, *flags.split()]) == code
        return " ".join("".join(self.capfd.readouterr()).split())


@pytest.fixture
def tool(capfd: pytest.CaptureFixture[str]) -> Tool:
    return Tool(plan.main, capfd)


def test_the_tool_plans_for_many_gpus(tool: Tool, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    more = "--pipeline-model-parallel-size 4 --global-batch-size 32"
    shown = tool(f"--world-size 16 --gpu H200 --png {picture}", more)
    assert "16 ranks (pp 4 × dp 4)" in shown
    assert "fits: " in shown
    for path in (picture, tmp_path / "plan_memory.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plan_may_ask_for_layers_that_this_machine_lacks(tool: Tool) -> None:
    eight = (
        "--bf16 --fp8-format hybrid --fp8-recipe blockwise --num-attention-heads 4 "
        "--num-experts 4 --disable-bias-linear"
    )
    shown = tool("--world-size 4 --gpu H100", f"--transformer-impl transformer_engine {eight}")
    assert "Transformer Engine's layers priced as the torch layers" in shown


def test_the_tool_searches_and_reports_errors(tool: Tool) -> None:
    assert "layouts of 4 GPUs can run" in tool("--world-size 4 --search --count 3", "--bf16")
    shown = tool("--world-size 3", "--tensor-model-parallel-size 2", code=2)
    assert "error: The number of ranks (3)" in shown


def test_recomputation_is_not_advised_with_graphs(tool: Tool) -> None:
    large = "--num-layers 64 --hidden-size 4096 --num-attention-heads 32 --seq-length 16384"
    graphs = "--cuda-graph-impl local --max-position-embeddings 16384"
    more = "--bf16 --use-distributed-optimizer --global-batch-size 128"
    shown = tool("--world-size 64 --gpu H100", f"{large} {graphs} {more}", code=1)
    assert "it would fit with full recomputation in place of" in shown
    assert not {"full", "selective"} & set(tool("--world-size 1 --search", graphs).split())


def test_a_task_without_a_cost_shows_its_schedule(capfd: pytest.CaptureFixture[str]) -> None:
    config = configuration([*MODEL, *PP4.split()])
    assert print_plan(config, None)
    shown = " ".join(capfd.readouterr().out.split())
    assert NO_COST in shown and "schedule 1f1b: bubble" in shown


def test_a_model_that_megatron_core_refuses_is_not_planned() -> None:
    config = configuration([*MODEL, *"--tensor-model-parallel-size 2 --nproc-per-node 2".split()])
    refused = dataclasses.replace(
        config, model=dataclasses.replace(config.model, num_query_groups=3)
    )
    with pytest.raises(ConfigError, match="megatron-core refuses this model: num_query_groups"):
        print_plan(refused, None)


@pytest.mark.parametrize(("count", "text"), [(2.5e9, "2.50 GB"), (1234567, "1.23 MB"), (0, "–")])
def test_sizes_are_shown_in_units(count: float, text: str) -> None:
    assert size(count) == text


def test_a_search_reads_flags_that_need_no_layout_and_says_if_nothing_fits(tool: Tool) -> None:
    """Micro-batches of 4 are too many for 4 replicas of a batch of 8."""
    more = "--bf16 --micro-batch-size 4"
    shown = tool("--world-size 4 --search --count 2", more)
    assert "best layout: " in shown and "the given layout" not in shown
    assert "error: " in tool("--world-size 4", more, code=2)
    large = "--num-layers 64 --hidden-size 16384 --ffn-hidden-size 65536 --num-attention-heads 128"
    assert "no layout fits: the closest, dp with" in tool(
        "--world-size 1 --search", f"--bf16 {large}", code=1
    )


def test_the_tool_tells_notes_all_errors_and_whether_a_run_fits(tool: Tool) -> None:
    large = "--num-layers 64 --hidden-size 16384 --ffn-hidden-size 65536 --num-attention-heads 128"
    assert "DOES NOT FIT" in tool("--world-size 1", large, code=1)
    shown = tool("--world-size 2", "--num-layers 0 --hidden-size 0", code=2)
    assert shown.count("error: ") >= 2
    given = "--padded-vocab-size 640 --tokenizer-type HuggingFaceTokenizer --tokenizer-model none"
    assert "plan: 1 rank," in tool("--world-size 1", given)
    shown = tool("--world-size 1 --video --png x.png", code=2)
    assert "`--png` is there for text models alone; leave it out with `--video`." in shown
    shown = tool("--world-size 1", "--lr 2e-3")
    assert shown.startswith("> `--lr` (0.002) takes the place of the value (0.001) that was given")
