"""Masks: FlexAttention, uncompiled on a CPU, against float64; what is made, kept and waited for."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask

from megatron_ext.data.batch import documents_of_tokens
from megatron_ext.layers import flex_attention as flex
from megatron_ext.layers import masks as masking
from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.layers.compiled import compiled_on_cpu
from megatron_ext.layers.context_parallel import slices_of, to_rank_order
from megatron_ext.layers.flex_attention import Span
from megatron_ext.parallel.context import ParallelContext
from tests.host_syncs import host_syncs
from tests.layers import plain
from tests.layers.test_attention import build, config
from tests.losses.dense_cross_entropy import Watch
from tests.ranks import ranks

S, B, N, G, D = 300, 2, 4, 2, 16
ENDS = [[40, 170], [129]]
FORMS = ["documents", "dense", None]


@pytest.fixture
def flexible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of a GPU, uncompiled."""
    monkeypatch.setattr(flex, "flex_fits", lambda query, dropout: True)
    flex._position_mask.cache_clear()
    monkeypatch.setattr(masking, "newest", masking.NewestMask())


@contextmanager
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Span]]:
    """Yield the spans of the block masks that are made within."""
    spans: list[Span] = []
    genuine = flex._rule

    def watched(span: Span, *args: Any, **kwargs: Any) -> Any:
        spans.append(span)
        return genuine(span, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(flex, "_rule", watched)
        yield spans


def qkv() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(S, B, n, D, generator=generator) for n in (N, G, G)]


def given(form: str | None) -> Tensor | None:
    """Return the mask of `ENDS` in one of the `FORMS`."""
    if form == "documents":
        return plain.document_indices(S, ENDS)
    return None if form is None else plain.documents(S, ENDS)[:, None]


def expected(forbidden: Tensor) -> Tensor:
    return plain.attention(*(x.double() for x in qkv()), forbidden)


def farther_than(left: int) -> Tensor:
    distance = torch.arange(S)[:, None] - torch.arange(S)[None, :]
    return distance > left


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("left", [None, 150])
@pytest.mark.usefixtures("flexible")
@ranks()
def test_documents_and_windows_equal_plain_arithmetic(
    context: ParallelContext, form: str | None, left: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbidden = plain.documents(S, ENDS) if form else plain.causal(S, B)
    window = None if left is None else (left, 0)
    transformer_config = config(num_query_groups=G, kv_channels=D, window_size=window)
    module = build(DotProductAttention, transformer_config, context)
    with made(monkeypatch) as masks:
        found = module(*qkv(), given(form))
    assert len(masks) == (form is not None or left is not None)
    if left is not None:
        forbidden = forbidden | farther_than(left)
    torch.testing.assert_close(found.double(), expected(forbidden), rtol=0, atol=2e-6)


@pytest.mark.usefixtures("flexible")
@ranks()
def test_a_window_that_looks_ahead(context: ParallelContext) -> None:
    module = build(DotProductAttention, config(window_size=(20, 30)), context)
    module.causal = False
    module.softmax_scale = D**-0.5
    found = module(*qkv(), None)
    forbidden = (farther_than(20) | farther_than(30).T).expand(B, -1, -1)
    torch.testing.assert_close(found.double(), expected(forbidden), rtol=0, atol=2e-6)


@pytest.mark.parametrize("form", ["documents", "dense"])
@pytest.mark.usefixtures("flexible")
@ranks()
def test_one_mask_for_all_samples(context: ParallelContext, form: str) -> None:
    module = build(DotProductAttention, config(kv_channels=D), context)
    mask = given(form)
    assert mask is not None
    found = module(*qkv(), mask[:1])
    forbidden = plain.documents(S, ENDS[:1]).expand(B, -1, -1)
    torch.testing.assert_close(found.double(), expected(forbidden), rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["all_gather", "a2a"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("flexible")
@ranks(cp=2)
def test_parts_of_the_sequence(context: ParallelContext, form: str | None, kind: str) -> None:
    forbidden = plain.documents(S, ENDS) if form else plain.causal(S, B)
    transformer_config = config(kv_channels=D, window_size=(150, 0), context_parallel_size=2)
    module = build(DotProductAttention, transformer_config, context, cp_comm_type=kind)
    rank = context.pgs.cp.rank()
    local = [to_rank_order(x, 2).chunk(2)[rank] for x in qkv()]
    mask = given(form)
    if form == "dense":
        own = [forbidden.chunk(4, dim=1)[chunk] for chunk in slices_of(rank, 2)]
        mask = torch.cat(own, dim=1)[:, None]
    found = module(*local, mask)
    truth = to_rank_order(expected(forbidden | farther_than(150)), 2).chunk(2)[rank]
    torch.testing.assert_close(found.double(), truth, rtol=0, atol=2e-6)


def test_the_dense_mask_of_documents_equals_megatron_cores() -> None:
    eod = 7
    tokens = torch.randint(0, 9, (5, 40), generator=torch.Generator().manual_seed(0))
    tokens[0, :3] = eod  # empty documents, and one that starts the sequence
    tokens[1, -1] = eod
    tokens[2] = 1  # one document only
    theirs = torch.stack([
        _get_ltor_masks_and_position_ids(row, eod, False, True, False, True)[0] for row in tokens
    ])  # fmt: skip
    documents = documents_of_tokens(tokens, eod).int()
    assert torch.equal(masking.document_mask(documents, 0, 40), theirs)
    assert torch.equal(masking.document_mask(documents, 10, 20), theirs[:, :, 10:30])
    assert torch.equal(masking.document_mask(documents, 10, 5), theirs[:, :, 10:15])


def test_one_dense_mask_of_documents_is_kept() -> None:
    """All layers of a micro-batch share it, and the next micro-batch's takes its place."""
    first, second = plain.document_indices(S, ENDS), plain.document_indices(S, ENDS)
    mask = masking.document_mask(first, 0, S)
    assert masking.document_mask(first.detach(), 0, S) is mask
    kept = weakref.ref(mask)
    del mask
    masking.document_mask(second, 0, S)
    gc.collect()
    assert kept() is None


def views() -> list[Tensor]:
    return [x.permute(1, 2, 0, 3) for x in qkv()]


@pytest.mark.parametrize("form", ["documents", "dense"])
def test_layers_share_a_mask_until_it_changes(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, _ = views()
    mask = given(form)
    assert mask is not None
    mask = mask.contiguous()
    plainly, windowed = Span(0, True, None), Span(0, True, (3, 0))
    with made(monkeypatch) as spans:
        for seen in (mask, mask.detach(), mask[:]):
            for span in (plainly, windowed):
                flex.block_mask(q, k, span, seen)
        assert spans == [plainly, windowed]
        for first in (0, 150, 0):
            part = mask[:, :, first : first + 150] if form == "dense" else mask
            flex.block_mask(q[:, :, :150], k, Span(first, True, None), part)
        assert len(spans) == 4
        copy = mask.clone()
        flex.block_mask(q, k, plainly, copy)
        assert len(spans) == 5
        copy.copy_(copy.flip(0))
        flex.block_mask(q, k, plainly, copy)
        assert len(spans) == 6
        # Parts of one tensor are masks of their own, as those of micro-batches that lie together.
        for sample in (copy[:1], copy[1:], copy[:1]):
            flex.block_mask(q[:1], k[:1], plainly, sample)
        assert len(spans) == 8


@pytest.mark.parametrize(
    ("causal", "window", "distances"),
    [
        (True, None, (0, None)),
        (False, None, (None, None)),
        (True, (3, 5), (0, 3)),
        (True, (0, 0), (0, 0)),
        (False, (3, 5), (-5, 3)),
        (False, (0, 0), (0, 0)),
        (False, (-1, 5), (-5, None)),
        (False, (3, -1), (None, 3)),
    ],
)
def test_a_window_of_0_sees_one_position_and_one_of_minus_1_all(
    causal: bool, window: tuple[int, int] | None, distances: tuple[int | None, int | None]
) -> None:
    assert Span(7, causal, window).distances() == distances


def test_blocks_that_no_query_sees_are_left_out() -> None:
    q, k, _ = views()
    made = flex.block_mask(q, k, Span(0, True, (100, 0)), None)
    seen = made.to_dense()[0, 0]
    assert seen.tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def blocks(made: Any) -> tuple[Tensor, Tensor]:
    """Return which blocks are looked into, and which are taken whole, ``[b, 1, rows, columns]``."""
    numbers, columns = made.full_kv_num_blocks, made.full_kv_indices
    whole = torch.zeros(columns.shape, dtype=torch.int64)
    listed = torch.arange(columns.size(-1)) < numbers[..., None]
    whole.scatter_add_(-1, columns.long(), listed.long())
    return made.to_dense() > 0, whole > 0


@pytest.mark.parametrize("first", [0, 150, 128])
@pytest.mark.parametrize("window", [None, (60, 0), (150, 0)])
@pytest.mark.parametrize("form", ["documents", None])
def test_blocks_are_those_of_torch(
    form: str | None, window: tuple[int, int] | None, first: int
) -> None:
    """torch evaluates the rule at all pairs of positions."""
    _, k, _ = views()
    q = torch.zeros(B, N, 128 if first == 128 else 150, D)
    documents = given(form)
    made = flex.block_mask(q, k, Span(first, True, window), documents)
    batch = None if documents is None else B
    truth = create_block_mask(made.mask_mod, batch, None, q.size(2), S, device="cpu")
    (seen, whole), (true, true_whole) = blocks(made), blocks(truth)
    assert torch.equal(whole, true_whole)
    if form is None or window is None:
        assert torch.equal(seen, true)
    else:  # Each of the two rules allows some pair of a block, but not the same one.
        assert bool((seen | ~true).all()) and int((seen & ~true).sum()) <= 1


@pytest.mark.usefixtures("flexible")
def test_blocks_made_in_inference_mode_serve_training_too() -> None:
    query, key, _ = (x.permute(1, 2, 0, 3) for x in qkv())
    span = Span(0, True, (100, 0))
    with torch.inference_mode():
        blocks = flex.block_mask(query, key, span, None)
    assert flex.block_mask(query, key, span, None) is blocks
    # The backward pass of FlexAttention saves them.
    assert not any(x.is_inference() for x in blocks.as_tuple() if isinstance(x, Tensor))
    with torch.inference_mode():
        assert not flex.limit_on(query.device, 0.7).is_inference()


def test_indices_that_do_not_grow_lose_no_pair() -> None:
    order = torch.randperm(S, generator=torch.Generator().manual_seed(0))
    shuffled = plain.document_indices(S, ENDS)[:, order]
    q, k, _ = views()
    made = flex.block_mask(q, k, Span(0, True, None), shuffled)
    truth = create_block_mask(made.mask_mod, B, None, S, S, device="cpu")
    (seen, whole), (true, true_whole) = blocks(made), blocks(truth)
    assert bool((seen | ~true).all()) and bool((true_whole | ~whole).all())


def test_making_blocks_of_documents_never_looks_at_all_pairs() -> None:
    """A dense mask of 8192 positions takes 64 MiB; 32 bytes for each pair of blocks are 128 KiB."""
    length = 8192
    documents = plain.document_indices(length, [list(range(500, length, 500))])
    query = torch.empty(1, 1, length, D)
    for span in (Span(0, True, None), Span(0, True, (100, 0))):
        with Watch() as watch:
            flex.block_mask(query, query, span, documents)
        assert watch.peak < length * length // 64, watch.peak


def test_making_blocks_takes_a_few_bytes_for_a_pair_of_positions() -> None:
    """A difference of positions alone would take 8, which at 32,768 positions are 8 GiB."""
    length = 1024
    mask = plain.causal(length, 1)[:, None].contiguous()
    for span in (Span(0, False, None), Span(0, True, (100, 0))):
        with Watch() as watch:
            flex._dense_block_mask(span, (length, length), mask)
        assert watch.peak < 4 * mask.numel()


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_the_host_waits_for_no_mask(form: str | None, each: bool) -> None:
    """A plain number among the indices of a mask would be copied to the device, twice."""
    q, k, _ = views()
    mask = given(form)
    flex._position_mask.cache_clear()
    with host_syncs() as places:
        mask = mask if mask is None or each else mask[:1]
        flex.block_mask(q, k, Span(0, True, (150, 0)), mask)
    assert places == []


def test_what_flex_attention_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    query = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16)
    assert not flex.flex_fits(query, 0.0), "a CPU has its own ways"

    class Cuda:
        is_cuda = True
        dtype = torch.bfloat16

        def __init__(self, d: int) -> None:
            self.d = d

        def size(self, dim: int) -> int:
            return self.d

    monkeypatch.setattr(flex, "compiles", lambda query: True)
    given: list[Any] = [(Cuda(128), 0.0), (Cuda(192), 0.0), (Cuda(128), 0.1), (Cuda(8), 0.0)]
    given.append((Cuda(16), 0.0))
    single = Cuda(128)
    single.dtype = torch.float32
    assert not flex.flex_fits(single, 0.0)  # type: ignore[arg-type]
    for fills_up in (True, False):
        monkeypatch.setattr(flex, "FILLS_UP_HEADS", fills_up)
        assert [flex.flex_fits(*one) for one in given] == [True, fills_up, False, False, True]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Compile attention on a CPU, and count how often."""
    torch._dynamo.reset()
    monkeypatch.setattr(flex.attention_in_blocks, "_variants", {})
    counter = CompileCounter()
    with compiled_on_cpu(counter):
        yield counter
    torch._dynamo.reset()


def test_a_micro_batch_compiles_nothing_anew(counted: CompileCounter) -> None:
    """Neither do the slices of a context-parallel rank, whose first queries are others."""
    q, k, v = qkv()
    for ends in (ENDS, [[7, 250], [33, 200]]):
        documents = plain.document_indices(S, ends)
        truth = plain.attention(*(x.double() for x in qkv()), plain.documents(S, ends))
        for first in (0, 150):
            part = q[first : first + 150]
            blocks = flex.block_mask(
                part.permute(1, 2, 0, 3), views()[1], Span(first, True, None), documents
            )
            found = flex.attention_in_blocks(part, k, v, blocks, D**-0.5).flatten(2)
            torch.testing.assert_close(
                found.double(), truth[first : first + 150], rtol=0, atol=2e-6
            )
    assert counted.frame_count == 1


def test_kinds_of_calls_are_compiled_apart_and_once(counted: CompileCounter) -> None:
    """`torch.compile` runs a function as written once it has compiled it 8 times."""
    q, k, v = qkv()
    windows = [(left, 0) for left in (10, 20, 30, 40)]
    kinds = [(form, w) for form in FORMS for w in (None, *windows) if (form, w) != (None, None)]
    for again in (False, True):
        for form, window in kinds:
            blocks = flex.block_mask(*views()[:2], Span(0, True, window), given(form))
            flex.attention_in_blocks(q, k, v, blocks, D**-0.5)
        assert counted.frame_count == len(kinds) > 8, f"again: {again}"
    with torch.no_grad():
        flex.attention_in_blocks(q, k, v, blocks, D**-0.5)
    assert counted.frame_count == len(kinds) + 1


def test_no_lengths_and_batches_reach_the_limit_of_one_function(counted: CompileCounter) -> None:
    lengths = [(300, 300), (290, 290), (150, 300), (140, 299), (140, 200), (170, 150), (200, 280)]
    with torch._dynamo.config.patch(recompile_limit=7):
        for batch in (2, 1, 2):
            for queries, keys in [*lengths, (100, 100), (50, 50), (150, 100), (100, 150)]:
                q, k, v = (x[:, :batch] for x in qkv())
                q, k, v = q[:queries], k[:keys], v[:keys]
                query, key = (x.permute(1, 2, 0, 3) for x in (q, k))
                blocks = flex.block_mask(query, key, Span(0, False, (100, 50)), None)
                flex.attention_in_blocks(q, k, v, blocks, D**-0.5)
