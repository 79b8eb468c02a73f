"""Distillation (Hinton et al. 2015, arXiv:1503.02531) against cached teacher logits.

    l = alpha T^2 KL(teacher || student, both at temperature T) + (1 - alpha) cross-entropy

The k largest logits of the teacher for every token are in two files, which `write_cache` writes
once: row ``offsets[sample] + position`` of ``values.npy`` and ``ids.npy``, each ``[tokens, k]``.
The KL is over those k tokens, with both distributions normalized over them.

    python pretrain_gpt.py --sft --data-path chats.jsonl ... \\
        --loss examples/custom_loss/distillation.py:DistillationConfig --loss-args cache=teacher/
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_ext.data.batch import Batch
from megatron_ext.errors import DataError
from megatron_ext.losses.custom import LossInputs, TokenLoss, TokenLossConfig
from megatron_ext.losses.vocabulary import VocabularyHead
from megatron_ext.parallel.context import ParallelContext


def write_cache(folder: Path, logits: Sequence[Tensor], k: int) -> None:
    """Write the k largest logits of each token to ``folder``.

    Args:
        logits: a tensor ``[positions, v]`` for each sample, in the order of the dataset.
    """
    folder.mkdir(parents=True, exist_ok=True)
    largest = [sample.float().topk(k) for sample in logits]
    lengths = [sample.shape[0] for sample in logits]
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]))
    np.save(folder / "values.npy", torch.cat([each.values for each in largest]).numpy())
    np.save(folder / "ids.npy", torch.cat([each.indices for each in largest]).numpy())


class Distillation(TokenLoss["DistillationConfig"]):
    """KL divergence to the teacher, mixed with cross-entropy."""

    name = "distillation loss"

    def __init__(self, config: DistillationConfig) -> None:
        super().__init__(config)
        self._offsets = self._open("offsets")
        self._values = self._open("values")
        self._ids = self._open("ids")

    def _open(self, name: str) -> NDArray[np.int64]:
        path = Path(self.config.cache) / f"{name}.npy"
        if not path.exists():
            raise DataError(f"cache ({self.config.cache}) must hold {path.name}; see write_cache.")
        rows: NDArray[np.int64] = np.load(path, mmap_mode="r")
        return rows

    def build(self, batches: Sequence[Batch], context: ParallelContext) -> list[LossInputs]:
        """Look up the teacher's logits of each token, ``[b, s, k]``, by its sample and position."""
        return [self._inputs(batch) for batch in batches]

    def _inputs(self, batch: Batch) -> LossInputs:
        if batch.sample_ids is None:
            raise DataError("The distillation cache is by sample, which only `--sft` data names.")
        samples = batch.sample_ids.cpu().numpy()
        rows = self._offsets[samples.clip(0)] + batch.position_ids.cpu().numpy()
        rows = np.where(samples < 0, 0, rows)
        device = batch.labels.device
        tensors = {
            "labels": batch.labels,
            "teacher": torch.from_numpy(self._values[rows]).to(device),
            "ids": torch.from_numpy(self._ids[rows]).to(device),
        }
        return LossInputs(batch.loss_weights, tensors)

    def token_losses(
        self, hidden: Tensor, head: VocabularyHead, inputs: Mapping[str, Tensor]
    ) -> Tensor:
        """Return losses ``[C]``; see `TokenLoss.token_losses`."""
        temperature, alpha = self.config.temperature, self.config.alpha
        logits = head.logits(hidden)
        student = (head.at(logits, inputs["ids"]) / temperature).log_softmax(dim=1)
        teacher = (inputs["teacher"].float() / temperature).log_softmax(dim=1)
        divergence = (teacher.exp() * (teacher - student)).sum(dim=1)
        cross_entropy = -head.log_prob(logits, inputs["labels"])
        return alpha * temperature**2 * divergence + (1 - alpha) * cross_entropy


@dataclass(frozen=True)
class DistillationConfig(TokenLossConfig):
    """Options: ``cache``, the folder of `write_cache`; ``temperature`` T; ``alpha``."""

    loss_class = Distillation
    cache: str = "teacher"
    temperature: float = 2.0
    alpha: float = 0.9
