"""Copies from and to an address: which ones, in which order, and by which process."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint import staging
from megatron_ext.checkpoint.files import TRACKER, folder_of
from megatron_ext.checkpoint.manifest import MANIFEST
from megatron_ext.checkpoint.remote import RemoteFolder
from megatron_ext.checkpoint.stored import CheckpointRef
from megatron_ext.config.fault_tolerance import FaultToleranceConfig
from megatron_ext.config.output import CheckpointConfig, PlanningConfig, staging_folder
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from tests.checkpoint.test_stored import damage, write


class Remote:
    """An address, whose calls a test can read."""

    def __init__(self, folder: Path, has: bool, calls: list[Any]) -> None:
        self.root, self.name, self.has, self.calls = folder, folder.name, has, calls
        self.notes = [f"note of {self.name}"]

    def fetch(self, step: int | None = None, *, passes_over: bool = False) -> int | None:
        self.calls.append((self.name, step))
        return 3 if self.has else None

    def check_writable(self) -> None:
        self.calls.append((self.name, "writable"))

    def fetch_records(self) -> None:
        self.calls.append((self.name, "records"))


@pytest.mark.parametrize(
    ("flags", "restarts", "has", "base", "wanted"),
    [
        ({}, 0, "", False, [("load", None), ("base", None)]),
        ({}, 0, "load", False, [("load", None)]),
        ({}, 0, "load", True, [("load", None), ("base", None)]),
        ({"ckpt_step": 5}, 0, "load", False, [("load", 5)]),
        ({}, 1, "save", False, [("save", None)]),
        ({}, 1, "save", True, [("save", None), ("base", None)]),
        ({"resume_mode": "auto"}, 0, "", False, [("save", None), ("load", None), ("base", None)]),
        ({"resume_mode": "auto"}, 0, "save load", False, [("save", None)]),
    ],
)
def test_the_first_checkpoint_that_is_found_is_copied_and_the_weights_under_adapters(
    flags: dict[str, Any],
    restarts: int,
    has: str,
    base: bool,
    wanted: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = {
        "save": "s3://b/save",
        "load": "s3://b/load",
        "pretrained_checkpoint": "s3://b/base",
    }
    config = CheckpointConfig(**addresses, **flags).resolved()
    calls = list[Any]()

    def remote_of(_: Any, folder: Path) -> Any:
        names = {staging_folder(f"s3://b/{name}"): name for name in ("save", "load", "base")}
        name = names[folder]
        return Remote(Path(name), name in has.split(), calls)

    monkeypatch.setattr(staging, "remote_of", remote_of)
    monkeypatch.setattr(staging, "generation", lambda: restarts)
    notes = staging._stage(config, needs_base=base, writes=False)
    assert calls == wanted
    copies = [note for note in notes if "has its copy on disk in" in note]
    assert [note.split(" (")[0] for note in copies] == list(addresses.values())
    assert notes[len(copies) :] == [f"note of {name}" for name, _ in wanted]


def test_addresses_are_kept_however_often_a_configuration_is_completed() -> None:
    given = CheckpointConfig(save="s3://b/run", load="local", usual_save_interval=7)
    once = given.resolved(may_restart=True)
    assert (once.save, once.load) == (str(staging_folder("s3://b/run")), "local")
    assert once.addresses == {"save": "s3://b/run"}
    assert (once.save_interval, once.passes_over_damaged) == (7, True)
    assert once.resolved(may_restart=True) == once
    back = once.as_given()
    assert (back.save, back.load, back.addresses) == ("s3://b/run", "local", {})


def test_a_folder_that_holds_checkpoints_comes_before_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[Any]()
    base = staging_folder("s3://b/base")
    remote = Remote(Path("base"), has=True, calls=calls)
    monkeypatch.setattr(staging, "remote_of", lambda _, path: remote if path == base else None)
    load = tmp_path / "load"
    config = CheckpointConfig(load=str(load), pretrained_checkpoint="s3://b/base").resolved()
    staging._stage(config, needs_base=False, writes=False)
    assert calls == [("base", None)]
    write(load, 4)
    staging._stage(config, needs_base=False, writes=False)
    assert calls == [("base", None)]


@pytest.mark.parametrize(
    ("is_first", "dry", "writes"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_only_the_first_process_of_a_real_run_writes(
    is_first: bool, dry: bool, writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[bool]()
    monkeypatch.setattr(staging, "_apart", lambda work: work())
    monkeypatch.setattr(staging, "_stage", lambda _, needs_base, writes: given.append(writes))
    config = RunConfig(
        checkpoint=CheckpointConfig(save="s3://b/save", peer_checkpoint_interval=1).resolved(),
        planning=PlanningConfig(dry_run=dry),
    )
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    staging.stage(config, is_first=is_first)
    assert given == [writes]
    assert staging.stage(RunConfig(), is_first=True) == [] and len(given) == 1


def test_a_failed_copy_of_records_is_only_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tries = list[str]()

    class Target:
        root = tmp_path

        def copy_records(self) -> None:
            tries.append("copy")
            raise (CheckpointError if len(tries) == 1 else OSError)("the storage is gone")

    monkeypatch.setattr(staging, "remote_of", lambda *_: Target())
    config = CheckpointConfig(save=str(tmp_path))
    staging.copy_records(config, is_first=False)
    assert tries == []
    for _ in range(2):
        staging.copy_records(config, is_first=True)
        told = capfd.readouterr().out
        assert told.startswith(f"note: the records in {tmp_path} could not be copied: ")
        assert "the storage is gone" in told
    staging.copy_records(CheckpointConfig(), is_first=True)
    assert len(tries) == 2


def test_the_step_in_an_address_is_copied_unless_another_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = list[int | None]()
    monkeypatch.setattr(staging, "_apart", lambda work: work())
    monkeypatch.setattr(RemoteFolder, "fetch", lambda _, step: steps.append(step))
    whole, one = "s3://b/run", "s3://b/run/iter_0000012"
    for address, step in ((whole, None), (whole, 5), (one, None), (one, 5)):
        assert staging.fetched("--load", address, step) == staging_folder(address)
    assert steps == [None, 5, 12, 5]
    assert staging.fetched("--load", str(tmp_path)) == tmp_path


@pytest.fixture
def remote(tmp_path: Path) -> RemoteFolder:
    there = tmp_path / "there"
    write(there, 2, 4, 8, 6)
    return RemoteFolder("--load", f"file://{there}", tmp_path / "here")


def test_the_checkpoint_of_the_tracker_is_copied_or_that_of_a_step(
    remote: RemoteFolder, tmp_path: Path
) -> None:
    here, there = remote.root, tmp_path / "there"
    assert remote.fetch(4) == 4 and not (here / TRACKER).exists()
    assert remote.fetch() == 6 and (here / TRACKER).read_text() == "6"
    assert remote.fetch(2) == 2 and (here / TRACKER).read_text() == "6"
    (there / TRACKER).unlink()
    assert remote.fetch() == 8


def test_a_copy_of_other_content_is_replaced(remote: RemoteFolder, tmp_path: Path) -> None:
    """Another run may have saved the same step there, and a file here may be damaged."""
    here, there = remote.root, tmp_path / "there"
    assert remote.fetch(4) == 4
    folder_of(here, 5).mkdir()
    wanted = (folder_of(there, 6) / "a").read_bytes()
    other = folder_of(there, 4)
    for name in ("a", "b", MANIFEST):
        (other / name).write_bytes((folder_of(there, 6) / name).read_bytes())
    assert remote.fetch(4) == 4
    assert (folder_of(here, 4) / "a").read_bytes() == wanted
    assert not folder_of(here, 5).exists()
    # A file that is cut is copied again; the manifest decides what is whole.
    (folder_of(here, 4) / "b").write_text("")
    assert remote.fetch(4) == 4
    assert (folder_of(here, 4) / "b").read_text() == "b of 6"


def test_an_interrupted_copy_goes_on_with_files_that_are_whole(
    remote: RemoteFolder, tmp_path: Path
) -> None:
    part = remote.root / "iter_0000004.tmp"
    part.mkdir(parents=True)
    (part / "a").write_text("a of 4")
    (part / "b").write_text("damage")  # as long as it should be
    assert remote.fetch(4) == 4
    assert (folder_of(remote.root, 4) / "b").read_text() == "b of 4"
    assert not part.exists()


def test_the_advice_names_a_checkpoint_that_is_whole(remote: RemoteFolder, tmp_path: Path) -> None:
    there = tmp_path / "there"
    damage(there, 6)
    with pytest.raises(CheckpointError, match="give `--ckpt-step 4`"):
        remote.fetch()
    damage(there, 4)
    with pytest.raises(CheckpointError, match="give `--ckpt-step 2`"):
        remote.fetch()
    damage(there, 2)
    with pytest.raises(CheckpointError, match="give another address"):
        remote.fetch()
    assert remote.fetch(passes_over=True) is None
    assert len(remote.notes) == 3


def test_records_are_copied_when_they_change_and_brought_when_they_are_longer(
    remote: RemoteFolder, tmp_path: Path
) -> None:
    here, there = remote.root, tmp_path / "there"
    (here / "postmortem_1").mkdir(parents=True)
    for name, text in (("metrics", "1\n"), (".lock", ""), (TRACKER, "9"), ("postmortem_1/a", "x")):
        (here / name).write_text(text)
    remote.copy_records()
    assert (there / "metrics").read_text() == "1\n" and (there / "postmortem_1" / "a").exists()
    assert not (there / ".lock").exists() and (there / TRACKER).read_text() == "6"
    (there / "metrics").unlink()
    remote.copy_records()
    assert not (there / "metrics").exists()  # It has not changed here.
    (here / "metrics").write_text("1\n2\n")
    remote.copy_records()
    assert (there / "metrics").read_text() == "1\n2\n"
    (here / TRACKER).unlink()
    for text, wanted in (("1\n", "1\n2\n"), ("1\n2\n3\n", "1\n2\n3\n")):
        (here / "metrics").write_text(text)
        remote.fetch_records()
        assert (here / "metrics").read_text() == wanted
    (here / "metrics").unlink()
    remote.fetch_records()
    assert (here / "metrics").read_text() == "1\n2\n"
    assert not (here / TRACKER).exists() and not (here / "iter_0000002").exists()


def test_a_manifest_is_the_last_to_come_and_the_first_to_go(
    remote: RemoteFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is cut short in between never looks whole."""
    done = list[str]()

    class Storage:
        async_impl = True

        def rm(self, path: str, recursive: bool = False) -> None:
            done.append(f"remove {Path(path).name}{' whole' if recursive else ''}")

    monkeypatch.setattr(RemoteFolder, "_place", (Storage(), "place"))
    monkeypatch.setattr(remote, "_put", lambda path, name: done.append(f"put {name}"))
    folder = tmp_path / "folder"
    folder.mkdir()
    entry = {"bytes": 1, "crc32": 0}
    own = {"__1_0.distcp": entry, "manifest_1_0.json": {**entry, "part": True}}
    listed = {f"__{rank}_0.distcp": entry for rank in (0, 1, 10)}
    listed |= {"common.pt": entry, "manifest_0_0.json": {**entry, "part": True}}
    module = "megatron_ext.checkpoint.remote"
    monkeypatch.setattr(f"{module}.on_first_rank", lambda work, _: work())
    monkeypatch.setattr(f"{module}.on_every_rank", lambda work, _: work())
    remote.upload(folder, 7, listed, own)
    name = "iter_0000007"
    assert done == [
        f"remove {MANIFEST}",
        f"remove {name} whole",
        f"put {name}/__1_0.distcp",
        f"put {name}/manifest_1_0.json",
        f"put {name}/common.pt",
        f"put {name}/{MANIFEST}",
    ]


def test_an_upload_is_tried_three_times(
    remote: RemoteFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_ext.checkpoint.remote.PAUSES", (0.0, 0.0))
    tries = list[int]()

    def work(works: int) -> str:
        tries.append(1)
        if len(tries) < works:
            raise OSError("the storage is busy")
        return "done"

    assert remote._tried("x", lambda: work(3)) == "done"
    tries.clear()
    with pytest.raises(CheckpointError, match="there/x: the storage is busy"):
        remote._tried("x", lambda: work(4))
    assert len(tries) == 3


def test_old_checkpoints_go_at_the_address_as_in_the_folder(
    remote: RemoteFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "megatron_ext.checkpoint.remote"
    monkeypatch.setattr(f"{module}.on_first_rank", lambda work, _: work())
    remote.root.mkdir()
    (remote.root / TRACKER).write_text("6")
    (remote.root / "iter_0000006.tmp").mkdir()
    (remote.root / "metrics.jsonl").write_text("{}\n")
    remote.finish(6, CheckpointConfig(keep_last=2), [], {2})
    left = sorted(path.name for path in (tmp_path / "there").glob("iter_*"))
    assert left == ["iter_0000004", "iter_0000006", "iter_0000008"]
    assert not (remote.root / "iter_0000006.tmp").exists()
    assert (tmp_path / "there" / "metrics.jsonl").read_text() == "{}\n"


def test_a_reference_names_the_folder_that_stands(tmp_path: Path) -> None:
    write(tmp_path, 2)
    assert CheckpointRef(tmp_path, 2, weights_only=False).path == folder_of(tmp_path, 2)


@pytest.mark.parametrize(
    ("flags", "elastic", "local", "refused"),
    [
        ({"peer_checkpoint_interval": 1}, True, "2", True),
        ({"non_persistent_save_interval": 1}, True, "2", True),
        ({"peer_checkpoint_interval": 1}, False, "2", False),
        ({"peer_checkpoint_interval": 1}, True, "4", False),
        ({}, True, "2", False),
    ],
)
def test_an_elastic_run_with_state_in_memory_needs_a_common_folder(
    flags: dict[str, int],
    elastic: bool,
    local: str,
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    config = RunConfig(
        checkpoint=CheckpointConfig(save="s3://b/run", **flags).resolved(),  # type: ignore[arg-type]
        fault_tolerance=FaultToleranceConfig(elastic_min_nodes=1 if elastic else None),
    )
    if refused:
        with pytest.raises(CheckpointError, match="gives several machines no common folder"):
            staging._check_machines(config)
    else:
        staging._check_machines(config)


def test_the_test_of_an_address_leaves_only_whole_checkpoints(
    remote: RemoteFolder, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    (folder_of(there, 4) / MANIFEST).unlink()
    (there / "metrics").write_text("kept")
    exported = there / "iter_0000002_hf"  # a user's own folder
    exported.mkdir()
    (exported / "config.json").write_text("{}")
    remote.check_writable()
    left = sorted(path.name for path in there.iterdir())
    assert left == [
        "iter_0000002", "iter_0000002_hf", "iter_0000006", "iter_0000008", TRACKER, "metrics",
    ]  # fmt: skip
    assert remote._iterations() == [2, 6, 8]
    assert list(remote.root.iterdir()) == []
