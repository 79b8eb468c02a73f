"""Which checkpoint flags choose, and what they hear if there is none."""

import dataclasses
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint import files, stored
from megatron_ext.checkpoint.best import BestCheckpoint
from megatron_ext.checkpoint.files import TRACKER, describe_file, folder_of
from megatron_ext.checkpoint.manifest import MANIFEST
from megatron_ext.checkpoint.stored import (
    CheckpointRef,
    check_files,
    check_replaced,
    choose,
    fault_of,
    find,
    load_notes,
    passes_over_damaged,
    read_progress,
    read_settings,
    refusal,
    stored_progress,
)
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.train.batch_size import Progress


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
    # Such a run does not start from scratch.
    assert load_notes(dataclasses.replace(config, starts_elsewhere=True)) == []


def write(root: Path, *iterations: int) -> None:
    """Write checkpoints with a manifest; the tracker names the last one."""
    for iteration in iterations:
        folder = folder_of(root, iteration)
        folder.mkdir(parents=True)
        (folder / "a").write_text(f"a of {iteration}")
        (folder / "b").write_text(f"b of {iteration}")
        listed = {name: describe_file(folder / name) for name in ("a", "b")}
        (folder / MANIFEST).write_text(json.dumps({"version": 1, "files": listed}))
    (root / TRACKER).write_text(str(iterations[-1]))


def damage(root: Path, iteration: int) -> None:
    (folder_of(root, iteration) / "b").write_text("")


def test_a_run_that_does_not_go_on_does_not_replace_another(tmp_path: Path) -> None:
    save = str(tmp_path / "run")
    more: dict[str, Any]
    write(tmp_path / "other", 5)
    check_replaced(CheckpointConfig(save=save, load=f"{tmp_path}/other"))
    write(Path(save), 2, 4)
    for more in ({}, {"load": f"{tmp_path}/other"}, {"load": save, "finetune": True}):
        with pytest.raises(CheckpointError) as caught:
            check_replaced(CheckpointConfig(save=save, **more))
        assert f"`--save` ({save}) holds the checkpoints of another run, up to iteration 4" in str(
            caught.value
        )
    for more in ({"load": f"{save}/"}, {"resume_mode": "auto"}, {"resume_mode": "disable"}):
        check_replaced(CheckpointConfig(save=save, **more))
    check_replaced(CheckpointConfig(load=save))


def test_first_weights_that_are_gone_are_told_to_a_run_that_goes_on(tmp_path: Path) -> None:
    write(tmp_path / "run", 2)
    config = CheckpointConfig(load=f"{tmp_path}/run", pretrained_checkpoint=f"{tmp_path}/gone")
    assert load_notes(config) == [
        f"`--pretrained-checkpoint` ({tmp_path}/gone) holds no checkpoint; the run goes on from "
        f"{tmp_path}/run, which comes first."
    ]
    write(tmp_path / "gone", 3)
    assert load_notes(config) == []


def test_the_checkpoint_of_iteration_0_is_one_like_others(tmp_path: Path) -> None:
    """An import of public weights writes it."""
    write(tmp_path, 0)
    assert choose(tmp_path, None) == 0 and choose(tmp_path, 0) == 0
    found = find(CheckpointConfig(load=str(tmp_path)))
    assert found == CheckpointRef(tmp_path, 0, weights_only=False)
    (tmp_path / TRACKER).unlink()
    assert choose(tmp_path, None) == 0
    (tmp_path / files.ANNOUNCEMENT).write_text("0")
    (tmp_path / TRACKER).write_text("7")
    assert choose(tmp_path, None) == 0


def test_only_older_checkpoints_stand_in_for_a_damaged_one(tmp_path: Path) -> None:
    write(tmp_path, 2, 4, 8, 6)
    damage(tmp_path, 6)
    advice = r"give `--ckpt-step 8` for the newest whole one"
    with pytest.raises(
        CheckpointError, match=rf"iteration 6 .*/b has 0 bytes instead of 6; {advice}"
    ):
        choose(tmp_path, None)
    damaged: stored.Damaged = {}
    assert choose(tmp_path, None, damaged) == 4
    assert list(damaged) == [folder_of(tmp_path, 6)]
    damage(tmp_path, 8)
    assert "give `--ckpt-step 4`" in refusal(tmp_path, 6, "fault")
    for iteration in (2, 4):
        damage(tmp_path, iteration)
    with pytest.raises(CheckpointError, match="there is no other whole one, so remove `--load`"):
        choose(tmp_path, None, damaged)


@pytest.mark.parametrize("name", ["a", "b"])
def test_every_listed_file_is_verified(name: str, tmp_path: Path) -> None:
    write(tmp_path, 2)
    checkpoint = CheckpointRef(tmp_path, 2, weights_only=False)
    check_files(checkpoint)
    path = folder_of(tmp_path, 2) / name
    path.write_text(path.read_text().swapcase())
    with pytest.raises(CheckpointError, match=rf"/{name} does not match its checksum; there is no"):
        check_files(checkpoint)
    check_files(checkpoint, lambda listed: set(listed) - {name})


def test_a_restarted_run_passes_over_what_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 2, 4)
    damage(tmp_path, 4)
    config = CheckpointConfig(load=str(tmp_path))
    with pytest.raises(CheckpointError, match="iteration 4 cannot be loaded"):
        find(config)
    monkeypatch.setattr(stored, "generation", lambda: 1)
    assert passes_over_damaged(config)
    found = find(config)
    assert found is not None and found.iteration == 2


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"resume_mode": "path"}, "--resume-mode path"),
        ({"exit_on_missing_checkpoint": True}, "--exit-on-missing-checkpoint"),
        ({"ckpt_step": 3}, "--ckpt-step"),
        ({"finetune": True}, "--finetune"),
    ],
)
def test_flags_that_need_a_checkpoint_are_named(
    given: dict[str, Any], named: str, tmp_path: Path
) -> None:
    empty = str(tmp_path / "empty")
    config = CheckpointConfig(load=empty, save=empty, **given)
    with pytest.raises(CheckpointError, match=f"holds no checkpoint, but `{named}` is given"):
        find(config)


def test_other_weights_and_local_snapshots_stand_in_for_a_missing_checkpoint(
    tmp_path: Path,
) -> None:
    empty, base = str(tmp_path / "empty"), tmp_path / "base"
    write(base, 4)
    config = CheckpointConfig(load=empty, pretrained_checkpoint=str(base), finetune=True)
    assert find(config) == CheckpointRef(base, 4, weights_only=True)
    nothing = str(tmp_path / "nothing")
    config = CheckpointConfig(load=empty, pretrained_checkpoint=nothing, finetune=True)
    with pytest.raises(CheckpointError, match=r"^`--pretrained-checkpoint` .* holds no"):
        find(config)
    config = CheckpointConfig(load=empty, non_persistent_local_ckpt_dir=str(tmp_path / "local"))
    assert find(config) is None
    (note,) = load_notes(config)
    assert "training starts from what `--non-persistent-local-ckpt-dir`" in note
    with pytest.raises(CheckpointError, match="is a file, but checkpoints are folders"):
        find(CheckpointConfig(load=str(folder_of(base, 4) / "a")))


def test_our_own_checkpoints_have_a_manifest(tmp_path: Path) -> None:
    write(tmp_path, 2)
    folder = folder_of(tmp_path, 2)
    assert fault_of(folder) is None
    (folder / MANIFEST).write_text(json.dumps({"files": {"a": describe_file(folder / "a")}}))
    assert fault_of(folder) is None  # as of the first version, which did not say its number
    (folder / MANIFEST).unlink()
    (folder / stored.RUN_CONFIG).write_text("{}")
    assert fault_of(folder) == f"{folder}/{MANIFEST} is missing"
    (folder / stored.RUN_CONFIG).unlink()
    assert fault_of(folder) == f"{folder}/metadata.json is missing"


def test_counters_of_megatron_lm_are_among_its_arguments(tmp_path: Path) -> None:
    arguments = Namespace(consumed_train_samples=24, consumed_valid_samples=8, iteration=3)
    wanted = {"consumed_train_samples": 24, "consumed_valid_samples": 8}
    assert stored_progress(tmp_path, arguments) == wanted
    assert stored_progress(tmp_path, Namespace()) == dict.fromkeys(wanted, 0)
    (tmp_path / stored.PROGRESS).write_text('{"iteration": 5}')
    assert stored_progress(tmp_path, arguments) == {"iteration": 5}


BEST = {"iteration": 4, "loss": 1.5, "regular": True}


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("iteration", 0, -1),
        ("consumed_train_samples", 3, 3.5),
        ("consumed_valid_samples", 3, "3"),
        ("skipped_iterations", 3, None),
        ("nan_iterations", 3, True),
        ("stale_evaluations", 0, -1),
        ("average_updates", 7, "7"),
        ("average_start", None, [1.0]),
        ("average_start", 0.5, "all"),
        ("epoch", None, "1"),
        ("lowest_loss", 1.5, True),
        ("floating_point_operations", 1e20, None),
        ("best_checkpoints", [BEST], [{**BEST, "regular": 1}]),
        ("best_checkpoints", [], [{**BEST, "loss": "low"}]),
        ("best_checkpoints", [BEST], [{**BEST, "more": 1}]),
        ("best_checkpoints", [BEST], [{**BEST, "iteration": -2}]),
        ("recent_values", [[1, 2.5], []], [[1], 2]),
        ("recent_values", [], [["1"]]),
        ("data_plan", "x", 1),
        ("data_order", {"a": 1}, [1]),
        ("data_order", None, "a"),
    ],
)
def test_each_counter_has_its_form(name: str, good: Any, bad: Any, tmp_path: Path) -> None:
    (tmp_path / stored.PROGRESS).write_text(json.dumps({name: good, "of a later version": [1]}))
    assert read_progress(tmp_path)[name] == good
    (tmp_path / stored.PROGRESS).write_text(json.dumps({name: bad}))
    with pytest.raises(CheckpointError, match=rf"damaged \(`{name}` is .* must be"):
        read_progress(tmp_path)


def test_every_counter_of_a_run_has_a_form_that_its_own_values_have(tmp_path: Path) -> None:
    assert {field.name for field in dataclasses.fields(Progress)} == set(stored._FORMS)
    run = Progress(
        iteration=3,
        epoch=0.5,
        best_checkpoints=[BestCheckpoint(2, 1.5, True)],
        recent_values=[[1.0, 2.0]],
        data_order={"a": [1]},
    )
    for progress in (Progress(), run):
        (tmp_path / stored.PROGRESS).write_text(json.dumps(progress.to_dict()))
        assert Progress.from_dict(read_progress(tmp_path)) == progress


def test_the_device_of_a_run_is_stored_beside_its_sections(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == {}
    path = tmp_path / stored.RUN_CONFIG
    path.write_text('{"model": {"num_layers": 4}, "device": "cuda"}')
    assert read_settings(tmp_path)["model"] == {"num_layers": 4}
    path.write_text('{"model": 4}')
    with pytest.raises(CheckpointError, match="model.* is a number instead of an object"):
        read_settings(tmp_path)


@pytest.mark.parametrize("text", ["12 and more", "1.5", "-3", "0x12", "1" * 16, ""])
def test_a_tracker_holds_one_number_and_nothing_else(text: str, tmp_path: Path) -> None:
    write(tmp_path, 2, 4)
    (tmp_path / TRACKER).write_text(text)
    with pytest.raises(CheckpointError, match=r"must hold the number .* one of \[2, 4\] into"):
        files.read_tracker(tmp_path)
    (tmp_path / TRACKER).write_text(" 12\n")
    assert files.read_tracker(tmp_path) == 12


def test_entries_of_all_releases_tell_whether_a_file_has_changed(tmp_path: Path) -> None:
    """The release that wrote a checkpoint and the one that reads it agree on the checksums."""
    path = tmp_path / "a"
    digest = {"blake2b": "cf4ab791c62b8d2b2109c90275287816"}
    checksum = {"crc32": 891568578}
    for content, is_unchanged in ((b"abc", True), (b"abd", False), (b"abcd", False)):
        path.write_bytes(content)
        for sums in (checksum, digest, digest | checksum):
            assert files.is_unchanged(path, {"bytes": 3, **sums}) == is_unchanged
    path.write_bytes(b"abc")
    assert describe_file(path) == {"bytes": 3, **checksum}


def test_the_flags_of_a_run_are_those_of_the_step_that_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path, 2, 4)
    for iteration in (2, 4):
        text = json.dumps({"training": {"seed": iteration}})
        (folder_of(tmp_path, iteration) / stored.RUN_CONFIG).write_text(text)
    assert stored.read_run_config(tmp_path)["training"]["seed"] == 4
    assert stored.read_run_config(tmp_path, 2)["training"]["seed"] == 2
    (folder_of(tmp_path, 2) / stored.RUN_CONFIG).unlink()
    with pytest.raises(CheckpointError, match="so `--use-checkpoint-args` has nothing to read"):
        stored.read_run_config(tmp_path, 2)
    (tmp_path / "empty").mkdir()
    for root, text in (("empty", "holds no checkpoint"), ("none", "is no folder")):
        with pytest.raises(CheckpointError, match=text):
            stored.read_run_config(tmp_path / root)


def test_weights_of_another_flag_are_refused_under_its_name(tmp_path: Path) -> None:
    stored.check_weights("--teacher-checkpoint", None)
    write(tmp_path / "run", 2)
    stored.check_weights("--teacher-checkpoint", str(tmp_path / "run"))
    with pytest.raises(CheckpointError, match=r"^`--teacher-checkpoint` \(.*/none\) holds no"):
        stored.check_weights("--teacher-checkpoint", str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="leaves the weights to a checkpoint, but there is"):
        stored.check_start(CheckpointConfig(), initializes=False)
    stored.check_start(CheckpointConfig(), initializes=True)
    stored.check_start(CheckpointConfig(load=str(tmp_path / "run")), initializes=False)
