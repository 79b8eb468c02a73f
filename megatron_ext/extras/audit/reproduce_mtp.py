"""Reproduces defects of megatron-core's multi-token prediction (MTP) on one stage.

These are D4, D5 and D9 to D14 of `defects.yaml`. An MTP depth is a module that predicts further
ahead. How much each of its targets weighs in a step of megatron-core is read from the gradients of
the logits: the gradient for a target is its weight times ``softmax - one-hot``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper, roll_tensor
from torch import Tensor

from megatron_ext.extras.audit.reproduced import Reproduced, Reproductions, on_ranks
from megatron_ext.extras.audit.stock_gpt import LENGTH, sequences, stock_gpt
from megatron_ext.parallel.context import ParallelContext

RAGGED = (20, 3, 29, 9)
"""Number of targets in each of four sequences; the other positions are masked."""


def _mask(targets: tuple[int, ...]) -> Tensor:
    """Return a mask ``[sequences, LENGTH]`` that is 1 at targets and 0 elsewhere.

    The targets of sequence i are its first ``targets[i]`` positions.
    """
    return (torch.arange(LENGTH) < torch.tensor(targets).unsqueeze(1)).float()


def _one_further(values: Tensor) -> Tensor:
    """Return ``[b, s]`` shifted left by one position, with 0 in the last position."""
    return F.pad(values[:, 1:], (0, 1))


def gradient_norm(module: torch.nn.Module) -> float:
    """Return the L2 norm of all gradients of a module."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return float(torch.stack([gradient.norm() for gradient in gradients]).norm())


@dataclass(frozen=True)
class Step:
    """Results of one step of megatron-core with one MTP depth.

    Attributes:
        losses: cross-entropy of the depth at each position by torch, ``[sequences, LENGTH]``.
        weights: factor of each of these losses in the gradient, ``[sequences, LENGTH]``.
        logged: the depth's loss in megatron-core's log.
        gradient: norm of the depth's gradient.
    """

    losses: Tensor
    weights: Tensor
    logged: float
    gradient: float


def mtp_step(
    context: ParallelContext,
    targets: tuple[int, ...],
    *,
    micro_batch: int = 1,
    per_token: bool = True,
) -> Step:
    """Run a step of megatron-core's GPTModel with one MTP depth, by megatron-core's schedule.

    The gradients are not divided by the number of targets.

    Args:
        targets: number of targets in each sequence; they come first, and the rest is masked.
        micro_batch: number of sequences in a micro-batch.
        per_token: ``calculate_per_token_loss`` of the model.
    """
    model = stock_gpt(context, mtp_num_layers=1, calculate_per_token_loss=per_token)
    tokens, labels, positions = sequences(len(targets))
    mask = _mask(targets)
    further = _one_further(labels)
    seen: list[tuple[Tensor, list[Tensor]]] = []

    def keep(_layer: Any, _inputs: Any, output: tuple[Tensor, Any]) -> None:
        gradient: list[Tensor] = []
        output[0].register_hook(gradient.append)  # type: ignore[no-untyped-call]
        # A copy, since megatron-core's cross-entropy overwrites the logits.
        seen.append((output[0].detach().clone(), gradient))

    def forward_step(data: Iterator[slice], chunk: Any) -> tuple[Tensor, Any]:
        rows = next(data)
        words = {"labels": labels[rows], "loss_mask": mask[rows].clone()}
        output = chunk(tokens[rows], positions[rows], None, **words)
        total = (output * mask[rows]).sum()
        count = mask[rows].sum().int()
        return output, lambda _output: (total, count, {})

    model.output_layer.register_forward_hook(keep)
    starts = range(0, len(targets), micro_batch)
    forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=iter([slice(start, start + micro_batch) for start in starts]),
        model=model,
        num_microbatches=len(starts),
        seq_length=LENGTH,
        micro_batch_size=micro_batch,
    )
    log: dict[str, Tensor] = {}
    MTPLossLoggingHelper.track_mtp_metrics(1 / len(starts), 1, None, total_loss_dict=log)
    # In each micro-batch the output layer gets the depth first, and the model's own states last.
    logits = torch.cat([kept for kept, _ in seen[::2]], dim=1).transpose(0, 1)
    gradients = torch.cat([gradient[0] for _, gradient in seen[::2]], dim=1).transpose(0, 1)
    slope = logits.softmax(-1) - F.one_hot(further, logits.size(-1))
    losses = F.cross_entropy(logits.flatten(0, 1).double(), further.flatten(), reduction="none")
    return Step(
        losses=losses.view_as(further),
        weights=(gradients * slope).sum(-1) / slope.square().sum(-1),
        logged=float(log["mtp_1 loss"]),
        gradient=gradient_norm(model.mtp),
    )


def _on_one_rank(targets: tuple[int, ...], **options: Any) -> Step:
    return on_ranks(partial(mtp_step, targets=targets, **options))[0]


def no_targets() -> Reproduced:
    """Measure D4 of `defects.yaml`: the gradient of an MTP depth if all targets are masked."""
    means = _on_one_rank((0,), per_token=False)
    return Reproduced(
        means.gradient,
        0.0,
        "Norm of the gradient of a depth of multi-token prediction in a step without targets, with "
        f"the mean of means (its logged loss is {means.logged:g}, and "
        f"{_on_one_rank((0,)).logged:g} per token, instead of 0).",
    )


def weight_of_a_target(targets: tuple[int, ...], *rows: int) -> list[float]:
    """Return the weights of some targets of the MTP depth, as multiples of the right weight.

    The right weight is the scaling factor (0.1) divided by the number of targets that the depth has
    in the whole step.

    Args:
        targets: number of targets of the main loss in each sequence; each sequence is a
            micro-batch.
        rows: indices of sequences; the weight of the first target of each is returned.
    """
    step = _on_one_rank(targets)
    right = 0.1 / sum(max(count - 1, 0) for count in targets)
    return [float(step.weights[row, 0]) / sum(targets) / right for row in rows]


def weight_of_a_depth() -> Reproduced:
    """Measure D5 of `defects.yaml`: the weight of one target of an MTP depth; 1 is right.

    The loss is per token, and the target is in the sequence with the fewest targets.
    """
    short = min(RAGGED)
    long = max(RAGGED)
    weights = weight_of_a_target(RAGGED, RAGGED.index(short), RAGGED.index(long))
    (full,) = weight_of_a_target((LENGTH,) * len(RAGGED), 0)
    return Reproduced(
        weights[0],
        1.0,
        f"Weight of a target of the first depth in the sequence with {short} of {sum(RAGGED)} "
        "targets, one sequence in a micro-batch, as a multiple of the right one (in the sequence "
        f"with {long} targets {weights[1]:.4f}, with no target masked {full:.4f}).",
    )


def logged_loss() -> Reproduced:
    """Measure D14 of `defects.yaml`: the logged loss of an MTP depth if target counts differ.

    Each sequence is a micro-batch; `RAGGED` has their numbers of targets.
    """
    step = _on_one_rank(RAGGED)
    whole = _on_one_rank(RAGGED, micro_batch=len(RAGGED))
    kept = _one_further(_mask(RAGGED))
    return Reproduced(
        step.logged,
        float((step.losses * kept).sum() / kept.sum()),
        f"Logged loss of the first depth with one of {len(RAGGED)} ragged sequences in a "
        f"micro-batch (with all of them in one {whole.logged:.4f}).",
    )


def _cumulative(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _shifted_padding(_context: ParallelContext) -> float:
    lengths = _cumulative(5, 6)
    padded = _cumulative(8, 8)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=lengths,
        cu_seqlens_kv=lengths,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
    )
    mask = torch.cat([torch.arange(8) < 5, torch.arange(8) < 6]).float().unsqueeze(0)
    return float(roll_tensor(mask, packed_seq_params=packed)[1])


def padded_packing() -> Reproduced:
    """Measure D9 of `defects.yaml`: how many targets an MTP depth has in padded packed samples."""
    return Reproduced(
        on_ranks(_shifted_padding)[0],
        (5 - 1) + (6 - 1),
        "Targets of the first depth in two packed samples of 5 and 6 tokens, each padded to 8.",
    )


def _shifted_short(context: ParallelContext) -> tuple[float, str]:
    lengths = _cumulative(2, 14)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    try:
        # Each rank holds half of each sample: 1 and 7 positions.
        count = roll_tensor(torch.ones(1, 8), cp_group=context.pgs.cp, packed_seq_params=packed)[1]
    except IndexError as error:
        return math.nan, f": IndexError ({error})"
    return float(count), ""


def short_packing() -> Reproduced:
    """Measure D10 of `defects.yaml`: the number of targets of an MTP depth on two CP ranks.

    One of the two packed samples is so short that a rank's slice of it is a single position.
    """
    by_rank = on_ranks(_shifted_short, cp=2)
    return Reproduced(
        sum(count for count, _ in by_rank),
        (2 - 1) + (14 - 1),
        "Targets of the first depth in two packed samples of 2 and 14 tokens at context-parallel "
        f"size 2{by_rank[0][1]}.",
    )


class _Attention(torch.nn.Module):
    """Causal core attention for packed samples, in place of megatron-core's, which refuses them.

    A sample also attends to the samples before it, which does not matter here.
    """

    def __init__(self, **_options: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_mask: Any, **_o: Any) -> Tensor:
        heads = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return mixed.transpose(0, 1).flatten(1)


def _recomputed(context: ParallelContext, recompute: bool) -> tuple[float, str]:
    options: dict[str, Any] = {"mtp_num_layers": 1}
    if recompute:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform"}
        options["recompute_num_layers"] = 1
    model = stock_gpt(context, positions="none", attention=_Attention, **options)
    lengths = _cumulative(LENGTH // 2, LENGTH // 2)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    tokens, labels, positions = sequences(1)
    try:
        losses = model(tokens, positions, None, labels=labels, packed_seq_params=packed)
    except TypeError as error:
        return math.nan, f": TypeError ({error})"
    losses.sum().backward()
    return gradient_norm(model.mtp), ""


def recomputed_packing() -> Reproduced:
    """Measure D11 of `defects.yaml`: the gradient norm of an MTP depth with packed samples.

    The depth is recomputed; the right norm is that without recomputation.
    """
    stock, error = on_ranks(partial(_recomputed, recompute=True))[0]
    return Reproduced(
        stock,
        on_ranks(partial(_recomputed, recompute=False))[0][0],
        "Norm of the gradient of a depth with packed samples and full recomputation; right is the "
        f"one without recomputation{error}.",
    )


def _logits_without_labels(context: ParallelContext) -> tuple[float, float, str]:
    model = stock_gpt(context, mtp_num_layers=1).eval()
    states: list[Tensor] = []
    model.decoder.register_forward_hook(lambda *called: states.append(called[-1].detach()))
    tokens, _, positions = sequences(1)
    with torch.no_grad():
        try:
            stock = float(model(tokens, positions, None).norm())
            error = ""
        except AttributeError as caught:
            stock = math.nan
            error = f": AttributeError ({caught})"
    return stock, float((states[0] @ model.output_layer.weight.T).norm()), error


def no_labels() -> Reproduced:
    """Measure D12 of `defects.yaml`: the norm of the logits if a model with MTP gets no labels."""
    stock, right, error = on_ranks(_logits_without_labels)[0]
    what = "Norm of the logits of a model with multi-token prediction that is given no labels"
    return Reproduced(stock, right, f"{what}{error}.")


PADDED = 12
"""Tokens of padding at the end of a sequence of `LENGTH`."""


def _routed(context: ParallelContext) -> list[float]:
    """Return, for each router, how many tokens it counts as not padding.

    The routers of the decoder layers come first, that of the MTP depth last.
    """
    model = stock_gpt(context, mtp_num_layers=1, num_moe_experts=4, moe_router_topk=2)
    counts: list[float] = []

    def count(_router: Any, inputs: tuple[Any, ...], words: dict[str, Any]) -> None:
        mask = words.get("padding_mask", inputs[1] if len(inputs) > 1 else None)
        counts.append(float(inputs[0].shape[:-1].numel() if mask is None else (~mask).sum()))

    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_pre_hook(count, with_kwargs=True)
    tokens, labels, positions = sequences(1)
    padding = (torch.arange(LENGTH) >= LENGTH - PADDED).unsqueeze(0)
    model(tokens, positions, None, labels=labels, loss_mask=~padding * 1.0, padding_mask=padding)
    return counts


def padding_of_a_depth() -> Reproduced:
    """Measure D13 of `defects.yaml`: how many tokens an MTP depth's router takes for real ones.

    The rest of the sequence is padding.
    """
    counts = on_ranks(_routed)[0]
    right = LENGTH - PADDED
    return Reproduced(
        counts[-1],
        right - 1,
        f"Tokens that the router of a depth counts in a sequence of {LENGTH} that ends with "
        f"{PADDED} of padding, shifted by one (the routers of the decoder count {counts[0]:g}).",
    )


REPRODUCTIONS: Reproductions = {
    "D4": no_targets,
    "D5": weight_of_a_depth,
    "D9": padded_packing,
    "D10": short_packing,
    "D11": recomputed_packing,
    "D12": no_labels,
    "D13": padding_of_a_depth,
    "D14": logged_loss,
}
