"""Reproduces defects D1 to D3, D25 to D28 and D43 of `defects.yaml`, in the router of experts.

The router of the installed megatron-core runs a step: micro-batches forward and backward, then its
data-parallel wrapper and ``finalize_model_grads``, as in a run with ``--calculate-per-token-loss``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_ext.core import take_auxiliary_losses
from megatron_ext.extras.audit.reproduced import Reproduced, Reproductions, on_ranks
from megatron_ext.parallel.context import ParallelContext

HIDDEN, EXPERTS, TOPK = 16, 4, 2
LENGTH, SEQUENCES = 8, 8
COEFFICIENT = 0.01
TOKENS, MICROBATCHES = 24, 400
"""Tokens of a micro-batch, and micro-batches of the step in which D43 is measured."""
BIAS: dict[str, Any] = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}


class _PlainGating(TopKRouter):  # type: ignore[misc]
    """megatron-core's router, but torch computes its logits instead of Transformer Engine."""

    def gating(self, input: Tensor) -> Tensor:
        return torch.nn.functional.linear(input, self.weight, self.bias)


def router_class() -> type[TopKRouter]:
    """Return megatron-core's router class, or a subclass of it that computes logits by torch.

    The subclass is needed where megatron-core's own cannot compute logits (D25 of `defects.yaml`).
    """
    return TopKRouter if hasattr(moe_utils, "te_general_gemm") else _PlainGating


def auxiliary_flags(kind: str) -> dict[str, Any]:
    """Return the fields of the TransformerConfig that turn on an auxiliary loss.

    ``kind`` is ``aux_loss``, ``seq_aux_loss`` or ``z_loss``.
    """
    if kind == "z_loss":
        return {"moe_z_loss_coeff": COEFFICIENT}
    return {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": COEFFICIENT}


def stock_router(
    context: ParallelContext, cls: type[TopKRouter] | None = None, **options: Any
) -> TopKRouter:
    """Return a router of megatron-core for layer 1 and the parallel sizes of ``context``.

    ``cls`` is the class of the router; None takes `router_class`. ``options`` are fields of the
    TransformerConfig.
    """
    base = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "add_bias_linear": False,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOPK,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "calculate_per_token_loss": True,
        "tensor_model_parallel_size": context.pgs.tp.size(),
        "sequence_parallel": context.pgs.tp.size() > 1,
        "context_parallel_size": context.pgs.cp.size(),
    }
    config = TransformerConfig(**{**base, **options})
    router = (cls or router_class())(config, pg_collection=context.pgs)
    router.set_layer_number(1)
    return router


def auxiliary_loss(kind: str, hidden: Tensor, weight: Tensor) -> Tensor:
    """Return an auxiliary loss by its published formula, times its coefficient.

    Args:
        kind: an argument of `auxiliary_flags`.
        hidden: the router's input in one micro-batch, ``[s, b, h]``.
        weight: the router's weight, ``[experts, h]``.
    """
    logits = hidden @ weight.T
    if kind == "z_loss":
        return COEFFICIENT * logits.logsumexp(-1).square().mean()
    # Switch Transformers, arXiv:2101.03961, eq. 4 to 6, for the k experts of a token.
    probs = logits.softmax(-1)
    chosen = torch.zeros_like(probs).scatter(-1, logits.topk(TOPK, dim=-1).indices, 1.0)
    over = (0, 1) if kind == "aux_loss" else (0,)
    fractions = chosen.mean(over) / TOPK
    means = probs.mean(over)
    return COEFFICIENT * EXPERTS * (fractions * means).sum(-1).mean()


def _own_positions(full: Tensor, context: ParallelContext) -> Tensor:
    """Return this rank's positions of ``[s, ...]`` under context and sequence parallelism."""
    cp = context.pgs.cp
    tp = context.pgs.tp
    pieces = full.chunk(2 * cp.size())
    both = torch.cat([pieces[cp.rank()], pieces[2 * cp.size() - 1 - cp.rank()]])
    own: Tensor = both.chunk(tp.size())[tp.rank()]
    return own


def auxiliary_share(
    context: ParallelContext, router: TopKRouter, kind: str, *, micro_batch: int, targets: int
) -> float:
    """Return the gradient of an auxiliary loss after a step, as a multiple of the right one.

    The right gradient is that of the mean over all micro-batches, in double precision; the main
    loss is 0. The step has `SEQUENCES` sequences of `LENGTH` tokens.

    Args:
        router: a router with this auxiliary loss.
        kind: the loss, as in `auxiliary_flags`.
        micro_batch: sequences in a micro-batch.
        targets: number of tokens of the step that are not masked.

    Raises:
        ArithmeticError: the gradient is not a multiple of the right one.
    """
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(LENGTH, SEQUENCES, HIDDEN, generator=generator)
    batches = torch.split(hidden, micro_batch, dim=1)
    full = torch.randn(EXPERTS, HIDDEN, generator=generator) * 0.5
    with torch.no_grad():
        router.weight.copy_(full)
    model = DistributedDataParallel(router.config, DistributedDataParallelConfig(), router)
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    for batch in batches:
        (0 * model(_own_positions(batch, context))[0].sum()).backward()
    local_targets = torch.tensor([targets // context.pgs.dp_cp.size()], dtype=torch.int)
    finalize_model_grads([model], local_targets)

    weight = full.double().requires_grad_()
    losses = [auxiliary_loss(kind, batch.double(), weight) for batch in batches]
    (right,) = torch.autograd.grad(torch.stack(losses).mean(), weight)
    gradient = router.weight.main_grad.double()
    multiple = float((gradient * right).sum() / right.square().sum())
    if float((gradient - multiple * right).norm()) > 1e-4 * max(multiple, 1.0) * right.norm():
        raise ArithmeticError(f"The gradient of {kind} is not a multiple of the right one.")
    return multiple


def _stock_share(context: ParallelContext, kind: str, micro_batch: int, targets: int) -> float:
    router = stock_router(context, **auxiliary_flags(kind))
    return auxiliary_share(context, router, kind, micro_batch=micro_batch, targets=targets)


def share_of(
    kind: str,
    *,
    micro_batch: int = 1,
    targets: int = LENGTH * SEQUENCES,
    **sizes: Any,
) -> float:
    """Return the gradient of an auxiliary loss, as a multiple of the right one.

    It is measured with megatron-core's router on forked ranks with the parallel ``sizes``
    (`layout_of`). `auxiliary_share` explains the other arguments.
    """
    measure = partial(_stock_share, kind=kind, micro_batch=micro_batch, targets=targets)
    return on_ranks(measure, **sizes)[0]


def parallel_ranks() -> Reproduced:
    """Measure D1 of `defects.yaml`: the gradient of an auxiliary loss with sharded tokens."""
    context = share_of("aux_loss", cp=2)
    z_loss = share_of("z_loss", tp=2)
    return Reproduced(
        share_of("aux_loss", tp=2),
        1.0,
        "Gradient of the load-balancing loss at tensor-parallel size 2 with sequence parallelism, "
        f"as a multiple of the right one (at context-parallel size 2 {context:.4f}, of the z-loss "
        f"{z_loss:.4f}).",
    )


def masked_targets() -> Reproduced:
    """Measure D2 of `defects.yaml`: an auxiliary loss's gradient if half of the targets are masked.

    The figure, as in D1, D3 and D28, is a multiple of the right gradient.
    """
    half = LENGTH * SEQUENCES // 2
    return Reproduced(
        share_of("aux_loss", targets=half),
        1.0,
        "Gradient of the load-balancing loss with half of the targets masked, as a multiple of the "
        f"right one (of the z-loss {share_of('z_loss', targets=half):.4f}).",
    )


def sequences_of_a_micro_batch() -> Reproduced:
    """Measure D3 of `defects.yaml`: the gradient of ``seq_aux_loss`` in micro-batches of 4."""
    return Reproduced(
        share_of("seq_aux_loss", micro_batch=4),
        1.0,
        "Gradient of `seq_aux_loss` with micro-batches of 4 sequences, as a multiple of the right "
        f"one (with 1 sequence {share_of('seq_aux_loss'):.4f}).",
    )


def no_targets() -> Reproduced:
    """Measure D28 of `defects.yaml`: an auxiliary loss's gradient if all targets are masked."""
    multiple = share_of("aux_loss", targets=0)
    return Reproduced(
        multiple,
        0.0,
        f"Gradient of the load-balancing loss of a step of {LENGTH * SEQUENCES} tokens without "
        "targets, as a multiple of that of its mean; without a number to divide by it should be 0.",
    )


def _logits(context: ParallelContext) -> tuple[float, float, str]:
    router = stock_router(context, TopKRouter)
    hidden = torch.randn(LENGTH, 1, HIDDEN)
    right = float((hidden.double() @ router.weight.double().T).norm())
    try:
        return float(router.gating(hidden).double().norm()), right, ""
    except NameError as error:
        return float("nan"), right, str(error)


def router_without_transformer_engine() -> Reproduced:
    """Measure D25 of `defects.yaml`: the norm of the router's logits without Transformer Engine."""
    stock, right, error = on_ranks(_logits)[0]
    what = "Norm of the router's logits of 8 tokens without Transformer Engine"
    return Reproduced(stock, right, f"{what}{f': NameError ({error})' if error else ''}.")


def _counted(context: ParallelContext) -> list[float]:
    router = stock_router(context, **BIAS)
    # Every token has chosen every expert, and one token is padding.
    router._apply_expert_bias(
        torch.ones(EXPERTS, EXPERTS, dtype=torch.bool), torch.arange(EXPERTS) == 1
    )
    counts: list[float] = router.local_tokens_per_expert.tolist()
    return counts


def padding_of_the_expert_bias() -> Reproduced:
    """Measure D26 of `defects.yaml`: how many tokens are counted for an expert's bias.

    Each of 4 experts gets all of 4 tokens, one of which is padding and should not count.
    """
    counts = on_ranks(_counted)[0]
    return Reproduced(
        counts[1],
        EXPERTS - 1.0,
        f"Tokens counted for the second of {EXPERTS} experts, which all of {EXPERTS} tokens chose, "
        f"of which the second is padding (for all experts: {counts}).",
    )


def _counted_in_16_bits(context: ParallelContext) -> list[tuple[float, float]]:
    """Return, for each expert, what its token counter shows after a step, and the true count.

    The counter is stored in bf16, which rounds large counts.
    """
    router = stock_router(context, bf16=True, params_dtype=torch.bfloat16, **BIAS)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=generator))
    model = Float16Module(router.config, router)
    right = torch.zeros(EXPERTS, dtype=torch.long)
    for _ in range(MICROBATCHES):
        hidden = torch.randn(TOKENS, 1, HIDDEN, generator=generator).bfloat16()
        right += model.module(hidden)[1].reshape(-1, EXPERTS).sum(0)
    return list(zip(router.local_tokens_per_expert.tolist(), right.tolist(), strict=True))


def counts_in_16_bits() -> Reproduced:
    """Measure D43 of `defects.yaml`: the tokens counted for the expert bias in a bf16 model."""
    counts = on_ranks(_counted_in_16_bits)[0]
    stock, right = max(counts, key=lambda pair: pair[1] - pair[0])
    all_of_them = ", ".join(f"{mine:.0f} of {truth}" for mine, truth in counts)
    return Reproduced(
        stock,
        float(right),
        "Tokens counted for an expert with --bf16 --moe-router-enable-expert-bias, of a step of "
        f"{MICROBATCHES} micro-batches of {TOKENS} tokens (for each expert: {all_of_them}).",
    )


def _log_size(context: ParallelContext, experts: bool) -> int:
    """Return the number of entries in a stage's log of auxiliary losses.

    With ``experts``, the stage first runs a router that logs a load-balancing loss.
    """
    auxiliary = auxiliary_flags("aux_loss")
    router = stock_router(context, num_layers=4, mtp_num_layers=1, **auxiliary)
    if experts:
        router(torch.randn(LENGTH, 1, HIDDEN))
    size: dict[str, Any] = {"num_layers": 4, "mtp_num_layers": 1, "pg_collection": context.pgs}
    names = ["load_balancing_loss"]
    # Newer releases have an object for the log.
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        report = moe_utils.get_moe_metrics_tracker().report
    else:
        report = moe_utils.track_moe_metrics
    report(1.0, 1, force_initialize=True, track_names=names, **size)
    return take_auxiliary_losses()["load_balancing_loss"].numel()


def log_without_experts() -> Reproduced:
    """Measure D27 of `defects.yaml`: the length of a stage's log of load-balancing losses.

    The stage has no experts; the right length is that of a stage with experts.
    """
    without, with_experts = (on_ranks(partial(_log_size, experts=x))[0] for x in (False, True))
    return Reproduced(
        without,
        with_experts,
        "Entries of the log of load balancing on a stage without experts, 4 layers and 1 depth of "
        "multi-token prediction in all; stages with experts, with which they are added up, have "
        f"{with_experts}.",
    )


REPRODUCTIONS: Reproductions = {
    "D1": parallel_ranks,
    "D2": masked_targets,
    "D3": sequences_of_a_micro_batch,
    "D25": router_without_transformer_engine,
    "D26": padding_of_the_expert_bias,
    "D27": log_without_experts,
    "D28": no_targets,
    "D43": counts_in_16_bits,
}
