"""Finds near-duplicate clips, such as copies that were encoded again, scaled or cropped.

A clip is described by its picture, the first, middle and last frame in grey at 8x8 pixels, and by
the mean colour of these frames. Two clips are near duplicates if their pictures correlate by at
least `ALIKE` and their mean colours are close. Random projections find candidate pairs without
comparing all (SimHash, Charikar 2002, doi:10.1145/509907.509965).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

ALIKE = 0.99
"""The least correlation between the pictures of near duplicates."""
_SIDE = 8
_BANDS = 24
_BITS_OF_BAND = 16
_CLOSE = 0.05
"""The largest difference between the mean colours of near duplicates in a channel.

It is a fraction of the range of this channel's mean over all clips."""
_FLAT = 1e-3
"""The contrast (standard deviation of the picture) up to which a clip is flat, almost one colour.

It is a fraction of the root mean square of the contrasts of all clips."""


class NearDuplicates:
    """Collects descriptions of clips, and finds near duplicates among them."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._pictures: list[NDArray[np.float32]] = []
        self._means: list[NDArray[np.float32]] = []

    def add(self, number: int, frames: Tensor) -> None:
        """Add clip ``number``, given its decoded frames or its latents, ``frames [c, t, h, w]``."""
        last = frames.size(1) - 1
        shown = frames[:, [0, last // 2, last]].float()
        grey = shown.mean(dim=0)
        self._numbers.append(number)
        self._pictures.append(adaptive_avg_pool2d(grey, _SIDE).reshape(-1).numpy())
        self._means.append(shown.mean(dim=(1, 2, 3)).numpy())

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield (number of the clip that is duplicated, number of the duplicate).

        Clips that are linked by pairs of near duplicates form a group. Each clip of a group except
        the first is yielded as a duplicate of the first. Flat clips, which have almost a single
        colour, are left out, since they have no other content to compare.
        """
        if len(self._numbers) < 2:
            return
        pictures = np.stack(self._pictures)
        pictures -= pictures.mean(axis=1, keepdims=True)
        lengths = np.linalg.norm(pictures, axis=1)
        varied = lengths > _FLAT * np.linalg.norm(pictures) / len(pictures) ** 0.5
        pictures /= np.where(varied, lengths, 1)[:, None]
        means = np.stack(self._means)
        limits = _CLOSE * (means.max(axis=0) - means.min(axis=0))
        # The smallest row of each clip's group. A pair joins the groups of its clips.
        first_of = np.arange(len(means))
        for a, b in self._alike(pictures, np.flatnonzero(varied)):
            if first_of[a] != first_of[b] and (np.abs(means[a] - means[b]) <= limits).all():
                both = (first_of == first_of[a]) | (first_of == first_of[b])
                first_of[both] = min(first_of[a], first_of[b])
        for row, first in enumerate(first_of.tolist()):
            if first != row:
                yield self._numbers[first], self._numbers[row]

    def _alike(
        self, pictures: NDArray[np.float32], rows: NDArray[np.int64]
    ) -> Iterator[tuple[int, int]]:
        """Yield pairs of indices of pictures that correlate by at least `ALIKE`.

        Each row of ``pictures`` is a picture with mean 0 and norm 1; only the rows with indices
        ``rows`` are compared. Each picture has several hashes, and two pictures are compared if
        they share one. Pairs may be repeated, and a few may be missed.
        """
        random = np.random.default_rng(0)
        powers = 1 << np.arange(_BITS_OF_BAND)
        for _ in range(_BANDS):
            planes = random.standard_normal((pictures.shape[1], _BITS_OF_BAND)).astype(np.float32)
            # Similar pictures are on the same side of most random planes, so they probably have
            # equal keys in at least one band. Compare only pictures with equal keys.
            keys = (pictures[rows] @ planes > 0) @ powers
            order = np.argsort(keys, kind="stable")
            starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
            for group in np.split(rows[order], starts[1:]):
                if len(group) > 1:
                    correlations = np.triu(pictures[group] @ pictures[group].T, 1)
                    for a, b in zip(*np.nonzero(correlations >= ALIKE), strict=True):
                        yield int(group[a]), int(group[b])
