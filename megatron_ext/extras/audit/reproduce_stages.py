"""Reproduces defects of multi-token prediction (MTP) on several pipeline stages: D6, D7 and D8.

The stage with an MTP depth holds a copy of the first stage's embedding. megatron-core's model,
data-parallel wrapper, ``finalize_model_grads`` and optimizer must keep the copies equal.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import AdamOptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_ext.extras.audit.reproduced import Reproduced, Reproductions, on_ranks
from megatron_ext.extras.audit.stock_gpt import stock_gpt
from megatron_ext.parallel.context import ParallelContext

RATE, DECOUPLED_RATE = 1e-3, 1e-2


def _wrapped(context: ParallelContext, **options: Any) -> DistributedDataParallel:
    model = stock_gpt(context, mtp_num_layers=1, **options)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    wrapped.zero_grad_buffer()
    return wrapped


def _step_of_the_copy(context: ParallelContext) -> float:
    """Return how far an Adam step moves this stage's embedding or its copy, with gradients of 1."""
    model = _wrapped(context)
    config = AdamOptimizerConfig(
        lr=RATE, decoupled_lr=DECOUPLED_RATE, weight_decay=0.0, clip_grad=0.0
    )
    optimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=RATE,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=10,
        lr_decay_style="constant",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
    scheduler.step(increment=1)
    for parameter in model.parameters():
        parameter.main_grad.fill_(1.0)
    weight = model.module.embedding.word_embeddings.weight
    before = weight.detach().clone()
    optimizer.step()
    return float((weight.detach() - before).abs().max())


def decoupled_rate() -> Reproduced:
    """Measure D6 of `defects.yaml`: how far a step moves the copy of the embedding.

    It is on the last of two stages, for an MTP depth, and the run has ``--decoupled-lr``.
    """
    first, copy = on_ranks(_step_of_the_copy, pp=2)
    return Reproduced(
        copy,
        DECOUPLED_RATE,
        "Distance that one step of Adam moves the copy of the embedding on the last of two stages "
        f"with `--lr {RATE:g} --decoupled-lr {DECOUPLED_RATE:g}`; the embedding of the first stage "
        f"moves {first:.4g}.",
    )


def _summed_gradient(context: ParallelContext, tied: bool) -> tuple[float, float]:
    """Let ``finalize_model_grads`` sum the gradients of the embedding and its copies.

    Before the sum, the gradient on pipeline stage i is 2^i. ``tied`` makes the output layer one of
    the copies. The three stages hold the embedding, a copy for the MTP depth, and the output layer.

    Returns:
        The gradient of this stage's weight after the sum, and the norm of its initial values.
    """
    layout = {"pipeline_model_parallel_layout": "Ett|m|L"}
    model = _wrapped(context, tied=tied, **layout)
    holder = model.module
    last = context.is_last_stage
    weight = holder.output_layer.weight if last else holder.embedding.word_embeddings.weight
    weight.main_grad.fill_(2.0**context.pp_rank)
    finalize_model_grads([model])
    return float(weight.main_grad.mean()), float(weight.detach().norm())


def stage_of_its_own() -> Reproduced:
    """Measure D7 of `defects.yaml`: the embedding's gradient if an MTP depth has its own stage."""
    untied = on_ranks(partial(_summed_gradient, tied=False), pp=3)
    tied = on_ranks(partial(_summed_gradient, tied=True), pp=3)
    given = on_ranks(
        partial(_summed_gradient, tied=False), pp=3, get_embedding_ranks=lambda ranks: ranks[:2]
    )
    (first, first_norm), (copy, copy_norm), (output, _) = untied
    return Reproduced(
        first,
        1.0 + 2.0,
        "Gradient of the embedding on three stages, `Ett|m|L`, with an untied output layer and "
        "megatron-core's default embedding ranks, when the embedding gets 1, its copy beside the "
        f"depth 2 and the output layer 4 (the copy has {copy:g} of 3, the output layer {output:g} "
        f"of 4; tied, the three have {', '.join(f'{gradient:g}' for gradient, _ in tied)} of 7; "
        f"the copy starts with a norm of {copy_norm:.3g} instead of {first_norm:.3g}; with "
        f"`get_embedding_ranks` that names the first two stages, as Megatron-LM's pretrain_gpt.py "
        f"does, the embedding has {given[0][0]:g}).",
    )


def _positions(context: ParallelContext) -> tuple[float, Tensor]:
    model = _wrapped(context, positions="learned_absolute")
    weight = model.module.embedding.position_embeddings.weight
    start = weight.detach().clone()
    weight.main_grad.fill_(2.0**context.pp_rank)
    finalize_model_grads([model])
    return float(weight.main_grad.mean()), start


def learned_positions() -> Reproduced:
    """Measure defect D8 of `defects.yaml`: position embeddings get only a part of their gradient.

    The first of two pipeline stages holds learned position embeddings. The second has a layer for
    multi-token prediction (MTP) with a copy of them, whose gradient should be added to theirs.
    """
    (first, start), (copy, start_of_copy) = on_ranks(_positions, pp=2)
    apart = float((start_of_copy - start).norm() / start.norm())
    return Reproduced(
        first,
        1.0 + 2.0,
        "Gradient of the learned positions of the first of two stages, when they get 1 and their "
        f"copy beside the depth 2 (the copy has {copy:g} of 3, and its first values are off by "
        f"{apart:.3g} of their norm).",
    )


REPRODUCTIONS: Reproductions = {
    "D6": decoupled_rate,
    "D7": stage_of_its_own,
    "D8": learned_positions,
}
