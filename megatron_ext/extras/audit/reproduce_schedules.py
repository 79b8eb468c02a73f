"""Reproduces defects of megatron-core's interleaved pipeline schedule: D15 and D16.

There are four stages, two on each of two ranks. Each multiplies its input by a number, so that the
gradient of each number is a simple product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_with_interleaving
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.extras.audit.reproduced import Reproduced, Reproductions, on_ranks
from megatron_ext.parallel.context import ParallelContext

LENGTH, BATCH, WIDTH, MICROBATCHES = 64, 2, 32, 8
FACTORS = (0.5, 1.25, 1.5, 0.75)
STEPS = 8
"""Number of steps in which D16 of `defects.yaml` is measured; it may be absent from some steps."""


class Factor(MegatronModule):  # type: ignore[misc]
    """One stage: its input ``[s, b, h]`` times a number; the first stage creates its own input."""

    def __init__(self, config: TransformerConfig, stage: int) -> None:
        super().__init__(config=config)
        self.stage = stage
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage: int | None = stage // 2
        self.weight = torch.nn.Parameter(torch.tensor(FACTORS[stage]))
        self.entering: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Take the tensor that the previous stage sent."""
        self.entering = tensors[0]

    def forward(self, microbatch: int) -> Tensor:
        """Return this stage's output ``[s, b, h]`` for a micro-batch, numbered from 0.

        In the first stage, each element of the input is ``microbatch + 1``.
        """
        if self.stage == 0:
            return torch.full((LENGTH, BATCH, WIDTH), float(microbatch + 1)) * self.weight
        assert self.entering is not None
        return self.entering * self.weight


def _gradients(context: ParallelContext, **messages: bool) -> list[float]:
    """Return the gradients of this rank's stages after one step of megatron-core's schedule.

    ``messages`` are fields of the TransformerConfig, such as ``overlap_p2p_comm``.
    """
    config = TransformerConfig(
        num_layers=4,
        hidden_size=WIDTH,
        num_attention_heads=1,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,
        **messages,
    )
    chunks = [Factor(config, 2 * index + context.pp_rank) for index in range(2)]

    def step(data: Iterator[int], chunk: Factor) -> tuple[Tensor, Any]:
        return chunk(next(data)), lambda output: (output.sum(), torch.tensor(1), {})

    forward_backward_pipelining_with_interleaving(
        forward_step_func=step,
        data_iterator=[iter(range(MICROBATCHES)) for _ in chunks],
        model=chunks,
        num_microbatches=MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
    )
    return [math.nan if x.weight.grad is None else float(x.weight.grad) for x in chunks]


def _steps(context: ParallelContext, count: int, messages: dict[str, bool]) -> list[list[float]]:
    return [_gradients(context, **messages) for _ in range(count)]


def _worst(what: str, *, steps: int, **messages: bool) -> Reproduced:
    """Run some steps, and return the gradient that differs most from its right value.

    Args:
        what: a sentence about the measurement, without a full stop.
        steps: number of steps; the gradients of all stages in all steps are compared.
        messages: the argument of `_gradients`.
    """
    ranks = on_ranks(partial(_steps, count=steps, messages=messages), pp=2, vpp=2)
    inputs = LENGTH * BATCH * WIDTH * sum(range(1, MICROBATCHES + 1))
    pairs = [
        (gradient, inputs * math.prod(FACTORS) / FACTORS[2 * index + rank])
        for rank, all_steps in enumerate(ranks)
        for gradients in all_steps
        for index, gradient in enumerate(gradients)
    ]

    def error(pair: tuple[float, float]) -> float:
        return math.inf if math.isnan(pair[0]) else abs(pair[0] / pair[1] - 1)

    stock, right = max(pairs, key=error)
    wrong = sum(error(pair) > 1e-6 for pair in pairs)
    return Reproduced(stock, right, f"{what} ({wrong} of {len(pairs)} gradients are wrong).")


def batched_messages() -> Reproduced:
    """Measure D15 of `defects.yaml`: gradients with batched messages between interleaved stages."""
    return _worst(
        "Worst gradient of a chain of four virtual chunks on two stages with batched messages",
        steps=1,
        batch_p2p_comm=True,
        overlap_p2p_comm=False,
        deallocate_pipeline_outputs=False,
    )


def deallocated_outputs() -> Reproduced:
    """Measure D16 of `defects.yaml`: gradients with overlapped messages and deallocated outputs."""
    return _worst(
        "Worst gradient of a chain of four virtual chunks on two stages with overlapped messages "
        f"and deallocated outputs, in {STEPS} steps",
        steps=STEPS,
        batch_p2p_comm=False,
        overlap_p2p_comm=True,
        deallocate_pipeline_outputs=True,
    )


def neither() -> Reproduced:
    """Measure the gradients without batched messages and deallocated outputs: they are correct."""
    return _worst(
        "Worst gradient of a chain of four virtual chunks on two stages with overlapped messages",
        steps=STEPS,
        batch_p2p_comm=False,
        overlap_p2p_comm=True,
        deallocate_pipeline_outputs=False,
    )


REPRODUCTIONS: Reproductions = {"D15": batched_messages, "D16": deallocated_outputs}
