"""The clips of the video example: the captions held out, and the measures of a clip."""

import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.config.run import RunConfig
from megatron_ext.video import task
from megatron_ext.video.config.joint import JointConfig
from megatron_ext.video.config.run import ConditionConfig
from megatron_ext.video.data.cli import parse_options
from megatron_ext.video.data.geometry import parse_plan
from megatron_ext.video.networks.mmdit.config import sizes_of
from tests.examples.scripts import EXAMPLES, calls, rows, smoke, stub, succeed
from tests.training_runs import config_of
from tests.video.networks.wan.plain import num_parameters

VIDEO = EXAMPLES / "video"


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, VIDEO / script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    done = run("make_clips.py", folder, "--per-caption=2", "--held-out=16")
    assert done.returncode == 0, done.stderr
    assert "64 clips of 32 captions" in done.stdout and "16 captions held out" in done.stdout
    return folder


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(VIDEO)
    import make_clips
    import measure_clips

    return make_clips, measure_clips


def rows_of(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "clips.jsonl").read_text().splitlines()]


def test_held_out_captions_have_no_clip_and_their_words_do(clips: Path) -> None:
    held_out = (clips / "held_out.txt").read_text().splitlines()
    trained = {row["text"] for row in rows_of(clips)}
    assert len(set(held_out)) == 16 and len(trained) == 32
    assert not trained & set(held_out)
    assert {w for text in held_out for w in text.split()} <= {w for t in trained for w in t.split()}


def test_held_out_captions_are_balanced_and_follow_the_seed(modules: Any) -> None:
    make, _ = modules
    drawn = [make.held_out_captions(16, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    for captions in drawn:
        # One of each pair of colour and direction, and shapes as evenly as 16 can be.
        assert set(Counter((colour, to) for colour, _, to in captions).values()) == {1}
        assert sorted(Counter(shape for _, shape, _ in captions).values()) == [5, 5, 6]


def test_a_word_without_a_clip_is_refused(tmp_path: Path) -> None:
    done = run("make_clips.py", tmp_path, "--held-out=99")
    assert done.returncode == 1
    assert "`--held-out` (99) must leave a caption for every word" in done.stderr
    assert not list(tmp_path.iterdir())


def test_rendered_clips_follow_their_captions(clips: Path) -> None:
    (clips / "samples.jsonl").write_text((clips / "clips.jsonl").read_text())
    done = run("measure_clips.py", clips, "--at-least=64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "64 of 64 follow their caption"


def test_other_captions_are_not_followed(clips: Path) -> None:
    turn = {"left": "right", "right": "up", "up": "down", "down": "left"}
    paint = {"red": "green", "green": "blue", "blue": "yellow", "yellow": "red"}
    lines = []
    for i, row in enumerate(rows_of(clips)):
        swap = turn if i % 2 else paint
        text = " ".join(swap.get(word, word) for word in row["text"].split())
        lines.append(json.dumps({"path": row["path"], "text": text}) + "\n")
    (clips / "samples.jsonl").write_text("".join(lines))
    done = run("measure_clips.py", clips, "--at-least=1")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "0 of 64 follow their caption"


def test_nothing_is_seen_where_nothing_moves_or_is(modules: Any) -> None:
    make, measure = modules
    background = np.full((9, 32, 32, 3), float(make.BACKGROUND))
    assert measure.colour_of(background) == measure.NOTHING
    assert measure.direction_of(background) == measure.NOTHING
    noise = background + np.random.default_rng(0).normal(0, 8, background.shape)
    assert measure.colour_of(noise) == measure.NOTHING
    still = background.copy()
    still[:, 10:20, 10:20] = make.COLOURS["red"]
    assert measure.colour_of(still) == "red"
    assert measure.direction_of(still) == measure.NOTHING


def test_a_shape_that_moves_slowly_or_aslant_goes_where_it_goes_furthest(modules: Any) -> None:
    make, measure = modules
    for name, (dy, dx) in make.DIRECTIONS.items():
        frames = np.full((9, 32, 32, 3), float(make.BACKGROUND))
        for i in range(9):
            y, x = 12 + dy * i + i // 4, 12 + dx * i + i // 4
            frames[i, y : y + 8, x : x + 8] = make.COLOURS["yellow"]
        assert (measure.colour_of(frames), measure.direction_of(frames)) == ("yellow", name)


def test_no_colour_and_no_samples_are_refused(modules: Any, tmp_path: Path) -> None:
    _, measure = modules
    with pytest.raises(SystemExit, match="`a cat moves left` must name one colour"):
        measure.wanted("a cat moves left")
    done = run("measure_clips.py", tmp_path)
    assert done.returncode == 1
    assert "samples.jsonl does not exist; give a folder that sample_video.py wrote" in done.stderr


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


def configured(training: list[str], gpus: int) -> RunConfig:
    words = training[training.index("pretrain_video.py") + 1 :]
    return config_of(words, task.VIDEO, ranks=gpus, device="cuda")


@pytest.mark.parametrize(
    ("script", "recompute", "steps", "microbatches"),
    [(STAGE1, (8, 38), 85000, 112), (I2V, (None, None), 13000, 48)],
)
def test_full_size_on_one_node(
    script: str, recompute: tuple[Any, Any], steps: int, microbatches: int, commands: Commands
) -> None:
    _, training = commands(script)
    assert training[:3] == ["pretrain_video.py", "--nproc-per-node", "8"]
    config = configured(training, 8)
    joint = config.section(JointConfig)
    assert num_parameters(sizes_of(config)) / 1e9 == pytest.approx(11.9, abs=0.03)
    assert (joint.recompute_double_blocks, joint.recompute_single_blocks) == recompute
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
    config = configured(training, 32)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.lr_warmup_iters, optimizer.adam_beta2) == (5e-5, 0, 0.999)
    assert (optimizer.weight_decay, optimizer.adam_eps) == (0.0, 1e-15)
    assert not config.ema.keeps_average(trains=True)
    assert config.section(ConditionConfig).reference_loss == "all"


def test_the_first_stage_starts_from_published_weights(commands: Commands) -> None:
    _, training = commands(STAGE1, WEIGHTS="FLUX.1 dev/transformer")
    assert training[training.index("--load-weights") + 1] == "FLUX.1 dev/transformer"
    assert "--load-weights" not in commands(STAGE1)[1]


def test_the_modes_and_layouts_of_the_stages(commands: Commands) -> None:
    first, last = (configured(commands(script)[1], 8) for script in (STAGE1, I2V))
    assert first.section(ConditionConfig).modes == ("t2v",)
    conditions = last.section(ConditionConfig)
    weights = {mode: conditions.weight(mode) for mode in conditions.modes}
    assert weights == {"t2v": 1, "i2v_head": 5, "i2v_tail": 1, "i2v_loop": 1}
    names = ("tensor_model_parallel_size", "context_parallel_size", "data_parallel_size")
    sizes = [[getattr(x.parallel, name) for name in names] for x in (first, last)]
    assert sizes == [[4, 1, 2], [2, 4, 1]]
    assert last.checkpoint.pretrained_checkpoint == "stage1"


@pytest.mark.parametrize(("script", "references"), [(STAGE1, ()), (I2V, (1,))])
def test_clips_for_the_stage(script: str, references: tuple[int, ...], commands: Commands) -> None:
    encoding, _ = commands(script)
    assert encoding[0] == "tools/preprocess_video.py"
    words = [str(VIDEO / Path(w).name) if w.endswith(".json") else w for w in encoding[1:]]
    options = parse_options(words)
    assert options.encode.reference_lengths == references
    assert options.text_encoder.text_length == 512


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("buckets_256px.json", {"256px": (45, 12, 6, 4, 3), "768px": (13,), "1024px": (7,)}),
        ("buckets_768px.json", {"256px": (130, 14, 10, 7, 6), "768px": (38, 6, 4, 3, 2)}),
    ],
)
def test_micro_batch_sizes_are_published(name: str, expected: dict[str, tuple[int, ...]]) -> None:
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
    shown = smoke(f"video/{I2V}", out)
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
