"""A streaming run starts from public weights, and its networks are exported."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.errors import CheckpointError
from megatron_ext.layers.initialization import shards_of
from megatron_ext.train.run import Run
from megatron_ext.video.convert.names import Naming
from megatron_ext.video.streaming.step import StreamingRunner
from tests.checkpoint.tiny import whole_tensors
from tests.video.convert.models import (
    exported,
    imported,
    make,
)
from tests.video.streaming.runs import run

STEPS = 3
"""Training steps. The generator is trained in the first and the last; averages begin after two."""


def whole(root: Path, step: int = STEPS) -> dict[str, Tensor]:
    folder = root / f"iter_{step:07d}"
    return whole_tensors(folder, root.with_suffix(f".{step}.pt"))


def starts_from_them(run: Run, wanted: dict[str, Tensor]) -> None:
    """Check that generator, critic and teacher have this rank's part of the imported weights."""
    runner = run.runner
    assert isinstance(runner, StreamingRunner)
    chunks = [*runner.chunks, *runner.critic.chunks, runner.teacher]
    for network in unwrap_model(chunks):
        for shard in shards_of(network):
            assert torch.equal(shard.tensor, shard.cut(wanted[shard.name])), shard.name


def test_a_run_starts_from_them_and_is_exported(tmp_path: Path) -> None:
    """Train on two tensor-parallel ranks; exported weights are imported again as the same."""
    source, root = make(tmp_path / "diffusers", torch.bfloat16), tmp_path / "ours"
    imported(source, root)
    wanted = whole(root, 0)
    words = f"--train-iters {STEPS} --tensor-model-parallel-size 2 --bf16 " + " ".join(
        f"--{flag}-checkpoint {root}" for flag in ("pretrained", "critic", "teacher")
    )
    run(tmp_path, words, ranks=2, prepare=partial(starts_from_them, wanted=wanted))
    trained = whole(tmp_path / "save")
    orders: dict[str, dict[str, Any]] = {
        "": {},
        "ema.": {"ema": True, "dtype": "float32"},
        "critic.": {"network": "critic", "naming": Naming.ORIGINAL},
    }
    for prefix, options in orders.items():
        target = exported(tmp_path / "save", tmp_path / f"exported {prefix}", **options)
        imported(target, tmp_path / f"again {prefix}")
        again = whole(tmp_path / f"again {prefix}", 0)
        assert again.keys() == wanted.keys()
        for name, tensor in again.items():
            assert torch.equal(tensor, trained[prefix + name]), name
            assert not torch.equal(tensor, wanted[name].to(tensor)), name
    assert WanTransformer3DModel.from_pretrained(tmp_path / "exported ").config.num_layers == 2


def test_what_is_not_there_is_not_exported(tmp_path: Path) -> None:
    root = tmp_path / "ours"
    imported(make(tmp_path / "diffusers"), root)
    orders: dict[str, dict[str, Any]] = {
        "holds no `ema.head.modulation.weight`; only a training run saves a critic": {"ema": True},
        "holds no `critic.head.modulation.weight`": {"network": "critic"},
        "`--ema` is for the generator, but `--network` is critic": {
            "ema": True,
            "network": "critic",
        },
        "holds no checkpoint of iteration 4|iter_0000004 does not exist": {"step": 4},
    }
    for sentence, options in orders.items():
        with pytest.raises(CheckpointError, match=sentence):
            exported(root, tmp_path / "back", **options)
        assert not (tmp_path / "back").exists()


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    root = tmp_path / "ours"
    imported(make(tmp_path / "diffusers"), root)
    (path, *_) = (root / "iter_0000000").glob("*.distcp")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        exported(root, tmp_path / "back")
