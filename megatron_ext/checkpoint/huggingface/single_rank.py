"""Our model on a single rank on the CPU, for tools that read or write its weights."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_ext.checkpoint.huggingface.names import RowShape
from megatron_ext.config import RunConfig
from megatron_ext.device import select
from megatron_ext.errors import CheckpointError
from megatron_ext.layout import Layout, ParallelContext, init_groups, seed_everything
from megatron_ext.models.chunks import build_chunks
from megatron_ext.models.gpt import build_gpt_chunk
from megatron_ext.models.transformer_config import build_transformer_config, params_dtype

PRECISIONS = {"float32": [], "bfloat16": ["--bf16"], "float16": ["--fp16"]}
"""Flags of each dtype."""
NO_TRAINING = "--micro-batch-size 1 --skip-train".split()
"""Flags that no configuration goes without."""
ORIGIN, ORIGIN_CONFIG = "huggingface", "huggingface_config"
"""Where a stored run configuration keeps the config.json that was imported."""


def row_shape(config: RunConfig) -> RowShape:
    """The order of fused rows in a run's full weights."""
    model = config.model
    heads, channels = model.num_attention_heads, model.kv_channels
    assert heads is not None and channels is not None
    return RowShape(heads, model.num_query_groups or heads, channels)


@contextmanager
def one_rank(config: RunConfig) -> Iterator[ParallelContext]:
    """The groups of a single rank, taken down at the end.

    Raises:
        CheckpointError: several ranks were started.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) != 1:
        raise CheckpointError(
            f"Models are converted on one rank, but {os.environ['WORLD_SIZE']} were started; start "
            "the tool without torchrun."
        )
    device = select("gloo")
    device.activate(0)
    context = init_groups(Layout(1), device)
    try:
        seed_everything(context, config.training.seed)
        yield context
    finally:
        context.destroy()


def build_bare(config: RunConfig, context: ParallelContext) -> Any:
    """The whole model on one rank on the CPU, in the run's dtype, with arbitrary weights."""
    model = dataclasses.replace(
        config.model, use_cpu_initialization=True, perform_initialization=False
    )
    config = dataclasses.replace(config, model=model)
    core = build_transformer_config(config)
    (chunk,) = build_chunks(build_gpt_chunk, config, core, context)
    return chunk.to(params_dtype(config))
