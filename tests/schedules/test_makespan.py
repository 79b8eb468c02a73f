"""The priced time of a step in pairs against the runtime itself, on ranks whose clocks are made up.

The ranks are threads. A stage computes nothing but the time: the values of its output are the time
at which it was ready, and so are the values of its input's gradient.
"""

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.config.parallel import PAIRED_SCHEDULES, SPLIT_SCHEDULES
from megatron_ext.device import cuda_shim
from megatron_ext.layers.transformer_config import StepTransformerConfig
from megatron_ext.layers.weight_gradients import DeferredWeightGradients
from megatron_ext.parallel.turns import Turns
from megatron_ext.schedules.pair_time import Piece, pair_time
from megatron_ext.schedules.plan import Durations
from megatron_ext.schedules.price import price
from megatron_ext.schedules.runtime import PipelineEngine
from tests.schedules.test_messages import CHUNKS, context_of, on_threads

SHAPE = (1, 1, 1)


class Rank:
    """The clock of a rank, and the time at which its network is free again."""

    now = network = 0.0

    def __init__(self) -> None:
        self.turns = Turns()
        self.queue = DeferredWeightGradients()

    def run(self, ready: Tensor, pieces: list[Piece]) -> Tensor:
        """Compute the pieces as soon as ``ready``; return the time, shaped like ``ready``."""
        self.now = max(self.now, float(ready.max()))
        for computing, exchange in pieces:
            self.now += computing
            if exchange:
                self.network = max(self.network, self.now) + exchange
                arrives = self.network
                self.turns.give_way()
                self.now = max(self.now, arrives)
        return torch.full_like(ready, self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds


class Stage(torch.nn.Module):
    def __init__(self, rank: Rank, ahead: list[Piece], back: list[Piece], late: float) -> None:
        super().__init__()
        self.rank = rank
        self.ahead = ahead
        self.back = back
        self.late = late
        self.entering: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        self.entering = tensors[0]

    def forward(self, _microbatch: int) -> Tensor:
        entering = self.entering
        if entering is None:
            entering = torch.zeros(SHAPE, requires_grad=True)
        output: Tensor = _Pass.apply(entering, self)  # type: ignore[no-untyped-call]
        return output


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, entering: Tensor, stage: Stage) -> Tensor:
        ctx.stage = stage
        return stage.rank.run(entering, stage.ahead)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        stage: Stage = ctx.stage
        if stage.late:
            stage.rank.queue.add(lambda: stage.rank.wait(stage.late))
        return stage.rank.run(gradient, stage.back), None


def step(batch: int, model: Any, _counts: None) -> tuple[Tensor, Any]:
    # The gradient of the loss is ready at once.
    return model(batch), lambda x: (0 * x.sum(), torch.tensor(1, dtype=torch.int), {})


@pytest.fixture(autouse=True)
def _on_a_cpu() -> None:
    cuda_shim.install()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("schedule", PAIRED_SCHEDULES)
def test_a_step_in_pairs_takes_as_long_as_its_price_says(schedule: str, size: int) -> None:
    draw = random.Random(f"{schedule} {size}")
    size = 1 if schedule == "no-pipelining" else size
    forward, inputs, weights, exchange = (draw.uniform(1, 2) for _ in range(4))
    splits = schedule in SPLIT_SCHEDULES
    layers = 2
    ahead = [(forward / 4, exchange / 4)] * (2 * layers)
    each = (inputs + (0 if splits else weights)) / 4
    back = [(0.0, exchange / 4), *[(each, exchange / 4)] * (2 * layers - 1), (each, 0.0)]
    late = weights if splits else 0.0
    alone = forward + inputs + weights + 2 * exchange
    hidden = alone - pair_time([*back[:-1], (each + late, 0.0)], ahead)
    ranks = [Rank() for _ in range(size)]
    plans = []
    lock = threading.Lock()

    def body(index: int) -> None:
        rank = ranks[index]
        with lock:
            config: Any = StepTransformerConfig(
                num_layers=8,
                hidden_size=1,
                num_attention_heads=1,
                pipeline_model_parallel_size=size,
                pipeline_dtype=torch.float32,
                moe_token_dispatcher_type="alltoall",
                calculate_per_token_loss=True,
                deallocate_pipeline_outputs=False,
                weight_gradients=rank.queue,
                turns=rank.turns,
            )
        chunks = [Stage(rank, ahead, back, late) for _ in range(CHUNKS.get(schedule, 1))]
        engine = PipelineEngine(schedule, chunks, config, context_of(schedule, size, index))
        plans.append(engine.plan(12, forward_only=False))
        engine.run(step, range(12), 12, SHAPE)

    on_threads(size, body)
    times = Durations(forward + exchange, inputs + exchange, weights, hidden)
    priced = price(plans[0], times).makespan
    simulated = max(rank.now for rank in ranks)
    assert hidden > exchange
    assert simulated == pytest.approx(priced, rel=0.03)
