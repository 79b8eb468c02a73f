"""Maps our LoRA adapters to the layers of a Hugging Face model, and back, under the names of peft.

Our layers and the public ones differ (r rank, p number of projections that a layer of ours joins):

- Ours joins several public layers, such as those to queries, keys and values. A matrix A that they
  share becomes a copy for each; separate ones, ``[p * r, in]`` (``--lora-separate-projections``),
  are theirs.
- transformers stacks the weights of a layer's routed experts in two parameters, ``gate_up_proj``
  and ``down_proj``, whose adapters are peft's ``target_parameters``. Published files have a layer
  for each projection of each expert, and so have adapters of other programs.
- Weights that are trained whole (``--lora-modules-to-save``) are peft's ``modules_to_save``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from megatron_ext.checkpoint.adapter_files import LAST_PARAMETER, Pairs, PublicLayers
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.text.config.hugging_face import HuggingFaceConfig
from megatron_ext.text.convert.config import fitting_family
from megatron_ext.text.convert.families.llama import FAMILY as LLAMA
from megatron_ext.text.convert.family import Family, Gpt
from megatron_ext.text.convert.reading import EMBEDDING, HEAD
from megatron_ext.text.convert.table import Run, Table

_ADAPTER = re.compile(
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?"
    r"(?P<linear>(?:self_attention|mlp)\.[\w.]*(?:linear_\w+|_proj))"
    r"\.lora\.(?P<matrix>[ab])$"
)
_OF_LAYER = re.compile(r"(?P<stem>decoder\.layers\.)(?P<rest>(?!\d+\.).*)$")
ROUTED = "mlp.experts.experts."
"""The beginning of the names that routed experts' layers have in checkpoints."""
_IN_CLASSES = (
    (re.compile(r"^backbone\."), "model."),
    (re.compile(r"\.block_sparse_moe\.(?=experts\.[gdu]|gate\.)"), ".mlp."),
    (re.compile(r"(?<=\.block_sparse_moe\.)input_linear(\.weight)?$"), "experts.gate_up_proj"),
    (re.compile(r"(?<=\.block_sparse_moe\.)output_linear(\.weight)?$"), "experts.down_proj"),
    (re.compile(r"(?<=\.block_sparse_moe\.router\.)layer\."), ""),
)
"""Names in published files, and those of the same in the classes of transformers 5."""


def in_class(name: str) -> str:
    """Return the name in transformers' class of a layer or tensor of a published file."""
    for pattern, theirs in _IN_CLASSES:
        name = pattern.sub(theirs, name)
    return name


@dataclass(frozen=True)
class TextAdapters:
    """Where the adapters of a language model lie in the layers of its Hugging Face family.

    Attributes:
        rank: the rank of the run's adapters.
        family: the model's family, or Llama's for a model of none.
        root: the folder of the run's checkpoints, for messages.
        per_expert: whether routed experts are written as layers of their own.
    """

    gpt: Gpt
    family: Family
    vocab_size: int
    rank: int
    root: Path
    per_expert: bool = False

    @classmethod
    def of(cls, config: RunConfig, root: Path, *, per_expert: bool = False) -> TextAdapters:
        gpt = Gpt.of(config)
        model = config.model
        like = config.section(HuggingFaceConfig).model()
        try:
            family = fitting_family(gpt) if like is None else like.family
        except CheckpointError:
            family = LLAMA
        vocab_size = model.unpadded_vocab_size or model.padded_vocab_size or 1
        vocab_size = vocab_size if like is None else like.vocab_size
        return cls(gpt, family, vocab_size, config.lora.lora_rank or 0, root, per_expert)

    @cached_property
    def table(self) -> Table:
        return self.family.table(self.gpt, self.vocab_size)

    def runs(self, weight: str, rows: int) -> list[Run]:
        """Return the runs of rows that make up our weight; [] if the family has no such weight."""
        return self.table.runs(weight, rows, self.gpt.model.num_layers or 0) or []

    def parameter(self, linear: str) -> str:
        """Return the template of the parameter in which transformers stacks experts' weights.

        ``linear`` is the name of the experts' layer in checkpoints.
        """
        part = self.table.layer[f"{linear}.weight"][0]
        if part.stacked:
            return in_class(part.tensor).removesuffix(".weight")
        module = part.tensor.partition(".{expert}")[0]
        if linear.endswith("linear_fc2"):
            return in_class(f"{module}.{LAST_PARAMETER}")
        return in_class(f"{module}.{'gate_up_proj' if self.gpt.model.gated else 'up_proj'}")

    def stacks(self, linear: str) -> bool:
        """Return whether the adapters of a layer are written as those of a stacked parameter."""
        if not linear.startswith(ROUTED):
            return False
        return not self.per_expert or self.table.layer[f"{linear}.weight"][0].stacked

    def to_public(self, matrices: Mapping[str, Tensor]) -> Pairs:
        """Return our matrices, given by name in a checkpoint, as those of public layers."""
        halves: dict[tuple[str | None, str], dict[str, Tensor]] = {}
        for name, values in matrices.items():
            match = _ADAPTER.match(name)
            assert match is not None
            halves.setdefault((match["layer"], match["linear"]), {})[match["matrix"]] = values
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for (number, linear), half in halves.items():
            first = 0 if number is None else int(number)
            layers = [half[x] if number is None else half[x][None] for x in ("a", "b")]
            for layer, (a, b) in enumerate(zip(*layers, strict=True), first):
                name = f"decoder.layers.{layer}.{linear}.weight"
                if self.stacks(linear):
                    path = self.parameter(linear).format(**self.table.numbers(layer))
                    found[path] = self._stacked(name, a, b)
                elif linear.startswith(ROUTED):
                    for expert, pair in enumerate(zip(a, b, strict=True)):
                        found |= self._layers(f"{name}[{expert}]", linear, *pair)
                else:
                    found |= self._layers(name, linear, a, b)
        return found

    def _stacked(self, name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matrices of a layer's experts, ``[e, r, in]`` and ``[e, out, r]``, as one."""
        a, b = _used(a, b)
        runs = self.runs(f"{name}[0]", b.size(1))
        if runs[0].expert is not None:
            b = torch.stack([next(iter(_pieces(runs, matrix).values())) for matrix in b])
        return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)

    def _layers(self, name: str, linear: str, a: Tensor, b: Tensor) -> Pairs:
        """Return the public layers that make up one of ours, each with its part of A and B."""
        model = self.gpt.model
        if self.family is LLAMA and linear == "mlp.linear_fc1" and not model.swiglu:
            raise CheckpointError(
                f"`--load` ({self.root}) has adapters on an MLP without `--swiglu`, for which "
                "peft's models have no gate_proj and up_proj; merge them with `tools/lora.py "
                "merge` instead."
            )
        pieces = _pieces(self.runs(name, len(b)), b)
        if not pieces:
            raise CheckpointError(
                f"`--load` ({self.root}) has adapters on `{linear}`, which a model of "
                f"`{self.family.model_type}` does not have; merge them with `tools/lora.py merge`."
            )
        separate = len(pieces) > 1 and len(a) == len(pieces) * self.rank
        if not separate and len(a) > self.rank:
            raise CheckpointError(
                f"`--load` ({self.root}) has an adapter each for the projections of `{linear}` "
                f"(`--lora-separate-projections`), but a model of `{self.family.model_type}` has "
                "one layer for them; merge the adapters with `tools/lora.py merge` instead."
            )
        found = {}
        for index, (tensor, piece) in enumerate(pieces.items()):
            low = a[index * self.rank :][: self.rank] if separate else a
            low, piece = (x[0] for x in _used(low[None], piece[None]))
            # safetensors refuses tensors that share memory.
            found[tensor.removesuffix(".weight")] = low.clone(), piece
        return found

    def whole(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """Return the public tensors that make up a weight of ours; {} if there are none.

        ``name`` is the weight's in a checkpoint, where ``values`` may be those of all layers.
        """
        match = _OF_LAYER.match(name)
        if match is None:
            weights = {name: values}
        else:
            layers = enumerate(values)
            weights = {f"{match['stem']}{layer}.{match['rest']}": x for layer, x in layers}
        found = {
            in_class(tensor): piece
            for weight, each in weights.items()
            for tensor, piece in _pieces(self.runs(weight, len(each)), each).items()
        }
        if name == EMBEDDING and self.tied_head is not None:
            (embedding,) = found.values()
            found[self.tied_head] = embedding.clone()
        return found

    @property
    def tied_head(self) -> str | None:
        """Return the name of an output layer that is the embedding, of which peft saves a copy."""
        parts = self.table.outer.get(HEAD)
        if self.gpt.model.untie_embeddings_and_output_weights or not parts:
            return None
        return parts[0].tensor


def _pieces(runs: list[Run], values: Tensor) -> dict[str, Tensor]:
    """Return the rows of each public tensor, given the rows of ours that ``runs`` describe."""
    found = {}
    for tensor in dict.fromkeys(run.tensor for run in runs):
        own = [run for run in runs if run.tensor == tensor]
        piece = values.new_empty(sum(run.count for run in own), *values.shape[1:])
        for run in own:
            rows = slice(run.start, run.start + run.count * run.step, run.step)
            piece[rows] = values[run.row : run.row + run.count]
        found[tensor] = piece
    return found


def _used(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return A ``[e, r, in]`` and B ``[e, out, r]`` without the last products that are all zero.

    An import fills adapters of a lower rank than others up with zeros.
    """
    used = (a.bool().any(2) | b.bool().any(1)).any(0)
    rank = int(used.nonzero().max()) + 1 if used.any() else 1
    return a[:, :rank], b[:, :, :rank]


_IN_LAYER = re.compile(r"^.*?\.\d+\.")
_MOVED = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names in ``target_modules`` that peft takes for those of experts, in a model that has any.

So it cannot find dense layers and shared experts by such names, but finds their weights by the
names of parameters.
"""


def _module(tensor: str) -> str:
    """Return the name of a tensor's module for peft's ``modules_to_save``.

    peft takes each module whose name ends so; a router is found with its parent's.
    """
    *_, parent, module, _ = tensor.split(".") if tensor.count(".") > 1 else ("", *tensor.split("."))
    return f"{parent}.{module}" if module in ("gate", "router") else module


def peft_layers(config: RunConfig, root: Path, *, per_expert: bool = False) -> PublicLayers:
    """Return the map from our LoRA adapters to the layers of the model's Hugging Face family.

    If the model fits no family, its layers get Llama's names; adapters on an MLP without
    ``--swiglu`` then raise a CheckpointError, since Llama has no such MLP.

    Args:
        root: folder of the checkpoints, which error messages name.
        per_expert: whether routed experts are layers of their own, as in published files, and not
            stacked, as in transformers' classes.
    """
    adapters = TextAdapters.of(config, root, per_expert=per_expert)
    count = adapters.gpt.moe.num_experts or 1
    linears = [f"{ROUTED}linear_{x}" for x in ("fc1", "fc2")]
    stacked = {
        _IN_LAYER.sub("", adapters.parameter(x).format(layer=0, mlp_layer=0))
        for x in linears
        if f"{x}.weight" in adapters.table.layer
    }

    def experts(path: str) -> int:
        return count if _IN_LAYER.sub("", path) in stacked else 1

    def target(path: str) -> str:
        in_layer = _IN_LAYER.sub("", path)
        if experts(path) > 1:
            return in_layer
        name = path.rpartition(".")[2]
        return f"{in_layer}.weight" if count > 1 and not per_expert and name in _MOVED else name

    return PublicLayers(
        _ADAPTER, adapters.to_public, target, "CAUSAL_LM", experts=experts, whole=adapters.whole,
        module=lambda tensor: "" if tensor == adapters.tied_head else _module(tensor),
    )  # fmt: skip
