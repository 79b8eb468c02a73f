"""Runs that need the add-on for their ranks get it, and others import none of it."""

from typing import Any

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.train import supervision as module
from megatron_ext.train.supervision import check_add_ons, given_flags, supervision_of
from tests.training_runs import SMALL, config_of


@pytest.mark.parametrize(
    ("words", "ranks", "under_torchrun", "expected"),
    [
        ("", 1, False, "plain"),
        ("", 2, False, "chosen"),
        # torchrun may start a lone rank again.
        ("", 1, True, "chosen"),
        ("--max-restarts 1", 1, False, "chosen"),
        (
            "--non-persistent-save-interval 5 --non-persistent-ckpt-type in_memory",
            1,
            False,
            "chosen",
        ),
        ("--save out --save-interval 5", 1, False, "plain"),
    ],
)
def test_which_runs_need_the_add_on(
    words: str,
    ranks: int,
    under_torchrun: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    config = config_of([*SMALL, *words.split()], ranks=ranks)
    if under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    chosen: Any = object()
    monkeypatch.setattr(module, "_chosen_supervision", lambda config: chosen)
    found = supervision_of(config)
    assert ("chosen" if found is chosen else "plain") == expected


def test_its_flags_are_refused_where_the_folder_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of([*SMALL, *"--max-restarts 1 --rerun-mode disabled".split()])
    assert "--max-restarts" in given_flags(config)
    check_add_ons(config)
    monkeypatch.setattr(module.extras, "is_there", lambda name: False)
    with pytest.raises(ConfigError, match="`--max-restarts`"):
        check_add_ons(config)
    check_add_ons(config_of(SMALL))
