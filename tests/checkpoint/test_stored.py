"""Which checkpoint flags choose, and what they hear if there is none."""

from pathlib import Path

import pytest

from megatron_ext.checkpoint.stored import find, load_notes
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.errors import CheckpointError


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, exists: bool) -> None:
    load = tmp_path / "load"
    if exists:
        load.mkdir()
    for save in (None, str(tmp_path / "save")):
        with pytest.raises(CheckpointError, match="leave `--load` out to start from scratch"):
            find(CheckpointConfig(load=str(load), save=save))


def test_the_save_folder_may_be_empty_at_first(tmp_path: Path) -> None:
    config = CheckpointConfig(load=f"{tmp_path}/run", save=f"{tmp_path}/other/../run")
    assert find(config) is None
    (note,) = load_notes(config)
    assert note.endswith("holds no checkpoint yet; training starts from scratch.")
    assert load_notes(CheckpointConfig(save=str(tmp_path))) == []
