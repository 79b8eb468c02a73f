"""Reproduces defects D17 to D20 and D22 to D24 of `defects.yaml`.

They are in megatron-core's losses, and in how it divides losses by the number of tokens. A function
such as `d17` returns the figure of the installed megatron-core and the right figure.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import distributed
from megatron.core.enums import ModelType
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.pipeline_parallel.hybrid_cp_schedule import (
    hybrid_context_parallel_forward_backward,
)
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.extras.audit.reproduced import Reproduced, Reproductions, on_ranks
from megatron_ext.parallel.context import ParallelContext

MICROBATCHES = 4
VOCABULARY = 64
FACTOR = 2.0
Loss = Callable[[Tensor], tuple[Any, ...]]


class Scale(MegatronModule):  # type: ignore[misc]
    """A model with one weight: it returns the weight, initially 2, times ``[1, 2, 3]``.

    So the weight's gradient is a sum over three positions.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.tensor(FACTOR))
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, _tensor: Tensor | None) -> None:
        """Ignore the input, since a single stage has none."""

    def forward(self) -> Tensor:
        """Return the weight times ``[1, 2, 3]``."""
        return self.weight * torch.tensor([1.0, 2.0, 3.0])


def _tiny(**changes: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=2, num_attention_heads=1, **changes)


def train_step(loss: Loss, *, per_token: bool) -> tuple[float, list[Any]]:
    """Run one step of megatron-core's schedule with the model `Scale`.

    Args:
        loss: takes the model's output ``[3]``; returns the loss, the number of its targets (may be
            left out), and a dictionary for the log.
        per_token: whether the gradient is divided by the number of targets of the whole step.

    Returns:
        The gradient of the model's weight, and the logged dictionary of each of the `MICROBATCHES`
        micro-batches.
    """
    transformer_config = _tiny(calculate_per_token_loss=per_token)
    transformer_config.finalize_model_grads_func = distributed.finalize_model_grads
    model = distributed.DistributedDataParallel(
        transformer_config, distributed.DistributedDataParallelConfig(), Scale(transformer_config)
    )

    def forward_step(_data: Iterator[Any], chunk: torch.nn.Module) -> tuple[Tensor, Loss]:
        return chunk(), loss

    reports = forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=iter(()),
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=3,
        micro_batch_size=1,
    )
    return float(model.module.weight.main_grad), reports


def weighted_loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of the outputs, a fractional number of targets (2.5), and an empty log."""
    return output.sum(), torch.tensor(2.5), {}


def mean_loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean of the outputs and an empty log, without the number of targets."""
    return output.mean(), {}


def logging_loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of the three outputs, their number, and a log that holds the detached sum."""
    total = output.sum()
    return total, torch.tensor(3), {"lm loss": total.detach()}


def _fractional_count(_context: ParallelContext) -> tuple[float, str]:
    try:
        return train_step(weighted_loss, per_token=True)[0], "was divided by the weights"
    except RuntimeError as error:
        return math.nan, f"raised RuntimeError: {error}"


def d17() -> Reproduced:
    """Measure D17 of `defects.yaml`: the gradient of a loss whose number of targets is 2.5."""
    ((stock, outcome),) = on_ranks(_fractional_count)
    what = f"gradient per token of a loss whose count of targets is the fraction 2.5: it {outcome}"
    return Reproduced(stock, sum((1.0, 2.0, 3.0)) / 2.5, what)


def _logged(_context: ParallelContext) -> float:
    return float(train_step(logging_loss, per_token=False)[1][0]["lm loss"])


def d18() -> Reproduced:
    """Measure D18 of `defects.yaml`: the logged loss if it shares its memory with the loss itself.

    `logging_loss` logs the detached tensor that it also returns as the loss.
    """
    (stock,) = on_ranks(_logged)
    what = (
        "logged loss of a micro-batch whose detached sum over 3 targets is also the loss, which "
        f"the schedule divides in place by the targets and by {MICROBATCHES} micro-batches"
    )
    return Reproduced(stock, FACTOR * sum((1.0, 2.0, 3.0)), what)


def _uncounted(_context: ParallelContext) -> float:
    return train_step(mean_loss, per_token=True)[0]


def d19() -> Reproduced:
    """Measure D19 of `defects.yaml`: the gradient of a loss that returns no number of targets.

    The run has two context-parallel ranks and ``--calculate-per-token-loss``.
    """
    stock = on_ranks(_uncounted, cp=2)[0]
    replicated = on_ranks(_uncounted, dp=2)[0]
    what = (
        "gradient with --calculate-per-token-loss of a loss that returns two values, so no count, "
        f"with --context-parallel-size 2; on 2 data-parallel ranks it is {replicated:.4g}"
    )
    return Reproduced(stock, sum((1.0, 2.0, 3.0)) / 3, what)


def _hybrid_context_parallel(_context: ParallelContext) -> float:
    transformer_config = _tiny()
    chunk = Scale(transformer_config)

    def forward_step(data: Iterator[Any], model: torch.nn.Module) -> tuple[Tensor, Loss]:
        next(data)
        return model(), mean_loss

    given = {
        "forward_step_func": forward_step,
        # One sample, and the samples of each rank in each group that runs without a barrier.
        "data_iterator": iter([([{}], [[[0]]])]),
        "model": chunk,
        "num_microbatches": 1,
        "forward_data_store": [],
        "config": transformer_config,
        "collect_non_loss_data": False,
        "forward_only": False,
        "no_sync_func": nullcontext,
        "total_num_tokens": 0,
        "check_first_val_step": lambda *_: False,
        "model_type": ModelType.encoder_or_decoder,
    }
    names = inspect.signature(hybrid_context_parallel_forward_backward).parameters
    hybrid_context_parallel_forward_backward(**{name: given.get(name) for name in names})
    assert chunk.weight.grad is not None
    return float(chunk.weight.grad)


def d20() -> Reproduced:
    """Measure D20 of `defects.yaml`: a mean loss's gradient with ``--hybrid-context-parallel``."""
    (stock,) = on_ranks(_hybrid_context_parallel)
    what = "gradient of the mean loss of a sample under the schedule of --hybrid-context-parallel"
    return Reproduced(stock, sum((1.0, 2.0, 3.0)) / 3, what)


def logits_and_labels() -> tuple[Tensor, Tensor]:
    """Return logits ``[16, 2, v]`` in fp32 and labels ``[16, 2]``."""
    generator = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(16, 2, VOCABULARY, generator=generator)
    return logits, torch.randint(0, VOCABULARY, (16, 2), generator=generator)


def logit_gradients(loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the gradients of the logits under ``loss``, and the correct ones, ``[16, 2, v]``.

    ``loss`` takes logits and labels and returns a loss for each label. The correct gradients are
    those of torch's cross-entropy in double precision.
    """
    logits, labels = logits_and_labels()
    exact = logits.double().requires_grad_()
    F.cross_entropy(exact.view(-1, VOCABULARY), labels.view(-1), reduction="sum").backward()  # type: ignore[no-untyped-call]
    mine = logits.clone().requires_grad_()
    # The loss overwrites its input, and a leaf tensor must not be overwritten.
    loss(mine * 1.0, labels).sum().backward()  # type: ignore[no-untyped-call]
    assert mine.grad is not None and exact.grad is not None
    return mine.grad.double(), exact.grad


def farthest(mine: Tensor, right: Tensor) -> tuple[float, float]:
    """Return the entry of ``mine`` that differs most from ``right``, and the right entry there."""
    worst = int((mine - right).abs().argmax())
    return float(mine.flatten()[worst]), float(right.flatten()[worst])


def _fused_gradient(context: ParallelContext) -> tuple[float, float, float]:
    group = context.pgs.tp
    fused, right = logit_gradients(lambda x, y: fused_vocab_parallel_cross_entropy(x, y, group))
    unfused, _ = logit_gradients(vocab_parallel_cross_entropy)
    return *farthest(fused, right), float((unfused - right).abs().max() / right.abs().max())


def d22() -> Reproduced:
    """Measure D22 of `defects.yaml`: a logit's gradient under fused cross-entropy in fp32.

    The logit is the one whose gradient is farthest from the right one.
    """
    ((stock, right, unfused),) = on_ranks(_fused_gradient)
    what = (
        "gradient, in fp32, of the logit that is farthest off with --cross-entropy-loss-fusion; "
        f"without it the largest error is {unfused:.0e} of the largest gradient"
    )
    return Reproduced(stock, right, what)


def _logit_after_the_loss(_context: ParallelContext) -> tuple[float, float]:
    logits, labels = logits_and_labels()
    given = logits.clone()
    vocab_parallel_cross_entropy(given, labels)
    return farthest(given, logits)


def d23() -> Reproduced:
    """Measure D23 of `defects.yaml`: a logit in fp32 after unfused cross-entropy overwrote it."""
    ((stock, right),) = on_ranks(_logit_after_the_loss)
    what = "logit in fp32, read after the unfused cross-entropy, which leaves the softmax in place"
    return Reproduced(stock, right, what)


def smoothed_loss(context: ParallelContext, smoothing: float) -> tuple[float, float]:
    """Compute label-smoothed losses with a vocabulary sharded over the tensor-parallel ranks.

    Returns:
        megatron-core's loss of the target for which it errs most, and torch's loss of that target
        in double precision.
    """
    full, labels = logits_and_labels()
    part = full.chunk(context.pgs.tp.size(), dim=-1)[context.pgs.tp.rank()].clone()
    mine = vocab_parallel_cross_entropy(part, labels, smoothing)
    # megatron-core spreads the smoothing over all other words, torch over all words.
    exact = F.cross_entropy(
        full.double().view(-1, VOCABULARY),
        labels.view(-1),
        reduction="none",
        label_smoothing=smoothing * VOCABULARY / (VOCABULARY - 1),
    )
    return farthest(mine.view(-1).double(), exact)


def d24() -> Reproduced:
    """Measure D24 of `defects.yaml`: the label-smoothed loss of a target on two TP ranks."""
    smoothed = partial(smoothed_loss, smoothing=0.1)
    stock, right = on_ranks(smoothed, tp=2)[0]
    ((alone, exact),) = on_ranks(smoothed)
    what = (
        "loss of the target that is farthest off with --label-smoothing 0.1 and "
        f"--tensor-model-parallel-size 2; on one rank the error is {abs(alone / exact - 1):.0e}"
    )
    return Reproduced(stock, right, what)


REPRODUCTIONS: Reproductions = {
    "D17": d17,
    "D18": d18,
    "D19": d19,
    "D20": d20,
    "D22": d22,
    "D23": d23,
    "D24": d24,
}
