"""Maps our parameters, and their adapters, to those of transformers' llama-like models.

Two of our weights are fused. ``linear_qkv`` holds, for each of g query groups, the rows of its
query heads, then of its key, then of its value: ``[g, n/g + 2, d, h]``, flattened to ``[rows, h]``
(Megatron's order). ``linear_fc1`` of a gated MLP holds the rows of gate_proj, then those of
up_proj: ``[2 * ffn, h]``.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_ext.checkpoint.conversion import Part, PeftLayers
from megatron_ext.config.model import ModelConfig
from megatron_ext.errors import CheckpointError

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED = ("mlp.gate_proj", "mlp.up_proj")
LAYER_MODULES = {
    "input_layernorm": ("input_layernorm",),
    "self_attention.linear_qkv": QKV,
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "self_attention.q_layernorm": ("self_attn.q_norm",),
    "self_attention.k_layernorm": ("self_attn.k_norm",),
    "pre_mlp_layernorm": ("post_attention_layernorm",),
    "mlp.linear_fc1": GATED,
    "mlp.linear_fc2": ("mlp.down_proj",),
}
"""Modules of one layer: our name, and the names of the corresponding modules of transformers."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OUTER = {
    "embedding.word_embeddings.weight": EMBEDDING,
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": HEAD,
}
VOCABULARY = (EMBEDDING, HEAD)
"""Weights of transformers with one row per vocabulary entry; ours have padding rows too."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)\.(weight|bias)$")
_BY_LAST_PART = {ours.rsplit(".", 1)[-1]: theirs for ours, theirs in LAYER_MODULES.items()}


@dataclass(frozen=True)
class RowShape:
    """The heads n, query groups g and head size d, which fix the order of ``linear_qkv``'s rows."""

    num_attention_heads: int
    num_query_groups: int
    kv_channels: int

    @property
    def heads_per_group(self) -> int:
        """Return n/g, the number of query heads that share a key and a value."""
        return self.num_attention_heads // self.num_query_groups


def modules_of(name: str) -> tuple[str, ...]:
    """Return the names of the transformers modules that correspond to one of our modules.

    ``name`` may be a path or only its end, such as ``linear_qkv``. Raise a CheckpointError if
    llama-like models have no such module.
    """
    for part in name.split("."):
        if part in _BY_LAST_PART:
            return _BY_LAST_PART[part]
    raise CheckpointError(
        f"`{name}` has no place in a llama-like model of transformers; its layers have "
        f"{', '.join(sorted(_BY_LAST_PART))}."
    )


def split_rows(name: str, tensor: Tensor, shape: RowShape) -> dict[str, Tensor]:
    """Return the rows of one of our tensors by transformers module; see `modules_of`.

    The tensor is a weight ``[rows, h]``, a bias ``[rows]``, or the matrix B ``[rows, r]`` of an
    adapter of rank r. It may be one tensor-parallel shard if ``shape`` has the heads of a shard.

    Raise a CheckpointError if the number of rows does not agree with ``shape``.
    """
    modules = modules_of(name)
    if modules == QKV:
        n, d = shape.heads_per_group, shape.kv_channels
        _check_rows(name, tensor, shape.num_query_groups * (n + 2) * d)
        groups = tensor.reshape(shape.num_query_groups, n + 2, d, *tensor.shape[1:])
        parts = groups[:, :n], groups[:, n : n + 1], groups[:, n + 1 :]
        return {module: part.flatten(0, 2) for module, part in zip(modules, parts, strict=True)}
    if modules == GATED:
        _check_rows(name, tensor, tensor.shape[0] // 2 * 2)
        return dict(zip(modules, tensor.chunk(2), strict=True))
    return {modules[0]: tensor}


def join_rows(name: str, parts: Mapping[str, Tensor], shape: RowShape) -> Tensor:
    """Join the tensors of transformers' modules into one of ours; the inverse of `split_rows`."""
    modules = modules_of(name)
    if modules == QKV:
        g, n, d = shape.num_query_groups, shape.heads_per_group, shape.kv_channels
        groups: list[Tensor] = []
        for module, heads in zip(modules, (n, 1, 1), strict=True):
            _check_rows(module, parts[module], g * heads * d)
            groups.append(parts[module].reshape(g, heads, d, *parts[module].shape[1:]))
        return torch.cat(groups, dim=1).flatten(0, 2)
    if modules == GATED:
        return torch.cat([parts[module] for module in modules])
    return parts[modules[0]]


def _check_rows(name: str, tensor: Tensor, rows: int) -> None:
    if tensor.shape[0] != rows:
        raise CheckpointError(
            f"`{name}` has {tensor.shape[0]} rows, but the shape of the model gives {rows}; "
            "give the number of heads, of query groups and the size of a head that it has."
        )


def hf_names(name: str) -> dict[str, str]:
    """Return the full names of one of our parameters in transformers, by module.

    An example is ``{"mlp.gate_proj": "model.layers.3.mlp.gate_proj.weight", ...}``; layers are
    numbered along the whole model. Raise a CheckpointError if llama-like models lack the parameter.
    """
    if name in OUTER:
        return {OUTER[name]: OUTER[name]}
    match = _LAYER.match(name)
    if match is None or match[2] not in LAYER_MODULES:
        raise CheckpointError(
            f"`{name}` has no place in a llama-like model of transformers; convert a dense decoder "
            "without experts and multi-token prediction."
        )
    return {
        module: f"model.layers.{match[1]}.{module}.{match[3]}" for module in LAYER_MODULES[match[2]]
    }


def to_hf(name: str, tensor: Tensor, shape: RowShape) -> dict[str, Tensor]:
    """Convert one of our unsharded parameters to tensors of transformers, by full name."""
    names = hf_names(name)
    if name in OUTER:
        return {OUTER[name]: tensor}
    return {names[module]: part for module, part in split_rows(name, tensor, shape).items()}


def from_hf(name: str, theirs: Mapping[str, Tensor], shape: RowShape) -> Tensor:
    """Convert tensors of transformers to one of our parameters; the inverse of `to_hf`."""
    names = hf_names(name)
    if name in OUTER:
        return theirs[OUTER[name]]
    return join_rows(name, {module: theirs[full] for module, full in names.items()}, shape)


def row_shape(model: ModelConfig) -> RowShape:
    """Return the `RowShape` of whole (unsharded) weights."""
    heads, channels = model.num_attention_heads, model.kv_channels
    assert heads is not None and channels is not None
    return RowShape(heads, model.num_query_groups or heads, channels)


_ADAPTER = re.compile(
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?:self_attention|mlp)\."
    r"(?P<linear>linear_\w+)\.lora\.(?P<matrix>[ab])$"
)


def llama_adapters(model: ModelConfig, root: Path) -> PeftLayers:
    """Return the map from our adapters to Llama's layers; ``root`` is only for error messages."""

    def parts(name: str, matrix: Tensor) -> Iterator[Part]:
        match = _ADAPTER.match(name)
        assert match is not None
        linear, kind = match["linear"], match["matrix"].upper()
        if linear.startswith("linear_fc") and not model.swiglu:
            raise CheckpointError(
                f"`--load` ({root}) has adapters on an MLP without `--swiglu`, for which peft's "
                "models have no gate_proj and up_proj; merge them with `tools/lora.py merge` "
                "instead."
            )
        stacked = match["layer"] is None
        first = 0 if stacked else int(match["layer"])
        for layer, values in enumerate(matrix if stacked else matrix[None], first):
            if kind == "B":
                found = split_rows(linear, values, row_shape(model))
            else:
                # safetensors refuses tensors that share memory.
                found = {twin: values.clone() for twin in modules_of(linear)}
            for twin, part in found.items():
                yield f"model.layers.{layer}.{twin}", kind, part

    return PeftLayers(_ADAPTER, parts, lambda path: path.rpartition(".")[2], "CAUSAL_LM")
