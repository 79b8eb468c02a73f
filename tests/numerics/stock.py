"""A small GPT whose weights follow from their names, and a batch for it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.data.batch import Batch, with_mtp_targets
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.text.model.gpt import build_gpt_chunk
from tests.layers import plain
from tests.training_runs import config_of

LENGTH, SEQUENCES, VOCABULARY = 32, 4, 96

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    f"--position-embedding-type rope --seq-length {LENGTH} --max-position-embeddings {LENGTH} "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 "
    f"--global-batch-size {SEQUENCES} --lr 1e-3 --train-iters 1 --use-cpu-initialization "
    f"--mock-data --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} "
    f"--padded-vocab-size {VOCABULARY}"
).split()


def gpt_config(*more: str, world_size: int = 1) -> RunConfig:
    return config_of([*SMALL, *more], ranks=world_size)


def gpt_chunk(run: RunConfig, context: ParallelContext) -> Any:
    """Build the whole model on this rank, its weights following from their names."""
    transformer_config = build_transformer_config(run)
    chunk = build_gpt_chunk(run, transformer_config, context, pre_process=True, post_process=True)
    plain.fill(chunk, context, run.section(MoEConfig).num_experts or 0)
    return chunk


def whole_batch(run: RunConfig, masks: Tensor | None = None) -> Batch:
    """Return one global batch with targets of all depths; masks are ``[SEQUENCES, LENGTH]``."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)
    mask = torch.ones(SEQUENCES, LENGTH) if masks is None else masks
    positions = torch.arange(LENGTH).expand(SEQUENCES, -1)
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), mask, positions)
    return with_mtp_targets(batch, run.model.mtp_num_layers or 0)


def ragged_masks() -> Tensor:
    """Return masks of unequal sums, with holes, ``[SEQUENCES, LENGTH]``."""
    mask = torch.ones(SEQUENCES, LENGTH)
    for row, first in enumerate((20, 3, 29, 9)):
        mask[row, first:] = 0
    mask[1, 1] = 0
    return mask


def rows(batch: Batch, first: int, count: int) -> Batch:
    def part(x: Any) -> Any:
        return tuple(map(part, x)) if isinstance(x, tuple) else x[first : first + count]

    names = ("tokens", "labels", "loss_weights", "position_ids", "mtp_labels", "mtp_loss_weights")
    return Batch(**{name: part(getattr(batch, name)) for name in names})


def gradients(chunk: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in chunk.named_parameters()
    }


def worst(mine: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    return max(
        float((mine[name] - want).norm() / want.norm().clamp(min=1e-12))
        for name, want in truth.items()
    )


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return plain losses ``[b, s]`` of logits ``[s, b, v]``."""
    losses = F.cross_entropy(logits.double().permute(1, 2, 0), labels, reduction="none")
    return losses.float()
