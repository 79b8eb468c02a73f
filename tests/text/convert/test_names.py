"""Fused rows have the order of transformers, and of a loop over heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.errors import CheckpointError
from megatron_ext.text.convert.names import (
    RowShape,
    from_hf,
    hf_names,
    join_rows,
    split_rows,
    to_hf,
)

SHAPES = [RowShape(8, 2, 4), RowShape(4, 4, 6), RowShape(6, 1, 2), RowShape(1, 1, 8)]


def parts_by_loop(tensor: Tensor, shape: RowShape) -> dict[str, Tensor]:
    """Sort rows one by one: each group has its query heads, then one key, then one value."""
    found: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
    row = 0
    for _ in range(shape.num_query_groups):
        per_group = shape.num_attention_heads // shape.num_query_groups
        for kind in ["q"] * per_group + ["k", "v"]:
            for _ in range(shape.kv_channels):
                found[kind].append(tensor[row])
                row += 1
    assert row == tensor.shape[0]
    return {f"self_attn.{kind}_proj": torch.stack(rows) for kind, rows in found.items()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("columns", [(5,), (), (3,)], ids=["weight", "bias", "LoRA B"])
def test_qkv_rows(shape: RowShape, columns: tuple[int, ...]) -> None:
    rows = (shape.num_attention_heads + 2 * shape.num_query_groups) * shape.kv_channels
    tensor = torch.randn(rows, *columns)
    parts = split_rows("self_attention.linear_qkv", tensor, shape)
    for name, expected in parts_by_loop(tensor, shape).items():
        assert torch.equal(parts[name], expected)
    assert len(parts) == 3
    joined = join_rows("decoder.layers.0.self_attention.linear_qkv.lora_B", parts, shape)
    assert torch.equal(joined, tensor)


def test_the_parts_of_tensor_parallel_ranks() -> None:
    shape, tensor = RowShape(8, 4, 2), torch.randn(32, 3)
    whole = split_rows("linear_qkv", tensor, shape)
    halves = [split_rows("linear_qkv", half, RowShape(4, 2, 2)) for half in tensor.chunk(2)]
    for name in whole:
        assert torch.equal(torch.cat([half[name] for half in halves]), whole[name])


def test_gated_and_plain_rows() -> None:
    tensor, shape = torch.arange(6.0), SHAPES[0]
    parts = split_rows("linear_fc1", tensor, shape)
    assert {k: v.tolist() for k, v in parts.items()} == {
        "mlp.gate_proj": [0, 1, 2],
        "mlp.up_proj": [3, 4, 5],
    }
    assert torch.equal(join_rows("linear_fc1", parts, shape), tensor)
    assert split_rows("linear_fc2", tensor, shape) == {"mlp.down_proj": tensor}
    assert join_rows("linear_proj", {"self_attn.o_proj": tensor}, shape) is tensor


def test_full_names_there_and_back() -> None:
    shape, name = SHAPES[0], "decoder.layers.12.self_attention.linear_qkv.bias"
    assert hf_names(name) == {
        f"self_attn.{x}_proj": f"model.layers.12.self_attn.{x}_proj.bias" for x in "qkv"
    }
    tensor = torch.randn(48)
    theirs = to_hf(name, tensor, shape)
    assert theirs.keys() == set(hf_names(name).values())
    assert torch.equal(from_hf(name, theirs, shape), tensor)
    outer = to_hf("output_layer.weight", tensor, shape)
    assert outer == {"lm_head.weight": tensor}
    assert from_hf("output_layer.weight", outer, shape) is tensor


def test_refusals() -> None:
    with pytest.raises(CheckpointError, match="`linear_qkv` has 47 rows, but .* gives 48"):
        split_rows("linear_qkv", torch.zeros(47), SHAPES[0])
    with pytest.raises(CheckpointError, match="`linear_fc1` has 5 rows, but .* gives 4"):
        split_rows("linear_fc1", torch.zeros(5), SHAPES[0])
    parts = {f"self_attn.{x}_proj": torch.zeros(8) for x in "qkv"}
    with pytest.raises(CheckpointError, match="`self_attn.q_proj` has 8 rows, but .* gives 32"):
        join_rows("linear_qkv", parts, SHAPES[0])
    with pytest.raises(CheckpointError, match="`router` has no place in a llama-like model"):
        split_rows("router", torch.zeros(2), SHAPES[0])
    for name in ("mtp.layers.0.eh_proj.weight", "decoder.layers.0.mlp.router.weight"):
        with pytest.raises(CheckpointError, match=f"`{name}` has no place in a llama-like"):
            hf_names(name)
