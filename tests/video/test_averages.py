"""Averaged weights of video models as their checkpoints hold them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.layers.initialization import shards_of
from megatron_ext.train.run import Run
from tests.checkpoint.tiny import whole_tensors
from tests.video.clips import train

DECAY = 0.9


def _weight(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """A whole weight that its name and the step decide."""
    digest = hashlib.blake2b(f"{name} {step}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(shape, generator=generator) / step


def _give_weights(run: Run) -> None:
    """Before each update of the averages, replace the weights by those of `_weight`."""
    assert run.ema is not None and run.optimizer is not None
    optimizer, update = run.optimizer, run.ema.update

    @torch.no_grad()
    def updated(step: int) -> None:
        for chunk in run.chunks:
            for shard in shards_of(chunk.module):
                shard.tensor.copy_(shard.cut(_weight(shard.name, shard.full_shape, step)))
        optimizer.reload_model_params()
        update(step)

    run.ema.update = updated  # type: ignore[method-assign]


def _stored(clips: Path, save: Path, words: str, **options: Any) -> dict[str, Tensor]:
    flags = f"--ema-decay {DECAY} --no-save-optim {words}"
    train(clips, save, flags, prepare=_give_weights, **options)
    return whole_tensors(save / "iter_0000003", save / "whole.pt")


def test_the_average_of_four_ranks_is_that_of_one_bit_for_bit(clips: Path, tmp_path: Path) -> None:
    """Whole in the checkpoint, and not the piece that rank 0 averages."""
    words = "--tensor-model-parallel-size 2 --use-distributed-optimizer"
    one = _stored(clips, tmp_path / "one", "")
    four = _stored(clips, tmp_path / "four", words, ranks=4)
    averages = {name: tensor for name, tensor in one.items() if name.startswith("ema.")}
    assert len(averages) > 50 and one.keys() == four.keys()
    for name, average in averages.items():
        weight = one[name.removeprefix("ema.")]
        assert average.dtype is torch.float32 and average.shape == weight.shape
        assert not torch.equal(average, weight)
        assert torch.equal(average.view(torch.int32), four[name].view(torch.int32)), name
