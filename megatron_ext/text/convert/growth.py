"""New rows of a vocabulary that grows, as transformers' ``resize_token_embeddings`` makes them.

``--resize-vocabulary noise`` is its ``mean_resizing=True`` (https://nlp.stanford.edu/~johnhew/
vocab-expansion.html): each new row is drawn from a normal distribution with the mean of the old
rows and 1e-9 of their covariance; where that covariance is not positive definite, as with fewer
rows than columns, it is the mean. ``mean`` takes the mean alone, and ``normal`` is
``mean_resizing=False``: a mean of zero, and the folder's ``initializer_range`` as the deviation.

Word embeddings and an output layer of its own each follow their own old rows. What is drawn depends
on the seed and on the name of the weight alone, so that it is the same on every layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, constraints

from megatron_ext.layers.initialization import Shard, generator_of
from megatron_ext.text.convert.config import read_model

SHARE = 1e-9
"""The share of the old rows' covariance that new rows have in transformers."""
_ROWS = 8192
"""Number of rows of a table that are read at a time."""


class Rows(Protocol):
    """A function that returns rows ``[n, h]`` or ``[n]`` of a folder's tensor, from and up to."""

    def __call__(self, first: int, end: int) -> Tensor: ...


@dataclass(frozen=True)
class Growth:
    """The growth of a vocabulary from ``old`` to ``new`` entries.

    Attributes:
        method: a value of ``--resize-vocabulary``.
        deviation: the standard deviation of the rows that ``normal`` draws.
        seed: the run's seed.
    """

    old: int
    new: int
    method: str
    deviation: float
    seed: int

    @classmethod
    def of(cls, folder: Path, size: int, method: str, seed: int) -> Growth:
        """Return the growth of the vocabulary of the model in ``folder`` to ``size`` entries."""
        model = read_model(folder)
        return cls(model.vocab_size, size, method, model.initializer_range, seed)

    @property
    def count(self) -> int:
        return self.new - self.old

    def note(self) -> str:
        """Return a sentence for the user on what is new."""
        how = {
            "mean": "are the mean of the old ones",
            "noise": "are drawn around the mean of the old ones",
            "normal": f"are drawn with a deviation of {self.deviation:g}",
        }
        return (
            f"The vocabulary has grown from {self.old} to {self.new} entries; new rows "
            f"{how[self.method]}."
        )

    def fill(self, shard: Shard, rows: Rows) -> None:
        """Fill the new rows that this rank holds of a weight; ``rows`` reads the old ones."""
        first = max(self.old, shard.offset[0])
        end = min(self.new, shard.offset[0] + len(shard.tensor))
        if first < end:
            values = self.values(shard.name, tuple(shard.full_shape[1:]), rows)
            own = slice(first - shard.offset[0], end - shard.offset[0])
            shard.tensor[own] = values[first - self.old : end - self.old].to(shard.tensor)

    def values(self, name: str, width: tuple[int, ...], rows: Rows) -> Tensor:
        """Return all new rows of the weight ``name``, float32 ``[count, *width]``."""
        with generator_of(name, self.seed):
            if self.method == "normal":
                drawn = torch.randn(self.count, *width) if width else torch.zeros(self.count)
                return self.deviation * drawn
            mean = sum(self._parts(rows), torch.zeros(width, dtype=torch.float64)) / self.old
            mean = mean.float()
            if self.method == "noise":
                return self._around(mean, rows)
        return mean.expand(self.count, *width)

    def _parts(self, rows: Rows) -> list[Tensor]:
        """Return the sums of the old rows, of a few thousand of them each, float64."""
        return [rows(*each).double().sum(0) for each in self._spans()]

    def _spans(self) -> list[tuple[int, int]]:
        return [(n, min(n + _ROWS, self.old)) for n in range(0, self.old, _ROWS)]

    def _around(self, mean: Tensor, rows: Rows) -> Tensor:
        """Return rows that vary as the old ones around their mean, by `SHARE` of the variance."""
        if not mean.dim():  # a bias, of whose deviation transformers takes the share
            square = sum((rows(*each).float() - mean).square().sum() for each in self._spans())
            deviation = (torch.as_tensor(square) / max(1, self.old - 1)).sqrt()
            return torch.normal(mean.expand(self.count), SHARE * deviation)
        covariance = torch.zeros(len(mean), len(mean))
        for each in self._spans():
            apart = rows(*each).float() - mean
            covariance.addmm_(apart.T, apart)
        covariance *= SHARE / self.old
        check: Any = constraints.positive_definite.check
        if not check(covariance):
            return mean.expand(self.count, -1)
        return MultivariateNormal(mean, covariance_matrix=covariance).sample((self.count,))
