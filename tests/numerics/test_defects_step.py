"""Defects of megatron-core's schedules (docs/numerics.md), and what we do instead."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.optimizer import AdamOptimizerConfig, MegatronOptimizer, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_with_interleaving
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.inspect.audit import reproduce_losses as losses
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.optim.update import parts_of, update_parameters
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


class _Net(MegatronModule):  # type: ignore[misc]
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.arange(24.0).view(6, 4))
        self.bias = torch.nn.Parameter(torch.ones(6))


def with_a_bad_gradient(
    *, bf16: bool, distributed: bool
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Build a model, one of whose 30 gradients is NaN, and its optimizer."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, bf16=bf16, params_dtype=dtype
    )
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, grad_reduce_in_fp32=True
        ),
        _Net(config).to(dtype),
    )
    core = AdamOptimizerConfig(
        lr=0.1, bf16=bf16, params_dtype=dtype, use_distributed_optimizer=distributed, clip_grad=1.0
    )
    optimizer = get_megatron_optimizer(core, [model])
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    model.zero_grad_buffer()
    for parameter in model.parameters():
        parameter.main_grad.fill_(0.5)
    model.module.bias.main_grad[0] = math.nan
    model.finish_grad_sync()
    return model, optimizer


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
@ranks(dp=2)
def test_d21_one_bad_gradient_skips_the_step(
    context: ParallelContext, bf16: bool, distributed: bool
) -> None:
    """Core applies it: the weight is no number, and after the next loss no weight is."""
    stock, optimizer = with_a_bad_gradient(bf16=bf16, distributed=distributed)
    assert optimizer.step()[0]
    assert sum(int(parameter.isnan().sum()) for parameter in stock.parameters()) == 1

    model, optimizer = with_a_bad_gradient(bf16=bf16, distributed=distributed)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    result = update_parameters(optimizer, clip_grad=1.0)
    assert not result.applied and math.isnan(result.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def with_a_dense_overflow() -> MegatronOptimizer:
    """Build an fp16 optimizer with infinite dense gradients and finite ones of its expert."""
    config = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, fp16=True, params_dtype=torch.float16
    )
    net = _Net(config).to(torch.float16)
    net.bias.allreduce = False  # how megatron-core marks the weights of experts
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), net)
    core = AdamOptimizerConfig(
        lr=0.1, fp16=True, params_dtype=torch.float16, initial_loss_scale=8.0, hysteresis=1
    )
    optimizer = get_megatron_optimizer(core, [model])
    model.zero_grad_buffer()
    net.weight.main_grad.fill_(math.inf)
    net.bias.main_grad.fill_(0.5)
    return optimizer


@ranks(dp=2, ep=2)
def test_d39_dense_weights_and_experts_have_one_loss_scale(context: ParallelContext) -> None:
    """Core divides the gradients of the experts by 8 for ever, and multiplies the loss by 4."""
    stock = with_a_dense_overflow()
    assert not stock.step()[0]
    assert [float(part.get_loss_scale()) for part in parts_of(stock)] == [4.0, 8.0]

    optimizer = with_a_dense_overflow()
    assert not update_parameters(optimizer, clip_grad=1.0).applied
    assert [float(part.get_loss_scale()) for part in parts_of(optimizer)] == [4.0, 4.0]
