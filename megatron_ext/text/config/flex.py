"""The effect of ``--moe-token-dispatcher-type flex``: a library for GPUs, or two hops by torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.device.gpus import Gpu
from megatron_ext.errors import FlagError
from megatron_ext.text.config.moe import MoEConfig


def has_flex_backend(name: str) -> bool:
    """Return whether the library of a ``--moe-flex-dispatcher-backend`` is installed.

    NCCL's (``ncclep``) never counts as installed: only newer releases of megatron-core take it,
    with flags that this package lacks.
    """
    if find_spec("deep_ep") is None:
        return False
    from megatron.core.transformer.moe import fused_a2a

    functions = {"deepep": "fused_dispatch", "hybridep": "hybrid_ep_dispatch"}
    return getattr(fused_a2a, functions.get(name, ""), None) is not None


def flex_fields(moe: MoEConfig, config: RunConfig) -> dict[str, object]:
    """Return the fields of `StepTransformerConfig` that say how tokens reach their experts.

    Without a GPU and the library these are the all-to-all's, whose tokens make two hops.
    """
    if _uses_backend(moe, config):
        return {}
    return {
        "moe_token_dispatcher_type": "alltoall",
        "moe_ranks_per_node": ranks_per_node(moe, config.parallel),
        # The fused kernels of Transformer Engine make copies for experts, not for nodes.
        "moe_permute_fusion": False,
    }


def _uses_backend(moe: MoEConfig, config: RunConfig) -> bool:
    """Return whether megatron-core's own dispatcher can run with the asked library."""
    parallel = config.parallel
    parts = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    name = moe.moe_flex_dispatcher_backend
    # The buffers of DeepEP have no place for padding.
    is_padded = moe.moe_pad_expert_input_to_capacity and name == "deepep"
    return (
        config.device == "cuda"
        and parallel.expert_model_parallel_size * parts > 1
        and not is_padded
        # Its kernels do not let another micro-batch compute meanwhile.
        and not parallel.overlap_moe_expert_parallel_comm
        and has_flex_backend(name)
    )


def ranks_per_node(moe: MoEConfig, parallel: ParallelConfig) -> int:
    """Return the number of ranks on each node.

    Without ``--moe-ranks-per-node`` it is the number that the launcher has started, and for a run
    elsewhere that of ``--nproc-per-node``, or else of most machines with GPUs.
    """
    if moe.moe_ranks_per_node is not None:
        return moe.moe_ranks_per_node
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return parallel.nproc_per_node if parallel.nproc_per_node > 1 else Gpu.per_node


def flex_errors(moe: MoEConfig, parallel: ParallelConfig) -> Iterator[FlagError]:
    """Yield an error if nodes of ``--moe-ranks-per-node`` do not fit the ranks of the experts."""
    node = moe.moe_ranks_per_node
    if node is None:
        return
    parts = parallel.expert_tensor_parallel_size or max(1, parallel.tensor_model_parallel_size)
    ranks = max(1, parallel.expert_model_parallel_size) * parts
    if node % parts or (ranks % node and node % ranks):
        yield FlagError(
            "--moe-ranks-per-node",
            node,
            "must be a multiple of `--expert-tensor-parallel-size` "
            f"({parts}) that divides the {ranks} ranks of all experts, or a multiple of those",
            f"use {ranks}",
        )
