"""Layers do nothing while they are captured that a CUDA graph forbids, forward and backward."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.layers import flex_attention as flex
from megatron_ext.layers.compiled import Compiled, compiled_on_cpu
from megatron_ext.layers.graphs import ChunkGraphs
from megatron_ext.parallel.context import ParallelContext
from tests.graph_stand_in import Capture, CaptureError, CpuGraph, graphs_on_a_cpu
from tests.layers import plain
from tests.layers.test_graphs import SLOTS, hidden
from tests.layers.test_layers import ENDS, HEADS, LAYERS, H, S, config, torch_block
from tests.ranks import on_ranks


def capture(context: ParallelContext, changes: dict[str, Any], inputs: dict[str, Tensor]) -> None:
    """Record the layers of a block as a GPU runs them, with the parts that are compiled there."""
    eager = mock.patch.object(Compiled, "_compile", lambda self: self.eager)
    with graphs_on_a_cpu(), compiled_on_cpu(), eager:
        block = torch_block(config(context, **changes), context)
        block.config.adds_in_place = True
        for parameter in block.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        for layer in block.layers:
            layer.current_microbatch = 0
        graphs = ChunkGraphs(block.layers, warmup_steps=1)
        block(hidden(0), **{"attention_mask": None, **inputs}).sum().backward()
        graphs.capture(SLOTS)
        assert len(CpuGraph.made) == 2 * SLOTS * LAYERS
        assert all(graph.operations for graph in CpuGraph.made)


ANGLES = torch.linspace(0.1, 3.0, S * H // HEADS).view(S, 1, 1, H // HEADS)
MASK = plain.documents(S, ENDS)[:, None]
DOCUMENTS = plain.document_indices(S, ENDS).int()
SWIGLU = {"gated_linear_unit": True, "activation_func": F.silu}


@pytest.mark.parametrize(
    ("sizes", "changes", "inputs"),
    [
        ({}, {}, {}),
        ({}, {"normalization": "LayerNorm", "add_bias_linear": True, "add_qkv_bias": True}, {}),
        ({}, {**SWIGLU, "hidden_dropout": 0.5}, {"rotary_pos_emb": ANGLES}),
        ({}, {"window_size": (3, 0)}, {}),
        ({}, {"qk_layernorm": True, "apply_query_key_layer_scaling": True}, {}),
        ({}, {}, {"attention_mask": MASK}),
        ({}, {}, {"attention_mask": DOCUMENTS}),
        ({}, {"window_size": (3, 0), "fp32_residual_connection": True}, {"attention_mask": MASK}),
        ({"tp": 2}, {"add_bias_linear": True}, {}),
    ],
)
def test_a_capture_forbids_nothing_that_layers_do(
    sizes: dict[str, int], changes: dict[str, Any], inputs: dict[str, Tensor]
) -> None:
    on_ranks(capture, sizes, changes=changes, inputs=inputs)


@pytest.mark.parametrize("mask", [None, MASK, DOCUMENTS])
def test_blocks_of_a_mask_are_made_within_a_capture(mask: Tensor | None) -> None:
    query = torch.zeros(len(ENDS), HEADS, S, 16)
    flex._position_mask.cache_clear()
    with graphs_on_a_cpu(), Capture(CpuGraph()):
        flex.block_mask(query, query, flex.Span(0, True, (3, 0)), mask)
        assert CpuGraph.made[0].operations


FORBIDDEN: dict[str, Callable[[Tensor], object]] = {
    "aten::_local_scalar_dense": lambda x: float(x.detach().sum()),
    "aten::nonzero": lambda x: x.detach().nonzero(),
    "aten::index.Tensor": lambda x: x.detach()[x > 0],
    "tolist": lambda x: x.detach().tolist(),
    "cpu": lambda x: x.cpu(),
    "tensor with device": lambda x: torch.tensor(1.0, device=x.device),
    "empty with pin_memory": lambda x: torch.empty(3, pin_memory=True),
    "pin_memory": lambda x: x.detach().pin_memory(),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "query": lambda x: torch.cuda.Event().query(),
    "manual_seed": lambda x: torch.cuda.manual_seed(1),
    "get_rng_state": lambda x: torch.cuda.get_rng_state(),
}


def plant(context: ParallelContext, name: str) -> None:
    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        FORBIDDEN[name](output[0] if isinstance(output, tuple) else output)

    hook = torch.nn.modules.module.register_module_forward_hook(after)
    try:
        with pytest.raises(CaptureError, match=f"{name} is forbidden while a CUDA graph is"):
            capture(context, {}, {})
    finally:
        hook.remove()


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_planted_operation_that_a_capture_forbids_is_found(name: str) -> None:
    on_ranks(plant, {}, name=name)
