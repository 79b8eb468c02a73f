"""Defects of megatron-core's schedules (docs/numerics.md), and what we do instead."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_with_interleaving
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.inspect.audit import reproduce_losses as losses
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext
from tests.numerics.reproductions import check_ratio
from tests.ranks import ranks
from tests.training_runs import TINY, config_of, errors_of, mock_data

LENGTH, BATCH, WIDTH, MICROBATCHES = 64, 2, 32, 8
FACTORS = (0.5, 1.25, 1.5, 0.75)


class Factor(MegatronModule):  # type: ignore[misc]
    """One stage: the input times a number; the first stage makes its own input."""

    def __init__(self, config: TransformerConfig, stage: int) -> None:
        super().__init__(config=config)
        self.stage = stage
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage: int | None = stage // 2
        self.weight = torch.nn.Parameter(torch.tensor(FACTORS[stage]))
        self.entering: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        self.entering = tensors[0]

    def forward(self, microbatch: int) -> Tensor:
        shape = (LENGTH, BATCH, WIDTH)
        entering = torch.full(shape, float(microbatch + 1)) if self.stage == 0 else self.entering
        return entering * self.weight


def interleaved(**messages: bool) -> TransformerConfig:
    return TransformerConfig(
        num_layers=4,
        hidden_size=WIDTH,
        num_attention_heads=1,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,
        **messages,
    )


def gradient_errors(context: ParallelContext, transformer_config: TransformerConfig) -> Tensor:
    """Return the relative errors of all four stages' gradients under core's own schedule."""
    chunks = [Factor(transformer_config, 2 * index + context.pp_rank) for index in range(2)]

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
    inputs = LENGTH * BATCH * WIDTH * sum(range(1, MICROBATCHES + 1))
    errors = torch.zeros(4)
    for chunk in chunks:
        truth = inputs * torch.tensor(FACTORS).prod() / chunk.weight.detach()
        errors[chunk.stage] = (chunk.weight.grad / truth - 1).abs().nan_to_num(nan=1e9)
    torch.distributed.all_reduce(errors, group=context.pgs.pp)
    return errors


EXACT = {"batch_p2p_comm": False, "overlap_p2p_comm": True, "deallocate_pipeline_outputs": False}


@ranks(pp=2, vpp=2)
def test_d15_stock_swaps_batched_messages_between_two_stages(context: ParallelContext) -> None:
    swapped = {**EXACT, "batch_p2p_comm": True, "overlap_p2p_comm": False}
    assert gradient_errors(context, interleaved(**swapped)).max() > 1e-2
    assert gradient_errors(context, interleaved(**EXACT)).max() <= 1e-6


@ranks(pp=2, vpp=2)
def test_d16_stock_frees_outputs_that_are_being_sent(context: ParallelContext) -> None:
    freed = interleaved(**{**EXACT, "deallocate_pipeline_outputs": True})
    # A race: most steps lose it.
    errors = [float(gradient_errors(context, freed).max()) for _ in range(8)]
    assert max(errors) > 1e-4
    for _ in range(8):
        assert gradient_errors(context, interleaved(**EXACT)).max() <= 1e-6


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("chunks", ["", "--num-virtual-stages-per-pipeline-rank 2"])
@pytest.mark.parametrize("core", ["", "core-"])
def test_d15_d16_no_run_has_either_configuration(stages: int, chunks: str, core: str) -> None:
    """Batched messages of virtual chunks are left to our own runtime, which does not use them."""
    schedule = core + ("interleaved" if chunks else "1f1b")
    words = f"--pipeline-model-parallel-size {stages} {chunks} --pipeline-schedule {schedule} "
    words += "--train-iters 1 --num-layers 8"
    made = build_transformer_config(config_of([*TINY, *mock_data(), *words.split()], ranks=stages))
    assert not (made.overlap_p2p_comm and made.deallocate_pipeline_outputs)
    if core and chunks:
        assert not made.batch_p2p_comm


def test_d20_stock_takes_a_flag_for_a_size_of_a_group() -> None:
    """`collect_non_loss_data`, False, is the factor of the loss in 0.16."""
    check_ratio(losses.d20, {"0.16": 0.0, "0.19": 1.0})


def test_d20_hybrid_context_parallelism_is_refused() -> None:
    words = [*TINY, *mock_data(), "--train-iters", "1", "--hybrid-context-parallel"]
    (error,) = errors_of(words)
    assert "`--hybrid-context-parallel`" in error and "not supported" in error
