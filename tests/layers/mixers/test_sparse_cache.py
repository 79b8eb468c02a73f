"""The cache of sparse attention, against passes over whole sequences."""

from functools import partial

import pytest
import torch

from megatron_ext.layers.kv_cache import KeyValueCache, PackedTokens, Segment
from megatron_ext.layers.mixers import sparse_attention
from megatron_ext.parallel.context import ParallelContext
from tests.layers.mixers.test_sparse_attention import TOPK, H, built, configured, near
from tests.layers.plain import drawn
from tests.ranks import on_ranks

PASSES = (((20, 3, 1), 0), ((1, 1, 9), 2), ((1, 8, 1), 0), ((1, 1, 1), 0))
"""For each pass, the number of new tokens of three sequences, and of padding."""


def check_cache(context: ParallelContext, words: str, stores: bool = True) -> None:
    module = built(context, configured(context, *words.split())).eval()
    lengths = [sum(counts[i] for counts, _ in PASSES) for i in range(3)]
    assert max(lengths) > TOPK
    hidden = [drawn(length, 1, H, seed=7 + i) for i, length in enumerate(lengths)]
    split = module.config.sequence_parallel
    tp = context.pgs.tp

    def output_of(x: torch.Tensor) -> torch.Tensor:
        own = x.chunk(tp.size())[tp.rank()] if split else x
        output, _ = module(own, attention_mask=None)
        parts = [torch.empty_like(output) for _ in range(tp.size())]
        torch.distributed.all_gather(parts, output.contiguous(), group=tp)
        return torch.cat(parts) if split else parts[0]

    with torch.no_grad():
        padded = [torch.cat((x, x.new_zeros(-len(x) % 2, 1, H))) for x in hidden]
        wanted = [output_of(x) for x in padded]
        cache = KeyValueCache(3 if stores else 0, max(lengths))
        module.cache = module.new_cache(cache)
        rotary = module.rotary_pos_emb
        hooks = [
            rotary.register_forward_pre_hook(cache.all_positions),
            rotary.register_forward_hook(cache.token_angles),
        ]
        starts = [0, 0, 0]
        passes = PASSES if stores else ((tuple(lengths), 1),)
        for counts, padding in passes:
            segments = [Segment(i, starts[i], count) for i, count in enumerate(counts)]
            total = sum(counts) + padding
            total += -total % 2 if split else 0
            cache.tokens = PackedTokens(segments, total, torch.device("cpu"))
            rows = [hidden[s.slot][s.start : s.end] for s in cache.tokens.segments]
            rows.append(torch.zeros(total - sum(counts), 1, H))
            output = output_of(torch.cat(rows))
            first = 0
            for segment in cache.tokens.segments:
                found = output[first : first + segment.length]
                near(found, wanted[segment.slot][segment.start : segment.end], "output", 2e-6)
                first += segment.length
            starts = [start + count for start, count in zip(starts, counts, strict=True)]
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize(
    ("layout", "words"), [({}, ""), ({"tp": 2}, ""), ({"tp": 2}, "--sequence-parallel")]
)
def test_cached_tokens_attend_as_in_whole_sequences(layout: dict[str, int], words: str) -> None:
    on_ranks(check_cache, layout, words=words)
    on_ranks(partial(check_cache, words=words, stores=False), layout)


def test_blocks_of_a_prompt_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_attention, "BLOCK_NUMBERS", {"cpu": 300, "cuda": 300})
    on_ranks(check_cache, {}, words="")
