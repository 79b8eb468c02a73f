"""Where the samples of a batch come from: their file, or the prefix of their dataset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from megatron_ext.data.samplers import Ints, StepPlan
from megatron_ext.text.sft.dataset import SftDataset


@dataclass(frozen=True)
class Origin:
    """Of a sample.

    Attributes:
        sample: its number in the split, from 0.
        source: its file, or the prefix of its dataset.
        number: of the conversation in its file, from 1; lines that were refused do not count.
        cut: tokens that truncation took away.
    """

    sample: int
    source: str
    number: int | None = None
    cut: int = 0


class Numbered(Dataset[dict[str, Any]]):
    """A dataset whose samples say their own number; rows of conversations say theirs anyway."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.plan: StepPlan | None = getattr(dataset, "plan", None)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        sample: dict[str, Any] = self._dataset[index]
        return {**sample, "sample": index} if self.plan is None else sample


class Drawn(Iterator[dict[str, Tensor]]):
    """Samples on their way into a loader.

    Attributes:
        last: what was drawn last.
    """

    def __init__(self, samples: Iterator[dict[str, Tensor]]) -> None:
        self._samples = samples
        self.last: dict[str, Tensor] = {}

    def __next__(self) -> dict[str, Tensor]:
        self.last = next(self._samples)
        return self.last


class Origins:
    """Looks up where the samples of one split come from."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._known: dict[int, Origin] = {}

    def of_row(
        self, row: int, samples: Ints | None, drawn: dict[str, Tensor]
    ) -> tuple[Origin | None, dict[int, Origin]]:
        """The origin of a row, or of each of its samples.

        Args:
            row: in the micro-batch.
            samples: number of the sample at each position, -1 in padding, ``[s]``.
            drawn: the collated samples of the micro-batch.
        """
        if samples is not None:
            numbers = [int(number) for number in np.unique(samples) if number >= 0]
            return None, {number: self._conversation(number) for number in numbers}
        if "sample" not in drawn:
            return None, {}
        return Origin(int(drawn["sample"][row]), self._prefix(row, drawn)), {}

    def _prefix(self, row: int, drawn: dict[str, Tensor]) -> str:
        """The dataset that a row was cut from; a blend says which of its datasets it took."""
        dataset = self._dataset
        if "dataset_id" in drawn:
            dataset = dataset.datasets[int(drawn["dataset_id"][row])]
        return str(getattr(dataset, "dataset_path", None) or type(dataset).__name__)

    def _conversation(self, sample: int) -> Origin:
        if sample not in self._known:
            self._known[sample] = self._look_up(sample)
        return self._known[sample]

    def _look_up(self, sample: int) -> Origin:
        dataset = self._dataset
        if not isinstance(dataset, SftDataset):
            return Origin(sample, type(dataset).__name__)
        store, place = dataset.place_of(sample)
        number = place
        for _, count in store.about["files"]:
            if number < count:
                break
            number -= count
        cut = int(store.lengths[place]) - 1 - int(dataset.lengths[sample])
        return Origin(sample, dataset.source_of(sample), number + 1, cut)
