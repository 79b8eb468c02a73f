"""Masks by sample, layer and place: parts of ranks are parts of one rank's."""

import pytest
import torch
from megatron.core import tensor_parallel
from torch import Tensor

from megatron_ext.layers.compiled import compiled_on_cpu
from megatron_ext.layers.context_parallel import slices_of
from megatron_ext.layers.dropout import (
    BiasDropoutAdd,
    HiddenDropout,
    attention_dropout,
    microbatch_masks,
    uniform,
)
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.parallel.context import ParallelContext
from tests.layers.test_layers import SMALL, torch_block
from tests.ranks import ranks

S, B, H = 16, 3, 8
CPU = torch.device("cpu")


def full_mask(site: str, first_sample: int, seed: int = 7) -> Tensor:
    """Return what one rank keeps of ``[S, B, H]`` with probability 0.5."""
    with microbatch_masks(seed, first_sample):
        drawn = [uniform(site, sample, (S, H), CPU) for sample in range(B)]
    return torch.stack(drawn, dim=1) >= 0.5


@ranks(tp=2, cp=2)
def test_ranks_keep_their_parts_of_the_full_mask(context: ParallelContext) -> None:
    want = full_mask("mlp 3", 40)
    half = S // 4
    mine = torch.cat([want[c * half : (c + 1) * half] for c in slices_of(context.cp_rank, 2)])
    for cut in (False, True):
        part = mine.chunk(2)[context.tp_rank] if cut else mine
        dropout = HiddenDropout(0.5, "mlp 3", context.pgs, sequence_parallel=cut)
        with microbatch_masks(7, 40):
            dropped = dropout(torch.ones(part.shape))
        assert torch.equal(dropped, part * 2.0)


@ranks()
def test_masks_go_with_the_sample_and_the_place(context: ParallelContext) -> None:
    first = full_mask("mlp 3", 40)
    # The second sample of one micro-batch is the first of another.
    assert torch.equal(first[:, 1], full_mask("mlp 3", 41)[:, 0])
    assert not torch.equal(first[:, 0], first[:, 1])
    assert not torch.equal(first, full_mask("mlp 4", 40))
    assert not torch.equal(first, full_mask("attention 3", 40))
    assert not torch.equal(first, full_mask("mlp 3", 40, seed=8))
    many = torch.stack([full_mask(f"mlp {layer}", 40) for layer in range(100)])
    assert float(many.float().mean()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@ranks(tp=2)
def test_each_place_of_each_layer_drops_by_itself(
    context: ParallelContext, sequence_parallel: bool
) -> None:
    transformer_config = StepTransformerConfig(
        **{**SMALL, "hidden_dropout": 0.5, "deterministic_dropout": True},
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
    )
    block = torch_block(transformer_config, context)
    found = [bda.dropout for x in block.layers for bda in (x.self_attn_bda, x.mlp_bda)]
    assert [dropout.probability for dropout in found] == [0.5] * 4
    assert {dropout.cut for dropout in found} == {sequence_parallel}
    sites = ["attention 1", "mlp 1", "attention 2", "mlp 2"]
    assert [dropout.site for dropout in found] == sites


@ranks()
def test_the_scores_of_some_heads_and_queries_lose_what_all_would(context: ParallelContext) -> None:
    whole = {"num_heads": 4, "length": S, "first_head": 0, "first_query": 0}
    with microbatch_masks(7, 0):
        all_ = attention_dropout(torch.ones(B, 4, S, S), 0.3, "scores 1", **whole)
        some = attention_dropout(
            torch.ones(B, 2, 4, 12), 0.3, "scores 1", **{**whole, "first_head": 2, "first_query": 8}
        )
    assert torch.equal(some, all_[:, 2:, 8:12, :12])
    assert float(all_.mean()) == pytest.approx(1, abs=0.05)


@ranks()
def test_recomputation_drops_the_same_elements(context: ParallelContext) -> None:
    """By the time of the backward pass another micro-batch has gone through."""
    dropout = HiddenDropout(0.5, "mlp 1", context.pgs, sequence_parallel=False)
    seen: list[Tensor] = []

    def layer(x: Tensor) -> Tensor:
        out: Tensor = dropout(x)
        seen.append(out.detach().clone())
        return out

    x = torch.ones(S, B, H, requires_grad=True)
    with microbatch_masks(7, 3):
        kept = tensor_parallel.checkpoint(layer, False, x)
    with microbatch_masks(7, 9):
        other = dropout(torch.ones(S, B, H))
    kept.sum().backward()
    first, again = seen
    assert torch.equal(first, again)
    assert x.grad is not None and torch.equal(x.grad, first)
    assert not torch.equal(first, other)


@ranks()
def test_evaluation_and_the_generators_are_left_alone(context: ParallelContext) -> None:
    dropout = HiddenDropout(0.5, "mlp 1", context.pgs, sequence_parallel=False).eval()
    before = torch.get_rng_state()
    with microbatch_masks(7, 3):
        x = torch.ones(S, B, H)
        assert dropout(x) is x
        dropout.train()(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any("sample" in name for name in tensor_parallel.get_cuda_rng_tracker().get_states())


@pytest.mark.parametrize("fused", [False, True])
@ranks()
def test_without_the_fusion_nothing_is_compiled(context: ParallelContext, fused: bool) -> None:
    """`--no-bias-dropout-fusion` holds for masks that no layout changes as well."""
    graphs = []

    def note(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    dropout = HiddenDropout(0.5, "mlp 3", context.pgs, sequence_parallel=False)
    add = BiasDropoutAdd(dropout)(training=True, fused=fused)
    x = torch.ones(S, B, H)
    with compiled_on_cpu(note), microbatch_masks(7, 40):
        found = add((x, None), torch.zeros_like(x), 0.5)
    assert len(graphs) == fused
    assert torch.equal(found, full_mask("mlp 3", 40) * 2.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bias", [None, torch.arange(float(H))])
@ranks()
def test_the_bias_is_dropped_and_added_with_the_output(
    context: ParallelContext, bias: Tensor | None, fused: bool
) -> None:
    dropout = HiddenDropout(0.5, "mlp 3", context.pgs, sequence_parallel=False)
    x, residual = torch.full((S, B, H), 3.0), torch.full((S, B, H), 10.0)
    summed = 3.0 + (0.0 if bias is None else bias)
    for training, share in ((True, full_mask("mlp 3", 40) * 2.0), (False, torch.ones(S, B, H))):
        with microbatch_masks(7, 40):
            found = BiasDropoutAdd(dropout)(training, fused)((x, bias), residual, 0.5)
        torch.testing.assert_close(found, 10.0 + summed * share)
