"""The text's keys and values, kept between passes without gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.model.wan.model import VideoDiT
from tests.ranks import ranks
from tests.video.model.wan.problem import Problem, frames_of, new_cache, plain_of, stream
from tests.video.networks import largest, one

PROBLEM = Problem(frames=6)


def count_projections(chunk: VideoDiT) -> list[int]:
    calls: list[int] = []
    for block in chunk.blocks.values():
        block.cross_attention.linear_kv.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@ranks()
def test_text_is_projected_once(context: ParallelContext) -> None:
    """For one text, also for an equal copy of it; in each pass with gradient anew."""
    chunk, inputs = one(PROBLEM, context), PROBLEM.inputs()
    cache, calls = new_cache(chunk, PROBLEM), count_projections(chunk)
    stream(chunk, cache, inputs, 3)
    stream(chunk, cache, {**inputs, "text": inputs["text"].clone()}, 3, start=3)
    assert len(calls) == 2
    chunk(**frames_of(inputs, 3, 3), cache=cache)
    assert len(calls) == 4
    cache.memo.clear()
    stream(chunk, cache, inputs, 3, start=3)
    assert len(calls) == 6
    with torch.inference_mode():
        for _ in range(2):
            text = inputs["text"].clone()
            stream(chunk, cache, {**inputs, "text": text}, 3, start=3)
    assert len(calls) == 6


@ranks()
def test_a_text_that_is_written_over_is_noticed(context: ParallelContext) -> None:
    """Though it is the same tensor as before, also where writes are not counted."""
    chunk, inputs = one(PROBLEM, context), PROBLEM.inputs()
    cache, calls = new_cache(chunk, PROBLEM), count_projections(chunk)
    stream(chunk, cache, inputs, 3)
    inputs["text"].copy_(PROBLEM.inputs(1)["text"])
    stream(chunk, cache, inputs, 3, start=3)
    assert len(calls) == 4
    with torch.inference_mode():
        text = inputs["text"].clone()
        stream(chunk, cache, {**inputs, "text": text}, 3, start=3)
        text.add_(1)
        stream(chunk, cache, {**inputs, "text": text}, 3, start=3)
    assert len(calls) == 6


@ranks()
def test_the_cache_follows_the_text(context: ParallelContext) -> None:
    """After another text every block holds its keys and values, as plain torch makes them."""
    chunk, inputs = one(PROBLEM, context, torch.float64), PROBLEM.inputs(dtype=torch.float64)
    plain = plain_of(chunk)
    cache = new_cache(chunk, PROBLEM)
    for text in (inputs["text"], PROBLEM.inputs(1, torch.float64)["text"]):
        stream(chunk, cache, {**inputs, "text": text}, 3, start=cache.end and 3)
        words = plain.text_embedding(text)
        for number, block in enumerate(plain.blocks):
            _, key, value = block.cross_attn.qkv(words, words)
            for got, want in zip(cache.memo.key_values[number], (key, value), strict=True):
                assert largest(got.permute(1, 2, 0, 3), want) < 1e-12


@ranks()
def test_a_change_of_text_changes_the_flow_as_a_fresh_cache_does(context: ParallelContext) -> None:
    chunk, inputs = one(PROBLEM, context), PROBLEM.inputs()
    other = {**inputs, "text": PROBLEM.inputs(1)["text"]}

    def last_block(texts: tuple[dict[str, Tensor], dict[str, Tensor]], *, clear: bool) -> Tensor:
        cache = new_cache(chunk, PROBLEM)
        with torch.no_grad():
            chunk(**frames_of(texts[0], 0, 3), cache=cache)
            if clear:
                cache.memo.clear()
            return chunk(**frames_of(texts[1], 3, 3), cache=cache)

    switched = last_block((inputs, other), clear=False)
    assert torch.equal(switched, last_block((inputs, other), clear=True))
    assert largest(switched, last_block((inputs, inputs), clear=False)) > 1e-3
