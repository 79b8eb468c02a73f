"""Reproduces defects D34 to D37 and D42 of `defects.yaml`, which are in megatron-core's layers.

A function such as `d34` returns the figure of the installed megatron-core and the right figure.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.extras.audit.reproduced import Reproduced, Reproductions, on_ranks
from megatron_ext.extras.audit.stock_gpt import sequences, stock_gpt
from megatron_ext.parallel.context import ParallelContext

HIDDEN = 8
TOKENS = 6
"""Tokens that each expert of a rank gets."""
ENDLESS = 12
"""Number of forward passes of a layer in one step at which its recomputation counts as endless."""


def _refusals(context: ParallelContext) -> list[str]:
    """Build megatron-core's attention and norm for a rank's parallel sizes; return their errors."""
    sizes = {"context_parallel_size": context.pgs.cp.size()}
    sizes["tensor_model_parallel_size"] = context.pgs.tp.size()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=4,
        sequence_parallel=context.pgs.tp.size() > 1,
        **sizes,
    )
    refused = []
    try:
        DotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=context.pgs)
    except AssertionError as error:
        refused.append(f"AssertionError: {error}")
    try:
        WrappedTorchNorm(config, 16)
    except AssertionError as error:
        refused.append(f"AssertionError: {error}")
    return refused


def d34() -> Reproduced:
    """Measure D34 of `defects.yaml`: how many layers can be built without Transformer Engine.

    There are two: attention at context-parallel size 2, and a norm with sequence parallelism. The
    figure is NaN unless both can be built.
    """
    attention = on_ranks(_refusals, cp=2)[0]
    norm = on_ranks(_refusals, tp=2)[0]
    refused = [*attention, *norm]
    what = (
        "layers without Transformer Engine that can be built, of attention with "
        f"--context-parallel-size 2 and a norm with --sequence-parallel: {'; '.join(refused)}"
    )
    return Reproduced(math.nan if refused else 2.0, 2.0, what)


def _inputs(rank: int) -> Tensor:
    """Return the hidden states ``[2 x TOKENS, h]`` for the two experts of a rank."""
    generator = torch.Generator().manual_seed(7 + rank)
    return torch.randn(2 * TOKENS, HIDDEN, generator=generator)


def _fill(experts: SequentialMLP, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in experts.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 2)


def _plain_gradients(experts: SequentialMLP, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Return the right gradients of the sum of the experts' squared outputs, by parameter name.

    Plain torch computes them in double precision. ``inputs`` are the tokens of each rank that holds
    these experts (`_inputs`).
    """
    weights = {name: p.detach().double().requires_grad_() for name, p in experts.named_parameters()}
    total = torch.zeros((), dtype=torch.float64)
    for part in inputs:
        for number, tokens in enumerate(part.double().chunk(2)):
            place = f"local_experts.{number}.linear_"
            inner = F.linear(tokens, weights[f"{place}fc1.weight"], weights.get(f"{place}fc1.bias"))
            fc2 = weights[f"{place}fc2.weight"], weights.get(f"{place}fc2.bias")
            total = total + F.linear(F.gelu(inner), *fc2).square().sum()
    gradients = torch.autograd.grad(total, list(weights.values()))
    return dict(zip(weights, gradients, strict=True))


def expert_gradients(
    context: ParallelContext, name: str, copies: bool
) -> tuple[float, float, float]:
    """Measure the gradients of one kind of expert parameters.

    Each rank holds two experts and has its own tokens for each of them. The gradients pass through
    megatron-core's data-parallel wrapper and ``finalize_model_grads``, as in a run.

    Args:
        name: the kind of parameter, such as ``fc1.weight``.
        copies: whether all ranks hold the same experts, so that gradients are summed.

    Returns:
        The norm of the gradients by megatron-core, the right norm, and the relative error of the
        gradients.
    """
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=HIDDEN,
        moe_ffn_hidden_size=HIDDEN,
        num_moe_experts=2 * context.pgs.ep.size(),
        add_bias_linear=name.endswith("bias"),
        tensor_model_parallel_size=context.pgs.tp.size(),
        sequence_parallel=True,
        expert_tensor_parallel_size=1,
        expert_model_parallel_size=context.pgs.ep.size(),
        calculate_per_token_loss=True,
    )
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = SequentialMLP(2, config, submodules, pg_collection=context.pgs)
    _fill(experts, seed=0 if copies else context.rank)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), experts)
    counts = torch.tensor([TOKENS, TOKENS])
    output, _ = model(_inputs(context.rank), counts, torch.ones(2 * TOKENS))
    output.square().sum().backward()
    finalize_model_grads([model], torch.tensor([1], dtype=torch.int))
    ranks = range(context.layout.world_size) if copies else [context.rank]
    right = _plain_gradients(experts, [_inputs(rank) for rank in ranks])
    kind = [n for n, _ in experts.named_parameters() if n.endswith(name)]
    mine = torch.cat([experts.get_parameter(n).main_grad.double().flatten() for n in kind])
    truth = torch.cat([right[n].flatten() for n in kind])
    return float(mine.norm()), float(truth.norm()), float((mine - truth).norm() / truth.norm())


def d35() -> Reproduced:
    """Measure D35 of `defects.yaml`: the norm of experts' gradients on two tensor-parallel ranks.

    Each rank holds a whole copy of the experts.
    """
    measure = partial(expert_gradients, name="fc1.weight", copies=True)
    stock, right, error = on_ranks(measure, tp=2, etp=1)[0]
    what = (
        "norm of the gradients of experts with --tensor-model-parallel-size 2 "
        "--sequence-parallel --expert-tensor-parallel-size 1 --expert-model-parallel-size 1; the "
        f"gradients are {error:.2g} of the right ones off"
    )
    return Reproduced(stock, right, what)


def d36() -> Reproduced:
    """Measure D36 of `defects.yaml`: the norm of the gradients of the experts' second biases.

    Each of two tensor-parallel ranks holds other experts.
    """
    measure = partial(expert_gradients, name="fc2.bias", copies=False)
    stock, right, error = on_ranks(measure, tp=2, ep=2, etp=1)[0]
    what = (
        "norm of the gradients of the second biases of experts with --tensor-model-parallel-size "
        "2 --sequence-parallel --expert-model-parallel-size 2; the gradients are "
        f"{error:.2g} of the right ones off"
    )
    return Reproduced(stock, right, what)


class CompressedQuery(torch.nn.Module):
    """The part of multi-latent attention that processes the compressed query.

    It stands in for megatron-core's MLASelfAttention, which release 0.16 cannot build without
    Transformer Engine. Its layers are megatron-core's own and have the same names as there.
    """

    def __init__(self, config: TransformerConfig, weight: Tensor, tp: ProcessGroup) -> None:
        super().__init__()
        self.q_layernorm = WrappedTorchNorm(config, weight.shape[1])
        self.linear_q_up_proj = ColumnParallelLinear(
            weight.shape[1],
            weight.shape[0],
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=tp,
        )
        self.linear_q_up_proj.weight.data.copy_(weight.chunk(tp.size())[tp.rank()])

    def forward(self, compressed: Tensor) -> Tensor:
        """Return this rank's part of the queries, ``[tokens, 2 * HIDDEN / tp]``."""
        queries: Tensor = self.linear_q_up_proj(self.q_layernorm(compressed))[0]
        return queries


def _query_norm(context: ParallelContext) -> tuple[float, float]:
    """Run a step of `CompressedQuery`, and measure the gradient of its ``q_layernorm``.

    Returns:
        The gradient's norm by megatron-core's ``finalize_model_grads``, and the right norm, by
        plain torch in double precision.
    """
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        qk_layernorm=True,
        tensor_model_parallel_size=context.pgs.tp.size(),
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
    )
    generator = torch.Generator().manual_seed(5)
    compressed = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(2 * HIDDEN, HIDDEN, generator=generator)
    layer = CompressedQuery(config, weight, context.pgs.tp)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), layer)
    model(compressed).square().sum().backward()
    finalize_model_grads([model], torch.tensor([1], dtype=torch.int))
    scale = torch.ones(HIDDEN, dtype=torch.float64, requires_grad=True)
    normed = F.layer_norm(compressed.double(), (HIDDEN,), scale, eps=config.layernorm_epsilon)
    (right,) = torch.autograd.grad(F.linear(normed, weight.double()).square().sum(), scale)
    return float(layer.q_layernorm.weight.main_grad.norm()), float(right.norm())


def d42() -> Reproduced:
    """Measure D42 of `defects.yaml`: the norm of the gradient of MLA's ``q_layernorm`` at TP 2."""
    stock, right = on_ranks(_query_norm, tp=2)[0]
    what = (
        "norm of the gradient of q_layernorm of multi-latent attention with --q-lora-rank "
        "--qk-layernorm --tensor-model-parallel-size 2"
    )
    return Reproduced(stock, right, what)


class EndlessError(Exception):
    """Raised to stop a recomputation that would never end."""


def _step(context: ParallelContext, **options: Any) -> tuple[float, float, str]:
    """Run one step of megatron-core's GPTModel; ``options`` are fields of its TransformerConfig.

    Return the norm of all gradients and the number of forward passes of the last MLP (both NaN
    after an error), and the error as text, or "".
    """
    torch.manual_seed(1)  # megatron-core draws the weights on a CPU from this generator
    model = stock_gpt(context, **options)
    passes = 0

    def count(*_inputs: Any) -> None:
        nonlocal passes
        passes += 1
        if passes >= ENDLESS:
            raise EndlessError(f"{ENDLESS} passes and no end")

    model.decoder.layers[-1].mlp.register_forward_pre_hook(count)
    tokens, labels, positions = sequences(2)
    try:
        model(tokens, positions, None, labels=labels).sum().backward()
    except (EndlessError, IndexError, AssertionError, RuntimeError) as error:
        return math.nan, math.nan, f"{type(error).__name__}: {error}"
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    return float(norm), float(passes), ""


SELECTIVE: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
PIECES: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 2,
}


def _recomputed(context: ParallelContext) -> tuple[float, list[str]]:
    """Run steps with recomputed layers.

    Returns:
        The number of forward passes of a recomputed MLP with biases, and a clause for each step
        that fails or has a wrong gradient.
    """
    clauses = []
    models: dict[str, dict[str, Any]] = {
        "3 layers": {"num_layers": 3},
        "multi-token prediction": {"mtp_num_layers": 1},
    }
    for name, options in models.items():
        right, _, _ = _step(context, **options)
        norm, _, error = _step(context, **options, **PIECES)
        if not abs(norm / right - 1) <= 1e-5:
            clauses.append(f"{name} in pieces of two: {error or f'a norm of {norm}, not {right}'}")
    # This must come last: after an error in a nested backward pass, autograd no longer works on a
    # rank.
    _, passes, error = _step(context, **SELECTIVE, add_bias_linear=True)
    if error:
        clauses.append(f"--recompute-modules mlp ends with {error}")
    return passes, clauses


def d37() -> Reproduced:
    """Measure D37 of `defects.yaml`: the forward passes of a recomputed MLP with biases."""
    ((stock, clauses),) = on_ranks(_recomputed)
    what = "forward passes of an MLP with biases in a step with recomputation"
    return Reproduced(stock, 2.0, "; ".join([what, *clauses]))


def _distributed(context: ParallelContext) -> tuple[float, float, str]:
    """Run a step with multi-token prediction and full recomputation.

    The inputs saved for recomputation are sharded over ranks (``distribute_saved_activations``).

    Returns:
        The norm of the gradients, the right norm, measured without sharding, and the error as text,
        or "".
    """
    depths = {**PIECES, "recompute_num_layers": 1, "mtp_num_layers": 1}
    right, _, _ = _step(context, **depths)
    stock, _, error = _step(context, **depths, distribute_saved_activations=True)
    return stock, right, error


REPRODUCTIONS: Reproductions = {
    "D34": d34,
    "D35": d35,
    "D36": d36,
    "D37": d37,
    "D42": d42,
}
