"""Clips of every layout against those that plain sampling on one process gives."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.data.clips import Clip
from megatron_ext.video.data.conditions import Text, condition
from megatron_ext.video.data.frames import decode
from megatron_ext.video.data.randomness import draw_noise
from megatron_ext.video.model.joint_blocks import JointOptions
from megatron_ext.video.model.tokens import pack, position_ids
from megatron_ext.video.networks.mmdit.config import SIZES
from megatron_ext.video.sampling.encoding import encode_on_reporting_rank, encode_requests
from megatron_ext.video.sampling.flow import References
from megatron_ext.video.sampling.generate import GroupSampler, decoded
from megatron_ext.video.sampling.requests import ClipRequest
from megatron_ext.video.sampling.solvers import Schedule
from tests.ranks import ranks, run_on_ranks
from tests.video.networks.harness import gathered_weights, layout_of
from tests.video.networks.mmdit.problem import Problem
from tests.video.sampling.problem import (
    CODEC,
    ENCODER,
    FLOW,
    I2V,
    LATENT,
    SAMPLING,
    SEED,
    SHAPE,
    requests_with,
    sampled,
    velocity_on,
)

TOLERANCE = 1e-5


def clips_of(context: ParallelContext, asked: list[ClipRequest], **changes: Any) -> Tensor | None:
    settings, shape = changes.pop("settings", {}), changes.pop("shape", SHAPE)
    models = (CODEC, ENCODER) if context.is_reporting_rank else (None, None)
    velocity = velocity_on(context, **settings)
    encoded = encode_on_reporting_rank(asked, shape, *models, context)
    sampling = dataclasses.replace(SAMPLING, **changes)
    schedule = Schedule(FLOW, sampling)
    latents = GroupSampler(velocity, encoded, schedule=schedule, context=context).latents()
    return None if latents is None else decoded(CODEC, latents, 2)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "start.png"
    pixels = np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def plainly(context: ParallelContext, asked: list[ClipRequest], path: Path) -> None:
    """Save the clips of a model in plain torch, sampled one by one on one process."""
    chunks = [chunk.module for chunk in velocity_on(context).chunks]
    plain = Problem(sizes=I2V).plain_model(gathered_weights(chunks))

    def velocity(x: Tensor, t: Tensor, text: Tensor, pooled: Tensor, given: References) -> Tensor:
        ids = position_ids(LATENT, 2).expand(len(x), -1, -1)
        none = torch.zeros(len(x), text.size(1), 3, dtype=torch.int64)
        cond = pack(condition(given.latents, given.masks), 2)
        x, text, pooled, cond = (v.double() for v in (x, text, pooled, cond))
        return plain(x, ids, text, none, t, pooled, cond=cond)

    encoded = encode_requests(asked, SHAPE, CODEC, ENCODER)
    noise = draw_noise(SEED, range(len(asked)), encoded.latent_shape, "sampling noise")
    clips = []
    for i in range(len(asked)):
        one, given = slice(i, i + 1), encoded.references
        text = Text(encoded.text.sequence[one], encoded.text.pooled[one])
        references = given and References(given.latents[one], given.masks[one])
        options = {"schedule": Schedule(FLOW, SAMPLING), "references": references}
        clips.append(sampled(velocity, text, encoded.null, noise[one], **options))
    torch.save(CODEC.decode(torch.cat(clips)), path)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, reference: Path) -> Tensor:
    path = tmp_path_factory.mktemp("truth") / "clips.pt"
    arguments = {"asked": requests_with(reference), "path": path}
    run_on_ranks(plainly, layout_of({}), arguments)
    found: Tensor = torch.load(path)
    return found


def compare(
    context: ParallelContext, asked: list[ClipRequest], want: Tensor, settings: dict[str, Any]
) -> None:
    found = clips_of(context, asked, settings=settings)
    assert (found is not None) == context.is_reporting_rank
    if found is not None:
        assert found.shape == want.shape and found.dtype == torch.float32
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, want, strict=True)]
        assert max(errors) < TOLERANCE


LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one": ({}, {}),
    "tp2 sp": ({"tp": 2}, {"sequence_parallel": True}),
    "pp2 zb-v": ({"pp": 2, "vpp": 2}, {"schedule": "zb-v"}),
    "cp2": ({"cp": 2}, {}),
    "cp2 a2a": ({"cp": 2}, {"options": JointOptions(cp_comm_type="a2a")}),
    "dp2": ({"dp": 2}, {}),
    "dp4": ({"dp": 4}, {}),
    "tp2 pp2 vpp2": ({"tp": 2, "pp": 2, "vpp": 2}, {"schedule": "interleaved"}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_give_the_clips_of_one_process(name: str, truth: Tensor, reference: Path) -> None:
    """Let two context-parallel ranks hold 20 and 28 of 48 image tokens, beside 8 text tokens."""
    sizes, settings = LAYOUTS[name]
    arguments = {"asked": requests_with(reference), "want": truth, "settings": settings}
    run_on_ranks(compare, layout_of(sizes, settings.get("schedule")), arguments)


@ranks()
def test_a_negative_prompt_takes_the_place_of_the_empty_caption(context: ParallelContext) -> None:
    """Give it to one of two requests; the other one keeps the empty caption."""
    velocity = velocity_on(context)

    def latents(*asked: ClipRequest, null: Text | None = None) -> Tensor:
        encoded = encode_requests(asked, SHAPE, CODEC, ENCODER, null=null)
        draws = [(SEED, 0)] * len(asked)
        schedule = Schedule(FLOW, SAMPLING)
        options = {"schedule": schedule, "context": context, "draws": draws}
        found = GroupSampler(velocity, encoded, **options).latents()  # type: ignore[arg-type]
        assert found is not None
        return found

    plain, led_away = latents(ClipRequest("a"), ClipRequest("a", negative_prompt="blur"))
    assert torch.allclose(plain, latents(ClipRequest("a"))[0], atol=1e-5)
    alone = latents(ClipRequest("a"), null=Text(*ENCODER.encode(["blur"])))
    assert torch.allclose(led_away, alone[0], atol=1e-5)
    assert not torch.allclose(led_away, plain, atol=1e-3)


@ranks()
def test_clips_are_seeded_and_references_exact(context: ParallelContext, reference: Path) -> None:
    asked = requests_with(reference)
    first = clips_of(context, asked)
    torch.rand(5)
    again = clips_of(context, asked, sample_batch_size=2)
    other = clips_of(context, asked, sample_seed=SEED + 1)
    assert first is not None and again is not None and other is not None
    assert torch.equal(first, again)
    assert not torch.allclose(first[0], other[0], atol=1e-2)
    start = decode(Clip(str(reference), ""), 0, 1, 1, (32, 32))[None]
    # The first latent frame stands for the first frame of the clip alone.
    seen = CODEC.decode(CODEC.encode(start))[0, :, 0]
    for clips in (first, other):
        assert torch.allclose(clips[1, :, 0], seen, atol=1e-6)
        assert not torch.allclose(clips[0, :, 0], seen, atol=1e-2)


@ranks(dp=3)
def test_fewer_prompts_than_replicas(context: ParallelContext) -> None:
    asked = requests_with(None, 5)
    five = clips_of(context, asked)
    one = clips_of(context, asked[:1])
    four = clips_of(context, asked[:4], sample_batch_size=1)
    if context.is_reporting_rank:
        assert five is not None and one is not None and four is not None
        assert torch.allclose(one, five[:1], atol=1e-5)
        assert torch.allclose(four, five[:4], atol=1e-5)


@ranks(dp=2)
def test_every_rank_fails_too(context: ParallelContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Tensor:
        raise MemoryError("16 TiB")

    monkeypatch.setattr(ENCODER, "encode", broken)
    with pytest.raises(DataError, match=r"^Encoding the .* \(MemoryError\('16 TiB'\)"):
        clips_of(context, requests_with(None))


@ranks(pp=2)
def test_every_rank_refuses_them(context: ParallelContext, tmp_path: Path, reference: Path) -> None:
    missing = [ClipRequest("a", str(tmp_path / "none.mp4"), "i2v_head")]
    with pytest.raises(DataError, match=r"^The clip \S*none\.mp4 cannot be read"):
        clips_of(context, missing)
    with pytest.raises(ConfigError, match=r"number of frames \(8\) must be a multiple"):
        clips_of(context, requests_with(None), shape=dataclasses.replace(SHAPE, num_frames=8))
    # The widths of the text are not those of the model.
    narrow = {"settings": {"sizes": SIZES["small"]}}
    with pytest.raises(DataError, match="but the model takes"):
        clips_of(context, requests_with(None), **narrow)
    settings = {"sizes": SIZES["tiny"]}
    with pytest.raises(ConfigError, match="built without `cond_embed` and would ignore it"):
        clips_of(context, requests_with(reference), settings=settings)
    found = clips_of(context, requests_with(None), settings=settings)
    assert (found is not None) == context.is_reporting_rank
