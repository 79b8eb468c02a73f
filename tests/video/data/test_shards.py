"""Shards and manifests: what is written is read, and what is not whole is refused."""

import copy
import json
import os
import pickle
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.errors import DataError
from megatron_ext.video.data.encode import VideoSample
from megatron_ext.video.data.geometry import Bucket
from megatron_ext.video.data.manifest import read_manifest
from megatron_ext.video.data.shards import Shard, ShardWriter, read_null, write_json, write_null

MANIFEST: dict[str, Any] = {
    "format": 1, "codec": {"codec": "/vae"}, "plan": {}, "shards": [],
    "references": ["head1", "tail1"],
    "text_encoder": {"text_encoder": "hashed", "length": 4, "width": 5, "pooled_width": 2},
    "buckets": [
        {"shape": asdict(Bucket("64px", frames, 64, 64)), "micro_batch_size": None}
        for frames in (1, 9, 17)
    ],
    "storage": "float32", "latent_channels": 3, "text_length": 4, "text_width": 5,
    "pooled_width": 2, "fps": 24, "fingerprint": "f",
}  # fmt: skip
FIELDS = ("latents", "text", "pooled", "geometry", "caption", "head1", "tail1")


def sample(number: int, frames: int) -> VideoSample:
    dice = torch.Generator().manual_seed(number)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=dice)

    names = ("head1", "tail1") if frames > 1 else ()
    return VideoSample(
        latents=values(3, frames, 2, 6), text=values(4, 5), pooled=values(2),
        references={name: values(3, 1, 2, 6) for name in names},
        fps=8 * (frames > 1), number=number, caption=f"a café {number}",
    )  # fmt: skip


SAMPLES = [sample(7, 3), sample(9, 1), sample(2**31 - 1, 5)]


def written(folder: Path, storage: str = "float32") -> dict[str, Any]:
    with ShardWriter(folder, "shard_00000", MANIFEST["references"], storage) as writer:
        for bucket, one in enumerate(SAMPLES):
            writer.add(one, bucket)
    return {**MANIFEST, "storage": storage}


def same(one: VideoSample, other: VideoSample, dtype: torch.dtype) -> None:
    for name in ("latents", "text", "pooled"):
        found = getattr(one, name)
        assert found.dtype == dtype and torch.equal(found, getattr(other, name).to(dtype)), name
    assert set(one.references) == set(other.references)
    for name, piece in other.references.items():
        assert torch.equal(one.references[name], piece.to(dtype)), name
    assert (one.fps, one.number, one.caption) == (other.fps, other.number, other.caption)


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_round_trip(tmp_path: Path, storage: str) -> None:
    dtype = getattr(torch, storage)
    shard = Shard(tmp_path, "shard_00000", written(tmp_path, storage), 3)
    assert len(shard) == 3 and shard.buckets().tolist() == [0, 1, 2]
    # Also in a process of a data loader.
    for reader in (shard, pickle.loads(pickle.dumps(shard))):
        for row, one in enumerate(SAMPLES):
            same(reader.sample(row), one, dtype)
            assert reader.number_of(row) == one.number
            assert reader.latent_shape(row) == one.latents.shape
    latents = sum(one.latents.numel() for one in SAMPLES)
    assert (tmp_path / "shard_00000_latents.bin").stat().st_size == latents * dtype.itemsize
    shard.sample(0).latents.zero_()  # what is read may be changed in place
    same(shard.sample(0), SAMPLES[0], dtype)


def test_megatron_core_reads_the_fields_and_no_file_stays_open(tmp_path: Path) -> None:
    shard = Shard(tmp_path, "shard_00000", written(tmp_path), 3)
    # Thousands of shards would use up the open files of a process.
    kept = [shard.sample(row) for row in range(3)]
    held = [path.resolve() for path in Path("/proc/self/fd").iterdir() if path.exists()]
    maps = Path("/proc/self/maps").read_text()
    assert kept and not any(tmp_path in path.parents for path in held)
    assert str(tmp_path) not in maps
    dataset = IndexedDataset(str(tmp_path / "shard_00000_latents"))
    for row, one in enumerate(SAMPLES):
        assert np.array_equal(dataset[row], one.latents.numpy().reshape(-1))


@pytest.mark.parametrize("durable", [True, False])
def test_what_marks_data_as_whole_is_on_the_disk_after_it(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a shard is written again nothing marks it as finished."""
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        events.append(f"sync {name.partition('.writing')[0]}")

    def renamed(source: str | Path, target: str | Path) -> None:
        replace(source, target)
        events.append(f"name {Path(target).name}")

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", renamed)
    marker = tmp_path / "shard_00000.json"
    write_json(marker, {}, durable=durable)
    synced = ["sync shard_00000.json"] if durable else []
    assert events == [*synced, "name shard_00000.json"]
    events.clear()
    with ShardWriter(tmp_path, "shard_00000", [], "float32", durable=durable) as writer:
        assert not marker.exists()
        writer.add(SAMPLES[1], 0)
    fields = ("latents", "text", "pooled", "geometry", "caption")
    assert {f"name shard_00000_{name}.idx" for name in fields} <= set(events)
    assert any(event.startswith("sync shard_00000_latents") for event in events) == durable


def test_shards_that_fail_leave_nothing_and_may_be_empty(tmp_path: Path) -> None:
    shard = ShardWriter(tmp_path, "shard_00000", [], "float32")
    with pytest.raises(RuntimeError, match="stop"), shard as writer:
        writer.add(SAMPLES[1], 0)
        raise RuntimeError("stop")
    assert not list(tmp_path.iterdir())
    with ShardWriter(tmp_path, "shard_00000", MANIFEST["references"], "float32"):
        pass
    shard = Shard(tmp_path, "shard_00000", MANIFEST, 0)
    assert len(shard) == 0 and shard.buckets().tolist() == []


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("damage", ["cut", "missing", "longer"])
def test_files_that_are_not_whole(tmp_path: Path, field: str, damage: str) -> None:
    manifest = written(tmp_path)
    path = tmp_path / f"shard_00000_{field}.bin"
    if damage == "missing":
        path.unlink()
        said = "is missing, but its index asks for"
    else:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] if damage == "cut" else whole + b"1234")
        said = rf"has {path.stat().st_size} bytes, but its index asks for {len(whole)}; copy it ag"
    with pytest.raises(DataError, match=rf"shard_00000_{field}.bin {said}"):
        Shard(tmp_path, "shard_00000", manifest, 3)


def test_files_cut_while_they_are_read(tmp_path: Path) -> None:
    shard = Shard(tmp_path, "shard_00000", written(tmp_path), 3)
    path = tmp_path / "shard_00000_latents.bin"
    path.write_bytes(path.read_bytes()[:-4])
    same(shard.sample(0), SAMPLES[0], torch.float32)
    with pytest.raises(DataError, match=r"latents.bin was cut while it was in use: it has \d+ by"):
        shard.sample(2)
    path.unlink()
    with pytest.raises(DataError, match=r"latents.bin cannot be read \(.*No such file"):
        shard.sample(0)


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    for suffix in ("bin", "idx"):
        (tmp_path / f"shard_00000_geometry.{suffix}").unlink()
    with IndexedWriter(tmp_path / "shard_00000_geometry", np.dtype(np.int32)) as writer:
        for _ in range(3):
            writer.add_document(np.arange(5, dtype=np.int32), [5])
    with pytest.raises(DataError, match=r"geometry.idx must give every clip 6 numbers, but does n"):
        Shard(tmp_path, "shard_00000", manifest, 3)
    manifest = written(tmp_path)
    with pytest.raises(DataError, match=r"idx holds 3 clips, but the manifest says 4 \(latents\)"):
        Shard(tmp_path, "shard_00000", manifest, 4)
    wrong = manifest | {"storage": "bfloat16"}
    with pytest.raises(DataError, match=r"latents.idx holds float32, but the manifest says int16"):
        Shard(tmp_path, "shard_00000", wrong, 3)
    few = Shard(tmp_path, "shard_00000", manifest | {"buckets": [0, 1]}, 3)
    with pytest.raises(DataError, match=r"holds the bucket numbers 0 to 2, but the manifest has 2"):
        few.buckets()
    path = tmp_path / "shard_00000_geometry.bin"
    numbers = np.fromfile(path, np.int32)
    np.where(np.arange(18) == 6, -1, numbers).astype(np.int32).tofile(path)
    damaged = Shard(tmp_path, "shard_00000", manifest, 3)
    with pytest.raises(
        DataError, match=r"holds the bucket numbers -1 to 2, but the manifest has 3"
    ):
        damaged.buckets()
    numbers.tofile(path)
    caption = tmp_path / "shard_00000_caption.bin"
    caption.write_bytes(b"\xff" + caption.read_bytes()[1:])
    assert damaged.sample(0).caption == "\ufffd" + SAMPLES[0].caption[1:]
    other = Shard(tmp_path, "shard_00000", manifest | {"text_width": 7}, 3)
    with pytest.raises(DataError, match=r"text.bin has 20 numbers for clip 1, .* shape \(4, 7\)"):
        other.sample(1)
    (tmp_path / "shard_00000_text.idx").write_bytes(b"no index at all, but long enough for one")
    with pytest.raises(DataError, match=r"text.idx does not start with the index magic MMIDIDX"):
        Shard(tmp_path, "shard_00000", manifest, 3)


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_null(tmp_path: Path, storage: str) -> None:
    text, pooled = torch.randn(4, 5), torch.randn(2)
    write_null(tmp_path, text, pooled, storage)
    manifest = MANIFEST | {"storage": storage}
    found = read_null(tmp_path, manifest)
    dtype = getattr(torch, storage)
    assert torch.equal(found[0], text.to(dtype)) and torch.equal(found[1], pooled.to(dtype))
    with pytest.raises(DataError, match=r"null_pooled.bin has 2 numbers for clip 0, .* \(9,\)"):
        read_null(tmp_path, manifest | {"pooled_width": 9})


def test_manifests(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    with pytest.raises(DataError, match=r"manifest.json does not exist, so the data is not whole"):
        read_manifest(tmp_path)
    write_json(path, MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST and list(tmp_path.iterdir()) == [path]
    for content, said in {
        "{": r"manifest.json cannot be read \(it is no valid JSON",
        "[1]": r"manifest.json cannot be read \(it holds a list instead of an object",
        "{}": r"manifest.json cannot be read \(KeyError\('format'\)\)",
        '{"format": 2}': r"has format 2, but 1 is read here; make it with tools/preprocess_video",
        '{"format": 1, "plan": {}}': r"manifest.json lacks `codec`, `text_encoder`, `buckets`, `sh",
        json.dumps(MANIFEST | {"fps": 0}): r"holds `fps` 0, which must be a number above 0",
        json.dumps(MANIFEST | {"storage": "int4"}): r"has the storage int4, which must be one of",
    }.items():
        path.write_text(content)
        with pytest.raises(DataError, match=said):
            read_manifest(tmp_path)


def _names(value: Any, name: str = "") -> list[str]:
    inside = value.items() if isinstance(value, dict) else enumerate(value[:1])
    found = []
    for key, inner in inside:
        found.append(f"{name}/{key}")
        if isinstance(inner, dict | list):
            found += _names(inner, found[-1])
    return found


PATCH_CODEC = {"codec": "patch", "codec_spatial": 8, "codec_temporal": 4, "codec_channels": 3}
WHOLE = {
    **MANIFEST,
    "codec": {**PATCH_CODEC, "codec_shift": 0.0, "codec_scale": 1.0},
    "shards": [{"name": "shard_00000", "clips": 3}],
}


@pytest.mark.parametrize("name", [x for x in _names(WHOLE) if x != "/format"])
def test_an_entry_that_is_missing_or_of_another_kind_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    *outer, last = [int(x) if x.isdigit() else x for x in name.split("/")[1:]]
    said = re.sub(r"/(\d+)", r"[\1]", name)[1:].replace("/", ".")
    for wrong in (None, -1.5):
        content = copy.deepcopy(WHOLE)
        entry: Any = content
        for key in outer:
            entry = entry[key]
        if wrong is not None and last not in ("codec_shift", "codec_scale"):
            entry[last] = wrong
            expected = f"{path} holds `{said}` -1.5, which must be "
        elif isinstance(last, str):
            del entry[last]
            expected = f"{path} lacks `{said}`; make it with tools/preprocess_video.py again."
        else:
            continue
        write_json(path, content)
        with pytest.raises(DataError) as caught:
            read_manifest(tmp_path)
        assert str(caught.value).startswith(expected)
