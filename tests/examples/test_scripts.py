"""All example scripts: each can be tried in a minute, and its full-size command has no errors."""

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    NemotronHConfig,
    PretrainedConfig,
    Qwen3NextConfig,
)

from benchmarks import cross_entropy, gpu_peers, gpu_throughput, gpu_try
from benchmarks.peers import OURS, PEERS
from megatron_ext.config.run import RunConfig
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.planning.memory import memory
from megatron_ext.planning.report import active_parameters, headline, model_parameters
from megatron_ext.text.config.positions import PositionConfig
from megatron_ext.text.cost.network import GptNetwork
from tests.config.test_cli import FP8, GPT3, LLAMA3, MIXTRAL
from tests.examples.scripts import EXAMPLES, ROOT, calls, start, start_stubbed, stub
from tests.text import tiny
from tests.training_runs import config_of, train_steps

TESTS = ROOT / "tests" / "examples"
GPU_ALL = ROOT / "benchmarks" / "gpu_all.sh"
SMOKING = {
    "test_examples.py": "quickstart.sh gpt/pretrain_gpt_1node.sh gpt/pretrain_llama3_8b.sh "
    "gpt/pretrain_llama3_8b_fp8.sh gpt/pretrain_deepseek_v3.sh slurm/pretrain_gpt.sbatch "
    "gpt/pretrain_qwen3_next_80b.sh gpt/pretrain_nemotron_h_56b.sh "
    "custom_model/train.sh "
    "custom_loss/train.sh custom_model/dit.sh sft/quickstart.sh sft/sft_qwen_8gpu.sh "
    "video/quickstart.sh",
    "test_video.py": "video/pretrain_stage1_256px.sh video/pretrain_i2v_768px.sh",
    "test_preferences.py": "dpo/train.sh",
    "test_distillation.py": "distillation/train.sh",
    "test_streaming.py": "streaming/quickstart.sh streaming/longtune_1.3b.sh",
}
"""Files whose slow tests run scripts with ``SMOKE=1``."""
SMOKED = {script: file for file, words in SMOKING.items() for script in words.split()}
FULL_SIZE = {
    "gpt/pretrain_gpt_1node.sh": 8, "gpt/pretrain_llama3_8b.sh": 8,
    "gpt/pretrain_llama3_8b_fp8.sh": 8, "slurm/pretrain_gpt.sbatch": 32, "custom_model/train.sh": 4,
    "custom_loss/train.sh": 4, "gpt/pretrain_deepseek_v3.sh": 1024,
    "gpt/pretrain_qwen3_next_80b.sh": 64, "gpt/pretrain_nemotron_h_56b.sh": 64,
}  # fmt: skip
"""Ranks of the scripts that take the data, the tokenizer and the checkpoints."""


def scripts() -> set[str]:
    found = [*EXAMPLES.rglob("*.sh"), *EXAMPLES.rglob("*.sbatch")]
    own = [x for x in found if not x.read_text(encoding="utf-8").startswith("# Sourced by ")]
    return {str(path.relative_to(EXAMPLES)) for path in own}


def test_every_script_has_a_smoke_mode_that_a_test_runs() -> None:
    assert scripts() == set(SMOKED)
    for script, file in SMOKED.items():
        assert '[[ -n "${SMOKE:-}" ]]' in (EXAMPLES / script).read_text(encoding="utf-8"), script
        text = (TESTS / file).read_text(encoding="utf-8")
        assert script in text or Path(script).name in text, (script, file)
        assert "smoke(" in text


@pytest.mark.parametrize("script", FULL_SIZE)
def test_full_size_on_gpus(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    config = config_of(words[first + 1 :], ranks=FULL_SIZE[script], device="cuda")
    assert config.checkpoint.save == "out"
    assert config.parallel.world_size == FULL_SIZE[script]


def llama_example(name: str, folder: Path, **environment: str) -> RunConfig:
    stub(folder, "python")
    words = [EXAMPLES / "gpt" / name, "data", "tokenizer", "out"]
    code, shown = start_stubbed(folder, *words, **environment)
    assert code == 0, shown
    return config_of(calls(folder, "python")[-1][1:], ranks=8, device="cuda")


def test_the_plan_of_deepseek_v3_counts_671_billion_parameters(tmp_path: Path) -> None:
    """Transformers' own class has as many; a token uses 37 billion of them (arXiv:2412.19437)."""
    stub(tmp_path, "python")
    script = EXAMPLES / "gpt" / "pretrain_deepseek_v3.sh"
    code, shown = start_stubbed(tmp_path, script, PLAN="1")
    assert code == 0, shown
    (words,) = calls(tmp_path, "python")
    network = GptNetwork.of(config_of(words[1:], ranks=0))
    ranks = memory(network)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(DeepseekV3Config())
    count = sum(parameter.numel() for parameter in theirs.parameters())
    used = sum(
        parameter.numel() // (256 // 8 if ".experts." in name else 1)
        for name, parameter in theirs.named_parameters()
    )
    assert (count // 10**9, used // 10**9) == (671, 37)
    # A depth has a layer like the last one, a projection of two hidden states, and three norms.
    (h, layer) = 7168, theirs.model.layers[-1]
    depth = 2 * h * h + 3 * h + sum(parameter.numel() for parameter in layer.parameters())
    unused = sum(x.numel() for x in layer.mlp.experts.parameters()) // 256 * 248
    assert model_parameters(ranks) == count + depth
    assert active_parameters(ranks, network) == used + depth - unused
    assert "of them used by a token" in headline(network, ranks)


QWEN3_NEXT = Qwen3NextConfig(
    num_hidden_layers=48, num_experts=512, num_experts_per_tok=10, intermediate_size=5120,
)  # fmt: skip
NEMOTRON_H = NemotronHConfig(
    hybrid_override_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-", hidden_size=8192,
    intermediate_size=32768, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
    mamba_num_heads=256, mamba_head_dim=64, ssm_state_size=256, n_groups=8,
)  # fmt: skip


@pytest.mark.parametrize(
    ("script", "model", "billions"),
    [
        ("pretrain_qwen3_next_80b.sh", QWEN3_NEXT, (79, 3)),
        ("pretrain_nemotron_h_56b.sh", NEMOTRON_H, (56, 56)),
    ],
)
def test_plans_of_mixed_layers_count_the_parameters_of_transformers(
    script: str, model: PretrainedConfig, billions: tuple[int, int], tmp_path: Path
) -> None:
    stub(tmp_path, "python")
    code, shown = start_stubbed(tmp_path, EXAMPLES / "gpt" / script, PLAN="1")
    assert code == 0, shown
    (words,) = calls(tmp_path, "python")
    network = GptNetwork.of(config_of(words[1:], ranks=0))
    ranks = memory(network)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(model)
    count = sum(parameter.numel() for parameter in theirs.parameters())
    unused = sum(
        parameter.numel() // 512 * (512 - 10)
        for name, parameter in theirs.named_parameters()
        if ".experts." in name
    )
    assert (count // 10**9, (count - unused) // 10**9) == billions
    assert model_parameters(ranks) == count
    assert active_parameters(ranks, network) == count - unused


def test_the_fp8_example_is_llama_3_8b_in_8_bits(tmp_path: Path) -> None:
    config = llama_example("pretrain_llama3_8b_fp8.sh", tmp_path, IMPL="torch")
    assert (config.fp8.fp8_format, config.fp8.fp8_recipe) == ("hybrid", "tensorwise")
    assert config.model.transformer_impl == "torch"
    bf16 = llama_example("pretrain_llama3_8b.sh", tmp_path)
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_query_groups"):
        assert getattr(config.model, name) == getattr(bf16.model, name)
    assert config.section(PositionConfig) == bf16.section(PositionConfig)
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
def test_a_job_is_queued_after_its_plan(said: str, code: int, queued: bool, tmp_path: Path) -> None:
    stub(tmp_path, "python", said)
    stub(tmp_path, "sbatch")
    script, words = EXAMPLES / "slurm" / "pretrain_gpt.sbatch", ["data", "tokenizer", "out"]
    found, shown = start_stubbed(tmp_path, script, *words, GPU="H200")
    assert found == code
    assert said.split(maxsplit=1)[1].split(">")[0].split(";")[0].strip() in shown
    assert calls(tmp_path, "sbatch") == ([[str(script), *words]] if queued else [])
    (planned,) = calls(tmp_path, "python")
    assert planned[0] == "pretrain_gpt.py"
    config = config_of(planned[1:], ranks=0)
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
        "gpu_try", "gpu_throughput", "attention", "cross_entropy", "doctor", "gpu_peers",
        "fp8_linear", "mmdit_block", "-m",
    }  # fmt: skip
    for script in (cross_entropy, gpu_throughput, gpu_peers, gpu_try):
        for words in found[script.__name__.rpartition(".")[2]]:
            assert script.parsed(words).out.parent == out
    (tried,) = map(gpu_try.parsed, found["gpu_try"])
    assert tried.seconds + 3 <= 60 - 3  # A few seconds less than `gpu_all.sh` allows.
    peers = [gpu_peers.parsed(words).peers for words in found["gpu_peers"]]
    assert [peer for each in peers for peer in each] == [*list(PEERS)[1:], OURS]
    start = "pytest -m gpu -v -p no:cacheprovider".split()
    assert all(words[: len(start)] == start for words in found["-m"])
    for path in (word for words in found["-m"] for word in words if word.startswith("tests/")):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("part", ["1", "2"])
def test_limits_of_a_call_of_gpu_all_fit_into_ten_minutes(part: str, tmp_path: Path) -> None:
    stub(tmp_path, "python")
    code, shown = start_stubbed(tmp_path, GPU_ALL, part, tmp_path / "results", LIST="1")
    limits = {line.rsplit(" ", 1)[0]: int(line.rsplit(" ", 1)[1]) for line in shown.splitlines()}
    assert code == 0 and calls(tmp_path, "python") == []
    assert not (tmp_path / "results").exists()
    assert sum(limits.values()) <= 560
    assert min(limits.values()) >= 15
    text = GPU_ALL.read_text(encoding="utf-8")
    assert 'timeout --kill-after="$GRACE" "$((limit - GRACE))"' in text  # A limit is a worst case.
    assert text.count("timeout ") == 1
    assert list(limits)[1] == {"1": "try", "2": "peer_plain_torch"}[part]
    assert start_stubbed(tmp_path, GPU_ALL, "3", tmp_path / "results")[0] == 2


def test_a_failing_piece_of_gpu_all_stops_no_other(tmp_path: Path) -> None:
    stub(tmp_path, "python", 'case "$*" in *gpu_try*) exit 3;; esac')
    out = tmp_path / "results"
    assert start_stubbed(tmp_path, GPU_ALL, "1", out)[0] == 1
    summary = (out / "summary_1.txt").read_text()
    assert "try: exit code 3" in summary
    assert summary.count("exit code 0") == len(summary.splitlines()) - 1 > 5


@pytest.mark.slow
def test_gpu_all_runs_through_at_its_smallest(tmp_path: Path) -> None:
    out = tmp_path / "results"
    given = {"TINY": "1", "DEVICE": "cpu", "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    code, shown = start(GPU_ALL, "all", out, **given)
    ends = dict(re.findall(r"(\S+): exit code (\d+)", (out / "summary_all.txt").read_text()))
    # A slow machine ends a piece at its limit (124); pytest finds no test that can run (5).
    assert set(ends.values()) <= {"0", "5", "124"} and code in (0, 1), shown
    tables = ends.keys() - {"wheels", "doctor", "tests_first", "tests_all"}
    assert len(tables) == 14
    in_time = {name for name in tables if ends[name] == "0"}
    assert in_time <= {path.stem for path in out.glob("*.md")}, shown
    if "try" in in_time:
        assert "FAILED" not in (out / "try.md").read_text()


SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --log-interval 1 --save-interval 2 --eval-iters 1 "
    "--eval-interval 4 --num-workers 0 "
)
SCRIPTS = {
    "gpt3": GPT3 + SMALL + "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 "
    "--rampup-batch-size 4 4 12 --global-batch-size 8 --train-iters 4 --lr-decay-iters 4 "
    "--initial-loss-scale 1024",
    "llama3": f"{LLAMA3} {FP8} --fp8-param-gather {SMALL} --tensor-model-parallel-size 2 "
    "--ffn-hidden-size 128 --num-query-groups 2 --kv-channels 16 --vocab-size 250 "
    "--global-batch-size 4 --train-samples 16 --lr-decay-samples 16 --lr-warmup-samples 4",
    # The script names a project of Weights & Biases only where the environment holds a key.
    "mixtral": MIXTRAL.split("--wandb")[0] + "--moe-permute-fusion " + SMALL + "--num-experts 2 "
    "--ffn-hidden-size 128 --num-query-groups 2 --pipeline-model-parallel-size 1 "
    "--expert-model-parallel-size 2 --global-batch-size 4 --train-iters 4 --lr-decay-iters 4 "
    "--lr-warmup-iters 1 --split 8,1,1",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the prefix of 2,000 documents of 20 tokens."""
    prefix = tmp_path_factory.mktemp("corpus") / "text_document"
    dice = np.random.default_rng(1)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(2000):
            writer.add_document(dice.integers(0, 400, 20), [20])
    return prefix


def words_of(name: str, corpus: Path, folder: Path, load: str) -> list[str]:
    vocab, merges = tiny.gpt2_files()
    files = {"D": corpus, "V": vocab, "M": merges, "TM": tiny.sentencepiece_model(), "C": load}
    files |= {"P": folder / "cache", "T": folder / "logs", "C/tensorboard": folder / "logs"}
    return [str(files.get(word, word)) for word in SCRIPTS[name].split()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_of_megatron_lm_train_and_go_on(name: str, corpus: Path, tmp_path: Path) -> None:
    save = tmp_path / "whole"
    words = words_of(name, corpus, tmp_path, str(save))
    whole = train_steps(words, save, ranks=2)
    assert [row["iteration"] for row in whole] == [1, 2, 3, 4]
    assert all(math.isfinite(row["lm loss"]) for row in whole)
    assert whole[-1]["grad_norm"] > 0 and math.isfinite(whole[-1]["grad_norm"])

    resumed = train_steps([*words, "--ckpt-step", "2"], tmp_path / "again", ranks=2)
    assert [row["iteration"] for row in resumed] == [3, 4]
    # The third step's loss; Mixtral's script starts its optimizer anew.
    equal = 1 if "--no-load-optim" in words else 2
    for row, want in zip(resumed[:equal], whole[2:], strict=False):
        assert row["lm loss"] == want["lm loss"]
