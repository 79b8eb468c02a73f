"""Merges datasets of encoded clips."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.data.progress import Progress
from megatron_ext.errors import DataError
from megatron_ext.video.data.blend import Blend
from megatron_ext.video.data.dataset import ShardedVideos
from megatron_ext.video.data.manifest import buckets_of
from megatron_ext.video.data.sets import joined_manifest
from megatron_ext.video.data.shards import (
    FORMAT,
    MANIFEST,
    ShardWriter,
    other_fields,
    shard_name,
    write_json,
    write_null,
)


def merge_videos(folders: Sequence[Path], output: Path) -> int:
    """Write the clips of several datasets, in order, into a new one; return the number of clips.

    The new dataset has no ``clips.jsonl``, since its clips come from several lists. Therefore no
    clips can be added to the new dataset later. The frame rate in its manifest, the default
    for sampling videos, is that of the first dataset.

    Raises:
        ConfigError: the datasets were encoded by different models, or differ in the micro-batch
            size of a bucket.
        DataError: a dataset is damaged, or the output exists.
    """
    if output.exists():
        raise DataError(f"`--output-prefix` ({output}) exists already; give another folder.")
    sets = [ShardedVideos(folder) for folder in folders]
    paths = [str(folder) for folder in folders]
    manifest = joined_manifest(Blend.once(paths), [one.manifest for one in sets], "--input")
    # This entry refers to the list of dropped clips, which stays with the old datasets.
    manifest.pop("dropped", None)
    numbers = {bucket: number for number, bucket in enumerate(buckets_of(manifest))}
    count = sum(map(len, sets))
    progress = Progress(count, 0, "clips", verb="Wrote")
    written = 0
    output.mkdir(parents=True)
    try:
        names: list[dict[str, Any]] = []
        for one in sets:
            own = [numbers[bucket] for bucket in buckets_of(one.manifest)]
            for shard in one.shards:
                name = shard_name(len(names))
                with ShardWriter(
                    output, name, other_fields(manifest), manifest["storage"]
                ) as writer:
                    for row, bucket in enumerate(shard.buckets()):
                        # Renumber the clips, since the numbers of each dataset begin at 0.
                        sample = dataclasses.replace(shard.sample(row), number=written)
                        writer.add(sample, own[bucket])
                        written += 1
                        progress.show(written, written)
                names.append({"name": name, "clips": len(shard)})
        write_null(output, *sets[0].null_text, manifest["storage"])
        write_json(output / MANIFEST, {"format": FORMAT, **manifest, "shards": names})
    except BaseException:
        shutil.rmtree(output)
        raise
    finally:
        progress.close()
    return count
