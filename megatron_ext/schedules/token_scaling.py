"""Division of a step's gradients by its tokens, without asking the device how many there were."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.distributed import ProcessGroup


def scale_by_tokens(
    chunks: Sequence[DistributedDataParallel],
    num_tokens: Tensor,
    *,
    pp: ProcessGroup,
    dp_cp: ProcessGroup,
    last_stage_rank: int,
) -> None:
    """Divide the gradients by the tokens of all data- and context-parallel ranks.

    The arithmetic of megatron-core's ``finalize_model_grads``, which waits for the device to learn
    whether there was a token at all; here the device decides by itself.

    Args:
        chunks: of this rank, their gradients summed over the data-parallel ranks.
        num_tokens: of this rank's micro-batches, int ``[]``; it is overwritten.
        pp: ranks of the pipeline.
        dp_cp: data- and context-parallel ranks.
        last_stage_rank: rank within ``pp`` that has counted.
    """
    torch.distributed.broadcast(num_tokens, group=pp, group_src=last_stage_rank)
    torch.distributed.all_reduce(num_tokens, group=dp_cp)
    scale = torch.where(num_tokens > 0, 1.0 / num_tokens, 1.0)
    for chunk in chunks:
        chunk.scale_gradients(scale)
