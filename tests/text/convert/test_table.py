"""Rows of our weights and of transformers' tensors, against a sort row by row."""

import itertools

import pytest
import torch
from torch import Tensor

from megatron_ext.config.model import ModelConfig
from megatron_ext.text.config.hybrid import MixerConfig
from megatron_ext.text.convert.table import (
    Part,
    Table,
    fused_qkv,
    gated_qkv,
    grouped_qkv,
    parse,
)
from megatron_ext.text.convert.weights import Sizes, fused_qkv_of
from megatron_ext.text.convert.writing import Described, Plan

SHAPES = [(8, 2, 4), (4, 4, 6), (6, 1, 2), (1, 1, 8)]
"""Numbers of heads and query groups, and the size of a head."""


def model_of(heads: int, groups: int, size: int) -> ModelConfig:
    return ModelConfig(num_attention_heads=heads, num_query_groups=groups, kv_channels=size)


def parts_by_loop(tensor: Tensor, heads: int, groups: int, size: int) -> dict[str, Tensor]:
    """Sort rows one by one: each group has its query heads, then one key, then one value."""
    found: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
    row = 0
    for _ in range(groups):
        for kind in ["q"] * (heads // groups) + ["k", "v"]:
            for _ in range(size):
                found[kind].append(tensor[row])
                row += 1
    assert row == tensor.shape[0]
    return {kind: torch.stack(rows) for kind, rows in found.items()}


def test_rows_of_gates_follow_each_head_in_the_tensor_of_queries() -> None:
    heads, groups, size = 6, 2, 3
    queries, gates = torch.randn(2, heads, size, 5)
    keys, values = torch.randn(2, groups, size, 5)
    of_group = heads // groups
    ours = torch.cat(
        [
            part.flatten(0, 1)
            for g in range(groups)
            for part in (
                queries[g * of_group : (g + 1) * of_group],
                gates[g * of_group : (g + 1) * of_group],
                keys[g : g + 1],
                values[g : g + 1],
            )
        ]
    )
    theirs = {
        "q": torch.stack([queries, gates], dim=1).flatten(0, 2),
        "k": keys.flatten(0, 1),
        "v": values.flatten(0, 1),
    }
    table = Table({}, {"qkv": gated_qkv(model_of(heads, groups, size), "q", "k", "v")})
    assert torch.equal(read(table, "decoder.layers.qkv[1]", theirs, ours), ours)


def read(table: Table, name: str, theirs: dict[str, Tensor], ours: Tensor) -> Tensor:
    """Return our tensor, put together from two blocks of rows and two of columns."""
    got = torch.full_like(ours, -1)
    cuts = [((0, 1), (1, ours.shape[0])), *(((0, 2), (2, x)) for x in ours.shape[1:])]
    for block in itertools.product(*cuts):
        own = tuple(slice(*sides) for sides in block)
        offset = [start for start, _ in block]
        for run in table.runs(name, ours.shape[0], 2) or []:
            found = run.overlap(offset, got[own].shape)
            if found is not None:
                values = theirs[run.tensor][found[1]]
                got[own][found[0]] = values.t() if run.transposed else values
    return got


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("columns", [(5,), ()], ids=["weight", "bias"])
def test_fused_rows_of_queries_keys_and_values(
    shape: tuple[int, int, int], columns: tuple[int, ...]
) -> None:
    heads, groups, size = shape
    ours = torch.randn((heads + 2 * groups) * size, *columns)
    parts = parts_by_loop(ours, *shape)
    separate = Table({}, {"qkv": grouped_qkv(model_of(*shape), "q", "k", "v")})
    assert torch.equal(read(separate, "decoder.layers.qkv[1]", parts, ours), ours)
    fused = torch.cat(list(parts.values()))
    table = Table({}, {"qkv": fused_qkv(model_of(*shape), "c")})
    assert torch.equal(read(table, "decoder.layers.1.qkv", {"c": fused}, ours), ours)
    if columns:
        turned = fused_qkv_of("c", transposed=True)
        sizes = Sizes(model_of(*shape), MixerConfig(), 0)
        table = Table({}, {"qkv": turned.parts(sizes, is_matrix=True)})
        assert torch.equal(read(table, "decoder.layers.1.qkv", {"c": fused.t()}, ours), ours)


def test_rows_of_stacked_experts_whose_gate_and_other_rows_alternate() -> None:
    experts = torch.randn(3, 4, 12)  # [e, h, 2 * ffn]
    parts = [Part("x.{layer}", None, at, 2, transposed=True, stacked=True) for at in (0, 1)]
    table = Table({}, {"fc1": parts})
    ours = torch.cat([experts[2, :, ::2], experts[2, :, 1::2]], dim=1).t()
    got = read(table, "decoder.layers.fc1[7][2]", {"x.7": experts}, ours)
    assert torch.equal(got, ours)
    runs = table.runs("decoder.layers.fc1[7][2]", 12, 2) or []
    assert [run.shape((12, 4)) for run in runs] == [(3, 4, 11), (3, 4, 12)]


def test_names_of_layers_and_depths() -> None:
    layer = {
        "a.weight": (Part("l.{layer}.gate"), Part("l.{layer}.up")),
        "e.weight": (Part("l.{layer}.{expert}"),),
    }
    table = Table({"w": (Part("W"),)}, layer, {"eh_proj.weight": (Part("l.{layer}.eh"),)})
    names = {
        "w": ["W"],
        "decoder.layers.a.weight[5]": ["l.5.gate", "l.5.up"],
        "decoder.layers.5.a.weight": ["l.5.gate", "l.5.up"],
        "decoder.layers.e.weight[5][3]": ["l.5.3"],
        "decoder.layers.5.e.weight[3]": ["l.5.3"],
        "mtp.layers.1.eh_proj.weight": ["l.9.eh"],
        "mtp.layers.1.transformer_layer.e.weight[3]": ["l.9.3"],
    }
    for name, want in names.items():
        assert [run.tensor for run in table.runs(name, 4, 8) or []] == want
    assert table.runs("decoder.layers.other.weight[5]", 4, 8) is None
    assert table.runs("router.weight", 4, 8) is None
    assert parse("output_layer.weight") is None


def test_exact_tensors_are_those_with_the_named_endings() -> None:
    table = Table({}, {}, exact=("bias", "scale"))
    names = ("layers.1.bias", "layers.1.scale", "layers.1.weight", "bias.weight")
    assert [table.is_exact(name) for name in names] == [True, True, False, False]
    assert not Table({}, {}).is_exact("layers.1.bias")


def test_copies_are_written_where_their_original_is() -> None:
    """A model with tied embeddings has no output layer that a depth could copy."""
    copies = {"copy.a": "A", "copy.b": "B"}
    table = Table({"a": (Part("A"),), "b": (Part("B"),)}, {}, copies=copies)
    both = [[Described("a", (4, 2), (0, 0), (2, 2))], [Described("a", (4, 2), (2, 0), (2, 2))]]
    plan = Plan.of(table, both, 1, torch.float16)
    assert {name: tuple(x.shape) for name, x in plan.tensors.items()} == {
        "A": (4, 2),
        "copy.a": (4, 2),
    }
    assert plan.pieces["copy.a"] == plan.pieces["A"]
    assert [(piece.rank, piece.index[0]) for piece in plan.pieces["A"]] == [
        (0, slice(0, 2, 1)),
        (1, slice(2, 4, 1)),
    ]
