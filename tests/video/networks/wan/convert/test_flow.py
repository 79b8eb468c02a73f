"""Public weights of Wan are tuned by flow matching in any layout, and leave as public weights."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from megatron_ext.errors import CheckpointError
from megatron_ext.programs.convert_checkpoint import main
from megatron_ext.train.run import Run
from megatron_ext.video.convert.find import writer_of
from megatron_ext.video.model.tokens import pack, unpack
from megatron_ext.video.networks import mmdit
from megatron_ext.video.sampling.samples import velocity_of
from tests.video.clips import SHORT, write_clips
from tests.video.networks.harness import relative
from tests.video.networks.wan.convert.models import exported, imported, network, tensors_of
from tests.video.wan_run import (
    FRAMES,
    KINDS,
    NO_REFERENCES,
    PATCH,
    SIDE,
    SIZES_OF_CLIPS,
    sampling_inputs,
    train,
)


def predict(run: Run, path: Path) -> None:
    """Let rank 0 write down the velocity that the run's weights predict before its first step."""
    velocity = velocity_of(run).of_shape((FRAMES, SIDE, SIDE))
    tokens, times, text, pooled = (x.float() for x in sampling_inputs())
    predicted = velocity(tokens, times, text, pooled, NO_REFERENCES)
    if run.context.rank == 0:
        torch.save(predicted, path)


def test_a_tuned_network_leaves_by_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rate too small to change any weight gives back the public weights, bit for bit.

    What the run predicts with them on two by two ranks is what diffusers predicts.
    """
    source = tmp_path / "diffusers"
    public = network(SIZES_OF_CLIPS)
    public.save_pretrained(source)
    assert imported(source, tmp_path / "ours") == ("tiny", "float32")
    data = write_clips(tmp_path / "clips", {SHORT: 9})
    words = (
        f"{KINDS['video-dit']} --pretrained-checkpoint {tmp_path / 'ours'} --lr 1e-30 "
        "--weight-decay 0 --ema-decay 0.5 --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2"
    )
    before = tmp_path / "predicted.pt"
    train(data, tmp_path / "tuned", words, ranks=4, prepare=partial(predict, path=before))
    x, times, text, *_ = (each.float() for each in sampling_inputs())
    with torch.no_grad():
        latents = unpack(x, (FRAMES, SIDE, SIDE), PATCH)
        (flow,) = public(latents, 1000 * times, text, return_dict=False)
    assert relative(torch.load(before), pack(flow, PATCH)) <= 1e-5
    words = f"export --load {tmp_path / 'tuned'} --hf {tmp_path / 'back'}"
    assert main([*words.split(), "--network", "critic"]) == 2
    said = "which has one network; leave it out.\n"
    assert capsys.readouterr().err.endswith(said) and not (tmp_path / "back").exists()
    assert main(words.split()) == 0
    averages = exported(tmp_path / "tuned", tmp_path / "averages", ema=True)
    for folder in (tmp_path / "back", averages):
        found, wanted = tensors_of(folder), tensors_of(source)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    model, info = WanTransformer3DModel.from_pretrained(averages, output_loading_info=True)
    assert not any(info.values()) and model.config.in_channels == SIZES_OF_CLIPS.channels


def test_a_network_without_public_form_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network here is such a one, but one of a user's own may be."""
    assert writer_of({"model": {}}) is None
    monkeypatch.setattr(mmdit, "NETWORK", dataclasses.replace(mmdit.NETWORK, conversion=None))
    said = "The checkpoint is of an MMDiT, whose weights have no public form; only those of "
    with pytest.raises(CheckpointError, match=f"{said}`--video-model video-dit or causal-"):
        writer_of({"video": {"task": "flow", "video_model": "mmdit"}})
