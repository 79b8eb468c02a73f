"""Runs of pretrain_video.py with HunyuanVideo: layouts, adapters, resuming, and sampling."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.parallel.context import ParallelContext
from megatron_ext.schedules.forward import forward_engine
from megatron_ext.video.convert.exporting import Export, export_weights
from megatron_ext.video.data.conditions import condition
from megatron_ext.video.model.tokens import pack
from megatron_ext.video.networks.hunyuan.config import SIZES
from megatron_ext.video.networks.hunyuan.convert.conversion import CONVERSION
from megatron_ext.video.networks.hunyuan.flow import HunyuanVelocity
from megatron_ext.video.sampling.flow import References
from megatron_ext.video.task import VIDEO
from tests.ranks import ranks
from tests.video.clips import POOLED, SHORT, WIDTH, Rows, steps, write_clips
from tests.video.networks.harness import build, gathered_weights, relative, wrapped
from tests.video.networks.hunyuan.problem import I2V, Problem, diffusers_model, run_plain, to_plain
from tests.video.networks.hunyuan.test_convert import network, tensors_of

KIND = (
    "--video-model hunyuan-video --train-iters 2 --guidance-embed --i2v-head-weight 1 "
    "--text-dropout 0.4"
)
"""A run of clips with and without references, and of captions with and without tokens."""
TP2SP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "tp2sp pp2": (4, f"{TP2SP} {PP2}"),
    # Three ranks cannot share 8 + 48 tokens: the text is padded.
    "cp3": (3, "--context-parallel-size 3"),
    "weights sharded over dp2": (
        2,
        "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params "
        "--recompute-double-blocks 1",
    ),
}


def run(data: Path, save: Path, words: str, **options: Any) -> Rows:
    return steps(data, save, f"{KIND} {words}", **{"task": VIDEO, **options})


def check(rows: Rows, wanted: Rows) -> None:
    assert len(rows) == len(wanted) > 0
    for row, want in zip(rows, wanted, strict=True):
        for name in ("loss", "grad_norm"):
            assert math.isclose(row[name], want[name], rel_tol=1e-5), (name, row, want)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("hunyuan") / "clips", {SHORT: 9})


@pytest.fixture(scope="module")
def one_rank(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return run(data, tmp_path_factory.mktemp("one"), "")


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_agree(data: Path, one_rank: Rows, name: str, tmp_path: Path) -> None:
    count, words = LAYOUTS[name]
    check(run(data, tmp_path, words, ranks=count), one_rank)


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(data: Path, tmp_path: Path) -> None:
    wanted = run(data, tmp_path, "--save-interval 1 --num-refiner-blocks 1")
    words = f"--load {tmp_path} --ckpt-step 1 --use-checkpoint-args --video-model hunyuan-video"
    layout = "--train-iters 2 --context-parallel-size 2"
    rows = steps(data, tmp_path / "on", f"{words} {layout}", flags=ONWARD, task=VIDEO, ranks=2)
    check(rows, wanted[1:])


ONWARD = (
    "--lr 1e-3 --lr-warmup-iters 1 --micro-batch-size 2 --global-batch-size 8 --log-interval 1 "
    "--num-workers 0 --text-dropout 0.4 --i2v-head-weight 1"
).split()
"""Flags of a run whose model a checkpoint describes."""


@pytest.mark.slow
def test_adapters_train_alike_on_ranks(data: Path, tmp_path: Path) -> None:
    lora = "--lora-rank 2 --lora-target-modules linear_qkv linear_fc2"
    one = run(data, tmp_path / "one", lora)
    two = run(data, tmp_path / "two", f"{lora} {TP2SP}", ranks=2)
    check(two, one)


SIZES_OF_CLIPS = dataclasses.replace(
    SIZES["tiny"], text_width=WIDTH, pooled_width=POOLED, guidance_embed=True
)
"""Sizes that fit the latents and captions of the clips."""


@pytest.mark.slow
def test_a_run_for_image_to_video_starts_from_weights_for_text_to_video(
    data: Path, tmp_path: Path
) -> None:
    """Read two ranks' slices of a file, and export what was not changed with the new input."""
    model = network(SIZES_OF_CLIPS)
    model.save_pretrained(tmp_path / "diffusers")
    words = (
        f"--load-weights {tmp_path / 'diffusers'} --i2v-head-weight 1 --train-iters 1 --lr 1e-30 "
        "--lr-warmup-iters 0 --weight-decay 0 --tensor-model-parallel-size 2"
    )
    flags = "--micro-batch-size 2 --global-batch-size 4 --log-interval 1 --num-workers 0".split()
    save = tmp_path / "save"
    assert len(steps(data, save, words, flags=flags, task=VIDEO, ranks=2)) == 1
    export_weights(CONVERSION, Export(load=save, target=tmp_path / "back", step=1))
    found, wanted = tensors_of(tmp_path / "back"), tensors_of(tmp_path / "diffusers")
    latents = found.pop("x_embedder.proj.weight")
    assert torch.equal(latents[:, :4], wanted.pop("x_embedder.proj.weight"))
    assert latents.shape[1] == 9 and not latents[:, 4:].abs().gt(1e-20).any()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@ranks(tp=2, cp=2)
def test_sampled_velocities_are_those_of_diffusers(context: ParallelContext) -> None:
    """Let the captions have 3 and 5 tokens of 5, which the ranks pad to 8."""
    problem = Problem(sequence_parallel=True)
    config, chunks = build(problem, context)
    ddp = wrapped(chunks, config, context)
    engine = forward_engine(ddp, config, context)
    velocity = HunyuanVelocity(engine, ddp, context, patch_size=2, guidance=4.0)
    given = problem.inputs()
    text = given["txt"][:, :5]
    text[0, 3:] = 0.0
    random = torch.Generator().manual_seed(5)
    masks = torch.tensor([True, False, False]).expand(2, -1)
    references = References(torch.randn(2, 4, 3, 8, 8, generator=random), masks)
    found = velocity.of_shape((3, 8, 8))(
        given["img"], given["timesteps"], text, given["y_vec"], references
    )
    model = diffusers_model(I2V)
    model.load_state_dict(to_plain(gathered_weights(chunks), I2V))
    plain = {
        **given,
        "txt": text,
        "txt_mask": torch.arange(5) < torch.tensor([3, 5])[:, None],
        "guidance": torch.full((2,), 4.0),
        "cond": pack(condition(references.latents, masks), 2),
    }
    with torch.no_grad():
        assert relative(found, run_plain(model, plain, I2V)) < 1e-5
