"""Every compiled function of the video networks against itself as written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_ext.video.model import modulation
from megatron_ext.video.model.mmdit import pointwise as mmdit
from megatron_ext.video.model.wan import pointwise as wan
from tests.layers.pointwise_cases import LAYER, RMS, B, Case, D, H, N, S, t
from tests.layers.test_pointwise import check_exact, check_kernels

TEXT = 5
FRAMES = 3


def _mmdit() -> Iterator[Case]:
    x, v, h = t(S, B, H), t(B, H), t(H)
    txt, img = t(TEXT, B, H), t(S - TEXT, B, H)
    table = t(S, B, 1, D // 2, trains=False), t(S, B, 1, D // 2, trains=False)
    yield Case("modulated", modulation.modulated_alone, [x, v, v])
    yield Case("modulated beside", mmdit.residual_and_modulated, [x, v, v])
    streams = [x, TEXT, v, v, v, v]
    yield Case("modulated streams", mmdit.residual_and_modulated_streams, streams)
    yield Case("add gated", mmdit.add_gated, [x, x, x, h, v])
    yield Case("add gated sum", mmdit.add_gated, [x, x, None, h, v])
    added = [x, txt, img, h, h, v, v]
    yield Case("add streams", mmdit.add_streams, added)
    both = [*added, v, v, v, v]
    yield Case("add and modulate", mmdit.add_and_modulate_streams, both)
    single = [t(S, B, 3 * N * D), t(3 * N * D), t(D), t(D), *table, RMS]
    yield Case("MMDiT heads", mmdit.heads, single)
    pair = [t(S - TEXT, B, 3 * N * D), None, t(TEXT, B, 3 * N * D), t(3 * N * D)]
    joint = [*pair, t(D), t(D), t(D), t(D), *table, RMS]
    yield Case("joint heads", mmdit.joint_heads, joint)
    no_text = [t(S, B, 3 * N * D), None, t(0, B, 3 * N * D), None]
    yield Case("joint heads without text", mmdit.joint_heads, [*no_text, *[t(D)] * 4, *table, RMS])


def _wan() -> Iterator[Case]:
    x, v, h = t(S, B, H), t(FRAMES, 1, B, H), t(H)
    yield Case("frames", wan.modulated_frames_alone, [x, v, v])
    yield Case("frames beside", wan.residual_and_modulated, [x, v, v])
    yield Case("gated", wan.gated, [x, x, h, v])
    yield Case("gated and normed", wan.gated_and_normed, [x, x, h, v, h, h, LAYER])
    yield Case("added and modulated", wan.added_and_modulated, [x, x, h, v, v])
    table = [t(FRAMES, S // FRAMES, 1, 1, D // 2, trains=False)] * 2
    qkv, bias, scales = t(S, B, 3 * N * D), t(3 * N * D), [t(N * D), t(N * D)]
    yield Case("sums of squares", wan.squares_of_heads, [qkv, bias, D])
    for total in (None, t(2, S, B, kind="positive")):
        given = [qkv, bias, total, *scales, *table, (D, N * D, 1e-6), 2, FRAMES]
        yield Case(f"video heads, sums given={total is not None}", wan.heads, given)
    q, own = t(S, B, N, D), t(N * D)
    yield Case("whole norm", wan._whole_norm, [q, own, own, N * D, 1e-6])
    yield Case("part's squares", wan._squares, [q, own])
    total = t(S, B, kind="positive")
    yield Case("part's norm", wan._scaled, [q, None, total, own, N * D, 1e-6])


CASES = [*_mmdit(), *_wan()]
QUICK = ("joint heads",)
BY_KERNELS = ("joint heads", "add and modulate", "joint heads without text")


@pytest.mark.parametrize(
    "case",
    [x if x.name in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in CASES],
    ids=lambda case: case.name,
)
def test_graphs_are_exact(case: Case) -> None:
    check_exact(case, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [x for x in CASES if x.name in BY_KERNELS], ids=lambda case: case.name
)
def test_kernels_are_exact_and_in_half_precision_no_coarser(case: Case) -> None:
    check_kernels(case)
