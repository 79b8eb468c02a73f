"""Clips that look alike are found whatever was done to them, and no others."""

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from megatron_ext.video.data.similar import NearDuplicates


def scene(number: int) -> Tensor:
    """Return a clip of a few soft waves that move, ``[3, 9, 64, 96]`` in [-1, 1]."""
    random = torch.Generator().manual_seed(number)
    y, x, t = torch.meshgrid(
        torch.linspace(0, 1, 64), torch.linspace(0, 1, 96), torch.arange(9) / 9, indexing="ij"
    )
    clip = torch.zeros(3, 9, 64, 96)
    for channel in range(3):
        for _ in range(4):
            a, b, c, phase = (torch.rand(4, generator=random) * 6).tolist()
            clip[channel] += torch.sin(a * x + b * y + c * t + phase).permute(2, 0, 1)
    return clip / 4


def test_copies_are_found_and_nothing_else() -> None:
    looks, first = NearDuplicates(), scene(0)
    for number in range(300):
        looks.add(number, scene(number))
    random = torch.Generator().manual_seed(1)
    noisy = first + 0.05 * torch.randn(first.shape, generator=random)
    smaller = interpolate(first, (32, 48), mode="bilinear", antialias=True)
    cut = interpolate(first[:, :, 1:-1, 2:-2], (64, 96), mode="bilinear")
    darker = 0.9 * first - 0.02
    for number, copy in enumerate((noisy, smaller, cut, darker), 1000):
        looks.add(number, copy)
    looks.add(2000, first.flip(-1))  # mirrored: another picture
    looks.add(2001, first[[2, 0, 1]])  # the same greys in other colours
    looks.add(2002, torch.full_like(first, 0.5))
    looks.add(2003, torch.full_like(first, 0.6))
    assert sorted(looks.pairs()) == [(0, 1000), (0, 1001), (0, 1002), (0, 1003)]


def test_beginning_middle_and_end_must_be_alike() -> None:
    """A group has the first of its clips, although it resembles another one alone."""
    first, other = scene(0), scene(1)
    looks = NearDuplicates()
    for number in range(20, 40):
        looks.add(number, scene(number))
    looks.add(0, first)
    for number, part in enumerate((slice(0, 1), slice(4, 5), slice(8, 9)), 1):
        changed = first.clone()
        changed[:, part] = other[:, part]
        looks.add(number, changed)
    # Frames between these are not compared.
    between = first.clone()
    between[:, 2:3] = other[:, 2:3]
    looks.add(4, between)
    assert list(looks.pairs()) == [(0, 4)]


def test_a_chain_of_likenesses_is_one_group() -> None:
    """The ends of a chain may look different; all belong to its first clip, in whatever order."""
    base, step = scene(0), scene(1)
    # Colours are compared too, so change none.
    step -= step[:, ::4].mean(dim=(1, 2, 3), keepdim=True)
    chain = {number: base + 0.05 * number * step for number in range(5)}
    for order in ((0, 1, 2, 3, 4), (4, 2, 0, 1, 3), (2, 3, 1, 4, 0)):
        looks = NearDuplicates()
        for number in order:
            looks.add(number, chain[number])
        for number in range(20, 40):
            looks.add(number, scene(number))
        assert sorted(looks.pairs()) == sorted((order[0], number) for number in order[1:])


def test_a_picture_is_a_clip_of_one_frame() -> None:
    looks = NearDuplicates()
    for number, clip in ((3, scene(0)[:, :1]), (5, scene(1)[:, :1]), (8, scene(1)[:, :1] * 0.99)):
        looks.add(number, clip)
    assert list(looks.pairs()) == [(5, 8)]
