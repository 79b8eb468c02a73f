"""Functions of data parallelism on tensors in 8 bits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.record import record


def replace_raw_data(tensor: Any, new_raw_data: Tensor) -> None:
    new_raw_data.copy_(tensor._bytes.view(new_raw_data.shape))
    tensor._bytes = new_raw_data


def cast_master_weights_to_fp8(
    model_weights: Sequence[Any],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Any = None,
) -> None:
    record("cast_master_weights_to_fp8", count=len(model_weights), group=group.size())
    for weight, master, start in zip(model_weights, master_weights, start_offsets, strict=True):
        if master is not None and start is not None:
            piece = weight._bytes.view(-1)[start : start + master.numel()]
            piece.copy_(master.bfloat16().to(torch.float8_e4m3fn).view(torch.uint8))
