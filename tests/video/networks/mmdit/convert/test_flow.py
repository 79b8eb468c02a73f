"""A step of flow matching with an MMDiT is diffusers' FLUX.1 in plain torch, on every layout."""

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_ext.checkpoint.stored import read_run_config
from megatron_ext.errors import ConfigError
from megatron_ext.layers.initialization import shards_of
from megatron_ext.programs import convert_checkpoint
from megatron_ext.train.run import Run
from megatron_ext.video.config.joint import JointSizes
from megatron_ext.video.config.run import FlowConfig
from megatron_ext.video.data.geometry import Bucket
from megatron_ext.video.data.randomness import draw_noise, draw_normals, draw_uniforms
from megatron_ext.video.model.tokens import pack, position_ids
from megatron_ext.video.networks.mmdit.config import SIZES
from megatron_ext.video.networks.mmdit.convert.table import parameters
from megatron_ext.video.sampling.flow import References
from megatron_ext.video.sampling.samples import velocity_of
from megatron_ext.video.task import VIDEO
from tests.training_runs import training_rows
from tests.video import clips
from tests.video.clips import CHANNELS, IMAGE, POOLED, SHORT, SIDE, TEXT, WIDTH, clip, write_clips
from tests.video.networks.harness import Tensors, check_gradients, check_weights, relative
from tests.video.networks.mmdit.convert.models import flux, ours_of, public_of, theirs

SEED, SHIFT = 5, 3
TINY = dataclasses.replace(SIZES["tiny"], channels=CHANNELS, text_width=WIDTH, pooled_width=POOLED)
FLAGS = (
    "--mmdit-size tiny --no-adaln-zero --train-iters 1 --lr 1e-3 --lr-warmup-iters 0 --clip-grad 1 "
    f"--micro-batch-size 2 --global-batch-size 4 --log-interval 1 --num-workers 0 --seed {SEED} "
    f"--i2v-head-weight 0 --i2v-tail-weight 0 --i2v-loop-weight 0 --flow-shift {SHIFT} "
    "--text-dropout 0.5 --pooled-dropout 0.5"
).split()
LAYOUTS = {
    "one rank": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "cp2": (2, "--context-parallel-size 2"),
    "tp2 dp2": (4, "--tensor-model-parallel-size 2 --use-distributed-optimizer"),
}
GUIDANCE = 3.5
KINDS = {"schnell": "", "dev": f"--guidance-embed --guidance {GUIDANCE}"}
BUCKETS = {"schnell": SHORT, "dev": IMAGE}
"""FLUX.1's two models: one learns from videos, one, which is told a guidance, from images."""


def sizes_of(kind: str) -> JointSizes:
    return dataclasses.replace(TINY, guidance_embed=kind == "dev")


def record(run: Run, path: Path) -> None:
    """Write down the weights that a run on one rank starts from, and the clips of its step."""
    plan: Any = run.train_source
    (chunk,) = run.chunks
    weights = {s.name: s.tensor.detach().clone() for s in shards_of(chunk.module)}
    planned = plan.video_plan.microbatches(0, 0, 0)
    steps = [(members, list(samples)) for _, members, samples in planned]
    torch.save({"weights": weights, "steps": steps}, path)


def microbatch(numbers: Any, samples: Any, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs of the network and the velocity, by the formulas."""
    bucket: Bucket = BUCKETS[kind]
    given = [clip(bucket, number) for number in numbers]
    x0 = torch.stack([sample.latents for sample in given]).double()
    shape = tuple(x0.shape[2:])
    noise = draw_noise(SEED, samples, tuple(x0.shape[1:])).double()
    logistic = torch.sigmoid(draw_normals(SEED, samples, "timestep").double())
    t = SHIFT * logistic / (1 + (SHIFT - 1) * logistic)
    spread, left = t[:, None, None, None, None], FlowConfig().sigma_min
    x_t = (1 - spread) * x0 + (spread + left * (1 - spread)) * noise
    text = torch.stack([sample.text for sample in given]).double()
    pooled = torch.stack([sample.pooled for sample in given]).double()
    text[draw_uniforms(SEED, samples, "text dropout") < 0.5] = 0.0
    pooled[draw_uniforms(SEED, samples, "pooled dropout") < 0.5] = 0.0
    ids = position_ids((shape[0], shape[1], shape[2]), 2)
    inputs = {
        "img": pack(x_t, 2), "img_ids": ids[None], "txt": text,
        "txt_ids": torch.zeros(1, TEXT, 3), "timesteps": t, "y_vec": pooled,
    }  # fmt: skip
    if kind == "dev":
        inputs["guidance"] = torch.full_like(t, GUIDANCE)
    return inputs, pack((1 - left) * noise - x0, 2)


@dataclasses.dataclass(frozen=True)
class Truth:
    """The results that torch and diffusers' class compute from ``weights``."""

    weights: Tensors
    loss: float
    norm: float
    gradients: Tensors


def truth_of(recorded: dict[str, Any], kind: str) -> Truth:
    sizes = sizes_of(kind)
    model = flux(sizes)
    model.load_state_dict(public_of(recorded["weights"], sizes))
    model.double()
    losses = []
    for numbers, samples in recorded["steps"]:
        inputs, velocity = microbatch(numbers, samples, kind)
        losses.append((theirs(model, inputs) - velocity).square().mean())
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    norm = math.sqrt(sum(float(x.square().sum()) for x in gradients.values()))
    own = ours_of({n: x.double() for n, x in gradients.items()}, sizes)
    return Truth(recorded["weights"], float(loss.detach()), norm, own)


def check(run: Run, truth: Truth) -> None:
    chunks = [chunk.module for chunk in run.chunks]
    check_weights(chunks, truth.weights)
    run.runner.observer = partial(check_gradients, chunks, truth.gradients, 2e-6)


@pytest.fixture(scope="module")
def clips_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("clips")
    return {kind: write_clips(root / kind, {BUCKETS[kind]: 9}) for kind in KINDS}


@pytest.fixture(scope="module")
def truths(clips_of: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Truth]:
    root = tmp_path_factory.mktemp("truth")
    found = {}
    for kind, words in KINDS.items():
        prepare = partial(record, path=root / f"{kind}.pt")
        clips.train(clips_of[kind], root / kind, words, flags=FLAGS, prepare=prepare)
        found[kind] = truth_of(torch.load(root / f"{kind}.pt"), kind)
    return found


QUICK = ("one rank-dev", "tp2 dp2-dev", "pp2-schnell", "cp2-schnell")
CASES = [(layout, kind) for layout in LAYOUTS for kind in KINDS]


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(*case, marks=[] if "-".join(case) in QUICK else pytest.mark.slow)
        for case in CASES
    ],
)
def test_a_step_is_that_of_diffusers(
    clips_of: dict[str, Path], truths: dict[str, Truth], tmp_path: Path, layout: str, kind: str
) -> None:
    ranks, words = LAYOUTS[layout]
    truth = truths[kind]
    prepare = partial(check, truth=truth)
    words = f"{KINDS[kind]} {words}"
    rows = clips.train(clips_of[kind], tmp_path, words, flags=FLAGS, ranks=ranks, prepare=prepare)
    (row,) = training_rows(rows)
    assert math.isclose(row["loss"], truth.loss, rel_tol=2e-6)
    assert math.isclose(row["grad_norm"], truth.norm, rel_tol=2e-6)


START = (
    "--lr 1e-30 --weight-decay 0 --lr-warmup-iters 0 --micro-batch-size 2 --global-batch-size 4 "
    "--log-interval 1 --num-workers 0 --train-iters 1 --text-dropout 0"
).split()
"""Flags of a run that name neither the network nor its sizes, and change no weight."""
T2V = "--i2v-head-weight 0 --i2v-tail-weight 0 --i2v-loop-weight 0"


def predict(run: Run, path: Path) -> None:
    """Let rank 0 write down what the run's weights predict for `microbatch`, without references."""
    inputs, _ = microbatch([0, 1], [0, 1], "schnell")
    tokens, times, text, pooled = (inputs[x].float() for x in ("img", "timesteps", "txt", "y_vec"))
    shape = (3, SIDE, SIDE)
    none = References(torch.zeros(2, CHANNELS, *shape), torch.zeros(2, 3, dtype=torch.bool))
    predicted = velocity_of(run).of_shape(shape)(tokens, times, text, pooled, none)
    if run.context.rank == 0:
        torch.save(predicted, path)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [("--tensor-model-parallel-size 2 --sequence-parallel", 2), (T2V, 1)],
    ids=["video with references", "video"],
)
def test_flux_becomes_a_model_of_videos(
    clips_of: dict[str, Path],
    tmp_path: Path,
    words: str,
    ranks: int,
) -> None:
    """Start from weights of images alone; the frame, and frames that are given, add nothing yet."""
    public = flux(TINY)
    public.save_pretrained(tmp_path / "flux")
    words = f"--load-weights {tmp_path / 'flux'} {words}"
    save, before = tmp_path / "run", tmp_path / "predicted.pt"
    options: Any = {"flags": START, "ranks": ranks, "prepare": partial(predict, path=before)}
    clips.train(clips_of["schnell"], save, words, **options, task=VIDEO)
    inputs = {n: x.float() for n, x in microbatch([0, 1], [0, 1], "schnell")[0].items()}
    with torch.no_grad():
        assert relative(torch.load(before), theirs(public, inputs)) <= 1e-5
    stored = read_run_config(save)
    assert stored["joint"]["cond_embed"] == (T2V not in words)
    assert stored["mmdit"]["mmdit_size"] == "tiny"
    if T2V not in words:
        options = {"flags": START, "ranks": ranks, "task": VIDEO}
        said = r"flux\) holds no `embedding.cond_in.bias`, and a run with `--lora-rank` trains ada"
        with pytest.raises(ConfigError, match=said):
            words += " --lora-rank 2"
            clips.train(clips_of["schnell"], tmp_path / "adapters", words, **options)


def test_weights_that_take_references_do_so_in_any_run(
    clips_of: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Open-Sora's file adds a bias to videos without references; a run of these keeps it."""
    sizes = dataclasses.replace(TINY, cond_embed=True)
    generator = torch.Generator().manual_seed(2)
    weights = {n: torch.randn(s, generator=generator) for n, s in parameters(sizes).items()}
    public = public_of(weights, sizes, "open-sora")
    save_file(public, tmp_path / "Open_Sora_v2.safetensors")
    words = f"{T2V} --load-weights {tmp_path / 'Open_Sora_v2.safetensors'}"
    clips.train(clips_of["schnell"], tmp_path / "run", words, flags=START, task=VIDEO)
    target = tmp_path / "back.safetensors"
    words = f"--load {tmp_path / 'run'} --hf {target} --naming open-sora"
    assert convert_checkpoint.main(["export", *words.split()]) == 0
    back = load_file(target)
    assert back.keys() == public.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in public.items())
    words = f"export --load {tmp_path / 'run'} --hf {tmp_path / 'folder'}"
    capfd.readouterr()
    assert convert_checkpoint.main(words.split()) == 2
    assert "published as a single file (open-sora, comfyui, orig" in capfd.readouterr().err
