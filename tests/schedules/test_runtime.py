"""The runtime against megatron-core's own functions and against plain torch arithmetic."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.config.parallel import SPLIT_SCHEDULES, V_SHAPED
from megatron_ext.config.precision import CudaGraphConfig
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.layers.weight_gradients import DeferredWeightGradients
from megatron_ext.losses.contract import pair
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.parallel.grid import Layout
from megatron_ext.schedules.forward import collect_outputs, evaluating, forward_engine
from megatron_ext.schedules.orders import SCHEDULES, build_plan
from megatron_ext.schedules.runtime import PipelineEngine, records_graphs
from tests.ranks import ranks, run_on_ranks
from tests.training_runs import TINY, curve, mock_data, train

STEPS = 3
FLAGS = [*TINY, *mock_data(), "--eod-mask-loss", "--train-iters", str(STEPS)]
SIZE = "--pipeline-model-parallel-size"
CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"


def losses_and_norms(words: str, ranks: int, folder: Path) -> list[tuple[float, float]]:
    return curve([*FLAGS, *words.split()], folder, ranks)


@pytest.mark.parametrize(
    ("words", "ranks", "core"),
    [
        ("", 1, "core-no-pipelining"),
        (f"{SIZE} 2", 2, "core-1f1b"),
        (f"{SIZE} 4 --tensor-model-parallel-size 2 --sequence-parallel", 8, "core-1f1b"),
        (f"{SIZE} 2 --overlap-grad-reduce --overlap-param-gather", 4, "core-1f1b"),
        (f"{SIZE} 2 {CHUNKS}", 2, "core-interleaved"),
        (f"{SIZE} 2 {CHUNKS} --overlap-grad-reduce --overlap-param-gather", 4, "core-interleaved"),
        (f"{SIZE} 2 --bf16", 2, "core-1f1b"),
        (f"{SIZE} 2 --no-calculate-per-token-loss", 2, "core-1f1b"),
    ],
)
def test_schedules_give_cores_bits(words: str, ranks: int, core: str, tmp_path: Path) -> None:
    ours = losses_and_norms(words, ranks, tmp_path / "ours")
    theirs = losses_and_norms(f"{words} --pipeline-schedule {core}", ranks, tmp_path / "core")
    assert len(ours) == STEPS
    assert ours == theirs


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return flags that start from one checkpoint, whatever the layout."""
    checkpoint = tmp_path_factory.mktemp("start") / "checkpoint"
    train([*TINY, *mock_data(), "--train-iters", "1"], checkpoint)
    return f"--load {checkpoint} --finetune"


@pytest.fixture(scope="module")
def one_f_one_b(start: str, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    return losses_and_norms(f"{SIZE} 2 {start}", 2, tmp_path_factory.mktemp("1f1b") / "run")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, "2 --pipeline-schedule zb-h1"),
        (2, "2 --pipeline-schedule zb-v"),
        (4, "4 --pipeline-schedule zb-h1"),
        (4, "2 --pipeline-schedule zb-h1 --overlap-grad-reduce --overlap-param-gather"),
        (4, "2 --pipeline-schedule zb-v --tensor-model-parallel-size 2 --sequence-parallel"),
        (4, "2 --pipeline-schedule zb-v --context-parallel-size 2"),
        (2, "2 --pipeline-schedule zb-h1 --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1"),
        # Both neighbours are the same peer; our messages name their ends.
        pytest.param(2, f"2 {CHUNKS}", id="d15 virtual chunks"),
        (2, "2 --pipeline-schedule dualpipe-v"),
        (4, "2 --pipeline-schedule dualpipe-v --overlap-grad-reduce --overlap-param-gather"),
    ],
)  # fmt: skip
def test_zero_bubble_and_virtual_chunks_train_like_1f1b(
    ranks: int, words: str, start: str, one_f_one_b: list[tuple[float, float]], tmp_path: Path
) -> None:
    mine = losses_and_norms(f"{SIZE} {words} {start}", ranks, tmp_path / "run")
    for row, want in zip(mine, one_f_one_b, strict=True):
        assert row == pytest.approx(want, rel=1e-6)


class Stage(torch.nn.Module):
    """``y = x w``, with the weight gradient put off where the schedule asks for it."""

    def __init__(self, weight: float, length: int, queue: DeferredWeightGradients | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(weight))
        self.length = length
        self.queue = queue
        self.entering: Tensor | None = None
        self.calls: list[int] = []

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        self.entering = tensors[0]

    def forward(self, microbatch: int) -> Tensor:
        entering = self.entering
        self.calls.append(microbatch)
        if entering is None:
            size = self.length + microbatch if self.length < 0 else self.length
            entering = torch.full((abs(size), 1, 2), float(microbatch + 1), requires_grad=True)
        if self.queue is None:
            return entering * self.weight
        result: Tensor = _Product.apply(entering, (self.weight, self.queue))  # type: ignore[no-untyped-call]
        return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, entering: Tensor, held: Any) -> Tensor:
        ctx.entering, ctx.held = entering.detach(), held
        return entering * held[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight, queue = ctx.held

        def weight_gradient() -> None:
            part = (gradient * ctx.entering).sum()
            weight.grad = part if weight.grad is None else weight.grad + part

        queue.add(weight_gradient)
        return gradient * weight.detach(), None


def engine_of(
    schedule: str, context: ParallelContext, *, length: int = 3, **changes: Any
) -> tuple[PipelineEngine, list[Stage]]:
    queue = DeferredWeightGradients() if schedule in SPLIT_SCHEDULES else None
    config: TransformerConfig = StepTransformerConfig(
        num_layers=8,
        hidden_size=2,
        num_attention_heads=1,
        pipeline_model_parallel_size=context.layout.pipeline_model_parallel_size,
        pipeline_dtype=torch.float32,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        deallocate_pipeline_outputs=True,
        weight_gradients=queue,
        **changes,
    )
    placement = context.placement
    stages = [placement.stage_of(context.pp_rank, c) for c in range(placement.num_chunks)]
    chunks = [Stage(1.0 + 0.25 * stage, length, queue) for stage in stages]
    return PipelineEngine(schedule, chunks, config, context), chunks


def layout_of(schedule: str, size: int, chunks: int) -> Layout:
    return Layout(
        world_size=size,
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        v_shape=schedule in V_SHAPED,
    )


def sum_loss(output: Tensor, non_loss_data: bool = False) -> Any:
    if non_loss_data:
        return output.detach().clone()
    total = output.sum()
    count = torch.tensor(output.numel(), dtype=torch.int)
    return total, count, {"sum": pair(total, count)}


def step(batch: int, model: Any, _counts: None) -> tuple[Tensor, Any]:
    return model(batch), sum_loss


def truth(num_stages: int, num_microbatches: int, length: int) -> tuple[list[float], list[float]]:
    """Return the loss of each micro-batch and the gradient of each weight, by plain torch."""
    weights = [torch.tensor(1.0 + 0.25 * s, requires_grad=True) for s in range(num_stages)]
    losses = []
    for i in range(num_microbatches):
        size = abs(length + i) if length < 0 else length
        output = torch.full((size, 1, 2), float(i + 1))
        for weight in weights:
            output = output * weight
        losses.append(output.sum())
    torch.stack(losses).sum().backward()
    return [float(loss.detach()) for loss in losses], [float(w.grad) for w in weights]


def check_step(
    context: ParallelContext, schedule: str, num_microbatches: int, length: int = 3
) -> None:
    engine, chunks = engine_of(schedule, context, length=length, variable_seq_lengths=length < 0)
    reports = engine.run(step, range(num_microbatches), num_microbatches, (length, 1, 2))
    losses, gradients = truth(context.placement.num_stages, num_microbatches, length)
    if context.is_last_stage:
        assert [float(report["sum"][0]) for report in reports] == pytest.approx(losses, rel=1e-5)
    else:
        assert reports == []
    for index, chunk in enumerate(chunks):
        assert chunk.calls == list(range(num_microbatches))
        stage = context.placement.stage_of(context.pp_rank, index)
        assert float(chunk.weight.grad) == pytest.approx(gradients[stage], rel=1e-5)


CASES = [
    (schedule, size, chunks, num_microbatches)
    for schedule in SCHEDULES
    for size, chunks in {
        "no-pipelining": [(1, 1)],
        "interleaved": [(2, 2), (3, 3)],
        "zb-v": [(2, 2), (4, 2)],
        "dualpipe-v": [(2, 2), (3, 2)],
    }.get(schedule, [(2, 1), (4, 1)])
    for num_microbatches in (1, 5, 8)
]


@pytest.mark.parametrize(("schedule", "size", "chunks", "num_microbatches"), CASES)
def test_losses_and_gradients_are_those_of_plain_torch(
    schedule: str, size: int, chunks: int, num_microbatches: int
) -> None:
    arguments = {"schedule": schedule, "num_microbatches": num_microbatches}
    run_on_ranks(check_step, layout_of(schedule, size, chunks), arguments)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-v", 2)])
def test_lengths_may_vary_between_microbatches(schedule: str, chunks: int) -> None:
    """A negative length makes micro-batch i ``-length - i`` long."""
    arguments = {"schedule": schedule, "num_microbatches": 5, "length": -9}
    run_on_ranks(check_step, layout_of(schedule, 2, chunks), arguments)


def check_forward_only(context: ParallelContext, schedule: str) -> None:
    engine, chunks = engine_of(schedule, context)
    with torch.no_grad():
        outputs = engine.run(
            step, range(5), 5, (3, 1, 2), forward_only=True, collect_non_loss_data=True
        )
    if context.is_last_stage:
        factor = math.prod(1.0 + 0.25 * s for s in range(context.placement.num_stages))
        found = [float(output[0, 0, 0]) for output in outputs]
        assert found == pytest.approx([factor * (i + 1) for i in range(5)])
        assert all(output.shape == (3, 1, 2) for output in outputs)
    else:
        assert outputs == []
    assert all(chunk.weight.grad is None for chunk in chunks)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)]
)
def test_forward_only_collects_what_is_no_loss(schedule: str, chunks: int) -> None:
    run_on_ranks(check_forward_only, layout_of(schedule, 2, chunks), {"schedule": schedule})


@ranks(pp=2, vpp=2)
def test_d16_outputs_are_deallocated_and_messages_stay_whole(context: ParallelContext) -> None:
    engine, chunks = engine_of("interleaved", context)
    kept: list[Tensor] = []

    def keeping(batch: int, model: Any, counts: None) -> tuple[Tensor, Any]:
        output, loss = step(batch, model, counts)
        kept.append(output)
        return output, loss

    engine.run(keeping, range(4), 4, (3, 1, 2))
    sent = 4 * (len(chunks) - (1 if context.is_last_stage else 0))
    assert sum(output.numel() == 1 and output.dim() == 1 for output in kept) == sent
    check_step(context, "interleaved", 6)


@ranks(pp=4)
def test_zb_h1_puts_weight_gradients_off(context: ParallelContext) -> None:
    """Weight gradients come after later input gradients, not within them."""
    engine, chunks = engine_of("zb-h1", context)
    events: list[tuple[str, tuple[int, int]]] = []
    queue: Any = engine.transformer_config.weight_gradients
    collect, compute = queue.collect, queue.compute
    queue.collect = lambda key: (events.append(("I", key)), collect(key))[1]
    queue.compute = lambda key: (events.append(("W", key)), compute(key))[1]
    engine.run(step, range(6), 6, (3, 1, 2))
    assert [key for kind, key in events if kind == "W"] == [(i, context.pp_rank) for i in range(6)]
    late = events.index(("W", (0, context.pp_rank))) - events.index(("I", (0, context.pp_rank)))
    # Rank r is r micro-batches late.
    assert late == context.pp_rank + 1
    assert chunks[0].weight.grad is not None


class Decoder(torch.nn.Module):
    """Holds one layer that learns which micro-batch it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [SimpleNamespace(current_microbatch=None)]


class Watched(Stage):
    """A stage that notes what it is told before each forward pass."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.decoder = Decoder()
        self.told: list[tuple[int, bool]] = []
        self.is_first = False

    def set_is_first_microbatch(self) -> None:
        self.is_first = True

    def forward(self, microbatch: int) -> Tensor:
        (layer,) = self.decoder.layers
        self.told.append((layer.current_microbatch, self.is_first))
        self.is_first = False
        return super().forward(microbatch)


@ranks()
def test_a_chunk_learns_its_micro_batch_and_that_weights_are_new(context: ParallelContext) -> None:
    engine, (chunk,) = engine_of("no-pipelining", context)
    engine.chunks = [watched := Watched(1.5, 3, None)]
    for _ in range(2):
        engine.run(step, range(3), 3, (3, 1, 2))
    assert watched.told == [(0, True), (1, False), (2, False)] * 2
    assert chunk.calls == []


@ranks()
def test_only_a_training_step_reduces_and_finalizes_gradients(context: ParallelContext) -> None:
    engine, chunks = engine_of("no-pipelining", context)
    for name in ("params_with_grad", "bucket_groups", "expert_parallel_bucket_groups"):
        vars(chunks[0])[name] = []
    finalized: list[Any] = []
    synced: list[str] = []

    @contextmanager
    def no_sync() -> Iterator[None]:
        synced.append("suspended")
        yield
        synced.append("resumed")

    config: Any = engine.transformer_config
    config.finalize_model_grads_func = lambda *given, **named: finalized.append((given, named))
    config.no_sync_func = no_sync
    vars(chunks[0])["start_grad_sync"] = None
    with torch.no_grad():
        engine.run(step, range(2), 2, (3, 1, 2), forward_only=True)
    assert (finalized, synced) == ([], [])
    for asked in (True, False):
        engine.run(step, range(2), 2, (3, 1, 2), force_all_reduce=asked)
    expected = {"pg_collection": context.pgs}
    assert finalized == [
        ((chunks, None), {**expected, "force_all_reduce": asked}) for asked in (True, False)
    ]
    assert synced == ["suspended", "resumed"] * 2


class Slots:
    """Stands in for the graphs of a chunk."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.events: list[str] = []

    def capture(self, number: int) -> None:
        self.events.append(f"capture {number}")
        if number < 9:
            self.num_slots = number

    def switch(self, on: bool) -> None:
        self.events.append("on" if on else "off")


@ranks()
def test_a_step_records_the_graphs_that_it_lacks(context: ParallelContext) -> None:
    engine, _ = engine_of("no-pipelining", context)
    graphs: Any = [Slots(0), Slots(2), Slots(2), Slots(2)]
    engine.graphs = graphs
    engine._prepare_graphs([1, 2, 3, 9])
    assert [each.events for each in graphs] == [
        ["capture 1", "on"],
        ["on"],
        ["capture 3", "on"],
        # The layers could not be recorded, so they run as they are.
        ["capture 9", "off"],
    ]
    engine.graphs = graphs = [Slots(0)]
    with torch.no_grad():
        engine.run(step, range(2), 2, (3, 1, 2), forward_only=True)
    assert graphs[0].events == []
    engine.run(step, range(2), 2, (3, 1, 2))
    assert graphs[0].events == ["capture 1", "on"]


@pytest.mark.parametrize(
    ("implementation", "device", "expected"),
    [("local", "cuda", True), ("local", "cpu", False), ("none", "cuda", False)],
)
def test_when_layers_are_recorded(implementation: str, device: str, expected: bool) -> None:
    assert records_graphs(CudaGraphConfig(cuda_graph_impl=implementation), device) is expected


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        (Layout(1), "1f1b"),
        (Layout(4, 1, 2, virtual_pipeline_model_parallel_size=2), "interleaved"),
        (Layout(4, 1, 2, virtual_pipeline_model_parallel_size=2, v_shape=True), "zb-v"),
    ],
    ids=str,
)
def test_forward_passes_follow_the_placement_of_the_stages(
    layout: Layout, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    context: Any = SimpleNamespace(placement=layout.placement)
    engine = forward_engine([], SimpleNamespace(), context)  # type: ignore[arg-type]
    assert engine.schedule == schedule


def test_an_engine_plans_groups_of_the_size_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    layout = Layout(4, 1, 2, virtual_pipeline_model_parallel_size=2)
    context: Any = SimpleNamespace(placement=layout.placement, layout=layout)
    chunks: Any = [None, None]
    given: Any = SimpleNamespace()
    for size in (None, 4):
        engine = PipelineEngine("interleaved", chunks, given, context, group_size=size)
        sizes: Any = {"pipeline_size": 2, "num_chunks": 2, "group_size": size}
        for forward_only in (False, True):
            sizes["forward_only"] = forward_only
            want = build_plan("interleaved", num_microbatches=8, **sizes)
            assert engine.plan(8, forward_only=forward_only).ranks == want.ranks


@ranks()
def test_outputs_are_collected_after_each_call_that_comes_before(context: ParallelContext) -> None:
    engine, _ = engine_of("no-pipelining", context)
    before: list[int] = []
    inputs = [{"microbatch": 4}, {"microbatch": 2}]
    outputs = collect_outputs(engine, inputs, (3, 1, 2), before.append)
    assert before == [0, 1]
    assert [output[0, 0, 0].tolist() for output in outputs] == [5.0, 3.0]


def test_modes_are_restored_after_an_error() -> None:
    chunk = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout())
    chunk[1].eval()
    with pytest.raises(ZeroDivisionError), evaluating([chunk]):
        assert not any(module.training for module in chunk.modules())
        raise ZeroDivisionError
    assert [module.training for module in chunk.modules()] == [True, True, False]
