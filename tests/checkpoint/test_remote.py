"""Checkpoints at an address: whole or not there, and the same bits on a machine without a copy."""

import fcntl
import functools
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from megatron_ext.checkpoint import remote
from megatron_ext.checkpoint.files import TRACKER, folder_of, published
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.manifest import MANIFEST
from megatron_ext.checkpoint.remote import RemoteFolder, remote_of
from megatron_ext.checkpoint.staging import fetched, stage
from megatron_ext.config.fault_tolerance import FaultToleranceConfig
from megatron_ext.config.output import CheckpointConfig, staging_folder
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.text.task import TEXT
from megatron_ext.train.main import main
from megatron_ext.train.reporting.files import read_metrics
from tests.checkpoint.test_background import same_content
from tests.checkpoint.tiny import build, load, manager, save
from tests.extras.resilience.faulty_runs import same_end
from tests.ranks import on_ranks, ranks
from tests.training_runs import SMALL, training_rows


class FaultyStorage(LocalFileSystem):  # type: ignore[misc]
    """Storage whose next copies fail as a file ``FAULTS`` says, one word for each copy.

    ``error`` raises, and ``part`` copies half of the file without a word. The end of a path, as a
    first word, ends the process that copies that file.
    """

    protocol = ("faulty",)
    faults = Path()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(LocalFileSystem._strip_protocol(str(path).removeprefix("faulty://")))

    def _next_fault(self, target: str) -> str:
        with self.faults.open("a+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            file.seek(0)
            first, _, rest = file.read().partition(" ")
            if first.startswith("iter_"):
                return "kill" if target.endswith(first) else ""
            file.truncate(0)
            file.write(rest)
        return first

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        fault = self._next_fault(rpath)
        if fault == "error":
            raise OSError("the storage is busy")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "part":
            content = Path(lpath).read_bytes()
            Path(rpath).write_bytes(content[: len(content) // 2])
            return
        super().put_file(lpath, rpath, **options)


@pytest.fixture(autouse=True)
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let faulty storage exist, and the user's cache folder lie in the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(FaultyStorage, "faults", tmp_path / "FAULTS")
    monkeypatch.setattr(remote, "PAUSES", (0.0, 0.0))
    fsspec.register_implementation("faulty", FaultyStorage, clobber=True)
    yield
    remote._remote.cache_clear()


def config_of(address: str, **options: Any) -> CheckpointConfig:
    return CheckpointConfig(save=address, load=address, **options).resolved()


def on_two_machines(context: Any, tmp_path: Path, address: str) -> None:
    """Save and load where each rank has a folder of its own in the place of the staging folder."""
    os.chdir(tmp_path / f"machine{context.rank}")
    os.environ["XDG_CACHE_HOME"] = "cache"
    tiny, plain = build(context), manager(context, tmp_path / "plain", keep_last=1)
    config = config_of(address, keep_last=1)
    config = CheckpointConfig(
        save=os.path.relpath(config.save or ""),
        load=os.path.relpath(config.load or ""),
        keep_last=1,
        addresses=config.addresses,
    )
    checkpoints = CheckpointManager(config, context)
    for iteration in (1, 2):
        tiny.step()
        save(plain, tiny, iteration, context)
        save(checkpoints, tiny, iteration, context)
    if context.rank == 0:
        there = tmp_path / "there"
        assert published(there) == published(Path(config.save or "")) == [2]
        assert (there / TRACKER).read_text() == "2"
        assert same_content(folder_of(there, 2), folder_of(tmp_path / "plain", 2))
    assert not list(Path(config.save or "").glob("*.tmp"))
    # The second machine has nothing of the checkpoint yet.
    assert (folder_of(Path(config.save or ""), 2)).exists() == (context.rank == 0)
    fresh = build(context)
    fresh.spoil()
    assert load(checkpoints, fresh).iteration == 2
    assert (folder_of(Path(config.save or ""), 2)).exists()
    save(manager(context, tmp_path / "again"), fresh, 2, context)
    if context.rank == 0:
        assert same_content(folder_of(tmp_path / "again", 2), folder_of(tmp_path / "plain", 2))


@pytest.mark.parametrize(
    "layout", [{"dp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.slow)], ids=["dp2", "tp2"]
)
def test_machines_that_share_nothing_save_and_load_the_bits_of_a_folder(
    layout: dict[str, int], tmp_path: Path
) -> None:
    for rank in range(2):
        (tmp_path / f"machine{rank}").mkdir()
    address = f"file://{tmp_path}/there"
    on_ranks(on_two_machines, layout, tmp_path=tmp_path, address=address)


@ranks(dp=2, timeout=120)
def test_a_failed_copy_is_tried_again_and_a_partial_one_is_never_whole(
    context: Any, tmp_path: Path
) -> None:
    tiny, there = build(context), tmp_path / "there"
    checkpoints = CheckpointManager(config_of(f"faulty://{there}"), context)

    def faults(words: str) -> None:
        if context.rank == 0:
            (tmp_path / "FAULTS").write_text(words)
        torch.distributed.barrier()

    faults("part")
    save(checkpoints, tiny, 1, context)
    assert published(there) == [1]
    faults("part " * 30)
    reason = r"/__\d_0.distcp: \d+ bytes have arrived instead of \d+; mend this or give another"
    with pytest.raises(CheckpointError, match=reason):
        save(checkpoints, tiny, 2, context)
    assert (there / TRACKER).read_text() == "1"
    assert not (folder_of(there, 2) / MANIFEST).exists()
    # The staging folder holds nothing that is not whole at the address.
    assert published(staging_folder(f"faulty://{there}")) == [1]
    faults("")
    save(checkpoints, tiny, 2, context)
    assert (there / TRACKER).read_text() == "2"


def saved_there(context: Any, address: str) -> None:
    tiny = build(context)
    checkpoints = CheckpointManager(config_of(address), context)
    for iteration in (1, 2, 3):
        tiny.step()
        save(checkpoints, tiny, iteration, context)


def test_what_is_damaged_there_is_passed_over_or_refused(tmp_path: Path) -> None:
    address, there = f"file://{tmp_path}/there", tmp_path / "there"
    on_ranks(saved_there, {"dp": 1}, address=address)
    config = config_of(address)
    staging = Path(config.save or "")
    target = remote_of(config, staging)
    assert target is not None
    # A run that was killed while it copied has left no manifest.
    (folder_of(there, 4)).mkdir()
    (folder_of(there, 4) / "__0_0.distcp").write_bytes(b"half")
    shutil.rmtree(staging)
    assert target.fetch() == 3
    assert published(staging) == [3]
    before = (folder_of(staging, 3) / "__0_0.distcp").stat().st_mtime_ns
    assert target.fetch() == 3
    assert (folder_of(staging, 3) / "__0_0.distcp").stat().st_mtime_ns == before
    target.check_writable()
    assert not folder_of(there, 4).exists()

    shard = folder_of(there, 3) / "__0_0.distcp"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    shutil.rmtree(staging)
    refused = "iter_0000003 cannot be loaded: .*does not match its checksum; give `--ckpt-step 2`"
    with pytest.raises(CheckpointError, match=refused):
        target.fetch()
    (folder_of(there, 2) / "__0_0.distcp").unlink()
    assert target.fetch(passes_over=True) == 1
    passed = [note.split(" is passed over")[0] for note in target.notes]
    assert passed == [f"{address}/iter_000000{i}" for i in (3, 2)]
    assert fetched("--load", f"{address}/iter_0000001") == folder_of(staging, 1)
    with pytest.raises(CheckpointError, match=r"holds no checkpoint of iteration 7.*\[1, 2, 3\]"):
        target.fetch(7)


def run(address: str, *flags: str, ranks: int = 2) -> int:
    words = [*SMALL, "--nproc-per-node", str(ranks), "--save", address, "--load", address]
    words += ["--train-iters", "4", "--save-interval", "1", "--eval-iters", "0", *flags]
    return main(TEXT, words)


def test_a_run_that_is_killed_while_it_copies_goes_on_elsewhere_with_the_same_bits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    there, undisturbed = tmp_path / "there", tmp_path / "undisturbed"
    assert run(str(undisturbed)) == 0
    address = f"faulty://{there}"
    (tmp_path / "FAULTS").write_text("iter_0000003/common.pt")
    assert run(address) != 0
    left = {i: (folder_of(there, i) / MANIFEST).is_file() for i in published(there)}
    assert left == {1: True, 2: True, 3: False}
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "FAULTS").unlink()
    capfd.readouterr()
    assert run(address) == 0
    told = capfd.readouterr().out
    where = staging_folder(address)
    assert f"{address} (`--save`, `--load`) has its copy on disk in {where}." in told
    assert f"--save {address}" in told
    assert published(there) == [1, 2, 3, 4]
    assert same_end(there, undisturbed, tmp_path) > 10
    rows, expected = (
        [row["lm loss"] for row in training_rows(read_metrics(folder / "metrics.jsonl"))]
        for folder in (there, undisturbed)
    )
    # The records of the third step, which were not copied, are those of the step after the kill.
    assert rows == expected
    text = (there / "config.yaml").read_text()
    assert f"save: {address}" in text and str(where) not in text
    assert (there / "report.html").is_file()


def test_an_address_that_cannot_be_used_is_refused_in_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def errors(**values: Any) -> list[str]:
        return list(CheckpointConfig(**values).errors(evaluates=True))

    assert errors(save="s3://bucket/run", async_save=True) == [
        "`--async-save` writes to folders, but `--save` (s3://bucket/run) is an address of object "
        "storage; leave `--async-save` out, or give a mounted folder."
    ]
    assert errors(load="memory://run") == [
        "`--load` (memory://run) is memory of one process, which the ranks of a run do not share; "
        "give a folder, or storage outside the run."
    ]
    unknown = {"class": "gone_fs.Storage", "err": "install gone_fs"}
    monkeypatch.setitem(known_implementations, "gone", unknown)
    for scheme, text in (
        ("gone", "`--save` (gone://b/run) needs the package gone_fs, which is not installed; run "),
        ("nowhere", "`--save` (nowhere://b/run) has a scheme that fsspec does not know; use a "),
    ):
        assert run(f"{scheme}://b/run") == 2
        assert text in capfd.readouterr().err
    (tmp_path / "FAULTS").write_text("error " * 9)
    assert run(f"faulty://{tmp_path}/there") == 2
    assert "cannot be written (" in (told := capfd.readouterr().err)
    assert "the storage is busy); give an address that can" in told


def test_machines_without_a_common_folder_refuse_what_needs_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = RunConfig(
        checkpoint=CheckpointConfig(save="s3://b/run", peer_checkpoint_interval=1).resolved(),
        fault_tolerance=FaultToleranceConfig(elastic_min_nodes=1),
    )
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    needs = r"^`--save` \(s3://b/run\) gives several machines no common folder, which .*; give a"
    with pytest.raises(CheckpointError, match=needs):
        stage(config, is_first=True)


def test_a_configuration_names_the_address_and_not_the_staging_folder(tmp_path: Path) -> None:
    config = RunConfig(checkpoint=CheckpointConfig(pretrained_checkpoint="s3://b/run/iter_0000003"))
    staged = functools.reduce(lambda x, _: x.resolved(), range(2), config.checkpoint)
    folder = staging_folder("s3://b/run/")
    assert staged.pretrained_checkpoint == str(folder / "iter_0000003")
    found = remote_of(staged, folder)
    assert isinstance(found, RemoteFolder) and found.address == "s3://b/run"
    assert remote_of(staged, tmp_path) is None
    assert staged.as_given() == config.checkpoint
