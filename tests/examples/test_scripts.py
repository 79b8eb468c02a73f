"""All example scripts: each can be tried in a minute, and its full-size command has no errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import cross_entropy, gpu_peers, gpu_throughput
from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.text.task import TEXT
from tests.examples.scripts import EXAMPLES, ROOT, calls, start_stubbed, stub

TESTS = ROOT / "tests" / "examples"
GPU_ALL = ROOT / "benchmarks" / "gpu_all.sh"
SMOKED = {
    "quickstart.sh": "test_examples.py",
    "gpt/pretrain_gpt_1node.sh": "test_examples.py",
    "gpt/pretrain_llama3_8b.sh": "test_examples.py",
    "gpt/pretrain_llama3_8b_fp8.sh": "test_examples.py",
    "slurm/pretrain_gpt.sbatch": "test_examples.py",
    "custom_model/train.sh": "test_examples.py",
    "custom_loss/train.sh": "test_examples.py",
    "custom_model/dit.sh": "test_examples.py",
    "sft/quickstart.sh": "test_examples.py",
    "sft/sft_qwen_8gpu.sh": "test_examples.py",
    "video/quickstart.sh": "test_examples.py",
    "video/pretrain_stage1_256px.sh": "test_video_stages.py",
    "video/pretrain_i2v_768px.sh": "test_video_stages.py",
    "streaming/quickstart.sh": "test_streaming_examples.py",
    "streaming/longtune_1.3b.sh": "test_streaming_examples.py",
}
"""The file whose slow tests run the script with ``SMOKE=1``."""
FULL_SIZE = {
    "gpt/pretrain_gpt_1node.sh": 8,
    "gpt/pretrain_llama3_8b.sh": 8,
    "gpt/pretrain_llama3_8b_fp8.sh": 8,
    "slurm/pretrain_gpt.sbatch": 32,
    "custom_model/train.sh": 4,
    "custom_loss/train.sh": 4,
}
"""Ranks of the scripts that take the data, the tokenizer and the checkpoints."""


def scripts() -> set[str]:
    """Return all scripts, without those that others source."""
    found = [*EXAMPLES.rglob("*.sh"), *EXAMPLES.rglob("*.sbatch")]
    return {
        str(path.relative_to(EXAMPLES))
        for path in found
        if not path.read_text(encoding="utf-8").startswith("# Sourced by ")
    }


def test_every_script_has_a_smoke_mode_that_a_test_runs() -> None:
    assert scripts() == set(SMOKED)
    for script, file in SMOKED.items():
        assert '[[ -n "${SMOKE:-}" ]]' in (EXAMPLES / script).read_text(encoding="utf-8"), script
        text = (TESTS / file).read_text(encoding="utf-8")
        assert script in text or Path(script).name in text, (script, file)
        assert "smoke(" in text


@pytest.mark.parametrize("script", FULL_SIZE)
def test_full_size_commands_have_no_errors_on_gpus(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, more in (("python", ""), ("srun", ""), ("scontrol", "echo node0")):
        stub(tmp_path, name, more)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "node[0-3]"}
    job["SLURM_SUBMIT_DIR"] = str(ROOT)
    queued = script.endswith("sbatch")
    words = [EXAMPLES / script, "data", "tokenizer", "out"]
    code, shown = start_stubbed(tmp_path, *words, **(job if queued else {}))
    assert code == 0, shown
    (words,) = calls(tmp_path, "srun" if queued else "python")
    first = next(i for i, word in enumerate(words) if word.endswith((".py", "pretrain_gpt.py")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = parse_args(
        words[first + 1 :], TEXT, world_size=FULL_SIZE[script], device="cuda"
    ).config
    assert config.checkpoint.save == "out"
    assert config.parallel.world_size == FULL_SIZE[script]


def llama_example(name: str, folder: Path, **environment: str) -> RunConfig:
    stub(folder, "python")
    words = [EXAMPLES / "gpt" / name, "data", "tokenizer", "out"]
    code, shown = start_stubbed(folder, *words, **environment)
    assert code == 0, shown
    return parse_args(calls(folder, "python")[-1][1:], TEXT, world_size=8, device="cuda").config


def test_the_fp8_example_is_llama_3_8b_in_8_bits(tmp_path: Path) -> None:
    config = llama_example("pretrain_llama3_8b_fp8.sh", tmp_path, IMPL="torch")
    assert (config.fp8.fp8_format, config.fp8.fp8_recipe) == ("hybrid", "tensorwise")
    assert config.model.transformer_impl == "torch"
    bf16 = llama_example("pretrain_llama3_8b.sh", tmp_path)
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_query_groups", "rotary_base"):
        assert getattr(config.model, name) == getattr(bf16.model, name)
    assert config.optimizer == bf16.optimizer
    assert config.training.train_samples == bf16.training.train_samples


@pytest.mark.parametrize(
    ("said", "code", "queued"),
    [
        ("echo fits: 65 GB", 0, True),
        ("echo DOES NOT FIT: 165 GB; exit 1", 1, False),
        ("echo error: no such file >&2; exit 2", 2, False),
    ],
)
def test_a_job_is_queued_only_after_its_plan(
    said: str, code: int, queued: bool, tmp_path: Path
) -> None:
    stub(tmp_path, "python", said)
    stub(tmp_path, "sbatch")
    script, words = EXAMPLES / "slurm" / "pretrain_gpt.sbatch", ["data", "tokenizer", "out"]
    found, shown = start_stubbed(tmp_path, script, *words, GPU="H200")
    assert found == code
    assert said.split(maxsplit=1)[1].split(">")[0].split(";")[0].strip() in shown
    assert calls(tmp_path, "sbatch") == ([[str(script), *words]] if queued else [])
    (planned,) = calls(tmp_path, "python")
    assert planned[0] == "pretrain_gpt.py"
    config = parse_args(planned[1:], TEXT, world_size=0, device="cpu").config
    assert config.planning.dry_run
    assert (config.planning.dry_run_nodes, config.planning.dry_run_gpu) == (4, "H200")
    assert config.parallel.world_size == 32


def test_gpu_all_runs_every_piece_with_flags_that_its_script_takes(tmp_path: Path) -> None:
    stub(tmp_path, "python")
    out = tmp_path / "results"
    code, shown = start_stubbed(tmp_path, GPU_ALL, "all", out)
    assert code == 0, shown
    assert "exit code 1" not in shown
    found: dict[str, list[list[str]]] = {}
    for words in calls(tmp_path, "python"):
        found.setdefault(Path(words[0]).stem, []).append(words[1:])
    assert set(found) == {
        "attention", "fp8_linear", "cross_entropy", "mmdit_block", "gpu_throughput", "gpu_peers",
        "doctor", "-m",
    }  # fmt: skip
    parsers = {
        "cross_entropy": cross_entropy.parsed,
        "gpu_throughput": gpu_throughput.parsed,
        "gpu_peers": gpu_peers.parsed,
    }
    for name, parsed in parsers.items():
        for words in found[name]:
            assert parsed(words).out.parent == out
    assert found["-m"] == [
        [*"pytest tests/gpu -m gpu -v -p no:cacheprovider -k".split(), "not tiny_size"]
    ]


def test_gpu_all_skips_what_finds_no_time_left(tmp_path: Path) -> None:
    stub(tmp_path, "python")
    out = tmp_path / "results"
    code, shown = start_stubbed(tmp_path, GPU_ALL, "2", out, BUDGET="10")
    assert code == 1
    assert calls(tmp_path, "python") == []
    summary = (out / "summary_2.txt").read_text()
    assert summary.count("skipped") == 3
    assert summary in shown
    assert start_stubbed(tmp_path, GPU_ALL, "3", out)[0] == 2
