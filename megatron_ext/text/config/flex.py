"""How tokens reach their experts: by a library for GPUs or in two hops, how often, and beside what.

The first two are the ways of ``--moe-token-dispatcher-type flex``. Tokens that recomputed layers
keep (``--moe-keep-dispatched-tokens``) are exchanged once, and others twice.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

from megatron_ext.config.inapplicable import Values
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.run import LayerSection, RunConfig
from megatron_ext.device.gpus import Gpu
from megatron_ext.errors import FlagError


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


def _takes(name: str, ranks: int) -> bool:
    """Return whether the installed library can exchange tokens among this number of ranks.

    DeepEP has settings for some numbers only, and asserts that it is one of them.
    """
    if name != "deepep":
        return True
    try:
        importlib.import_module("deep_ep").Buffer.get_dispatch_config(ranks)
    except AssertionError:
        return False
    return True


def flex_fields(values: Values, parallel: ParallelConfig) -> dict[str, object]:
    """Return the fields of `StepTransformerConfig` that say how tokens reach their experts.

    Without a GPU and the library these are the all-to-all's, whose tokens make two hops.
    """
    if uses_library(values):
        return {}
    return {
        "moe_token_dispatcher_type": "alltoall",
        "moe_ranks_per_node": ranks_per_node(values["moe_ranks_per_node"], parallel),
        # The fused kernels of Transformer Engine make copies for experts, not for nodes.
        "moe_permute_fusion": False,
    }


def values_of(moe: LayerSection, config: RunConfig) -> Values:
    """Return the values of a run that functions of this file read; ``moe`` is its `MoEConfig`."""
    sections = config.model, config.parallel, config.precision, moe
    values = {name: value for section in sections for name, value in vars(section).items()}
    return {**values, "device": config.device}


def uses_library(values: Values) -> bool:
    """Return whether megatron-core's own dispatcher runs, with the library that is asked for."""
    parts = values["expert_tensor_parallel_size"] or values["tensor_model_parallel_size"]
    ranks = values["expert_model_parallel_size"] * max(1, parts)
    backend = values["moe_flex_dispatcher_backend"]
    return (
        values["device"] == "cuda"
        and ranks > 1
        # Its kernels move tokens in bf16.
        and values["bf16"]
        # The buffers of DeepEP have no place for padding.
        and not (values["moe_pad_expert_input_to_capacity"] and backend == "deepep")
        # Its kernels do not let another micro-batch compute meanwhile.
        and not values["overlap_moe_expert_parallel_comm"]
        # Nor do they take turns with the shared expert.
        and not values["moe_shared_expert_overlap"]
        and not keeps_tokens(values)
        # megatron-core gives them no rows in 8 bits.
        and {values["moe_dispatch_fwd_dtype"], values["moe_combine_bwd_dtype"]} == {"bf16"}
        and has_flex_backend(backend)
        and _takes(backend, ranks)
    )


def recomputes_experts(values: Values) -> bool:
    """Return whether the layers of experts run again in the backward pass."""
    granularity = values["recompute_granularity"]
    by_name = granularity == "selective" and "moe" in (values["recompute_modules"] or ())
    return granularity == "full" or by_name or values["moe_layer_recompute"]


def keeps_tokens(values: Values) -> bool:
    """Return whether recomputed layers keep the tokens that their experts have got."""
    return (
        values["moe_keep_dispatched_tokens"]
        and values["num_experts"] is not None
        and values["expert_model_parallel_size"] > 1
        and recomputes_experts(values)
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


def overlap_errors(parallel: ParallelConfig, model: ModelConfig) -> Iterator[FlagError]:
    """Yield an error for each option that does not go with ``--moe-shared-expert-overlap``."""
    refused = partial(FlagError, "--moe-shared-expert-overlap", None)
    if parallel.overlap_moe_expert_parallel_comm:
        yield refused(
            "does not go with `--overlap-moe-expert-parallel-comm`, under which another "
            "micro-batch computes during the exchange",
            "leave one out",
        )
    if "shared_experts" in (model.recompute_modules or ()):
        yield refused(
            "does not go with `--recompute-modules shared_experts`, which computes the shared "
            "expert as a whole",
            "leave one out",
        )


def format_errors(values: Values) -> Iterator[FlagError]:
    """Yield an error for each option that does not go with rows in 8 bits."""
    from megatron_ext.layers.fp8.blocks import BLOCKS

    for name in ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"):
        given = values[name]
        block = BLOCKS.get(given)
        if block is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        if values["moe_token_dispatcher_type"] == "allgather":
            yield FlagError(
                flag,
                given,
                "does not go with `--moe-token-dispatcher-type` (allgather)",
                "use alltoall or flex",
            )
        if values["fp16"]:
            yield FlagError(flag, given, "does not go with `--fp16`", "use `--bf16`")
        hidden = values["hidden_size"] or 0
        if hidden % block:
            yield FlagError(
                flag,
                given,
                f"needs a `--hidden-size` ({hidden}) that is divisible by {block}, the values with "
                "one scale",
                f"use {(hidden // block + 1) * block}, or bf16 here",
            )


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
