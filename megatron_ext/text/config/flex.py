"""How tokens reach their experts: by a library for GPUs or in two hops, and how often.

The first two are the ways of ``--moe-token-dispatcher-type flex``. Tokens that recomputed layers
keep (``--moe-keep-dispatched-tokens``) are exchanged once, and others twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.device.gpus import Gpu
from megatron_ext.errors import FlagError

if TYPE_CHECKING:
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


def flex_fields(
    config: RunConfig, backend: str, *, pads: bool, keeps: bool, given_ranks: int | None
) -> dict[str, object]:
    """Return the fields of `StepTransformerConfig` that say how tokens reach their experts.

    Without a GPU and the library these are the all-to-all's, whose tokens make two hops.

    Args:
        backend: the library, ``--moe-flex-dispatcher-backend``.
        pads: ``--moe-pad-expert-input-to-capacity``.
        keeps: whether recomputed layers keep the tokens that they have dispatched.
        given_ranks: ``--moe-ranks-per-node``.
    """
    if not keeps and _uses_backend(config, backend, pads=pads):
        return {}
    return {
        "moe_token_dispatcher_type": "alltoall",
        "moe_ranks_per_node": ranks_per_node(given_ranks, config.parallel),
        # The fused kernels of Transformer Engine make copies for experts, not for nodes.
        "moe_permute_fusion": False,
    }


def _uses_backend(config: RunConfig, backend: str, *, pads: bool) -> bool:
    """Return whether megatron-core's own dispatcher can run with the asked library."""
    parallel = config.parallel
    parts = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    return (
        config.device == "cuda"
        and parallel.expert_model_parallel_size * parts > 1
        # The buffers of DeepEP have no place for padding.
        and not (pads and backend == "deepep")
        # Its kernels do not let another micro-batch compute meanwhile.
        and not parallel.overlap_moe_expert_parallel_comm
        and has_flex_backend(backend)
    )


def recomputes_experts(
    granularity: str | None, modules: Sequence[str] | None, moe_layer_recompute: bool
) -> bool:
    """Return whether the layers of experts run again in the backward pass.

    Args:
        granularity: ``--recompute-granularity``.
        modules: ``--recompute-modules``.
        moe_layer_recompute: ``--moe-layer-recompute``.
    """
    by_name = granularity == "selective" and "moe" in (modules or ())
    return granularity == "full" or by_name or moe_layer_recompute


def keeps_tokens(moe: MoEConfig, config: RunConfig) -> bool:
    """Return whether recomputed layers keep the tokens that their experts have got."""
    model = config.model
    return (
        moe.moe_keep_dispatched_tokens
        and moe.num_experts is not None
        and config.parallel.expert_model_parallel_size > 1
        and recomputes_experts(
            model.recompute_granularity, model.recompute_modules, moe.moe_layer_recompute
        )
    )


def ranks_per_node(given: int | None, parallel: ParallelConfig) -> int:
    """Return the number of ranks on each node.

    Without ``given``, ``--moe-ranks-per-node``, it is the number that the launcher has started, and
    for a run elsewhere that of ``--nproc-per-node``, or else of most machines with GPUs.
    """
    if given is not None:
        return given
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return parallel.nproc_per_node if parallel.nproc_per_node > 1 else Gpu.per_node


def node_errors(node: int, parallel: ParallelConfig) -> Iterator[FlagError]:
    """Yield an error if ``--moe-ranks-per-node``, ``node``, does not fit the experts' ranks."""
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
