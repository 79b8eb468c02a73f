"""A run starts from published weights by --load-weights alone, in any layout."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.checkpoint.stored import read_run_config
from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError, MegatronExtError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.programs import lora
from megatron_ext.train.run import Run
from megatron_ext.video.convert.reading import open_published
from megatron_ext.video.convert.training import load_weights
from megatron_ext.video.model.tokens import pack, unpack
from megatron_ext.video.sampling.samples import velocity_of
from megatron_ext.video.task import VIDEO
from tests.ranks import on_ranks
from tests.training_runs import training_rows
from tests.video.clips import SHORT, attempt, write_clips
from tests.video.convert.forms import stored
from tests.video.networks.harness import relative
from tests.video.networks.wan.convert.models import (
    bare,
    exported,
    make,
    network,
    original_tensors,
    tensors_of,
)
from tests.video.networks.wan.convert.test_convert import starts_from_them
from tests.video.streaming.runs import run as streaming_run
from tests.video.wan_run import (
    FRAMES,
    NO_REFERENCES,
    PATCH,
    SIDE,
    SIZES_OF_CLIPS,
    sampling_inputs,
)

FLAGS = (
    "--lr 1e-3 --lr-warmup-iters 0 --micro-batch-size 2 --global-batch-size 4 --log-interval 1 "
    "--num-workers 0 --seed 5"
).split()
"""Flags of a run that name neither the network nor its sizes."""
run = partial(attempt, flags=FLAGS, task=VIDEO)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write weights of Wan, as diffusers does and in a file of ComfyUI, and clips."""
    root = tmp_path_factory.mktemp("weights")
    network(SIZES_OF_CLIPS).save_pretrained(root / "diffusers")
    save_file(original_tensors(root / "diffusers"), root / "comfyui.safetensors")
    write_clips(root / "clips", {SHORT: 9})
    return root


def predict(run: Run, path: Path) -> None:
    """Let rank 0 write down the velocity that the run's weights predict before its first step."""
    velocity = velocity_of(run).of_shape((FRAMES, SIDE, SIDE))
    tokens, times, text, pooled = (x.float() for x in sampling_inputs())
    predicted = velocity(tokens, times, text, pooled, NO_REFERENCES)
    if run.context.rank == 0:
        torch.save(predicted, path)


def test_a_run_names_only_its_weights(root: Path, tmp_path: Path) -> None:
    """Start on two by two ranks from a folder, go on, and export what was not changed."""
    words = (
        f"--load-weights {root / 'diffusers'} --resume-mode auto --lr 1e-30 --weight-decay 0 "
        "--ema-decay 0.5 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    )
    before = tmp_path / "predicted.pt"
    save = tmp_path / "save"
    options: Any = {"ranks": 4, "prepare": partial(predict, path=before)}
    code, rows = run(root / "clips", save, f"{words} --train-iters 1", **options)
    assert code == 0 and len(training_rows(rows)) == 1
    x, times, text, *_ = (each.float() for each in sampling_inputs())
    with torch.no_grad():
        latents = unpack(x, (FRAMES, SIDE, SIDE), PATCH)
        (flow,) = network(SIZES_OF_CLIPS)(latents, 1000 * times, text, return_dict=False)
    assert relative(torch.load(before), pack(flow, PATCH)) <= 1e-5
    config = read_run_config(save)
    assert config["video"]["video_model"] == "video-dit"
    assert config["weights"]["weights_origin"]["path"] == str(root / "diffusers")
    found, wanted = tensors_of(exported(save, tmp_path / "back")), tensors_of(root / "diffusers")
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@torch.no_grad()
def check_reading(context: ParallelContext, source: Path) -> None:
    chunk = bare(context, SIZES_OF_CLIPS)
    loaded = load_weights(RunConfig(), [chunk], source, None, SIZES_OF_CLIPS)
    own = sum(p.numel() * p.element_size() for p in chunk.parameters())
    assert own <= loaded.bytes_read <= 1.1 * own


@pytest.mark.parametrize("form", ["diffusers", "comfyui.safetensors"])
def test_each_rank_reads_its_slices(root: Path, form: str) -> None:
    on_ranks(check_reading, {"tp": 2}, source=root / form)


ADAPTERS = "--video-model video-dit --lora-rank 2 --lora-target-modules linear_fc1"


def test_adapters_lie_on_published_weights(root: Path, tmp_path: Path) -> None:
    """Resume adapters that were saved alone; they need the same weights again."""
    weights = f"--load-weights {root / 'comfyui.safetensors'}"
    whole, half = tmp_path / "whole", tmp_path / "half"
    _, rows = run(root / "clips", whole, f"{ADAPTERS} {weights} --train-iters 2")
    run(root / "clips", half, f"{ADAPTERS} {weights} --train-iters 1")
    resumed = f"{ADAPTERS} --train-iters 2 --load {half}"
    _, later = run(root / "clips", half, f"{resumed} {weights}")
    assert training_rows(later)[-1]["loss"] == training_rows(rows)[-1]["loss"]
    with pytest.raises(CheckpointError, match="`--load-weights` is missing: .* adapters witho"):
        run(root / "clips", tmp_path / "other", resumed)
    merge = f"merge --load {half} --save {tmp_path / 'merged'}"
    assert lora.main(merge.split()) == 0
    merged = stored(exported(tmp_path / "merged", tmp_path / "merged.safetensors"))
    plain = load_file(root / "comfyui.safetensors")
    changed = {name for name, tensor in plain.items() if not torch.equal(tensor, merged[name])}
    assert changed == {name for name in plain if name.endswith("ffn.0.weight")}


@pytest.mark.slow
def test_adapters_beside_products_of_eight_bits_resume_to_the_same_bits(
    root: Path, tmp_path: Path
) -> None:
    """The history of scales of the frozen weights is saved with the adapters."""
    words = f"{ADAPTERS} --load-weights {root / 'diffusers'} --bf16 --fp8-format hybrid"
    clips = root / "clips"
    _, whole = run(clips, tmp_path / "whole", f"{words} --train-iters 3")
    run(clips, tmp_path / "half", f"{words} --train-iters 3 --exit-interval 2")
    _, later = run(clips, tmp_path / "half", f"{words} --train-iters 3 --load {tmp_path / 'half'}")
    rows = training_rows(whole)[-1], training_rows(later)[-1]
    for name in ("iteration", "loss", "grad_norm"):
        assert rows[0][name] == rows[1][name], name


REFUSED = {
    "--video-dit-size mini": "`--video-dit-size` (mini) contradicts `--load-weights` (",
    "--dit-condition i2v": "not 8 as this run by its flags and its data; leave out `--dit-cond",
    "--video-model mmdit": "`--video-model` (mmdit) cannot start from `--load-weights` (",
    "--pretrained-checkpoint x": "and `--pretrained-checkpoint` (x) both give initial weights",
    "--use-checkpoint-args --load x": "and `--use-checkpoint-args` both give the shape of the mod",
    "--load-weights-entry model": "`--load-weights-entry model` is for a file of torch.save",
}


@pytest.mark.parametrize("words", REFUSED)
def test_flags_that_contradict_the_weights(root: Path, words: str) -> None:
    weights = f"--load-weights {root / 'diffusers'} --video-data-path {root / 'clips'}"
    flags = [*FLAGS, *"--train-iters 1".split(), *weights.split(), *words.split()]
    with pytest.raises(MegatronExtError) as caught:
        parse_args(flags, VIDEO, world_size=1, device="cpu")
    assert any(REFUSED[words] in sentence for sentence in caught.value.messages)


def test_data_of_other_widths(root: Path, tmp_path: Path) -> None:
    sizes = dataclasses.replace(SIZES_OF_CLIPS, text_width=20)
    network(sizes).save_pretrained(tmp_path / "wide")
    words = f"--load-weights {tmp_path / 'wide'} --train-iters 1"
    with pytest.raises(MegatronExtError, match="holds a model with text_width 20, not 12 as this"):
        run(root / "clips", tmp_path / "save", words)


def test_three_networks_of_streaming_start_from_published_weights(tmp_path: Path) -> None:
    source = make(tmp_path / "diffusers", torch.bfloat16)
    words = "--train-iters 1 --tensor-model-parallel-size 2 --bf16 " + " ".join(
        f"--{flag} {source}" for flag in ("load-weights", "critic-checkpoint", "teacher-checkpoint")
    )
    with open_published(source) as model:
        wanted = {name: model.parameter(name, torch.bfloat16) for name in model.mapped.parameters}
    streaming_run(tmp_path, words, ranks=2, prepare=partial(starts_from_them, wanted=wanted))
