"""Graphs of layers against the layers themselves, with captures that are run again on the CPU."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

from megatron_ext.layers import flex_attention as flex
from megatron_ext.layers import masks
from megatron_ext.layers.compiled import Compiled, compiled_on_cpu
from megatron_ext.layers.graphs import ChunkGraphs, arguments_of
from megatron_ext.parallel.context import ParallelContext
from tests.graph_stand_in import Capture, CpuGraph, graphs_on_a_cpu
from tests.layers import plain
from tests.layers.test_layers import HEADS, LAYERS, B, H, S, config, torch_block
from tests.ranks import ranks

SLOTS = 2


def on_graphs(test: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(test)
    def body(context: ParallelContext) -> None:
        with graphs_on_a_cpu():
            test(context)

    return ranks()(body)


def block_of(context: ParallelContext, **changes: Any) -> TransformerBlock:
    block = torch_block(config(context, **changes), context)
    plain.fill(block, context)
    enter(block, 0)
    return block


def graphed(context: ParallelContext, **changes: Any) -> tuple[TransformerBlock, ChunkGraphs]:
    """Return a block after a first step without graphs, and its graphs."""
    block = block_of(context, **changes)
    graphs = ChunkGraphs(block.layers, warmup_steps=1)
    run(block, hidden(0)).sum().backward()
    graphs.capture(SLOTS)
    graphs.switch(True)
    block.zero_grad()
    return block, graphs


def hidden(seed: int, batch: int = B) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(S, batch, H, generator=generator).requires_grad_()


def run(block: TransformerBlock, x: Tensor, mask: Tensor | None = None) -> Tensor:
    return block(x, mask)


def enter(block: TransformerBlock, microbatch: int) -> None:
    for layer in block.layers:
        layer.current_microbatch = microbatch


def summed_as_by_data_parallelism(block: TransformerBlock) -> dict[str, Tensor]:
    """Sum the gradients of the parameters from now on, taken whenever there is one."""
    totals: dict[str, Tensor] = {}

    def add(name: str, parameter: Tensor) -> None:
        totals[name] = totals.get(name, 0) + parameter.grad
        parameter.grad = None

    for name, parameter in block.named_parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(add, name))
    return totals


def same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) and all(map(torch.equal, got, want))


@on_graphs
def test_microbatches_in_flight_are_what_they_are_without(context: ParallelContext) -> None:
    block, graphs = graphed(context)
    graphs.capture(SLOTS)
    assert graphs.num_slots == SLOTS, "what was recorded is not recorded again"
    graphs.switch(True)
    eager = block_of(context)
    found, wanted = [], []
    for model, kept in ((block, found), (eager, wanted)):
        totals = summed_as_by_data_parallelism(model)
        for step in range(2):
            inputs = [hidden(10 * step + microbatch) for microbatch in range(SLOTS)]
            outputs = []
            for microbatch, x in enumerate(inputs):
                # A step may have more micro-batches than are ever in flight.
                enter(model, step * SLOTS + microbatch)
                outputs.append(run(model, x))
            for microbatch, output in enumerate(outputs):
                (output * hidden(99 + microbatch).detach()).sum().backward()
            kept += [output.detach().clone() for output in outputs]
            kept += [x.grad for x in inputs if x.grad is not None]
        kept += [totals[name] for name, _ in model.named_parameters()]
    same(found, wanted)
    assert len(CpuGraph.replays) == 2 * 2 * SLOTS * LAYERS


@on_graphs
def test_threads_that_pin_memory_do_not_end_a_capture(context: ParallelContext) -> None:
    graphed(context)
    assert len(CpuGraph.made) == 2 * SLOTS * LAYERS
    assert {graph.mode for graph in CpuGraph.made} == {"thread_local"}
    assert torch.cuda.graph is Capture


@on_graphs
def test_layers_run_as_often_before_the_capture_as_the_flag_says(context: ParallelContext) -> None:
    block = block_of(context)
    graphs = ChunkGraphs(block.layers, warmup_steps=2)
    run(block, hidden(0))
    name = "make_graphed_callables"
    with mock.patch.object(torch.cuda, name, wraps=getattr(torch.cuda, name)) as record:
        graphs.capture(1)
    assert record.call_args.kwargs == {"num_warmup_iters": 2}


@on_graphs
def test_a_gradient_that_left_is_not_overwritten(context: ParallelContext) -> None:
    """The message with it may be under way when the slot is used again."""
    block, _ = graphed(context)
    first, second = hidden(1), hidden(2)
    run(block, first).sum().backward()
    before = first.grad.clone()
    run(block, second).sum().backward()
    assert torch.equal(first.grad, before)
    assert not torch.equal(second.grad, before)


@on_graphs
def test_an_output_may_be_deallocated_once_sent(context: ParallelContext) -> None:
    block, _ = graphed(context)
    layer = block.layers[-1]
    output, _ = layer(hidden_states=hidden(1), attention_mask=None)
    want = output.detach().clone()
    output.data = torch.empty(1)
    again, _ = layer(hidden_states=hidden(1), attention_mask=None)
    assert torch.equal(again, want)


@on_graphs
def test_other_calls_run_without(context: ParallelContext) -> None:
    block, graphs = graphed(context)
    mask = torch.zeros(B, 1, S, S, dtype=torch.bool)
    for call in (
        lambda: run(block, hidden(1, batch=B + 1)),
        lambda: run(block, hidden(1), mask),
        lambda: run(block.eval(), hidden(1)),
        lambda: torch.no_grad()(run)(block.train(), hidden(1)),
        lambda: graphs.switch(False) or run(block, hidden(1)),
    ):
        call()
    assert CpuGraph.replays == []


@on_graphs
def test_evaluation_drops_nothing(context: ParallelContext) -> None:
    block, _ = graphed(context, hidden_dropout=0.5)
    eager = block_of(context, hidden_dropout=0.5).eval()
    assert torch.equal(run(block.eval(), hidden(1)), run(eager, hidden(1)))


@on_graphs
def test_masks_are_those_without_graphs(context: ParallelContext) -> None:
    """Recording takes no random numbers, and a replay takes as many as the layers do."""
    found = []
    for record in (False, True):
        block = block_of(context, hidden_dropout=0.5)
        torch.manual_seed(5)
        if record:
            graphs = ChunkGraphs(block.layers, warmup_steps=2)
        run(block, hidden(0))
        if record:
            graphs.capture(1)
            graphs.switch(True)
        found.append([run(block, hidden(seed)).detach().clone() for seed in (1, 2)])
    same(*found)
    assert not torch.equal(found[0][0], found[0][1])
    assert len(CpuGraph.replays) == 2 * LAYERS


@on_graphs
def test_tables_that_layers_keep_are_those_of_the_angles(context: ParallelContext) -> None:
    """The fused layers make cosines once for each tensor of angles, before they are captured."""
    angles = torch.linspace(0.1, 3.0, S * H // HEADS).view(S, 1, 1, H // HEADS)
    found = []
    with compiled_on_cpu(), mock.patch.object(Compiled, "_compile", lambda self: self.eager):
        for record in (False, True):
            block = block_of(context)
            graphs = ChunkGraphs(block.layers, warmup_steps=1)
            block(hidden(0), None, rotary_pos_emb=angles)
            if record:
                graphs.capture(1)
                graphs.switch(True)
            found.append(block(hidden(1), None, rotary_pos_emb=angles).detach().clone())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert len(CpuGraph.replays) == LAYERS


@on_graphs
def test_all_layers_read_the_mask_that_the_first_makes_of_a_replays_documents(
    context: ParallelContext,
) -> None:
    block, eager = block_of(context), block_of(context)
    ends = [[[3], [5]], [[1, 4], [2]], [[6], [1, 7]]]
    documents = [plain.document_indices(S, each).int() for each in ends]
    graphs, made = ChunkGraphs(block.layers, warmup_steps=1), mock.Mock(wraps=torch.arange)
    run(block, hidden(0), documents[0]).sum().backward()
    with mock.patch.object(torch, "arange", made):
        graphs.capture(SLOTS)
    assert made.call_count == 2 * SLOTS  # for all layers, before the capture and within it
    graphs.switch(True)
    for microbatch, each in enumerate(documents[1:]):
        enter(block, microbatch)
        same([run(block, hidden(1), each)], [run(eager, hidden(1), each)])
    assert len(CpuGraph.replays) == 2 * LAYERS


@on_graphs
def test_graphs_keep_the_blocks_of_positions_that_they_read(context: ParallelContext) -> None:
    """They are made before the capture, apart from those that other calls may push out."""
    query, kept = torch.zeros(B, HEADS, S, 16), dict[Any, Any]()

    def blocks() -> Any:
        return flex.block_mask(query, query, flex.Span(0, True, (3, 0)), None)

    common = blocks()
    with masks.newest.kept_for_graphs(kept):
        before = blocks()
        with Capture(CpuGraph()):
            assert blocks() is before
    assert before is not common and any(found is before for found, _ in kept.values())
    with Capture(CpuGraph()):
        assert blocks() not in (common, before)
    assert blocks() is common


@on_graphs
def test_what_waits_for_parameters_is_called(context: ParallelContext) -> None:
    block, _ = graphed(context)
    called: list[torch.nn.Module] = []
    layer = block.layers[1]
    for module in layer.modules():
        module.register_forward_pre_hook(lambda module, _: called.append(module))
        module.register_forward_pre_hook(
            lambda module, args, kwargs: called.append(module), with_kwargs=True
        )
    run(block, hidden(1))
    assert len(called) == 2 * len(list(layer.modules()))
    assert set(called) == set(layer.modules())
    assert len(CpuGraph.replays) == LAYERS


@on_graphs
def test_products_that_add_to_the_gradient_buffer(context: ParallelContext) -> None:
    """Recording adds to the buffer too, which must not show; then no hook adds any more."""
    block, found = block_of(context), []
    block.config.adds_in_place = True
    for parameter in block.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    graphs = ChunkGraphs(block.layers, warmup_steps=2)
    for record in (False, True):
        if record:
            graphs.capture(SLOTS)
            graphs.switch(True)
            assert all(not parameter.main_grad.any() for parameter in block.parameters())
        for parameter in block.parameters():
            parameter.grad, parameter.grad_added_to_main_grad = None, False
        run(block, hidden(1)).sum().backward()
        linears = [p for p in block.parameters() if p.dim() == 2]
        assert all(p.grad_added_to_main_grad for p in linears)
        assert not any(p.grad_added_to_main_grad for p in block.parameters() if p.dim() == 1)
        found.append([p.main_grad.clone() for p in linears])
    same(*found)
    assert all(gradient.any() for gradient in found[0])
    # Of the layers of all slots those of a shape share what autograd is given.
    assert len(graphs.gradient_placeholder) == len({p.shape for p in block.parameters()})
    assert len({p.grad.data_ptr() for p in linears if p.grad is not None}) < len(linears)


def test_only_tensors_are_arguments() -> None:
    found = arguments_of({"hidden_states": torch.ones(2), "context": None})
    assert [argument.name for argument in found] == ["hidden_states"]
    with pytest.raises(AssertionError, match="inference of a layer"):
        arguments_of({"inference": 1})
