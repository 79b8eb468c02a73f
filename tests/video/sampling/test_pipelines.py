"""tools/sample_video.py makes of published folders the clips that diffusers' pipelines make."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from megatron_ext.programs.convert_checkpoint import main as convert
from megatron_ext.train.forking import fork_ranks
from megatron_ext.video.sampling import samples
from megatron_ext.video.sampling.mp4 import as_bytes
from megatron_ext.video.sampling.tool import sample_video
from megatron_ext.video.task import VIDEO
from tests.training_runs import train_on_ranks
from tests.video.sampling import pipelines
from tests.video.sampling.pipelines import FRAMES, SEED, SIDE, STEPS

# diffusers' schedulers turn tensors into arrays in a way that numpy 2 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
SIZE = f"--sample-size {SIDE} {SIDE} --sample-frames {FRAMES} --sample-steps {STEPS}"
MOST = 2
"""The largest difference of a pixel, of 255."""
Sample = Callable[..., Tensor]


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sample:
    """Return a function that samples by the program, and returns frames ``[P, f, H, W, 3]``."""

    def write(folder: Path, pixels: Any, requests: Any, **options: Any) -> None:
        np.save(tmp_path / "clips.npy", np.stack([as_bytes(clip[None])[0] for clip in pixels]))

    monkeypatch.setattr(samples, "write_clips", write)
    monkeypatch.setattr(
        "megatron_ext.train.main.launch",
        lambda main, *, nproc_per_node, **_: fork_ranks(main, nproc_per_node),
    )

    def call(words: str, *texts: str) -> Tensor:
        flags = f"{SIZE} {words} --sample-seed {SEED} --sample-dir {tmp_path / 'clips'}"
        more = ["--sample-texts", *texts] if texts else []
        assert sample_video(VIDEO, [*flags.split(), *more]) == 0
        return torch.from_numpy(np.load(tmp_path / "clips.npy")).float()

    return call


def difference(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape and float(wanted.std()) > 10
    return float((found - wanted).abs().max())


@pytest.mark.parametrize("scheduler", ["unipc", "dpm++", "euler"])
def test_a_folder_of_wan_gives_the_clips_of_its_pipeline(
    scheduler: str, tmp_path: Path, sample: Sample
) -> None:
    root = tmp_path / "wan"
    pipeline = pipelines.wan(root, scheduler)
    wanted = pipelines.sampled(pipeline, "a red square", negative_prompt="left")
    (found,) = sample(f"--load-weights {root} --sample-negative-prompt left", "a red square")
    assert difference(found, wanted) <= MOST


@pytest.mark.parametrize("kind", ["2.1", "flf2v", "a14b", "ti2v"])
def test_images_become_the_clips_of_the_pipeline(kind: str, tmp_path: Path, sample: Sample) -> None:
    root = tmp_path / "wan"
    pipeline = pipelines.wan_of_images(root, kind)
    (tmp_path / "ends").mkdir()
    first, last = (pipelines.picture(tmp_path / "ends" / f"{i}.png", i) for i in range(2))
    given = {"image": first, "last_image": last} if kind == "flf2v" else {"image": first}
    wanted = pipelines.sampled(pipeline, "a red square", **given)
    if kind == "flf2v":
        row = {"text": "a red square", "reference": "ends", "mode": "i2v_loop"}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        found = sample(f"--load-weights {root} --sample-prompts {tmp_path}/rows.jsonl")
    else:
        image = tmp_path / "ends" / "0.png"
        found = sample(f"--load-weights {root} --sample-image {image}", "a red square")
    assert difference(found[0], wanted) <= MOST


@pytest.mark.parametrize("guidance", [True, False])
def test_a_folder_of_flux_gives_the_picture_of_its_pipeline(
    guidance: bool, tmp_path: Path, sample: Sample
) -> None:
    root = tmp_path / "flux"
    pipeline = pipelines.flux(root, guidance=guidance)
    strength = {"guidance_scale": 5.0} if guidance else {}
    wanted = pipelines.pictures_of_flux(pipeline, "a red square", **strength)
    words = "--guidance 5" if guidance else ""
    found = sample(f"--load-weights {root} {words} --sample-frames 1", "a red square")
    assert difference(found[0], wanted) <= MOST


def test_a_folder_of_hunyuan_video_gives_the_clip_of_its_pipeline(
    tmp_path: Path, sample: Sample
) -> None:
    root = tmp_path / "hunyuan"
    pipeline = pipelines.hunyuan(root)
    template = pipelines.template_of_hunyuan(pipeline)
    options = {"prompt_template": template, "max_sequence_length": 256, "guidance_scale": 6.0}
    wanted = pipelines.sampled(pipeline, "a red square", **options)
    (found,) = sample(f"--load-weights {root}", "a red square")
    assert difference(found, wanted) <= MOST


LAYOUTS = {
    "tp2 pp2": "--nproc-per-node 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "cp2 dp2": "--nproc-per-node 4 --context-parallel-size 2",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_gives_the_clips_of_the_pipeline(
    layout: str, tmp_path: Path, sample: Sample
) -> None:
    """Let two experts share the steps of three clips, with one model in memory at a time."""
    root = tmp_path / "wan"
    texts = ["a red square", "green circle", "a square moves right"]
    pipeline = pipelines.wan(root, experts=True)
    found = sample(f"--load-weights {root} --sample-offload {LAYOUTS[layout]}", *texts)
    for number, text in enumerate(texts):
        assert difference(found[number], pipelines.sampled(pipeline, text, number)) <= MOST


def test_guidance_rests_outside_its_range(tmp_path: Path, sample: Sample) -> None:
    root = tmp_path / "wan"
    pipeline = pipelines.wan(root)
    plain = pipelines.sampled(pipeline, "a red square", guidance_scale=1.0)
    words = f"--load-weights {root} --sample-guidance-range"
    assert difference(sample(f"{words} 0 0.001", "a red square")[0], plain) <= MOST
    guided = pipelines.sampled(pipeline, "a red square")
    assert difference(sample(f"{words} 0 1", "a red square")[0], guided) <= MOST
    part = sample(f"{words} 0.6 1", "a red square")[0]
    assert min(difference(part, plain), difference(part, guided)) > 3 * MOST


def test_a_network_without_its_pipeline_takes_encoders_by_flags(
    tmp_path: Path, sample: Sample
) -> None:
    root = tmp_path / "wan"
    wanted = pipelines.sampled(pipelines.wan(root), "a red square")
    flags = f"--load-weights {root}/transformer --codec {root}/vae --t5-path {root}/text_encoder"
    (found,) = sample(f"{flags} --sample-scheduler unipc --sample-shift 3", "a red square")
    assert difference(found, wanted) <= MOST


def test_two_experts_share_the_steps(tmp_path: Path, sample: Sample) -> None:
    root = tmp_path / "wan"
    pipeline = pipelines.wan(root, experts=True)
    wanted = pipelines.sampled(pipeline, "a red square", guidance_scale=4.0, guidance_scale_2=3.0)
    scales = "--sample-text-scale 4 --sample-low-noise-text-scale 3"
    (found,) = sample(f"--load-weights {root} {scales}", "a red square")
    assert difference(found, wanted) <= MOST
    one = sample(f"--load-weights {root} {scales} --sample-boundary 0.01", "a red square")[0]
    assert difference(one, wanted) > 3 * MOST


@pytest.mark.slow
def test_a_tuned_wan_leaves_as_a_part_of_its_pipeline(tmp_path: Path, sample: Sample) -> None:
    """The run samples what diffusers' pipeline samples with the exported weights, averaged or not.

    It reads the sizes of the network and its first weights from the pipeline's folder.
    """
    root = tmp_path / "wan"
    pipeline = pipelines.wan(root)
    for number in range(2):
        pipelines.picture(tmp_path / f"{number}.png", number)
    rows = [json.dumps({"path": f"{i}.png", "text": "a red square"}) for i in range(2)]
    (tmp_path / "clips.jsonl").write_text("\n".join(rows))
    flags = (
        f"--load-weights {root}/transformer --video-data-path {tmp_path}/clips.jsonl "
        f"--online-encoding --codec {root}/vae --text-encoder umt5 --t5-path {root}/text_encoder "
        "--no-fps-words --train-iters 3 --lr 1e-2 --lr-warmup-iters 0 --micro-batch-size 1 "
        "--global-batch-size 2 --num-workers 0 --ema-decay 0.5 --text-dropout 0"
    ).split()
    buckets = [f"--video-buckets={json.dumps({f'{SIDE}px': {'1': [1.0, 1]}})}"]
    save = tmp_path / "tuned"
    assert train_on_ranks([*flags, *buckets], save=save, task=VIDEO)[0] == 0
    before = pipelines.sampled(pipeline, "a red square")
    for average in ("--no-sample-ema", ""):
        exported = tmp_path / f"exported{average}"
        words = f"export --load {save} --hf {exported}{'' if average else ' --ema'}"
        assert convert(words.split()) == 0
        pipeline.transformer = WanTransformer3DModel.from_pretrained(exported)
        wanted = pipelines.sampled(pipeline, "a red square")
        assert difference(wanted, before) > 5 * MOST
        words = f"--load {save} {average} --sample-scheduler unipc --sample-shift 3"
        (found,) = sample(words, "a red square")
        assert difference(found, wanted) <= MOST
