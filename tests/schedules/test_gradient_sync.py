"""When the reduction of gradients starts, and that it changes none of them."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch import Tensor

from megatron_ext.parallel.context import ParallelContext, seed_everything
from megatron_ext.schedules.communication import GradientSync
from megatron_ext.schedules.orders import build_plan
from megatron_ext.schedules.plan import COMPUTE, Kind
from megatron_ext.text.task import GPT
from megatron_ext.train.run import Run
from megatron_ext.train.setup import build_run
from megatron_ext.train.step import StepInputs
from tests.ranks import ranks
from tests.training_runs import TINY, mock_data, prepared

FLAGS = [*TINY, *mock_data(), *"--train-iters 4 --eod-mask-loss --global-batch-size 8".split()]


def _run(context: ParallelContext, words: str, *, overlap: bool) -> Run:
    """Build a run on a CPU with the communication of a GPU, which gloo can do as well."""
    flags = [*FLAGS, *words.split()]
    _, config, tokenizer = prepared(flags, GPT, ranks=context.layout.world_size)
    optimizer = dataclasses.replace(
        config.optimizer, overlap_grad_reduce=overlap, overlap_param_gather=overlap
    )
    config = dataclasses.replace(config, optimizer=optimizer)
    seed_everything(context, config.training.seed)
    return build_run(config, GPT, context, torch.device("cpu"), tokenizer)


def _step(run: Run, mark: Callable[[str], None]) -> dict[str, Tensor]:
    number = run.batch_size.num_microbatches
    batches = run.train_source.next_step(number)
    consumed = run.progress.consumed_train_samples
    mark("step")
    inputs = StepInputs(batches, number, consumed)
    run.runner.train(inputs, run.batch_size.global_batch_size)
    run.parameter_gather.switch_on()
    with run.parameter_gather.paused():
        return {n: p.detach().clone() for c in run.chunks for n, p in c.named_parameters()}


def _events(run: Run, events: list[str]) -> None:
    """Note each backward pass as it ends, and each reduction as it starts."""

    def noted(bucket: _ParamAndGradBucketGroup, *args: Any, **kwargs: Any) -> None:
        if bucket.grad_reduce_handle is None:
            events.append("reduce")
        _ParamAndGradBucketGroup.start_grad_sync(bucket, *args, **kwargs)

    for chunk in run.chunks:
        first = next(chunk.parameters())
        first.register_post_accumulate_grad_hook(lambda _: events.append("first weight"))
        for bucket in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            bucket.start_grad_sync = partial(noted, bucket)


def _compare(context: ParallelContext, words: str, *, in_place: bool = False) -> list[list[str]]:
    """Return the events of three steps, whose weights are those of a run that overlaps nothing.

    With ``in_place`` products overwrite the gradients of the step before, but in that run.
    """
    plain, overlapped = (_run(context, words, overlap=overlap) for overlap in (False, True))
    if in_place:
        plain.runner.check_zeroed = lambda chunks: None
        for run in (plain, overlapped):
            run.runner.transformer_config.adds_in_place = True
    events: list[str] = []
    _events(overlapped, events)
    for _ in range(3):
        truth = _step(plain, lambda _: None)
        found = _step(overlapped, events.append)
        for name, weight in truth.items():
            assert torch.equal(weight, found[name]), name
    steps: list[list[str]] = []
    for event in events:
        steps.append([]) if event == "step" else steps[-1].append(event)
    return steps


class FakeChunk:
    """Notes what is asked of a model chunk with two buckets, one of them of experts."""

    def __init__(self, number: int, events: list[str]) -> None:
        # A weight that no product of this step touches still has the gradient of the last one.
        idle = torch.nn.Parameter(torch.zeros(2))
        idle.main_grad = torch.ones(2)  # type: ignore[attr-defined]
        idle.overwrite_main_grad = True  # type: ignore[attr-defined]
        self.params_with_grad = [idle]
        self.number = number
        self.events = events
        self.bucket_groups = [self.bucket("dense")]
        self.expert_parallel_bucket_groups = [self.bucket("expert")]

    def bucket(self, name: str) -> Any:
        return SimpleNamespace(
            per_param_grad_ready_counts={"a": 1},
            params=["a", "b"],
            is_first_batch=True,
            grad_reduce_handle=None,
            start_grad_sync=lambda: self.events.append(f"reduce {name} {self.number}"),
        )

    def parameters(self) -> int:
        return self.number

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield
        self.events.append(f"resume {self.number}")

    def start_grad_sync(self, _: int) -> None:
        self.events.append(f"reduce all of {self.number}")


def synced(
    schedule: str, rank: int, num_chunks: int, *, aligned: bool
) -> tuple[list[str], list[FakeChunk]]:
    """Return the events of one rank's step of two micro-batches on two pipeline ranks."""
    events: list[str] = []
    chunks = [FakeChunk(number, events) for number in range(num_chunks)]
    plan = build_plan(schedule, pipeline_size=2, num_microbatches=2, num_chunks=num_chunks)
    hooks: Any = SimpleNamespace(
        no_sync_func=[chunk.no_sync for chunk in chunks],
        grad_sync_func=[chunk.start_grad_sync for chunk in chunks] if aligned else None,
        param_sync_func=lambda number: events.append(f"gather {number}"),
    )
    sync = GradientSync(chunks, hooks, plan.ranks[rank], plan.placement)
    sync.start()
    for action in plan.ranks[rank]:
        chunk = plan.placement.chunk_of(action.stage)
        if action.kind is Kind.FORWARD:
            sync.before_forward(chunk)
        elif action.kind in (Kind.BACKWARD, Kind.INPUT):
            sync.before_backward(action)
        if action.kind in COMPUTE:
            events.append(f"{action.kind.value}{action.microbatch} {chunk}")
            if action.kind is not Kind.FORWARD:
                sync.computed(action)
    sync.finish()
    return events, chunks


def test_gradients_are_reduced_during_or_after_the_last_backward_pass() -> None:
    during = ["gather 0", "F0 0", "F1 0", "B0 0", "resume 0", "B1 0"]
    during += ["reduce dense 0", "reduce expert 0"]
    # The first stage of a rank with one chunk never waits for its last backward pass to end.
    for aligned in (False, True):
        assert synced("1f1b", 0, 1, aligned=aligned)[0] == during
    after = ["gather 0", "F0 0", "B0 0", "F1 0", "B1 0", "resume 0", "reduce all of 0"]
    assert synced("1f1b", 1, 1, aligned=True)[0] == after
    events, _ = synced("1f1b", 1, 1, aligned=False)
    assert events.index("resume 0") == events.index("B1 0") - 1
    # Deferred weight gradients complete the gradients, not those of the input.
    events, _ = synced("zb-h1", 0, 1, aligned=False)
    assert events[-3:] == ["W1 0", "resume 0", "reduce all of 0"]


def test_weights_are_gathered_a_chunk_ahead() -> None:
    events, _ = synced("interleaved", 0, 2, aligned=True)
    assert events[:3] == ["gather 0", "gather 1", "F0 0"]
    assert [event for event in events if event.startswith("gather")] == ["gather 0", "gather 1"]
    last = {chunk: max(i for i, e in enumerate(events) if e == f"B1 {chunk}") for chunk in (0, 1)}
    for chunk, place in last.items():
        assert events[place + 1 : place + 3] == [f"resume {chunk}", f"reduce all of {chunk}"]


def test_an_incomplete_count_of_the_first_step_is_forgotten() -> None:
    _, (chunk,) = synced("1f1b", 0, 1, aligned=False)
    assert not chunk.params_with_grad[0].main_grad.any()  # type: ignore[attr-defined]
    buckets = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    assert [bucket.per_param_grad_ready_counts for bucket in buckets] == [{}, {}]
    # Counts of later steps, and complete ones, are those that megatron-core expects.
    plan = build_plan("1f1b", pipeline_size=2, num_microbatches=2)
    hooks: Any = SimpleNamespace(
        no_sync_func=chunk.no_sync, grad_sync_func=None, param_sync_func=None
    )
    buckets[0].is_first_batch = False
    buckets[1].params = ["a"]
    for bucket in buckets:
        bucket.per_param_grad_ready_counts = {"a": 1}
    sync = GradientSync([chunk], hooks, plan.ranks[0], plan.placement)
    last = [action for action in plan.ranks[0] if action.kind is Kind.BACKWARD][-1]
    sync.computed(last)
    assert [bucket.per_param_grad_ready_counts for bucket in buckets] == [{"a": 1}] * 2


@ranks(dp=2)
def test_one_stage_reduces_while_its_last_backward_pass_runs(context: ParallelContext) -> None:
    """Reduction overlaps from the second step on, when the gradients have been counted."""
    first, *rest = _compare(context, "--ddp-num-buckets 4")
    assert first.count("first weight") == 2
    assert first.index("reduce") > _last_index(first)
    for step in rest:
        assert step.count("reduce") == first.count("reduce") > 1
        assert step.index("reduce") < _last_index(step)


@ranks(dp=2)
def test_overwritten_gradients_are_reduced_whole(context: ParallelContext) -> None:
    _compare(context, "--ddp-num-buckets 4", in_place=True)


@pytest.mark.slow
@ranks(pp=2, dp=2)
def test_stages_are_aligned_but_the_first_and_deferred_too(context: ParallelContext) -> None:
    steps = _compare(context, "--pipeline-model-parallel-size 2")
    assert all(step.count("reduce") == 1 for step in steps)
    _compare(context, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1")


@ranks(dp=2)
def test_a_parameter_without_gradient_stops_nothing(context: ParallelContext) -> None:
    """This holds in the first step, which megatron-core counts by, and in a later one."""
    run = _run(context, "--ddp-num-buckets 4", overlap=True)
    model = run.chunks[0].module
    norm, forward = model.decoder.final_layernorm, model.forward
    norm.forward = lambda x: x
    used = {"norm": False}

    def with_or_without(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return output + 0 * norm.weight.sum() if used["norm"] else output

    model.forward = with_or_without
    for used["norm"] in (False, True, False):
        weights = _step(run, lambda _: None)
        assert all(torch.isfinite(weight).all() for weight in weights.values())


def _last_index(step: list[str]) -> int:
    return len(step) - 1 - step[::-1].index("first weight")
