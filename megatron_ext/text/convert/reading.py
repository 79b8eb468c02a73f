"""Fills model chunks, in any layout, from a folder of Hugging Face weights.

Each rank reads only its slices. Weights that are stored with few bits become plain values while
they are read (`stored`).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor
from tqdm import tqdm

from megatron_ext.checkpoint.conversion import weight_shards
from megatron_ext.checkpoint.safetensors_files import (
    TensorFolder,
    check_dtype,
    file_of_each,
    index_of,
    index_path,
    only_dtype,
)
from megatron_ext.errors import CheckpointError
from megatron_ext.layers.initialization import Shard
from megatron_ext.parallel.collectives import on_every_rank, union_of_all_ranks
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.convert.config import HuggingFaceModel, read_model
from megatron_ext.text.convert.growth import Growth
from megatron_ext.text.convert.multimodal import roots_of
from megatron_ext.text.convert.quantization import ENTRY, read_quantization
from megatron_ext.text.convert.stored import FP8, Finder
from megatron_ext.text.convert.table import (
    Index,
    Run,
    Shapes,
    Table,
    parse,
    widen,
)

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
"""Our names of the weights that have one row for each token of the vocabulary."""


@dataclass
class Loaded:
    """The result of loading a folder on one rank.

    Attributes:
        bytes_read: number of bytes of tensors that this rank has read.
        notes: sentences on what the folder lacks, and on what was not loaded.
    """

    bytes_read: int = 0
    notes: list[str] = field(default_factory=list)


def load_folder(
    chunks: Sequence[torch.nn.Module],
    folder: Path,
    context: ParallelContext,
    *,
    may_lack_depths: bool = True,
    growth: Growth | None = None,
) -> Loaded:
    """Fill this rank's model chunks with the weights of a Hugging Face folder.

    All ranks call this together. The chunks may be wrapped, for example by DDP. LoRA adapters keep
    their values. If the folder has no weights for the MTP depths, the depths keep their values too,
    and so do indexers that the run adds to the folder's model (`sparse_start`); if
    ``may_lack_depths`` is False, raise a CheckpointError instead. An optimizer that was built
    before must copy the model's new weights afterwards. With ``growth``, the vocabulary of the
    chunks has more entries than the folder's, and the new ones are filled.

    Raise a CheckpointError on every rank if a tensor is missing, superfluous, or of another shape.
    """
    what = f"{folder} cannot be read"
    reading = _Reading(folder, chunks, growth, may_lack=may_lack_depths)
    try:
        needs = union_of_all_ranks(on_every_rank(reading.open, what), context)
        decoder, depths = (
            least_shapes((name, shape) for of_depth, name, shape in needs if of_depth is kind)
            for kind in (False, True)
        )
        # Every rank checks the tensors of all ranks, so that all come to the same result.
        on_every_rank(lambda: reading.check(decoder, depths, may_lack_depths), what)
        on_every_rank(reading.fill, what)
    finally:
        reading.close()
    return Loaded(reading.source.bytes_read, reading.notes)


class _Reading:
    """Reads a folder of Hugging Face weights on one rank.

    All ranks call `open`, `check` and `fill`, in this order.
    """

    def __init__(
        self,
        folder: Path,
        chunks: Sequence[torch.nn.Module],
        growth: Growth | None,
        *,
        may_lack: bool,
    ) -> None:
        self.folder = folder
        self.may_lack = may_lack
        self.growth = growth
        self.notes: list[str] = []
        self.chunks = unwrap_model(list(chunks))
        self.shards = [shard for chunk in self.chunks for shard in weight_shards(chunk)]

    def open(self) -> set[tuple[bool, str, tuple[int, ...]]]:
        """Open the folder; return which tensors it must have for this rank.

        The tensors must hold the whole parameters of which this rank has shards. An entry is
        (whether the tensor is of an MTP depth, its name, the smallest shape that it must have).
        """
        self.model = read_model(self.folder)
        self.notes += self.model.notes()
        self.source = WeightFolder(self.model)
        self.table = self.model.table(self.source.shapes())
        self.notes += self.source.notes()
        self._leave_out_indexers()
        decoder: Shapes = {}
        depths: Shapes = {}
        for shard in self.shards:
            needs = depths if is_of_depth(shard.name) else decoder
            for run in self._runs(shard):
                widen(needs, run.tensor, run.shape(shard.full_shape))
        return {
            (of_depth, name, shape)
            for of_depth, needs in ((False, decoder), (True, depths))
            for name, shape in needs.items()
        }

    def _leave_out_indexers(self) -> None:
        """Let indexers keep their values if the folder's model has none, and note it."""
        from megatron_ext.text.convert.sparse_start import INDEXER, SPARSE

        if self.model.family.model_type not in SPARSE:
            return
        others = [shard for shard in self.shards if INDEXER not in shard.name]
        if len(others) == len(self.shards):
            return
        if not self.may_lack:
            raise CheckpointError(
                f"{self.folder} holds no indexers, and `--no-initialization` or "
                "`--lora-quantize-weights` gives them no values; leave it out."
            )
        self.shards = others
        self.notes.append(
            f"{self.folder} holds no indexers, so those of sparse attention start from their "
            "initial values."
        )

    def close(self) -> None:
        if hasattr(self, "source"):
            self.source.close()

    def _runs(self, shard: Shard) -> list[Run]:
        rows = shard.full_shape[0]
        layers = self.model.fields["num_layers"]
        runs = self.table.runs(shard.name, rows, layers)
        if runs is None:
            raise CheckpointError(
                f"{self.model.path} describes a {self.model.family.model_type} model, which has no "
                f"place for `{shard.name}`; leave out the flag that adds it."
            )
        return runs

    def check(self, decoder: Shapes, depths: Shapes, may_lack_depths: bool) -> None:
        """Check that the folder has every tensor that some rank needs, and no others.

        ``depths`` has the shapes of the needed tensors of the MTP depths, by name, ``decoder`` of
        all others. If the folder has no tensor of the depths, they keep their values, or raise a
        CheckpointError if ``may_lack_depths`` is False. Raise one also if a tensor is missing,
        superfluous, or of another shape or dtype.
        """
        source = self.source
        beside = depths_in(source.others, self.table, self.model) if depths else set()
        if beside:
            raise CheckpointError(
                f"{self.folder} holds `{min(beside)}` beside the text model, whose weights of "
                "multi-token prediction cannot be read from there; give `--mtp-num-layers 0`."
            )
        if depths and not depths.keys() & source.names:
            if not may_lack_depths:
                raise CheckpointError(
                    f"{self.folder} holds no weights of multi-token prediction, and "
                    "`--no-initialization` or `--lora-quantize-weights` gives them no values; "
                    "leave it out, or give `--mtp-num-layers 0`."
                )
            self.shards = [shard for shard in self.shards if not is_of_depth(shard.name)]
            self.notes.append(
                f"{self.folder} holds no weights of multi-token prediction, so its depths start "
                "from their initial values."
            )
            depths = {}
        elif not depths and depths_in(source.names, self.table, self.model):
            self.notes.append(
                f"{self.folder} holds weights of multi-token prediction, which a run without "
                "`--mtp-num-layers` leaves out."
            )
        check_tensors(source, self.table, decoder | depths, self.model)
        unused = self.table.without_place(source.names)
        if unused:
            self.notes.append(
                f"{self.folder} holds {len(unused)} tensors such as `{min(unused)}`, which have no "
                "place in the model and are left out."
            )

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the folder's values into this rank's shards; fill vocabulary padding with zeros."""
        shown = {"unit": "tensor", "delay": 1.0, "leave": False, "disable": None}
        for shard in tqdm(self._memory(), "Loading", **shown):
            if shard.is_vocabulary:
                shard.tensor[max(0, self.model.vocab_size - shard.offset[0]) :] = 0
            for run in self._runs(shard):
                overlap = run.overlap(shard.offset, shard.tensor.shape)
                if overlap is not None:
                    rows, index = overlap
                    target = shard.tensor[rows]
                    self.source.copy(run.tensor, index, target, transposed=run.transposed)
            if shard.is_vocabulary and self.growth is not None:
                tensor = self._runs(shard)[0].tensor
                self.growth.fill(shard, partial(self.source.rows, tensor))
        self._note_rounding()

    def _note_rounding(self) -> None:
        """Note weights that a folder keeps in float32, but that our model has in its own dtype."""
        rounded = {
            run.tensor
            for shard in self.shards
            if shard.tensor.dtype in (torch.bfloat16, torch.float16)
            for run in self._runs(shard)
            if self.table.is_exact(run.tensor) and self.source.dtype(run.tensor) == "float32"
        }
        if rounded:
            self.notes.append(
                f"{self.folder} holds weights in float32 whatever dtype the others have, such as "
                f"`{min(rounded)}`; they are rounded to the model's dtype."
            )

    def _memory(self) -> Iterable[Shard]:
        """Return the shards with memory to write to, if only for a moment (`layers.quantized`)."""
        parameters = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        if all(getattr(parameter, "quantized", None) is None for parameter in parameters):
            return self.shards
        from megatron_ext.layers.quantized import shards_to_fill

        return shards_to_fill(self.chunks, weight_shards)


class WeightFolder(TensorFolder):
    """A folder with the weights of a Hugging Face model, from which slices of weights are read.

    A weight may be stored with few bits in several tensors; ``names`` has the weight's name alone,
    and ``shapes`` the shape that it has in the model.

    Attributes:
        others: names of the weights of a multimodal model that are not of its text part, and not in
            ``names``.
    """

    def __init__(self, model: HuggingFaceModel) -> None:
        folder = model.path.parent
        _refuse_two_models(folder)
        super().__init__(folder)
        self._holds_adapters = (folder / "adapter_config.json").is_file()
        try:
            if model.wrapping is None:
                self.rename(_without_root(self.stored_names, model))
            self._quantization = read_quantization(model.raw, model.path)
            found = Finder(self, self._quantization)
        except BaseException:
            self.close()
            raise
        self.quantized = found.weights
        self.unused = found.unused
        names = (self.stored_names - found.parts - found.unused) | found.weights.keys()
        self.others = set[str]()
        if model.wrapping is not None:
            roots = roots_of(model.wrapping.kind.form(names))
            self.others = {name for name in names if not name.startswith(roots)}
        self._names = names - self.others

    @property
    def names(self) -> set[str]:
        return self._names

    def shapes(self) -> Shapes:
        plain = {x: self.shape(x) for x in self._names - self.quantized.keys()}
        quantized = {x: self.quantized[x].shape for x in self._names & self.quantized.keys()}
        return plain | quantized

    def notes(self) -> list[str]:
        """Return a note on adapters and one on tensors that are not used, if there are any."""
        notes = []
        if self._holds_adapters:
            notes.append(
                f"{self.folder} holds adapters of peft beside the whole weights (adapter_config"
                ".json): transformers applies them, but here `--adapter-path` alone does. Remove "
                "them if the weights are merged."
            )
        if not self.unused:
            return notes
        ends = sorted({name.rpartition(".")[2] for name in self.unused})
        return [
            *notes,
            f"{self.folder} holds {len(self.unused)} tensors for quantized activations "
            f"({', '.join(f'`{end}`' for end in ends)}), which have no effect here.",
        ]

    def check_kind(self, name: str) -> None:
        """Raise a CheckpointError if the weight ``name`` has a dtype that cannot be read."""
        if name in self.quantized:
            return
        kind = self.dtype(name)
        if kind in FP8 and not self._quantization.method:
            raise CheckpointError(
                f"{self.folder} holds `{name}` as {kind}, but its config.json has no "
                f"`{ENTRY}`, which says how to read it; copy config.json again."
            )
        check_dtype(self.folder, name, kind, kind)

    def whole(self, name: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the values of a whole weight; those of a quantized one in ``dtype``."""
        if name not in self.quantized:
            return self.tensor(name)
        *lead, rows, columns = self.quantized[name].shape
        values = torch.empty((*lead, rows, columns), dtype=dtype)
        for own in itertools.product(*map(range, lead)):
            index: Index = (*own, slice(0, rows), slice(0, columns))
            self.copy(name, index, values[own], transposed=False)
        return values

    def rows(self, name: str, first: int, end: int) -> Tensor:
        """Return the rows of a table of the vocabulary from ``first`` to ``end - 1``."""
        shape = (end - first, *self.shape_of(name)[1:])
        rows = torch.empty(shape, dtype=torch.float32)
        index: Index = (slice(first, end), *(slice(0, size) for size in shape[1:]))
        self.copy(name, index, rows, transposed=False)
        return rows

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight in the model."""
        quantized = self.quantized.get(name)
        return tuple(self.shape(name) if quantized is None else quantized.shape)

    def copy(self, name: str, index: Index, target: Tensor, *, transposed: bool) -> None:
        """Copy a slice of the weight ``name`` to ``target``.

        ``index`` selects the slice. If ``transposed``, ``target`` gets the transpose of the slice.
        """
        if name in self.quantized:
            self.quantized[name].copy(self, index, target.t() if transposed else target)
            return
        values = self.block(name, index)
        target.copy_(values.t() if transposed else values)


def _refuse_two_models(folder: Path) -> None:
    """Raise a CheckpointError if a folder holds one file of weights, and an index of others.

    transformers reads the one file, vLLM those of the index.
    """
    single = "model.safetensors"
    if not ((folder / single).is_file() and index_path(folder, "model").is_file()):
        return
    if single not in file_of_each(folder, "model").values():
        raise CheckpointError(
            f"{folder} holds {single} and also {index_of('model')}, which lists other files: "
            "programs differ in which they read; remove the ones of the older model."
        )


def _without_root(names: Collection[str], model: HuggingFaceModel) -> dict[str, str]:
    """Return the names of a model's tensors -> those in the files, if the files leave out the root.

    The root, such as ``transformer.``, is the name of the part without the output layer. Files lack
    it where that part was saved alone, and those of the first GPT-2.
    """
    embedding = model.family.weights.outer[EMBEDDING].tensors[0]
    root, _, rest = embedding.partition(".")
    if rest not in names or any(name.startswith(f"{root}.") for name in names):
        return {}
    sources = model.family.weights.outer.values()
    outside = tuple(tensor for source in sources for tensor in source.tensors)
    return {f"{root}.{name}": name for name in names if not name.startswith(outside)}


class OtherTensors:
    """The tensors of a multimodal folder that do not belong to its text model.

    Attributes:
        described: all of them, by name, without values (on the meta device).
    """

    def __init__(self, model: HuggingFaceModel) -> None:
        self._source = WeightFolder(model)
        packed = self._source.others & self._source.quantized.keys()
        if packed:
            self._source.close()
            raise CheckpointError(
                f"{self._source.folder} holds `{min(packed)}`, which is not of the text model, "
                "with few bits, but weights are written plain; use the folder of the model before "
                "it was quantized."
            )
        self.described = {
            name: torch.empty_like(self._source.tensor(name), device="meta")
            for name in sorted(self._source.others)
        }

    def read(self, name: str) -> Tensor:
        return self._source.tensor(name)

    def close(self) -> None:
        self._source.close()


def without_missing_depths(model: HuggingFaceModel) -> HuggingFaceModel:
    """Return ``model`` without MTP depths if its folder has no weights for them, else unchanged.

    transformers does not save the weights of MTP depths, but keeps their number in config.json.
    """
    if not model.fields.get("mtp_num_layers"):
        return model
    with WeightFolder(model) as source:
        if depths_in(source.names, model.table(), model):
            return model
    fields = {**model.fields, "mtp_num_layers": None}
    if "hybrid_layer_pattern" in fields:
        fields["hybrid_layer_pattern"] = fields["hybrid_layer_pattern"].partition("/")[0]
        fields["depth_kind"] = None
    return dataclasses.replace(model, fields=fields)


def check_one_dtype(model: HuggingFaceModel) -> str:
    """Return the dtype that all of a model's weights have, such as ``"bfloat16"``.

    Quantized weights have that of the others, or bfloat16 if there are no others; tensors that are
    always float32 do not count. Raise a CheckpointError if the dtypes differ.
    """
    with WeightFolder(model) as source:
        table = model.table(source.shapes())
        kinds = set[str]()
        for name in source.names - buffers_in(source, source.names).keys():
            source.check_kind(name)
            if not table.is_exact(name) and name not in source.quantized:
                kinds.add(source.dtype(name))
        if source.quantized and not kinds:
            kinds.add("bfloat16")
    return only_dtype(model.path.parent, kinds)


def least_shapes(needs: Iterable[tuple[str, tuple[int, ...]]]) -> Shapes:
    """Return, by name, the smallest shape that covers all shapes of a tensor in ``needs``."""
    least: Shapes = {}
    for name, shape in needs:
        widen(least, name, shape)
    return least


def is_of_depth(name: str) -> bool:
    """Tell whether our parameter ``name`` belongs to a depth of multi-token prediction."""
    own = parse(name)
    return own is not None and own.block != "decoder"


def beyond_decoder(tensors: Iterable[str], num_layers: int) -> set[str]:
    """Return the names in ``tensors`` that belong to layers after the last decoder layer.

    transformers numbers the MTP depths as such layers.
    """
    numbers = {name: _LAYER_NUMBER.search(name) for name in tensors}
    return {name for name, match in numbers.items() if match and int(match[1]) >= num_layers}


_LAYER_NUMBER = re.compile(r"\.(?:layers|h)\.(\d+)\.")


def depths_in(tensors: Iterable[str], table: Table, model: HuggingFaceModel) -> set[str]:
    """Return the names in ``tensors`` that belong to depths of multi-token prediction.

    Layers after the last one of a model without depths are none: its config.json has been changed.
    """
    if table.path_of_depths:
        return {name for name in tensors if name.startswith(table.path_of_depths)}
    if not (table.depth or model.raw.get("num_nextn_predict_layers")):
        return set()
    return beyond_decoder(tensors, table.end_of_decoder(model.fields["num_layers"]))


_MASK = re.compile(r"\.(?:attn|attention)\.(?:bias|masked_bias)$")


def buffers_in(source: WeightFolder, tensors: Iterable[str]) -> dict[str, str]:
    """Return the tensors that older releases of transformers saved beside weights, with a reason.

    No layer has a weight of such a name and shape.
    """
    found = {}
    for name in tensors:
        if name.endswith("rotary_emb.inv_freq"):
            found[name] = "the frequencies of rotary positions are computed"
        elif _MASK.search(name) and source.shape_of(name)[:2] in ((), (1,), (1, 1)):
            found[name] = "the mask of attention is computed"
    return found


def reasons_to_skip(
    source: WeightFolder, table: Table, extra: Collection[str], model: HuggingFaceModel
) -> dict[str, str]:
    """Return the tensors, of those that no parameter needs, that are left out for a reason."""
    without_place = dict.fromkeys(table.without_place(extra), "it has no place in our model")
    depths = dict.fromkeys(depths_in(extra, table, model), "it is of multi-token prediction")
    return without_place | depths | buffers_in(source, extra)


def check_tensors(
    source: WeightFolder, table: Table, needs: Shapes, model: HuggingFaceModel
) -> None:
    """Raise a CheckpointError if a tensor is missing, superfluous, or of another shape or dtype.

    ``needs`` has the shape of each tensor that the folder must hold.
    """
    shapes = source.shapes()
    for name, shape in needs.items():
        source.check_kind(name)
        if shapes[name] != shape:
            raise CheckpointError(
                f"{source.folder} holds `{name}` with shape {list(shapes[name])}, but its "
                f"config.json implies {list(shape)}; copy the whole model again."
            )
    extra = shapes.keys() - needs.keys()
    extra -= table.copies.keys() | reasons_to_skip(source, table, extra, model).keys()
    embedding, head = (table.outer[name][0].tensor for name in (EMBEDDING, HEAD))
    if head in extra:
        if not torch.equal(source.whole(head), source.whole(embedding)):
            raise CheckpointError(
                f"{source.folder} holds a `{head}` of its own, but its config.json says "
                "`tie_word_embeddings` true; say false."
            )
        extra.remove(head)
    layers = table.end_of_decoder(model.fields["num_layers"])
    later = beyond_decoder(extra, layers)
    if later:
        raise CheckpointError(
            f"{source.folder} holds `{min(later)}`, but its config.json says that there are "
            f"{layers} layers (`{model.family.key_of('num_layers')}`); mend "
            "that entry, or save the model with fewer layers."
        )
    if extra:
        raise CheckpointError(
            f"{source.folder} holds `{min(extra)}`, which a model of its `model_type` does not "
            "have; use a plain model for causal language modelling."
        )
