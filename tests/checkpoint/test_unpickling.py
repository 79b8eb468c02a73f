"""Checkpoints of strangers run no code: a pickle that would make a file makes none."""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

import megatron_ext
from megatron_ext.checkpoint.files import describe_file, folder_of
from megatron_ext.checkpoint.manifest import MANIFEST, read_manifest
from megatron_ext.checkpoint.unpickling import MetadataReader, common_state_of, read_tensors
from megatron_ext.errors import CheckpointError
from megatron_ext.programs.convert_checkpoint import main as convert
from megatron_ext.text.task import GPT
from megatron_ext.train.exit_codes import EXIT_CODE_USER_ERROR
from megatron_ext.train.forking import fork_ranks
from megatron_ext.train.main import main
from tests.checkpoint.tiny import build, load, manager, save
from tests.ranks import ranks
from tests.training_runs import TINY, mock_data


class Trap:
    """An object that makes a file when an ordinary reader unpickles it."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self._marker), "w")


def _into_metadata(path: Path, trap: Trap) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = trap
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _into_common(path: Path, trap: Trap) -> None:
    content = torch.load(path / "common.pt", weights_only=False)
    torch.save({**content, "trap": trap}, path / "common.pt")


def _into_objects(path: Path, trap: Trap) -> None:
    """Put the trap into the place of the random states, an object among the shards."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    index = next(i for i in metadata.storage_data if i.fqn.startswith("rng_state/"))
    torch.save([trap], path / "strange.distcp")
    place = metadata.storage_data[index]
    place.relative_path, place.offset = "strange.distcp", 0
    place.length = (path / "strange.distcp").stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _into_common_object(path: Path, trap: Trap) -> None:
    """Move the common state to where newer releases of megatron-core keep it."""
    content = torch.load(path / "common.pt", weights_only=False)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    torch.save([{**content, "trap": trap}], path / "strange.distcp")
    (path / "common.pt").unlink()
    name, size = "common_state/shard_0_1", (path / "strange.distcp").stat().st_size
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex(name)] = _StorageInfo("strange.distcp", 0, size)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _sign(path: Path) -> None:
    """Make the manifest match, as a stranger would."""
    files = {file.name: describe_file(file) for file in path.iterdir() if file.name != MANIFEST}
    (path / MANIFEST).write_text(json.dumps({"version": 1, "files": files}))


TRAPS = {
    ".metadata": _into_metadata,
    "common.pt": _into_common,
    "common_state": _into_common_object,
    "rng_state": _into_objects,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stranger") / "run"
    two = [*TINY, *mock_data(), "--nproc-per-node", "2", "--train-iters", "1"]
    assert main(GPT, [*two, "--save", str(folder)]) == 0
    return folder


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.mark.parametrize("place", TRAPS)
def test_a_prepared_pickle_is_refused(
    place: str, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "marker"
    TRAPS[place](folder_of(root, 1), Trap(marker))
    _sign(folder_of(root, 1))
    capfd.readouterr()
    flags = [*TINY, *mock_data(), "--nproc-per-node", "2", "--train-iters", "2"]
    assert main(GPT, [*flags, "--load", str(root)]) == EXIT_CODE_USER_ERROR
    shown = capfd.readouterr().err
    assert place in shown
    assert "names `io.open`, which does not belong into a checkpoint" in shown
    assert "Traceback" not in shown
    # The common state is read before ranks start.
    sayers = {"error: "} if place.startswith("common") else {"[rank 0", "[rank 1"}
    assert {line[:7] for line in shown.splitlines()} <= sayers
    assert not marker.exists()


def test_tools_refuse_traps(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Run the tool in a process of its own, since ranks are forked from this one later."""
    marker, target = tmp_path / "marker", tmp_path / "out"
    _into_metadata(folder_of(root, 1), Trap(marker))
    _sign(folder_of(root, 1))
    words = ["export", "--load", str(root), "--hf", str(target)]
    assert fork_ranks(lambda: convert(words), 1) == EXIT_CODE_USER_ERROR
    assert "/.metadata names `io.open`, which does not belong" in capfd.readouterr().err
    with pytest.raises(CheckpointError, match=r"\.metadata names `io.open`"):
        read_tensors(folder_of(root, 1), ["a"])
    assert not marker.exists()
    assert not target.exists()


def test_a_tensor_that_claims_to_be_an_object_is_not_unpickled(saved: Path) -> None:
    """Check it of `read_tensors`, since the index decides how an entry is read."""
    path = folder_of(saved, 1)
    entries = MetadataReader(str(path)).read_metadata().state_dict_metadata
    name = next(name for name in entries if name.startswith("rng_state/"))
    with pytest.raises(CheckpointError, match="holds no tensor `rng_state/"):
        read_tensors(path, [name])


@pytest.mark.parametrize("content", [b"junk", pickle.dumps({"a": 1})])
def test_a_common_state_that_is_none_is_one_sentence(content: bytes, root: Path) -> None:
    path = folder_of(root, 1)
    _into_common_object(path, Trap(path / "marker"))
    (path / "strange.distcp").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot be read \(.*\); load another checkpoint"):
        common_state_of(path)
    torch.save([1], path / "strange.distcp")
    with pytest.raises(CheckpointError, match=r"common_state/shard_0_1 must hold names and values"):
        common_state_of(path)
    (path / "strange.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"iter_0000001 cannot be read \(.*strange\.distcp"):
        common_state_of(path)


def test_files_outside_of_the_folder_are_refused(root: Path) -> None:
    path = folder_of(root, 1)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"]["../../secret"] = manifest["files"]["common.pt"]
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="names ../../secret, which does not lie in"):
        read_manifest(path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "/etc/passwd"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="names the file /etc/passwd, but shards lie in"):
        MetadataReader(str(path)).read_metadata()


@pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps({"a": 1}), b"\x80\x04."])
def test_a_damaged_index_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read \(.*\); load another"):
        MetadataReader(str(tmp_path)).read_metadata()


@ranks(dp=2)
def test_strictness_that_lists_all_names_uses_the_same_reader(context: Any, tmp_path: Path) -> None:
    """Check `raise_all`, with which megatron-core reads the index of its own accord."""
    tiny, strict = build(context), manager(context, tmp_path, dist_ckpt_strictness="raise_all")
    tiny.step()
    save(manager(context, tmp_path), tiny, 1, context)
    assert load(strict, tiny).iteration == 1
    torch.distributed.barrier()
    if context.rank == 0:
        _into_metadata(folder_of(tmp_path, 1), Trap(tmp_path / "marker"))
        _sign(folder_of(tmp_path, 1))
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=r"\.metadata names `io.open`"):
        load(strict, tiny)
    assert not (tmp_path / "marker").exists()


UNSAFE = (
    r"pickle\.load|FileSystemReader\(|load_common_state_dict\(|allow_pickle=T|"
    r"\bnp\.load\(|yaml\.load\(|extractall"
)


def test_nothing_else_in_the_package_unpickles() -> None:
    """Pickles are read through `checkpoint.unpickling`, or with ``weights_only=True``.

    `reproduced` reads what its own forked ranks have written a moment before, `helper` what the
    helpers of its own save have, `snapshot` and `flight` what the same user's run has written in
    folders that are that user's alone, and `disk.reading` YAML with a safe loader.
    """
    package = Path(megatron_ext.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(UNSAFE, line) or ("torch.load(" in line and "weights_only=True" not in line)
    }
    assert found <= {
        "checkpoint/helper.py",
        "checkpoint/snapshot.py",
        "checkpoint/unpickling.py",
        "extras/resilience/flight.py",
        "extras/audit/reproduced.py",
        "disk/reading.py",
    }
