"""Steps of all layouts wait for what they use on a GPU, and the host waits in one place."""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_ext.data import batch
from megatron_ext.data.batch import StepLoader
from megatron_ext.device import streams as copies
from megatron_ext.layers.graphs import _Owned
from megatron_ext.layers.linear_function import _Sent as Sent
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.optim.builder import choose_kernels
from megatron_ext.parallel.context import ParallelContext, seed_everything
from megatron_ext.schedules.communication import Channels
from megatron_ext.schedules.plan import Action, Kind
from megatron_ext.text.task import GPT
from megatron_ext.train.loop import IntervalMetrics
from megatron_ext.train.run import Run, StopRequests
from megatron_ext.train.setup import build_run
from tests.graph_stand_in import CpuGraph, graphs_on_a_cpu
from tests.host_syncs import READ
from tests.ranks import on_ranks, ranks
from tests.runs_from_inside import one_step
from tests.stream_order import OutOfOrder, StreamOrder
from tests.stream_stand_in import stream_order
from tests.training_runs import TINY, mock_data, prepared

STEPS, MICROBATCHES = 3, 2
FLAGS = [*TINY, *mock_data(), *"--train-iters 10 --seq-length 32 --micro-batch-size 1".split()]
PIPELINE = "--pipeline-model-parallel-size 2"
CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
FP8 = "--bf16 --ffn-hidden-size 192 --fp8-format hybrid --fp8-recipe"
GRAPHS = "--cuda-graph-impl local"
RECORDING = "megatron_ext/layers/graphs.py:_add_slot"
TENSOR = "--tensor-model-parallel-size 2"


def build(context: ParallelContext, words: str, *, overlap: bool = False) -> Run:
    """Build a run with a GPU's copies of batches, weight gradients and update."""
    samples = MICROBATCHES * context.layout.data_parallel_size
    flags = [*FLAGS, *words.split(), "--global-batch-size", str(samples)]
    _, config, tokenizer = prepared(flags, GPT, ranks=context.layout.world_size)
    optimizer = dataclasses.replace(
        config.optimizer, overlap_grad_reduce=overlap, overlap_param_gather=overlap
    )
    config = dataclasses.replace(config, optimizer=optimizer)
    seed_everything(context, config.training.seed)
    run = build_run(config, GPT, context, torch.device("cpu"), tokenizer)
    for chunk in run.chunks:
        for module in chunk.modules():
            if isinstance(getattr(module, "config", None), StepTransformerConfig):
                module.config.adds_in_place = True
    if isinstance(run.train_source.loader, StepLoader):
        run.train_source.loader.device = torch.device("cuda", 0)
    choose_kernels(run.optimizer, fused=True)
    run.runner.scales_in_update = True
    return run


def take_steps(run: Run, number: int = STEPS) -> StreamOrder:
    with stream_order() as order:
        metrics = IntervalMetrics(run)
        for _ in range(number):
            one_step(run, metrics)
    return order


def messages(order: StreamOrder) -> list[int]:
    """Return how many messages went each way between this rank and another."""
    return [len(works) for (_, peer), works in order.channels.items() if peer is not None]


def check(context: ParallelContext, words: str, overlap: bool, num_messages: list[int]) -> None:
    """Replayed graphs write the same memory again, which may still be sent."""
    with graphs_on_a_cpu() if GRAPHS in words else contextlib.nullcontext():
        order = take_steps(build(context, words, overlap=overlap))
        assert (len(CpuGraph.replays) > 0) == (GRAPHS in words)
    assert order.default.clock[order.default] > 400 * STEPS
    assert messages(order) == [STEPS * MICROBATCHES * n for n in num_messages]
    waits = Counter(order.waits)
    assert (waits.pop(RECORDING, 0) > 0) == (GRAPHS in words)
    # The update before; once also which 8-bit layers have a whole history.
    assert waits == {READ: STEPS - 1 + ("delayed" in words)}


@pytest.mark.parametrize(
    ("sizes", "words", "overlap", "num_messages"),
    [
        ({}, "--bf16 --ema-decay 0.9 --reset-attention-mask --eod-mask-loss", False, []),
        ({}, f"{FP8} delayed", False, []),
        ({}, f"{FP8} tensorwise", False, []),
        ({"tp": 2}, f"{FP8} rowwise {TENSOR} --sequence-parallel", False, []),
        ({"tp": 2}, f"{TENSOR} --sequence-parallel --mtp-num-layers 1", False, []),
        ({"tp": 2}, f"{TENSOR} --recompute-granularity full --recompute-method uniform "
                    "--recompute-num-layers 1", False, []),
        ({"cp": 2}, "--context-parallel-size 2 --cp-comm-type a2a", False, []),
        ({"cp": 2}, "--context-parallel-size 2 --reset-attention-mask", False, []),
        ({"dp": 2}, "--ddp-num-buckets 4 --bf16", True, []),
        ({"pp": 2}, PIPELINE, False, [1, 1]),
        ({"pp": 2}, f"{PIPELINE} --pipeline-schedule zb-h1", False, [1, 1]),
        ({"pp": 2, "vpp": 2}, f"{PIPELINE} {CHUNKS}", False, [3, 3]),
        ({"pp": 2, "dp": 2}, PIPELINE, True, [1, 1]),
        ({"pp": 2}, f"{PIPELINE} {GRAPHS}", False, [1, 1]),
        ({"pp": 2, "vpp": 2}, f"{PIPELINE} {CHUNKS} {GRAPHS}", False, [3, 3]),
    ],
)  # fmt: skip
def test_steps_wait_for_what_they_use(
    sizes: dict[str, int], words: str, overlap: bool, num_messages: list[int]
) -> None:
    arguments: dict[str, Any] = {"words": words, "overlap": overlap}
    on_ranks(check, sizes, **arguments, num_messages=num_messages)


def to_device_at_once(host: Tensor, device: torch.device) -> Tensor:
    """Send a batch as `to_device` does, but let nobody wait for it."""
    with torch.cuda.stream(copies._stream_of_copies(device)):
        return host.pin_memory().to(device, non_blocking=True)


def take_at_once(channels: Channels, kind: Kind, action: Action) -> Tensor:
    """Return a message that may not have arrived."""
    return channels.received[kind, action.microbatch, action.stage][1]


def send_and_reuse(channels: Channels, action: Action, tensor: Tensor) -> None:
    """Overwrite the tensor while it may still be sent."""
    SEND(channels, action, tensor)
    tensor.detach().zero_()


SEND = Channels.send


@pytest.mark.parametrize(
    ("sizes", "words", "owner", "name", "planted", "said"),
    [
        ({}, "", batch, "to_device", to_device_at_once,
         "which copy to the GPU on a side stream .* wrote"),
        ({"tp": 2}, f"{TENSOR} --sequence-parallel", Sent, "get", lambda sent: sent.tensor,
         r":add_product\) reads .* which _allgather_base_ on .*/linear_function.py:_gathered"),
        ({"tp": 2}, TENSOR, Sent, "get", lambda sent: sent.tensor,
         r"which allreduce_ on the comm"),
        ({"pp": 2}, PIPELINE, Channels, "take", take_at_once, "which recv_ on the comm"),
        ({"pp": 2}, PIPELINE, Channels, "send", send_and_reuse, "overwrites .* which send on the"),
        ({"pp": 2}, f"{PIPELINE} {GRAPHS}", _Owned, "backward", lambda ctx, gradient: gradient,
         "overwrites .* which send on the"),
    ],
)  # fmt: skip
def test_a_planted_use_without_a_wait_is_found(
    sizes: dict[str, int], words: str, owner: Any, name: str, planted: Callable[..., Any], said: str
) -> None:
    found = pytest.raises(pytest.fail.Exception, match=f"OutOfOrder: .*{said}")
    with mock.patch.object(owner, name, planted), found:
        on_ranks(take_two_steps, sizes, words=words)


def take_two_steps(context: ParallelContext, words: str) -> None:
    with graphs_on_a_cpu() if GRAPHS in words else contextlib.nullcontext():
        take_steps(build(context, words), 2)


@ranks(dp=2)
def test_a_reduction_that_nobody_waits_for_is_found(context: ParallelContext) -> None:
    run = build(context, "--ddp-num-buckets 4", overlap=True)
    run.runner.transformer_config.finalize_model_grads_func = lambda *_, **__: None
    with pytest.raises(OutOfOrder, match="which reduce_scatter_tensor_coalesced_ on the"):
        take_steps(run, 1)


@ranks()
def test_a_planted_wait_of_the_host_is_found(context: ParallelContext) -> None:
    run = build(context, "")
    run.runner.observer = lambda: print(float(run.chunks[0].buffers[0].grad_data.sum()))
    places = Counter(take_steps(run).waits)
    assert places.pop(READ) == STEPS - 1
    assert list(places.values()) == [STEPS]
    assert "tests/train/test_stream_order.py:<lambda>" in places


@ranks()
def test_requests_to_stop_are_read_one_step_later(context: ParallelContext) -> None:
    flags = dataclasses.replace(build(context, "").config.training, exit_duration_in_mins=0)
    with stream_order() as order:
        requests = StopRequests(flags, time.time())
        found = [requests.check(torch.device("cuda", 0)) for _ in range(3)]
    assert found == [None, "duration", "duration"]
    assert order.waits == [READ] * 2


@pytest.mark.slow
@ranks(dp=2, ep=2)
def test_experts_wait_for_what_they_use(context: ParallelContext) -> None:
    """The host must know how many tokens each expert gets, and on a GPU asks in core alone."""
    words = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"
    waits = Counter(take_steps(build(context, words)).waits)
    assert waits.pop(READ) == STEPS - 1
    # The experts of a CPU multiply one after the other, and so read how many tokens each has.
    others = {
        path.rpartition("/")[0] for path in waits if "megatron_ext/layers/experts" not in path
    }
    assert others == {"megatron/core/transformer/moe"}
