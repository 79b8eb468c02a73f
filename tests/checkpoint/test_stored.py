"""A run starts from the weights in a folder of checkpoints, or in the folder of one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.checkpoint.files import TRACKER, root_of
from megatron_ext.checkpoint.stored import find
from megatron_ext.config.checkpoint import CheckpointConfig
from megatron_ext.errors import CheckpointError


def write(root: Path, *iterations: int) -> None:
    """Write checkpoints that look whole to all that does not load them."""
    for iteration in iterations:
        folder = root / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        for name in ("metadata.json", ".metadata", "common.pt"):
            (folder / name).write_text(str(iteration))
    (root / TRACKER).write_text(str(iterations[-1]))


def test_one_checkpoint_of_several(tmp_path: Path) -> None:
    write(tmp_path / "run", 3, 5)
    for asked, want in (("run", 5), ("run/iter_0000005", 5), ("run/iter_0000003", 3)):
        found = find(CheckpointConfig(pretrained_checkpoint=str(tmp_path / asked)))
        assert found is not None and found.weights_only
        assert (found.root, found.iteration) == (tmp_path / "run", want)
        assert found.path == tmp_path / "run" / f"iter_{want:07d}"
    with pytest.raises(CheckpointError, match=r"iter_0000004\) holds no checkpoint; give a folder"):
        find(CheckpointConfig(pretrained_checkpoint=str(tmp_path / "run" / "iter_0000004")))


def test_folders_of_other_names_are_roots(tmp_path: Path) -> None:
    for name in ("iter_12", "iter_0000012.replaced", "iter_0000012x", "run"):
        (tmp_path / name).mkdir()
        assert root_of(tmp_path / name) == (tmp_path / name, None)
    assert root_of(tmp_path / "iter_0000012") == (tmp_path / "iter_0000012", None)
    (tmp_path / "iter_0000012").mkdir()
    assert root_of(tmp_path / "iter_0000012") == (tmp_path, 12)
