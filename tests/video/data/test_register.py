"""Keys of samples, and the register of a dataset: what makes a sample another one."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import DataError
from megatron_ext.video.config.encoding import EncodeConfig
from megatron_ext.video.data.clips import Clip, list_folder, read_list
from megatron_ext.video.data.geometry import Bucket
from megatron_ext.video.data.members import Member
from megatron_ext.video.data.preprocess import _new_names, _register_of
from megatron_ext.video.data.register import (
    Entry,
    Register,
    read_register,
    refuse_other_options,
    row_keys,
    write_register,
)


def key(clip: Clip, folder: Path) -> str:
    (found,) = row_keys([clip], str(folder))
    return found


def test_a_key_changes_with_the_row_and_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(b"abc")
    os.utime(path, ns=(5, 5))
    clip = Clip(str(path), "a cat", 24.0, 3.0)
    before = key(clip, tmp_path)
    changes: list[dict[str, Any]] = [
        {"caption": "a dog"}, {"fps": 3.0}, {"fps": None}, {"motion": 24.0}, {"motion": None},
        {"fps": 3.0, "motion": 24.0}, {"path": str(tmp_path / "b.mp4")},
    ]  # fmt: skip
    found = [before, *(key(replace(clip, **change), tmp_path) for change in changes)]
    os.utime(path, ns=(5, 6))
    found.append(key(clip, tmp_path))
    path.write_bytes(b"abcd")
    os.utime(path, ns=(5, 5))
    found.append(key(clip, tmp_path))
    assert len(set(found)) == len(found)
    path.write_bytes(b"xyz")
    os.utime(path, ns=(5, 5))
    assert key(clip, tmp_path) == before
    first, second, other = row_keys([clip, clip, replace(clip, caption="")], str(tmp_path))
    assert first == before and len({first, second, other}) == 3


@pytest.mark.parametrize("named", ["list", "folder"])
def test_a_key_stays_when_the_clips_move_together_with_their_list(
    named: str, tmp_path: Path
) -> None:
    folder = tmp_path / "before"
    folder.mkdir()
    (folder / "a.mp4").write_bytes(b"abc")
    (folder / "a.txt").write_text("a cat")
    (folder / "l.csv").write_text("path,text\na.mp4,a cat\n")

    def keys(folder: Path) -> list[str]:
        source = folder / "l.csv" if named == "list" else folder
        clips = [clip for clip in read_list(source) if clip.path.endswith(".mp4")]
        return row_keys(clips, list_folder(source))

    before = keys(folder)
    assert keys(folder.rename(tmp_path / "after")) == before


def test_a_key_of_a_clip_in_a_tar_file_is_that_of_the_member(tmp_path: Path) -> None:
    """Other members may be appended to the archive."""
    archive = tmp_path / "0.tar"
    archive.write_bytes(b"abc")
    member = Member(str(archive), "a.mp4", 512, 3, 7.0)
    clip = Clip(str(member), "a cat", member=member)
    before = key(clip, tmp_path)
    archive.write_bytes(b"abcdef")
    os.utime(archive, (9, 9))
    assert key(clip, tmp_path) == before
    changed = [replace(member, size=4), replace(member, modified=8.0)]
    found = {key(replace(clip, member=member), tmp_path) for member in changed}
    assert len(found | {before}) == 3


IMAGE, SHORT, LONG = (Bucket("64px", frames, 64, 48) for frames in (1, 9, 17))


def test_what_is_written_is_read_and_buckets_keep_their_numbers(tmp_path: Path) -> None:
    assert read_register(tmp_path) is None
    entries = [Entry("b.0", 3, "/b", "shard_00001", 7.5), Entry("a", 0, "/a")]
    register = Register({"encode": {"clip_seed": 3}}, [SHORT], entries)
    numbers = [register.bucket_number(bucket) for bucket in (LONG, SHORT, IMAGE, LONG)]
    assert numbers == [1, 0, 2, 1] and register.buckets == [SHORT, LONG, IMAGE]
    write_register(tmp_path, register)
    assert read_register(tmp_path) == register
    assert [path.name for path in tmp_path.iterdir()] == ["clips.jsonl"]
    assert [entry.row for entry in entries] == ["b", "a"]
    assert register.shards() == {"shard_00001": entries[:1]}
    # Samples are in the order of their shards, not of the rows that these come from.
    register.entries = [*entries, Entry("c", 1, "/c", "shard_00000"), replace(entries[0], key="d")]
    assert [*register.shards()] == ["shard_00000", "shard_00001"]
    assert [entry.key for entry in register.shards()["shard_00001"]] == ["b.0", "d"]


@pytest.mark.parametrize(
    "change",
    [
        {"shard": "../shard_00000"}, {"shard": 3}, {"fps": "8"}, {"number": -1}, {"number": 1.5},
        {"key": None}, {"colour": "red"},
    ],
)  # fmt: skip
def test_a_damaged_line_is_named(change: dict[str, Any], tmp_path: Path) -> None:
    write_register(tmp_path, Register({}, [], [Entry("a", 0, "/a"), Entry("b", 1, "/b")]))
    path = tmp_path / "clips.jsonl"
    head, first, second = path.read_text().splitlines()
    second = json.dumps({**json.loads(second), **change})
    path.write_text(f"{head}\n{first}\n{second}\n")
    with pytest.raises(DataError, match=r"cannot be read \(line 3 is damaged: .*; copy it again"):
        read_register(tmp_path)


def test_options_that_either_side_lacks_differ() -> None:
    both: dict[str, Any] = {"storage": "float32", "encode": {"fps_cap": 24, "lengths": (1, 9)}}
    folder = Path("set")
    refuse_other_options(folder, json.loads(json.dumps(both)), both)
    more = {**both, "encode": {**both["encode"], "new": 3}}
    for old, new, said in (
        (both, more, r"\(`encode.new` None there, 3 here\)"),
        (more, both, r"\(`encode.new` 3 there, None here\)"),
        (both, {**both, "storage": "bfloat16"}, r"\(`storage` 'float32' there, 'bfloat16' here\)"),
    ):
        with pytest.raises(DataError, match=rf"\(set\) holds a dataset of other options {said}"):
            refuse_other_options(folder, old, new)


def test_a_flag_that_is_newer_than_a_dataset_counts_as_its_default(tmp_path: Path) -> None:
    options = {"encode": asdict(EncodeConfig(clip_seed=5))}
    older = {name: x for name, x in options["encode"].items() if name != "video_windows"}
    write_register(tmp_path, Register({"encode": older}))
    assert _register_of(tmp_path, options).options == {"encode": json.loads(json.dumps(older))}
    with pytest.raises(DataError, match=r"`encode.video_windows` None there, 'all' here"):
        _register_of(tmp_path, {"encode": {**options["encode"], "video_windows": "all"}})


@pytest.mark.parametrize(
    ("registered", "on_disk", "first"),
    [
        ((), (), "shard_00000"),
        (("shard_00002",), (), "shard_00003"),
        (("shard_00002",), ("shard_00007",), "shard_00008"),
        (("shard_00009",), ("shard_00010", "shard_00007"), "shard_00011"),
    ],
)
def test_a_new_shard_takes_no_name_in_use(
    registered: tuple[str, ...], on_disk: tuple[str, ...], first: str
) -> None:
    entries = [Entry(name, i, "/a", name) for i, name in enumerate(registered)]
    names = _new_names(Register({}, [], entries), on_disk)
    assert next(names) == first and next(names) > first
