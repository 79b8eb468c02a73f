"""Stores encoded clips on disk, in shards.

A shard has one Megatron indexed dataset for each field, such as
``FOLDER/shard_00003_latents.bin`` with its ``.idx``, which holds one document for each clip. A
document of ``geometry`` is six int32 numbers: ``bucket, t, h, w, fps`` and the number of the clip.
A document of ``caption`` is UTF-8 bytes. ``shard_00003.json`` marks a shard as finished;
``manifest.json``, which is written last, makes the folder a dataset. ``null_text`` and
``null_pooled`` hold the encoded empty caption. References and image embeddings are fields too, such
as ``head1`` and ``image_head``; a clip that has none has an empty document.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.data.indexed import bin_path, idx_path, read_index
from megatron_ext.data.indexed_writer import IndexedWriter
from megatron_ext.disk.bus import cut_in_use
from megatron_ext.disk.reading import UnreadableFile, read_json_object, shortened
from megatron_ext.disk.writing import open_new
from megatron_ext.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_ext.video.data.encode import VideoSample

FORMAT = 1
_FIELDS = ("latents", "text", "pooled", "geometry", "caption")
_GEOMETRY = 6
MANIFEST = "manifest.json"
_NAME = re.compile(r"shard_[0-9]{5,9}|p[0-9a-f]{12}")
ADVICE = "make it with tools/preprocess_video.py"


def shard_name(number: int) -> str:
    return f"shard_{number:05}"


def number_of(name: str) -> int:
    """Return the number in the name of a shard, such as 3 for ``shard_00003``."""
    return int(name.removeprefix("shard_"))


def names_in(folder: Path) -> list[str]:
    """Return the sorted names of the shards or parts in a folder that have a ``.json``."""
    paths = folder.glob("*.json") if folder.is_dir() else ()
    return sorted(path.stem for path in paths if _NAME.fullmatch(path.stem))


def write_json(path: Path, content: Any, *, durable: bool = True) -> None:
    """Write a JSON file atomically: under a temporary name, then renamed.

    With ``durable`` wait until the file is on the disk, so that it survives a power failure.
    """
    temporary = path.with_name(f"{path.name}.writing.{os.getpid()}")
    with open_new(temporary) as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        if durable:
            os.fsync(stream.fileno())
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a manifest or a shard's ``.json``; raise DataError if it is missing or unusable."""
    try:
        content = read_json_object(path)
        stored_format = content["format"]
    except UnreadableFile as error:
        if error.missing:
            raise DataError(f"{path} does not exist, so the data is not whole; {ADVICE}.") from None
        raise DataError(f"{path} cannot be read ({error.reason}); {ADVICE} again.") from None
    except KeyError as error:
        raise DataError(f"{path} cannot be read ({error!r}); {ADVICE} again.") from None
    if stored_format != FORMAT:
        raise DataError(
            f"{path} has format {shortened(stored_format)}, but {FORMAT} is read here; {ADVICE} "
            "again."
        )
    return content


def to_storage(tensor: Tensor, storage: str) -> NDArray[Any]:
    """Return the flat values of a tensor as they are stored.

    ``storage`` is "float32", or "bfloat16", whose bits are stored as int16.
    """
    import torch

    flat = tensor.detach().reshape(-1)
    if storage == "bfloat16":
        return flat.bfloat16().view(torch.int16).numpy()
    return flat.float().numpy()


def dtype_of(field: str, storage: str) -> np.dtype[Any]:
    """Return the dtype on disk of a field, such as ``latents``; ``storage`` as in `to_storage`."""
    numbers = np.int16 if storage == "bfloat16" else np.float32
    return np.dtype({"geometry": np.int32, "caption": np.uint8}.get(field, numbers))


class ShardWriter:
    """Writes the fields of one shard, clip by clip.

    Use it in a `with` block. At the end of the block files get their final names, unless an
    exception was raised.

    Args:
        name: name of the shard.
        others: names of further fields that clips may have (`other_fields`).
        storage: dtype of the stored numbers, "float32" or "bfloat16".
        durable: whether to wait at the end until files are on the disk.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        others: Sequence[str],
        storage: str,
        *,
        durable: bool = True,
    ) -> None:
        self._folder = folder
        self._name = name
        self._storage = storage
        self._durable = durable
        self._others = others
        self._writers: dict[str, IndexedWriter] = {}

    def __enter__(self) -> ShardWriter:
        (self._folder / f"{self._name}.json").unlink(missing_ok=True)
        with ExitStack() as opened:
            for field in (*_FIELDS, *self._others):
                prefix = self._folder / f"{self._name}_{field}"
                dtype = dtype_of(field, self._storage)
                writer = IndexedWriter(prefix, dtype, durable=self._durable)
                self._writers[field] = opened.enter_context(writer)
            self._stack = opened.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def add(self, sample: VideoSample, bucket: int) -> None:
        """Append one clip; ``bucket`` is the number of its bucket in the manifest."""
        import torch

        tensors = {"latents": sample.latents, "text": sample.text, "pooled": sample.pooled}
        images = {image_field(side): x for side, x in sample.image_embeds.items()}
        given = {**sample.references, **images}
        tensors |= {name: given.get(name, torch.zeros(0)) for name in self._others}
        values = {name: to_storage(tensor, self._storage) for name, tensor in tensors.items()}
        geometry = [bucket, *sample.latents.shape[1:], sample.fps, sample.number]
        values["geometry"] = np.array(geometry, np.int32)
        values["caption"] = np.frombuffer(sample.caption.encode(), np.uint8)
        for field, value in values.items():
            self._writers[field].add_document(value, [value.size])

    def copy(self, shard: Shard, row: int) -> None:
        """Append one clip of another shard, byte for byte."""
        for field, writer in self._writers.items():
            values = shard.fields[field][row]
            writer.add_document(values, [values.size])


def other_fields(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the fields that a set has for references and image embeddings."""
    sides = manifest.get("image_embeds", {}).get("sides", ())
    return (*manifest["references"], *map(image_field, sides))


def image_field(side: str) -> str:
    """Return the name of the field with image embeddings of a frame, such as ``image_head``."""
    return f"image_{side}"


class Field:
    """One field of one shard, such as the latents of all its clips.

    ``prefix`` is the path of its ``.bin`` and ``.idx`` without the suffix.

    Each read opens the file: with thousands of shards, permanent memory maps would exceed the
    number of files that a process may have open.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self.prefix = prefix
        self._dtype = dtype
        index = read_index(prefix)
        if index.dtype != dtype:
            raise DataError(
                f"{idx_path(prefix)} holds {index.dtype.name}, but the manifest says "
                f"{dtype.name}; {ADVICE} again."
            )
        self.begins = np.concatenate([[0], np.cumsum(index.lengths, dtype=np.int64)])
        size = bin_path(prefix).stat().st_size if bin_path(prefix).is_file() else -1
        if size != self.begins[-1] * dtype.itemsize:
            raise DataError(
                f"{bin_path(prefix)} {f'has {size} bytes' if size >= 0 else 'is missing'}, but its "
                f"index asks for {self.begins[-1] * dtype.itemsize}; copy it again, or {ADVICE} "
                "again."
            )

    def __len__(self) -> int:
        return len(self.begins) - 1

    def read(self, first: int, last: int) -> NDArray[Any]:
        """Return the flat values of the clips from ``first`` to ``last - 1``.

        A file that has been truncated or removed raises DataError.
        """
        begin = int(self.begins[first])
        end = int(self.begins[last])
        path = bin_path(self.prefix)
        try:
            offset = begin * self._dtype.itemsize
            values = np.fromfile(path, self._dtype, count=end - begin, offset=offset)
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error}); {ADVICE} again.") from None
        if len(values) != end - begin:
            expected = int(self.begins[-1]) * self._dtype.itemsize
            raise DataError(cut_in_use(path, path.stat().st_size, expected))
        return values

    def __getitem__(self, row: int) -> NDArray[Any]:
        return self.read(row, row + 1)

    def shaped(self, row: int, storage: str, *shape: int) -> Tensor:
        """Return the values of one clip in ``shape``, which may contain one -1.

        The dtype is ``storage``, "float32" or "bfloat16". DataError is raised if the number of
        values does not fit the shape.
        """
        import torch

        values = self[row]
        tensor = torch.from_numpy(values)
        if storage == "bfloat16":
            tensor = tensor.view(torch.bfloat16)
        try:
            return tensor.reshape(shape)
        except RuntimeError:
            raise DataError(
                f"{bin_path(self.prefix)} has {values.size} numbers for clip {row}, which do not "
                f"fit the shape {shape} of the other files; {ADVICE} again."
            ) from None


class Shard:
    """One shard of a dataset, with ``clips`` clips; they are indexed by row, from 0.

    A file that is missing, damaged, or does not fit the manifest raises DataError.
    """

    def __init__(self, folder: Path, name: str, manifest: dict[str, Any], clips: int) -> None:
        self.name = name
        self._manifest = manifest
        self.fields = {
            field: Field(folder / f"{name}_{field}", dtype_of(field, manifest["storage"]))
            for field in (*_FIELDS, *other_fields(manifest))
        }
        for field, stored_field in self.fields.items():
            if len(stored_field) != clips:
                raise DataError(
                    f"{idx_path(stored_field.prefix)} holds {len(stored_field)} clips, but the "
                    f"manifest says {clips} ({field}); {ADVICE} again."
                )
        geometry = self.fields["geometry"]
        if (np.diff(geometry.begins) != _GEOMETRY).any():
            raise DataError(
                f"{idx_path(geometry.prefix)} must give every clip {_GEOMETRY} numbers, but does "
                f"not; {ADVICE} again."
            )

    def __len__(self) -> int:
        return len(self.fields["geometry"])

    def buckets(self) -> NDArray[np.int64]:
        """Return the bucket number of each clip; raise DataError if a bucket is unknown."""
        geometry = self.fields["geometry"]
        numbers = geometry.read(0, len(self)).reshape(-1, _GEOMETRY)[:, 0].astype(np.int64)
        num_buckets = len(self._manifest["buckets"])
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < num_buckets:
            raise DataError(
                f"{bin_path(geometry.prefix)} holds the bucket numbers {numbers.min()} to "
                f"{numbers.max()}, but the manifest has {num_buckets} buckets; {ADVICE} again."
            )
        return numbers

    def number_of(self, row: int) -> int:
        """Return the number, in the list of clips, of the clip with index ``row`` in the shard."""
        return int(self.fields["geometry"][row][-1])

    def latent_shape(self, row: int) -> tuple[int, int, int, int]:
        """Return the shape (c, t, h, w) of the latents of one clip."""
        _, t, h, w, *_ = (int(value) for value in self.fields["geometry"][row])
        return self._manifest["latent_channels"], t, h, w

    def sample(self, row: int) -> VideoSample:
        """Read the clip with index ``row`` in the shard.

        DataError is raised if a file has changed or does not fit the others.
        """
        from megatron_ext.video.data.encode import VideoSample

        manifest = self._manifest
        storage = self._manifest["storage"]
        fields = self.fields
        _, t, h, w, fps, number = (int(value) for value in fields["geometry"][row])
        channels = manifest["latent_channels"]
        length = manifest["text_length"]
        width = manifest["text_width"]
        return VideoSample(
            latents=fields["latents"].shaped(row, storage, channels, t, h, w),
            text=fields["text"].shaped(row, storage, length, width),
            pooled=fields["pooled"].shaped(row, storage, manifest["pooled_width"]),
            references={
                name: fields[name].shaped(row, storage, channels, -1, h, w)
                for name in manifest["references"]
                if fields[name].begins[row + 1] > fields[name].begins[row]
            },
            fps=fps,
            number=number,
            caption=fields["caption"][row].tobytes().decode(errors="replace"),
            image_embeds=self._image_embeds(row),
        )

    def _image_embeds(self, row: int) -> dict[str, Tensor]:
        """Return the image embeddings of the clip ``row``, those of frames that it has."""
        about = self._manifest.get("image_embeds")
        if about is None:
            return {}
        stored = {side: self.fields[image_field(side)] for side in about["sides"]}
        return {
            side: field.shaped(row, self._manifest["storage"], about["tokens"], about["width"])
            for side, field in stored.items()
            if field.begins[row + 1] > field.begins[row]
        }


def write_null(folder: Path, text: Tensor, pooled: Tensor, storage: str) -> None:
    """Write the encoded empty caption, ``[l, d]`` and pooled ``[e]``, into a dataset's folder.

    ``storage`` is "float32" or "bfloat16".
    """
    for field, tensor in (("text", text), ("pooled", pooled)):
        values = to_storage(tensor.cpu(), storage)
        with IndexedWriter(folder / f"null_{field}", dtype_of(field, storage)) as writer:
            writer.add_document(values, [values.size])


def read_null(folder: Path, manifest: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Read the encoded empty caption: token embeddings ``[l, d]`` and pooled ``[e]``.

    DataError is raised if it is damaged.
    """
    storage = manifest["storage"]

    def read(name: str, *sizes: str) -> Tensor:
        field = Field(folder / f"null_{name}", dtype_of(name, storage))
        return field.shaped(0, storage, *(manifest[size] for size in sizes))

    return read("text", "text_length", "text_width"), read("pooled", "pooled_width")
