"""tools/plan.py: its options, its JSON, and that its commands run the layouts that it proposes."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.programs.plan import main
from megatron_ext.text.task import TEXT
from megatron_ext.train.main import main as train
from megatron_ext.video.task import VIDEO
from tests.text.cost.layouts import LATENT, LLAMA_8B, MODEL
from tests.video.clips import FLAGS

SHAPE = ["--dry-run-shape", "64x64x17", "--codec-spatial", "8", "--text-length", "8"]


def planned(own: str, *more: str) -> int:
    return main([*own.split(), "--video", "--", *FLAGS, *SHAPE, *more])


def test_a_video_run_is_planned_for_all_its_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert planned("--world-size 4 --gpu H200") == 0
    shown = capfd.readouterr().out
    assert "4 ranks (dp 4)" in shown and "fits: " in shown
    assert planned("--world-size 1 --gpu H100", "--mmdit-size", "11b") == 1
    assert "DOES NOT FIT" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("own", "errors"),
    [
        ("--png x.png", ["`--png` is there for text models alone; leave it out with `--video`."]),
        ("--search --png x", ["`--png` is there for text models alone; leave it out with "
         "`--video`.", "`--png` draws one plan; leave it out with `--search`."]),
        ("--flags 2", ["`--flags` (2) needs `--search`; give both."]),
    ],
)  # fmt: skip
def test_options_without_effect_are_refused_together(
    own: str, errors: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert planned(f"--world-size 4 {own}") == 2
    assert capfd.readouterr().err.splitlines() == [f"error: {text}" for text in errors]


def test_a_search_needs_one_batch_and_clips_of_one_shape(
    capfd: pytest.CaptureFixture[str],
) -> None:
    data = ["--video-data-path", "clips"]
    assert main([*"--world-size 4 --search --video --".split(), *FLAGS, *data]) == 2
    assert "`--search` with `--video` needs `--dry-run-shape`" in capfd.readouterr().err
    words = shlex.join(MODEL).replace("--global-batch-size 8", "").split()
    assert main([*"--world-size 4 --search --".split(), *words]) == 2
    assert "`--search` needs `--global-batch-size`" in capfd.readouterr().err


def test_a_search_replaces_the_sizes_of_a_file_and_refuses_what_no_flag_takes_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    own = [
        *"--world-size 2 --search --json -- --config".split(),
        str(path),
        "--layout",
        "2",
        *MODEL,
    ]
    sizes = "tensor_model_parallel_size: 2\npipeline_model_parallel_size: 2\n"
    layouts = "layouts: {'2': {recompute_granularity: selective}}\n"
    path.write_text(f"{sizes}{layouts}", encoding="utf-8")
    assert main(own) == 0
    shown = capfd.readouterr()
    assert "none is chosen" not in shown.err
    found = json.loads(shown.out)
    assert {x["pipeline_parallel_size"] for x in found["layouts"]} == {1, 2}
    assert "--layout none" in found["commands"][0]
    for one, row in zip(found["layouts"], found["best"], strict=True):
        assert one["layout"] and one.items() >= row.items()
    flat = next(i for i, x in enumerate(found["layouts"]) if x["pipeline_parallel_size"] == 1)
    assert "--pipeline-model-parallel-size 1" in found["commands"][flat]
    path.write_text(f"recompute_granularity: selective\n{sizes}{layouts}", encoding="utf-8")
    assert main(own) == 2
    assert capfd.readouterr().err.splitlines()[-1] == (
        "error: `recompute_granularity` in a `--config` file (selective) fixes what `--search` "
        "tries in several ways; remove it from the file, or put it under `layouts`."
    )


MOE = "--bf16 --num-experts 4 --moe-ffn-hidden-size 96 --moe-layer-freq [0,1,1,1]"
SEARCHES = {
    "dense": (TEXT, [*MODEL, *"--bf16 --tensor-model-parallel-size 2 --vocab-size 700".split()]),
    "experts": (TEXT, [*MODEL, *MOE.split(), "--recompute-activations"]),
    "latent": (TEXT, [*MODEL, *f"{LATENT} --rope-type rope --mtp-num-layers 1 --num-layers 5 "
               "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|ttmL "
               "--bf16".split()]),
    "video": (VIDEO, [*FLAGS, *SHAPE, "--tensor-model-parallel-size", "4"]),
}  # fmt: skip


def figures(report: dict[str, Any], row: dict[str, Any]) -> None:
    for name in ("step_seconds", "tokens_per_second", "model_flops_utilization", "peak_bytes"):
        assert report[name] == pytest.approx(row[name]), name


@pytest.mark.parametrize("name", SEARCHES)
def test_the_flags_of_a_proposed_layout_run_it(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    program, flags = SEARCHES[name]
    own = "--world-size 4 --gpu H100".split() + ["--video"] * (program is VIDEO)
    assert main([*own, "--search", "--json", "--count", "6", "--", *flags]) == 0
    found = json.loads(capfd.readouterr().out)
    assert 4 < len(found["best"]) == len(found["commands"]) == len(found["layouts"])
    if name == "latent":
        assert any(layout["pipeline_layout"] for layout in found["layouts"])
    script = "pretrain_video.py" if program is VIDEO else "pretrain_gpt.py"
    for row, text in zip(found["best"], found["commands"], strict=True):
        joined = shlex.split(text.replace("\\\n", ""))
        start, words = joined[:4], joined[4:]
        assert start == ["python", script, "--nproc-per-node", "4"]
        assert main([*own, "--json", "--", *words]) == 0
        report = json.loads(capfd.readouterr().out)
        figures(report, row)
        assert report["data_parallel_size"] == row["data_parallel_size"]
    # The program prints the same, and says of no size that it replaces another.
    assert train(program, [*joined[2:], *"--dry-run --dry-run-gpu H100".split()]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert f"estimated on H100: {row['step_seconds']:.3g} s a step" in shown
    assert f"MFU {row['model_flops_utilization']:.1%}" in shown
    assert "parallel-size` (" not in shown


def test_the_best_layout_comes_first_and_is_compared_with_the_given_one(
    capfd: pytest.CaptureFixture[str],
) -> None:
    flags = [*LLAMA_8B.split(), *"--tensor-model-parallel-size 8 --num-layers 4".split()]
    assert main([*"--world-size 16 --search --count 3 --flags 2 --".split(), *flags]) == 0
    lines = capfd.readouterr().out.splitlines()
    first, *rest = (line for line in lines if not line.startswith(">"))
    assert first.startswith("best layout: ") and " MFU " in first
    text = "\n".join(rest)
    assert "the given layout: " in text and "less time" in text
    assert max(map(len, lines)) <= 100
    assert text.count("torchrun --nnodes 2 --nproc-per-node 8") == 2
    assert "--dry-run --dry-run-nodes 2 --dry-run-gpu H100" in text


def test_a_plan_as_json_has_all_tables_and_nothing_else_on_stdout(
    capfd: pytest.CaptureFixture[str],
) -> None:
    flags = [*MODEL, *"--tensor-model-parallel-size 2 --vocab-size 700 --lr 1e-2".split()]
    assert main([*"--world-size 4 --json --".split(), *flags]) == 0
    shown = capfd.readouterr()
    report = json.loads(shown.out)
    assert "`--lr` (0.01) takes the place" in shown.err
    assert report["fits"] is True and report["gpu"] == "H100"
    (rank,) = report["memory"]
    assert rank["peak_bytes"] == report["peak_bytes"]
    total = sum(row["seconds"] for row in report["step_time"])
    assert total == pytest.approx(report["step_seconds"])
    tables = {"stages", "memory", "recomputation", "sent", "step_time", "reserve", "assumptions"}
    assert tables <= set(report)
