"""Gradients that are sharded over data-parallel ranks, against runs with whole gradients.

Two ranks with one micro-batch each add the same numbers in the same order, whether or not the
gradients are sharded, so that weights agree to the bit, unless they are clipped: the sums of their
squares are those of other shares. Sums over several micro-batches are rounded
in another order: losses, norms and gradients then agree within 1e-6.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron_ext.layers.gradient_shards import GradientBucket, ShardedGradients
from megatron_ext.parallel.context import ParallelContext, seed_everything
from megatron_ext.planning.memory import memory
from megatron_ext.text.cost.network import GptNetwork
from megatron_ext.text.task import GPT
from megatron_ext.train.run import Run
from megatron_ext.train.setup import build_run
from tests.ranks import on_ranks, ranks
from tests.runs_from_inside import train_step
from tests.training_runs import SAME_WEIGHTS, prepared

FLAGS = [
    *SAME_WEIGHTS,
    *"--train-iters 4 --eod-mask-loss --global-batch-size 8 --micro-batch-size 1".split(),
    *"--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --seq-length 32 --mock-data".split(),
    *"--tokenizer-type NullTokenizer --vocab-size 255 --max-position-embeddings 32".split(),
]
SHARDED = "--data-parallel-sharding-strategy optim_grads --ddp-bucket-size 2000"
TIED = "--no-untie-embeddings-and-output-weights"
INTERLEAVED = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"


def _run(context: ParallelContext, words: str, *, overlap: bool = False) -> Run:
    """Build a run on a CPU, with ``overlap`` of its communication, which gloo can do as well."""
    flags = [*FLAGS, *words.split()]
    _, config, tokenizer = prepared(flags, GPT, ranks=context.layout.world_size)
    optimizer = dataclasses.replace(
        config.optimizer, overlap_grad_reduce=overlap, overlap_param_gather=overlap
    )
    config = dataclasses.replace(config, optimizer=optimizer)
    seed_everything(context, config.training.seed)
    return build_run(config, GPT, context, torch.device("cpu"), tokenizer)


Found = dict[str, Tensor]


def _steps(run: Run, count: int, *, observes: bool = False) -> list[tuple[float, Found, Found]]:
    """Train, and return norms, whole gradients (if it ``observes`` them) and weights of steps."""
    found = []
    for _ in range(count):
        gradients: Found = {}
        take = partial(lambda into: into.update(_named(run, lambda p: p.main_grad)), gradients)
        run.runner.observer = take if observes else None
        result = train_step(run)
        run.parameter_gather.switch_on()
        with run.parameter_gather.paused():
            weights = _named(run, lambda parameter: parameter.detach())
        losses = {f"loss {name}": loss for name, loss in result.losses.items()}
        found.append((result.update.grad_norm, gradients, weights | losses))
    return found


def _named(run: Run, take: Callable[[Any], Tensor]) -> Found:
    return {
        f"{index}.{name}": take(parameter).clone()
        for index, chunk in enumerate(run.chunks)
        for name, parameter in chunk.named_parameters()
    }


def _agree(
    context: ParallelContext, words: str, tolerance: float = 1e-6, **how: bool
) -> tuple[Run, int]:
    """Compare three steps with those of a run with whole gradients.

    Return the run with sharded gradients, and the most bytes that its gradients had at a time.
    With ``in_place`` products add to the gradients themselves, as they do on a GPU.
    """
    in_place = how.pop("in_place", False)
    plain, sharded = _run(context, words), _run(context, f"{words} {SHARDED}", **how)
    for run in (plain, sharded):
        run.runner.transformer_config.adds_in_place = in_place
    peak = _watched(sharded)
    for each in zip(
        _steps(plain, 2, observes=True) + _steps(plain, 1),
        _steps(sharded, 2, observes=True) + _steps(sharded, 1),
        strict=True,
    ):
        (norm, gradients, weights), (own_norm, own_gradients, own_weights) = each
        assert own_norm == pytest.approx(norm, rel=max(tolerance, 1e-7))
        for name, gradient in gradients.items():
            _close(own_gradients[name], gradient, tolerance, name)
        for name, weight in weights.items():
            # Adam divides small gradients by their size, so weights differ by more.
            _close(own_weights[name], weight, 10 * tolerance, name)
    return sharded, max(peak)


def _close(found: Tensor, truth: Tensor, tolerance: float, name: str) -> None:
    difference = (found.double() - truth.double()).norm()
    assert difference <= tolerance * truth.double().norm(), (name, float(difference))


def _watched(run: Run) -> list[int]:
    """Return a list that gets the bytes of all gradient storage whenever a bucket gets memory."""
    peak: list[int] = [0]

    def storage(run: Run) -> int:
        chunks: Any = run.chunks
        tensors = [b.whole for chunk in chunks for b in chunk.gradient_buckets]
        tensors += [b.grad_data for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
        unique = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        return sum(tensor.untyped_storage().nbytes() for tensor in unique.values())

    def watched(bucket: GradientBucket) -> None:
        GradientBucket.allocate(bucket)
        if run.runner.observer is None:
            peak.append(storage(run))

    for chunk in run.chunks:
        assert isinstance(chunk, ShardedGradients)
        for bucket in chunk.gradient_buckets:
            assert not bucket.live
            bucket.allocate = partial(watched, bucket)  # type: ignore[method-assign]
    return peak


def _predicted(run: Run, context: ParallelContext) -> int:
    return memory(GptNetwork.of(run.config))[context.pp_rank].state.gradients


@ranks(dp=2, timeout=120)
def test_weights_are_those_of_whole_gradients(context: ParallelContext) -> None:
    """They agree to the bit with one micro-batch; products may add in place, and in bf16."""
    alone = "--global-batch-size 2 --clip-grad 0 --no-calculate-per-token-loss"
    _agree(context, alone, tolerance=0.0)
    run, peak = _agree(context, "")
    (chunk,) = run.chunks
    whole = 4 * sum(p.numel() for p in chunk.parameters())
    # The sums are half; the embedding and the output layer are the largest buckets.
    assert peak <= _predicted(run, context) < 0.9 * whole
    assert peak > 0.8 * _predicted(run, context)
    assert all(not bucket.live for bucket in chunk.gradient_buckets)
    for parameter in chunk.parameters():
        assert parameter.main_grad.numel() < parameter.numel() or parameter.numel() < 2000
    _agree(context, f"{TIED} --mtp-num-layers 1", in_place=True, overlap=True)
    half = "--bf16 --no-accumulate-allreduce-grads-in-fp32"
    run, peak = _agree(
        context,
        f"{half} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        tolerance=1e-2,
        overlap=True,
    )
    assert peak <= _predicted(run, context)


LAYOUTS = {
    "dp4 ep2": ({"dp": 4, "ep": 2}, "--expert-model-parallel-size 2 --num-experts 4 "
                "--moe-router-load-balancing-type none"),
    "tp2 dp2": ({"tp": 2, "dp": 2}, "--tensor-model-parallel-size 2 --sequence-parallel "
                "--qk-layernorm"),
    "pp2 dp2": ({"pp": 2, "dp": 2}, f"--pipeline-model-parallel-size 2 {TIED}"),
    "dp2 latent attention, shared experts, Muon": (
        {"dp": 2},
        "--multi-latent-attention --no-group-query-attention --qk-layernorm --qk-head-dim 8 "
        "--q-lora-rank 24 --kv-lora-rank 16 --qk-pos-emb-head-dim 4 --v-head-dim 12 "
        "--num-experts 4 --moe-router-load-balancing-type none --optimizer muon "
        "--moe-shared-expert-intermediate-size 32 --muon-extra-scale-factor 0.2",
    ),
    "pp2 vpp2 dp2": ({"pp": 2, "vpp": 2, "dp": 2}, f"{INTERLEAVED} --mtp-num-layers 1"),
}  # fmt: skip


def _in_layout(context: ParallelContext, words: str) -> None:
    run, peak = _agree(context, words, in_place="experts" not in words)
    assert 0 < peak <= _predicted(run, context)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_with_whole_gradients(name: str) -> None:
    sizes, words = LAYOUTS[name]
    on_ranks(_in_layout, sizes, words=words)


@ranks(dp=2)
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped(context: ParallelContext) -> None:
    run = _run(context, SHARDED)
    (chunk,) = run.chunks
    before = _named(run, lambda parameter: parameter.detach())
    finish = chunk.finish_grad_sync

    def spoiled(**how: Any) -> None:
        finish(**how)
        if context.dp_rank == 1:
            chunk.gradient_buckets[0].sums[0] = math.nan

    chunk.finish_grad_sync = spoiled
    ((norm, _, after),) = _steps(run, 1)
    assert not math.isfinite(norm)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    # A step that ended before its gradients were finished leaves whole ones, which have no memory.
    chunk._show(whole=True)
    chunk.zero_grad_buffer()
    assert not any(parameter.main_grad.any() for parameter in chunk.parameters())


SIZES = (3, 5)
"""Numbers of elements of a bucket's parameters, which two ranks share unevenly."""


def _bucket(context: ParallelContext, *, factor: float = 1.0, averages: bool = False) -> Any:
    """Return a bucket of the parameters `SIZES`, without memory for their gradients."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    offset = 40  # other buckets come before it
    ends = [(offset, offset + 3), (offset + 3, offset + 8)]
    buffer = SimpleNamespace(
        data_parallel_group=context.pgs.dp,
        ddp_config=SimpleNamespace(average_in_collective=averages),
        param_index_map={p: (*span, 0) for p, span in zip(parameters, ends, strict=True)},
    )
    grads = SimpleNamespace(
        params_list=parameters,
        grad_data=torch.zeros(8),
        gradient_scaling_factor=factor,
        offset=offset,
    )
    return GradientBucket(buffer, grads, torch.zeros(8 // context.pgs.dp.size()))


@ranks(dp=2)
def test_a_gradient_that_comes_late_is_reduced_apart(context: ParallelContext) -> None:
    """It must not change what is under way, nor be lost; every rank keeps its half."""
    bucket = _bucket(context, factor=0.5)
    mine = torch.arange(8.0)
    bucket.allocate()
    bucket.whole += (context.dp_rank + 1) * mine
    bucket.reduce()
    assert bucket.reducing and bucket.live
    bucket.allocate()
    assert not bucket.reducing and not bucket.whole.any()
    bucket.whole += 10
    bucket.reduce()
    bucket.add()
    assert not bucket.live
    total = (0.5 * 3 * mine + 10).chunk(2)[context.dp_rank]
    assert torch.equal(bucket.sums, total)
    bucket.show(whole=False)
    own = [p.main_grad.tolist() for p in bucket.params]
    assert own == ([total[:3].tolist(), total[3:].tolist()], [[], total.tolist()])[context.dp_rank]
    bucket.gather()
    bucket.show(whole=True)
    assert torch.equal(torch.cat([p.main_grad for p in bucket.params]), 0.5 * 3 * mine + 10)


@ranks()
def test_the_remaining_buckets_of_a_pass_are_reduced_at_its_end(context: ParallelContext) -> None:
    """The first came late again, the second was complete, the third lacks a gradient."""
    late, complete, lacking = buckets = [_bucket(context) for _ in range(3)]
    chunk: Any = SimpleNamespace(gradient_buckets=buckets, _reduced=2, _overlap=True, _last=None)
    chunk._complete = partial(ShardedGradients._complete, chunk)
    chunk._reduce = partial(ShardedGradients._reduce, chunk)
    for bucket in (late, complete):
        bucket.missing.clear()
        chunk._reduce(bucket)
    late.allocate()
    late.whole += 7
    ShardedGradients.finish_microbatch(chunk)
    assert chunk._last is lacking and lacking.reducing and chunk._reduced == 0
    chunk._complete()
    assert [bucket.sums.tolist() for bucket in buckets] == [[7.0] * 8, [0.0] * 8, [0.0] * 8]
    assert not any(bucket.live for bucket in buckets)
    assert all(bucket.missing == set(bucket.params) for bucket in buckets)


@pytest.mark.parametrize("averages", [False, True])
@ranks()
def test_the_flag_decides_whether_the_collective_averages(
    context: ParallelContext, averages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo has no average, which --ddp-average-in-collective asks NCCL for."""
    used: list[Any] = []
    monkeypatch.setattr(
        torch.distributed, "reduce_scatter_tensor", lambda *_, op, **more: used.append(op)
    )
    _bucket(context, averages=averages).reduce()
    assert used == [ReduceOp.AVG if averages else ReduceOp.SUM]
