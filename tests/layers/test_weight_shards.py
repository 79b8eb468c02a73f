"""Weights that are sharded over data-parallel ranks, against runs with sharded gradients alone.

Gradients are summed in the same order in both, so that weights agree to the bit, unless gradients
are clipped: the sums of their squares are those of other shares.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.layers.chunks import build_chunks, own_elements, wrap_chunks
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.layers.weight_shards import WeightBucket, whole_weights
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.planning.memory import memory
from megatron_ext.text.cost.network import GptNetwork
from megatron_ext.text.task import GPT
from megatron_ext.train.run import Run
from tests.layers.test_gradient_shards import FLAGS, INTERLEAVED, TIED, _run
from tests.ranks import on_ranks, ranks
from tests.runs_from_inside import train_step
from tests.training_runs import prepared

FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
EXPERTS = "--num-experts 4 --moe-router-load-balancing-type none"


def _pair(context: ParallelContext, words: str) -> tuple[Run, Run]:
    """Return two runs, the second with sharded weights."""
    strategy = "--use-distributed-optimizer --data-parallel-sharding-strategy"
    runs = [_run(context, f"{words} {strategy} optim_grads{more}") for more in ("", "_params")]
    return runs[0], runs[1]


def _train(run: Run) -> dict[str, Any]:
    """Train one step; return the gradient norm and the losses."""
    result = train_step(run)
    return {"norm": result.update.grad_norm, **{k: float(v) for k, v in result.losses.items()}}


def _weights(run: Run) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for index, chunk in enumerate(run.chunks):
        for name, parameter in chunk.named_parameters():
            yield f"{index}.{name}", parameter


def _differences(plain: Run, sharded: Run) -> dict[str, float]:
    """Return the largest difference of each of this rank's shards from the other run's weight."""
    found = {}
    for (name, whole), (_, parameter) in zip(_weights(plain), _weights(sharded), strict=True):
        start = getattr(parameter, "weight_shard", (None, 0))[1]
        own = own_elements(parameter).view(-1)
        part = whole.detach().view(-1)[start : start + own.numel()]
        found[name] = float((part - own).abs().max()) if part.numel() else 0.0
    return found


def _buckets(run: Run) -> list[WeightBucket]:
    chunks: Any = run.chunks
    return [bucket for chunk in chunks for unit in chunk.units for bucket in unit.buckets]


@contextmanager
def _watched(run: Run) -> Iterator[list[int]]:
    """Yield a list that gets the bytes of all weights' storage whenever a bucket is gathered."""
    peak: list[int] = []
    mine = _buckets(run)
    start: Any = WeightBucket.start

    def watched(bucket: WeightBucket) -> None:
        assert not bucket.live
        start(bucket)
        if bucket in mine:
            # Between passes, one NaN stands for all weights of a bucket.
            there = [p for _, p in _weights(run) if p.untyped_storage().nbytes() > p.element_size()]
            kept = {p.untyped_storage()._cdata: p for p in there}
            own = {b.own.untyped_storage()._cdata: b.own for b in mine}
            every = [*kept.values(), *own.values()]
            peak.append(sum(x.untyped_storage().nbytes() for x in every))

    with mock.patch.object(WeightBucket, "start", watched):
        yield peak


def _agree(context: ParallelContext, words: str, tolerance: float = 0.0) -> None:
    """Compare four steps, and the memory of the weights with the planned one."""
    plain, sharded = _pair(context, words)
    with _watched(sharded) as peak:
        for _ in range(4):
            assert _train(sharded) == pytest.approx(_train(plain), rel=1e-6, abs=0.0)
            assert not any(bucket.live for bucket in _buckets(sharded))
            differing = {k: v for k, v in _differences(plain, sharded).items() if v > tolerance}
            assert not differing
    planned = memory(GptNetwork.of(sharded.config))[context.pp_rank].state.parameters
    assert max(peak) <= planned
    # The plan counts the largest two neighbours, wherever the other ranks have theirs.
    assert max(peak) > 0.9 * planned


@ranks(dp=2, timeout=120)
def test_weights_are_those_of_whole_weights(context: ParallelContext) -> None:
    _agree(context, TIED)
    plain, sharded = _pair(context, "")
    whole = sum(parameter.numel() for _, parameter in _weights(plain))
    assert sum(bucket.own.numel() for bucket in _buckets(sharded)) < 0.55 * whole
    shapes = {name: parameter.shape for name, parameter in _weights(plain)}
    assert all(bool(parameter.isnan().all()) for _, parameter in _weights(sharded))
    with whole_weights(sharded.chunks):
        for (name, weight), (_, other) in zip(_weights(plain), _weights(sharded), strict=True):
            assert torch.equal(weight, other) and other.shape == shapes[name]


class _Live(TorchDispatchMode):
    """The most bytes of memory that operations within it have made and that live at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor):
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = weakref.ref(storage)
        alive = (storage() for storage in self._made.values())
        self.peak = max(self.peak, sum(x.nbytes() for x in alive if x is not None))
        return out


@ranks(dp=4)
def test_no_rank_holds_a_whole_model_while_it_is_built(context: ParallelContext) -> None:
    """Two shards, and the layer that is given its place; without shards, the model and its sums."""
    words = "--num-layers 8 --use-distributed-optimizer --data-parallel-sharding-strategy"
    flags = [*FLAGS, *words.split(), "optim_grads_params"]
    _, config, _ = prepared(flags, GPT, ranks=4)
    with _Live() as live:
        transformer_config = build_transformer_config(config)
        bare = build_chunks(GPT.model_chunk, config, transformer_config, context, 64)
        whole = sum(4 * parameter.numel() for parameter in bare[0].parameters())
        wrap_chunks(bare, config, transformer_config, context, torch.device("cpu"))
    assert live.peak < 0.9 * whole, live.peak / whole


LAYOUTS = {
    "tp2 dp2": ({"tp": 2, "dp": 2}, "--tensor-model-parallel-size 2 --sequence-parallel "
                "--qk-layernorm --bf16", 0.0),
    "pp2 dp2": ({"pp": 2, "dp": 2}, f"--pipeline-model-parallel-size 2 {TIED} {FULL} 2", 0.0),
    "pp2 vpp2 dp2": ({"pp": 2, "vpp": 2, "dp": 2},
                     f"{INTERLEAVED} --mtp-num-layers 1 {FULL} 1", 0.0),
    "dp4 ep2": ({"dp": 4, "ep": 2}, f"--expert-model-parallel-size 2 {EXPERTS} "
                "--moe-shared-expert-intermediate-size 32", 1e-6),
    "dp2 ep2, pairs": ({"dp": 2, "ep": 2}, f"--expert-model-parallel-size 2 {EXPERTS} --bf16 "
                       "--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm",
                       1e-6),
    "dp2 cp2": ({"dp": 2, "cp": 2}, "--context-parallel-size 2 --clip-grad 0.01 "
                "--use-cpu-initialization", 1e-6),
    "dp2 MTP": ({"dp": 2}, f"--mtp-num-layers 2 {TIED} --cross-entropy-impl eager", 1e-6),
    "dp2 latent attention, Muon": (
        {"dp": 2},
        "--multi-latent-attention --no-group-query-attention --qk-layernorm --qk-head-dim 8 "
        "--q-lora-rank 24 --kv-lora-rank 16 --qk-pos-emb-head-dim 4 --v-head-dim 12 "
        "--optimizer muon --muon-extra-scale-factor 0.2 --recompute-granularity selective "
        "--recompute-modules core_attn mlp", 1e-6),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_with_whole_weights(name: str) -> None:
    sizes, words, tolerance = LAYOUTS[name]
    on_ranks(partial(_agree, words=words, tolerance=tolerance), sizes)
