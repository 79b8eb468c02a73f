"""The stages of Open-Sora 2.0: their commands at full size, and both of them at a tiny one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.video import task
from megatron_ext.video.config.mmdit import MMDiTConfig
from megatron_ext.video.config.run import ConditionConfig
from megatron_ext.video.data.geometry import parse_plan
from megatron_ext.video.data.preprocess_options import parse_options
from tests.examples.scripts import EXAMPLES, calls, rows, smoke, stub, succeed

VIDEO = EXAMPLES / "video"
STAGE1, I2V = "pretrain_stage1_256px.sh", "pretrain_i2v_768px.sh"
Commands = Callable[..., tuple[list[str], list[str]]]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Return a script's commands with the flags of eight GPUs: encoding, and training."""
    python = stub(tmp_path, "python")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("vae", "t5", "clip"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")

    def started(script: str, **environment: str) -> tuple[list[str], list[str]]:
        (tmp_path / "python.calls").unlink(missing_ok=True)
        encoders = {name: str(tmp_path / name.lower()) for name in ("VAE", "T5", "CLIP")}
        words = ["clips.jsonl", "latents", *(["stage1"] if script == I2V else []), "out"]
        succeed(VIDEO / script, *words, PYTHON=str(python), **encoders, **environment)
        encoding, training = calls(tmp_path, "python")
        return encoding, training

    return started


def config_of(training: list[str], gpus: int) -> RunConfig:
    words = training[training.index("pretrain_video.py") + 1 :]
    return parse_args(words, task.VIDEO, world_size=gpus, device="cuda").config


@pytest.mark.parametrize(
    ("script", "recompute", "steps", "microbatches"),
    [(STAGE1, (8, 38), 85000, 112), (I2V, (None, None), 13000, 48)],
)
def test_full_size_on_one_node(
    script: str, recompute: tuple[Any, Any], steps: int, microbatches: int, commands: Commands
) -> None:
    _, training = commands(script)
    assert training[:3] == ["pretrain_video.py", "--nproc-per-node", "8"]
    config = config_of(training, 8)
    assert config.section(MMDiTConfig).sizes(config.model).num_parameters / 1e9 == pytest.approx(
        11.9, abs=0.03
    )
    mmdit = config.section(MMDiTConfig)
    assert (mmdit.recompute_double_blocks, mmdit.recompute_single_blocks) == recompute
    training_flags, replicas = config.training, config.parallel.data_parallel_size
    size, batch = training_flags.batch_sizes
    assert (training_flags.train_iters, batch // (size * replicas)) == (steps, microbatches)
    optimizer, ema = config.optimizer, config.ema.ema_decay
    assert (optimizer.lr, optimizer.lr_warmup_iters) == (1e-4, 1000)
    assert (optimizer.adam_beta1, optimizer.adam_beta2) == (0.9, 0.95)
    assert (optimizer.adam_eps, optimizer.weight_decay, optimizer.clip_grad) == (1e-15, 0.01, 1.0)
    assert (ema, config.section(ConditionConfig).reference_loss) == (0.9999, "masked")


@pytest.mark.parametrize("script", [STAGE1, I2V])
def test_the_published_hyper_parameters_on_four_nodes(script: str, commands: Commands) -> None:
    _, training = commands(script, OPENSORA="1", NODES="4", RENDEZVOUS="first:29500")
    assert training[:6] == "-m torch.distributed.run --nnodes 4 --nproc-per-node 8".split()
    config = config_of(training, 32)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.lr_warmup_iters, optimizer.adam_beta2) == (5e-5, 0, 0.999)
    assert (optimizer.weight_decay, optimizer.adam_eps) == (0.0, 1e-15)
    assert not config.ema.keeps_average(trains=True)
    assert config.section(ConditionConfig).reference_loss == "all"


def test_the_modes_and_layouts_of_the_stages(commands: Commands) -> None:
    first, last = (config_of(commands(script)[1], 8) for script in (STAGE1, I2V))
    assert first.section(ConditionConfig).modes == ("t2v",)
    weights = {
        mode: last.section(ConditionConfig).weight(mode)
        for mode in last.section(ConditionConfig).modes
    }
    assert weights == {"t2v": 1, "i2v_head": 5, "i2v_tail": 1, "i2v_loop": 1}
    sizes = [
        (p.tensor_model_parallel_size, p.context_parallel_size, p.data_parallel_size)
        for p in (first.parallel, last.parallel)
    ]
    assert sizes == [(4, 1, 2), (2, 4, 1)]
    assert last.checkpoint.pretrained_checkpoint == "stage1"


@pytest.mark.parametrize(("script", "references"), [(STAGE1, ()), (I2V, (1,))])
def test_clips_are_encoded_for_the_stage(
    script: str, references: tuple[int, ...], commands: Commands
) -> None:
    encoding, _ = commands(script)
    assert encoding[0] == "tools/preprocess_video.py"
    words = [str(VIDEO / Path(w).name) if w.endswith(".json") else w for w in encoding[1:]]
    options = parse_options(words)
    assert options.encode.reference_lengths == references
    assert options.text_encoder.text_length == 512


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "buckets_256px.json",
            {"256px": (45, 12, 6, 4, 3), "768px": (13,), "1024px": (7,)},
        ),
        ("buckets_768px.json", {"256px": (130, 14, 10, 7, 6), "768px": (38, 6, 4, 3, 2)}),
    ],
)
def test_micro_batch_sizes_are_the_published_ones(
    name: str, expected: dict[str, tuple[int, ...]]
) -> None:
    plan = parse_plan((VIDEO / name).read_text())
    assert set(plan.rules) == set(expected)
    for resolution, sizes in expected.items():
        rules = plan.rules[resolution]
        lengths = [1] if len(sizes) == 1 else range(1, 130, 4)
        found = {frames: rules[frames].micro_batch_size for frames in rules}
        assert found == {f: sizes[0 if f == 1 else 1 + max(0, (f - 5) // 32)] for f in lengths}
        assert {rule.probability for rule in rules.values()} == {0.5 if len(sizes) == 1 else 1.0}


@pytest.mark.slow
def test_both_stages_run_and_the_second_begins_with_the_first(tmp_path: Path) -> None:
    out = tmp_path / "run"
    shown = smoke(f"video/{I2V}", out, timeout=500)
    assert "holds no `embedding.cond_in.weight`, so it starts at zero." in shown
    first, last = rows(out / "stage1", "train"), rows(out, "train")
    for found in (first, last):
        assert [row["iteration"] for row in found] == [1, 2, 3, 4]
        assert all(math.isfinite(row["loss"]) for row in found)
    assert not any("loss i2v_head" in row for row in first)
    assert any("loss i2v_head" in row for row in last)
    # Steps of one bucket each, whose micro-batch sizes are 2 and 4.
    seen = [0, *(row["consumed_samples"] for row in first)]
    assert {after - before for before, after in itertools.pairwise(seen)} == {8, 16}
