"""Modes, their frames and tokens, dropped captions, and the numbers that decide about them."""

import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.config.run import MODES, ConditionConfig, TextDropoutConfig
from megatron_ext.video.data.conditions import (
    Section,
    Text,
    condition,
    draw_modes,
    drop_text,
    frame_masks,
    loss_mask,
    null_like,
    place_references,
    sections,
    text_mask,
)
from megatron_ext.video.data.dataset import VideoBatch
from megatron_ext.video.data.given_frames import (
    image_embeds,
    masked_latents,
    reference_latents,
)
from megatron_ext.video.data.randomness import (
    Randomness,
    draw_microbatch,
    draw_noise,
    draw_normals,
    draw_uniforms,
    generator,
    sample_numbers,
)
from tests.ranks import on_ranks

SHORT_V2V = ConditionConfig(v2v_frames=2, v2v_easy_frames=3)


def batch_of(references: dict[str, Tensor], **images: Tensor) -> VideoBatch:
    latents = torch.zeros(2, 3, 5, 2, 2)
    return VideoBatch(latents, torch.zeros(2, 1, 4), torch.zeros(2, 0), references, images)


def test_given_frames_are_chosen_clip_by_clip() -> None:
    names = ("masked_head1", "masked_loop1", "masked_none")
    masked = {name: torch.full((2, 3, 5, 2, 2), i + 1.0) for i, name in enumerate(names)}
    images = {side: torch.full((2, 7, 4), i + 1.0) for i, side in enumerate(("head", "tail"))}
    batch = batch_of(masked, **images)
    config = ConditionConfig()
    for drawn, latents, first, both in (
        (modes("i2v_head", "i2v_loop"), [1, 2], [1, 1], [(1, 0), (1, 2)]),
        (modes("i2v_loop", "t2v"), [2, 3], [1, 0], [(1, 2), (0, 0)]),
    ):
        assert masked_latents(batch, drawn, config)[:, 0, 0, 0, 0].tolist() == latents
        given = image_embeds(batch, drawn, config, ("first",))
        assert given.shape == (2, 7, 4) and given[:, 0, 0].tolist() == first
        given = image_embeds(batch, drawn, config, ("head", "tail"))
        assert given.shape == (2, 14, 4)
        assert [(row[0, 0], row[7, 0]) for row in given] == both
    for drawn, remedy in (
        (modes("i2v_tail", "t2v"), "--masked-references tail --reference-lengths 1"),
        (modes("i2v_middle", "t2v"), "--masked-references middle"),
    ):
        with pytest.raises(DataError, match=f"no reference masked_.* with `{remedy}`"):
            masked_latents(batch, drawn, config)
    with pytest.raises(DataError, match="`--image-encoder --masked-references middle`"):
        image_embeds(batch, modes("i2v_middle", "t2v"), config, ("first",))
    with pytest.raises(DataError, match="preprocess them with `--image-encoder`"):
        image_embeds(batch_of({}), modes("t2v", "t2v"), config, ("first",))
    with pytest.raises(DataError, match="no reference middle1.* with `--middle-reference`"):
        reference_latents(batch, modes("i2v_middle", "t2v"), config)


def test_rows_of_zeros_are_no_tokens() -> None:
    text = torch.randn(2, 4, 3)
    text[0, 2:] = 0
    assert text_mask(text).tolist() == [[True, True, False, False], [True] * 4]


def modes(*names: str) -> Tensor:
    return torch.tensor([MODES.index(name) for name in names])


FRAMES = {
    "t2v": [], "i2v_head": [0], "i2v_tail": [4], "i2v_loop": [0, 4], "v2v_head": [0, 1],
    "v2v_tail": [3, 4], "v2v_head_easy": [0, 1, 2], "v2v_tail_easy": [2, 3, 4], "i2v_middle": [2],
}  # fmt: skip


@pytest.mark.parametrize("mode", FRAMES)
def test_each_mode_gives_its_frames(mode: str) -> None:
    frames = FRAMES[mode]
    masks = frame_masks(modes(mode, "t2v"), 5, SHORT_V2V)
    assert masks[0].nonzero().flatten().tolist() == frames
    assert not masks[1].any()
    left_out = loss_mask(masks, 6, "masked")
    assert left_out.shape == (2, 30)
    for token in range(30):
        assert left_out[0, token] == (0.0 if token // 6 in frames else 1.0)


def test_draws_follow_the_weights() -> None:
    config = ConditionConfig()
    before = dataclasses.asdict(config)
    drawn = draw_modes(config, 5, draw_uniforms(3, range(8000), "condition"))
    found = torch.bincount(drawn, minlength=len(MODES)).double()
    want = torch.tensor([1.0, 5, 1, 1, 0, 0, 0, 0, 0], dtype=torch.float64) / 8
    sigma = (8000 * want * (1 - want)).sqrt()
    assert ((found - 8000 * want).abs() <= 3 * sigma).all()
    assert dataclasses.asdict(config) == before
    config = ConditionConfig(t2v_weight=0, i2v_head_weight=3, i2v_tail_weight=0, i2v_loop_weight=7)
    ends = torch.tensor([0.0, 0.3 - 1e-12, 0.3 + 1e-12, 1 - 2**-53], dtype=torch.float64)
    drawn = [MODES[i] for i in draw_modes(config, 3, ends).tolist()]
    assert drawn == ["i2v_head", "i2v_head", "i2v_loop", "i2v_loop"]


def test_a_short_clip_does_not_take_modes_from_later_ones() -> None:
    config = ConditionConfig(v2v_head_weight=4, v2v_tail_easy_weight=4)
    uniforms = draw_uniforms(3, range(500), "condition")
    long = draw_modes(config, 33, uniforms)
    for frames, missing in ((9, ("v2v_head", "v2v_tail_easy")), (17, ("v2v_tail_easy",))):
        short = {MODES[i] for i in draw_modes(config, frames, uniforms).tolist()}
        assert short == set(config.modes) - set(missing)
    assert torch.equal(draw_modes(config, 33, uniforms), long)
    assert {MODES[i] for i in long.tolist()} == set(config.modes)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.v2v_head_weight = 0  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


def test_conditions_are_the_mask_and_the_given_latents_and_zeros_for_images() -> None:
    references = torch.full((2, 4, 5, 2, 2), torch.nan)
    references[0, :, 0], references[0, :, 4] = 2.0, 3.0
    given = condition(references, frame_masks(modes("i2v_loop", "t2v"), 5, ConditionConfig()))
    want = torch.zeros(2, 5, 5, 2, 2)
    want[0, 0, [0, 4]] = 1.0
    want[0, 1:, 0], want[0, 1:, 4] = 2.0, 3.0
    assert torch.equal(given, want)
    assert condition(references.bfloat16(), torch.zeros(2, 5).bool()).dtype == torch.bfloat16
    config = ConditionConfig()
    assert sections("v2v_head", 33, config) == (Section(0, 9, "head"),)
    assert sections("v2v_tail", 33, config) == (Section(24, 9, "tail"),)
    assert sections("v2v_tail_easy", 33, config) == (Section(16, 17, "tail"),)
    assert sections("i2v_loop", 33, config) == (Section(0, 1, "head"), Section(32, 1, "tail"))
    config = ConditionConfig(t2v_weight=0)
    drawn = draw_modes(config, 1, torch.linspace(0, 0.999, 50))
    assert set(drawn.tolist()) == {MODES.index("t2v")}
    given = condition(torch.randn(50, 4, 1, 8, 8), frame_masks(drawn, 1, config))
    assert given.shape == (50, 5, 1, 8, 8) and not given.any()


@pytest.mark.parametrize(
    ("kind", "counted"),
    [
        ("all", [[0, 1, 2, 3, 4]] * 5),
        ("masked", [[0, 1, 2, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3], [1, 2, 3], [2, 3, 4]]),
        ("trimmed", [[0, 1, 2, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3], [1, 2, 3], [0, 1, 2, 3, 4]]),
    ],
)
def test_tokens_that_count(kind: str, counted: list[list[int]]) -> None:
    names = ("t2v", "i2v_head", "i2v_tail", "i2v_loop", "v2v_head")
    mask = loss_mask(frame_masks(modes(*names), 5, SHORT_V2V), 3, kind).view(5, 5, 3)
    for row, frames in zip(mask, counted, strict=True):
        want = torch.zeros(5, 3)
        want[frames] = 1.0
        assert torch.equal(row, want)


def test_references_stand_where_the_mode_has_them() -> None:
    head, tail = torch.randn(4, 1, 2, 2), torch.randn(4, 2, 2, 2)
    pieces = [(Section(0, 1, "head"), head), (Section(3, 2, "tail"), tail)]
    placed = place_references(pieces, (4, 5, 2, 2), torch.float32)
    assert torch.equal(placed[:, :1], head) and torch.equal(placed[:, 3:], tail)
    assert not placed[:, 1:3].any()
    for start, frames, piece in ((4, "4 to 5", tail), (3, "3 to 4", head)):
        with pytest.raises(DataError, match=rf"frames {frames} have shape \(4, \d, 2, 2\), but"):
            place_references([(Section(start, 2, "head"), piece)], (4, 5, 2, 2), torch.float32)


def test_a_condition_holds_what_the_masks_show_and_nothing_else() -> None:
    references = torch.randn(2, 4, 3, 2, 5)
    masks = torch.tensor([[True, False, False], [False, True, True]])
    found = condition(references, masks)
    assert found.shape == (2, 5, 3, 2, 5)
    for b in range(2):
        for t in range(3):
            given = float(masks[b, t])
            assert torch.equal(found[b, 0, t], torch.full((2, 5), given))
            assert torch.equal(found[b, 1:, t], references[b, :, t] * given)


def test_a_clip_just_long_enough_takes_a_mode() -> None:
    for mode, least in (("t2v", 1), ("i2v_head", 2), ("i2v_loop", 2), ("v2v_tail_easy", 4)):
        assert sections(mode, least, SHORT_V2V) == {
            "t2v": (), "i2v_head": (Section(0, 1, "head"),),
            "i2v_loop": (Section(0, 1, "head"), Section(1, 1, "tail")),
            "v2v_tail_easy": (Section(1, 3, "tail"),),
        }[mode]  # fmt: skip


def test_modes_that_cannot_be_are_refused() -> None:
    zero = {f"{mode}_weight": 0.0 for mode in MODES}
    only = ConditionConfig(**{**zero, "v2v_head_weight": 1.0})  # type: ignore[arg-type]
    assert draw_modes(only, 10, torch.tensor([0.5])).tolist() == [MODES.index("v2v_head")]
    with pytest.raises(ConfigError, match=r"\(v2v_head\) must fit .* which have 9 latent frames"):
        draw_modes(only, 9, torch.tensor([0.5]))
    with pytest.raises(DataError, match=r"v2v_head was asked for a clip of 9 .* needs 10"):
        frame_masks(modes("v2v_head"), 9, ConditionConfig())
    with pytest.raises(DataError, match=r"condition mode \(i2v_haed\) must be one of t2v"):
        sections("i2v_haed", 9, ConditionConfig())
    with pytest.raises(ConfigError) as caught:
        ConditionConfig(i2v_head_weight=-1, v2v_frames=0, reference_loss="some")
    first, second, third = caught.value.messages
    assert first.startswith("`--i2v-head-weight` (-1) must be at least 0")
    assert second.startswith("`--v2v-frames` (0) must be at least 1")
    assert third.startswith("`--reference-loss` (some) must be one of masked, all, trimmed")
    with pytest.raises(ConfigError, match="weights of all condition modes are 0"):
        ConditionConfig(**zero)  # type: ignore[arg-type]


NULL = Text(torch.randn(1, 3, 4), torch.randn(1, 6))


def captions(seed: int) -> Text:
    random = torch.Generator().manual_seed(seed)
    return Text(torch.randn(5, 8, 4, generator=random), torch.randn(5, 6, generator=random))


def test_only_what_is_dropped_is_replaced() -> None:
    text = captions(1)
    sequence = torch.tensor([True, False, True, False, False])
    pooled = torch.tensor([True, True, False, False, False])
    kept = drop_text(text, NULL, sequence, pooled)
    for i in range(5):
        want = text.sequence[i]
        if sequence[i]:
            want = torch.stack([NULL.sequence[0, min(k, 2)] for k in range(8)])
        assert torch.equal(kept.sequence[i], want)
        assert torch.equal(kept.pooled[i], NULL.pooled[0] if pooled[i] else text.pooled[i])
    # The empty captions of a batch may differ, as negative prompts do.
    nulls = Text(torch.randn(5, 3, 4), torch.randn(5, 6))
    every = torch.ones(5, dtype=torch.bool)
    kept = drop_text(text, nulls, every, every)
    for i in range(5):
        want = torch.stack([nulls.sequence[i, min(k, 2)] for k in range(8)])
        assert torch.equal(kept.sequence[i], want) and torch.equal(kept.pooled[i], nulls.pooled[i])
    half = Text(text.sequence.bfloat16(), text.pooled.bfloat16())
    kept = drop_text(half, NULL, sequence, pooled)
    assert kept.sequence.dtype == kept.pooled.dtype == torch.bfloat16
    with pytest.raises(DataError, match="has 3 tokens, but the captions of the batch have 2"):
        null_like(NULL, Text(NULL.sequence[:, :2], NULL.pooled))


def test_captions_are_dropped_as_often_as_the_flags_say() -> None:
    config = TextDropoutConfig()
    assert config.text_dropout == pytest.approx(0.31622777)
    text = draw_uniforms(5, range(MANY), "text dropout") < config.text_dropout
    pooled = draw_uniforms(5, range(MANY), "pooled dropout") < config.pooled_dropout
    assert float(text.double().mean()) == pytest.approx(0.316, abs=0.015)
    assert float(pooled.double().mean()) == pytest.approx(0.316, abs=0.015)
    assert float((text & pooled).double().mean()) == pytest.approx(0.10, abs=0.01)
    drawn = draws(range(100), seed=5)
    assert torch.equal(drawn.drop_text, text[:100])
    assert torch.equal(drawn.drop_pooled, pooled[:100])
    always = draws(range(100), text_dropout=1.0, pooled_dropout=1.0)
    assert always.drop_text.all() and always.drop_pooled.all()
    for value in (-0.1, 1.5, math.nan):
        with pytest.raises(ConfigError, match=r"`--pooled-dropout` .* at least 0 and at most 1"):
            TextDropoutConfig(pooled_dropout=value)


SHAPE, MANY = (4, 3, 8, 8), 10_000


def draws(samples: range, seed: int = 7, **dropout: float) -> Randomness:
    return draw_microbatch(seed, samples, SHAPE, ConditionConfig(), TextDropoutConfig(**dropout))


def flat(drawn: Randomness) -> Tensor:
    fields = [getattr(drawn, field.name) for field in dataclasses.fields(drawn)]
    return torch.cat([x.reshape(len(x), -1).double() for x in fields], dim=1)


def drawn_in_step(dp_rank: int, dp_size: int, num_microbatches: int, consumed: int = 24) -> Tensor:
    """Return what a rank draws in one step, ``[m, b, -1]``, two samples in a micro-batch."""
    numbers = [sample_numbers(consumed, m, 2, dp_rank, dp_size) for m in range(num_microbatches)]
    return torch.stack([flat(draws(samples)) for samples in numbers])


def check_ranks(context: ParallelContext) -> None:
    """Check that a replica's ranks draw alike, and all replicas together what one would."""
    size = context.layout.data_parallel_size
    mine = drawn_in_step(context.dp_rank, size, 4 // size)
    everyone = [torch.empty_like(mine) for _ in range(context.layout.world_size)]
    torch.distributed.all_gather(everyone, mine)
    replicas: list[int] = [0] * len(everyone)
    torch.distributed.all_gather_object(replicas, context.dp_rank)
    whole = drawn_in_step(0, 1, 4)
    for drawn, replica in zip(everyone, replicas, strict=True):
        assert torch.equal(drawn, whole[replica::size])


@pytest.mark.parametrize("sizes", [{"tp": 2, "dp": 2}, {"cp": 2, "pp": 2}])
def test_ranks_of_a_replica_draw_alike_and_replicas_do_not(sizes: dict[str, int]) -> None:
    on_ranks(check_ranks, sizes)


def test_draws_differ_by_sample_purpose_and_seed_alone() -> None:
    drawn = draws(range(400))
    noise = drawn.noise.flatten(1)
    assert len(torch.unique(noise, dim=0)) == 400
    # Correlations of 768 numbers have a standard deviation of 0.036.
    correlation = torch.corrcoef(noise[:50]).fill_diagonal_(0)
    assert float(correlation.abs().max()) < 0.2
    assert len(torch.unique(drawn.normals)) == 400
    for x in (drawn.modes, drawn.drop_text, drawn.drop_pooled):
        assert len(torch.unique(x)) > 1
    one = draw_noise(7, [3], SHAPE)
    assert not torch.equal(one, draw_noise(7, [3], SHAPE, "sampling noise"))
    assert not torch.equal(one, draw_noise(8, [3], SHAPE))
    # torch's generator on the CPU would take these two seeds for one.
    assert not torch.equal(one, draw_noise(7 + 2**32, [3], SHAPE))
    assert not torch.equal(draw_uniforms(7, [3], "a"), draw_uniforms(7, [3], "b"))
    whole = drawn_in_step(0, 1, 4)
    torch.rand(5)
    assert torch.equal(drawn_in_step(0, 1, 2, consumed=28), whole[2:])
    assert torch.equal(flat(draws(range(5, 9)))[2], flat(draws(range(7, 8)))[0])


def test_the_numbers_of_a_sample_are_fixed() -> None:
    """Other numbers would change the noise of a run that is resumed by another version."""
    raw = generator(7, 3, "noise").bit_generator.random_raw(2)
    assert [int(x) for x in raw] == [12068487855653168946, 14840744999015460438]
    want = generator(7, 3, "noise").standard_normal(SHAPE, dtype=np.float32)
    assert np.array_equal(draw_noise(7, [3], SHAPE)[0].numpy(), want)
    want = generator(7, 3, "timestep").standard_normal(2)
    found = draw_normals(7, [3], "timestep", 2)
    assert torch.equal(found, torch.from_numpy(want)[None].float())
    assert torch.equal(draw_normals(7, [3], "timestep"), found[:, 0])
    assert float(draw_uniforms(7, [3], "condition")) == generator(7, 3, "condition").random()


def test_numbers_are_standard_normal() -> None:
    for x in (draw_noise(1, range(4), (4, 5, 50, 50)), draw_normals(1, range(MANY), "timestep")):
        assert x.dtype == torch.float32
        x, sigma = x.double().flatten(), 1 / math.sqrt(x.numel())
        assert abs(float(x.mean())) < 4 * sigma
        assert float(x.var()) == pytest.approx(1, abs=4 * math.sqrt(2) * sigma)
        assert float((x < 1).double().mean()) == pytest.approx(0.8413, abs=2 * sigma)
