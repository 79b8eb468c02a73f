"""The switches that a search of layouts tries for a GPT, besides those that it tries for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_ext.config.run import RunConfig
from megatron_ext.planning.switch import Switch
from megatron_ext.text.config.moe import MoEConfig

DISPATCHER = "moe_token_dispatcher_type"

ALL_TO_ALL = Switch("all-to-all", {DISPATCHER: "alltoall"}, applies=lambda layout, _: layout.ep > 1)
"""A token goes to the ranks of its experts alone."""

PAIRS = Switch(
    "pairs",
    {"overlap_moe_expert_parallel_comm": True},
    applies=lambda layout, _: layout.ep > 1,
)
"""Forward and backward passes run in pairs, each of which hides the other's exchange."""

KEPT_TOKENS = Switch(
    "kept tokens",
    {"moe_keep_dispatched_tokens": True},
    applies=lambda layout, _: layout.ep > 1 and layout.recompute == "full",
)
"""Recomputed layers keep the tokens that their experts have got, and exchange them once."""

TWO_HOPS = Switch(
    "two hops",
    {DISPATCHER: "flex"},
    applies=lambda layout, gpu: layout.ep > gpu.per_node,
    changes_memory=False,
)
"""A token goes to each node once, and then to its experts on the node."""


NORM_INPUTS_ON_HOST = Switch(
    "host norms",
    {"fine_grained_activation_offloading": True, "offload_modules": ["attn_norm", "mlp_norm"]},
    applies=lambda layout, _: layout.recompute != "full",
    saves="activations",
    on_host=True,
)
"""The inputs of a layer's two norms wait in host memory for the backward pass."""

LAYER_INPUTS = "host inputs"
"""The inputs of layers that are recomputed wait in host memory for the backward pass."""


def switches(config: RunConfig) -> Sequence[Switch]:
    """Return the ways that a run can use: what it moves to the host, and how it sends tokens."""
    moves = config.offload.moves_activations
    return *(() if moves else _hosting(config)), *_dispatching(config)


def _hosting(config: RunConfig) -> Sequence[Switch]:
    inputs = Switch(
        LAYER_INPUTS,
        {"cpu_offloading_num_layers": config.model.num_layers},
        applies=lambda layout, _: layout.recompute == "full",
        saves="activations",
        on_host=True,
    )
    return NORM_INPUTS_ON_HOST, inputs


def _dispatching(config: RunConfig) -> Sequence[Switch]:
    """Return the ways to exchange tokens, each with the dispatcher that it needs."""
    moe = config.section(MoEConfig)
    if not moe.num_experts:
        return ()
    if moe.moe_token_dispatcher_type == "flex":
        return PAIRS, KEPT_TOKENS
    if moe.moe_token_dispatcher_type == "alltoall":
        return PAIRS, KEPT_TOKENS, TWO_HOPS
    others = (replace(x, values={**ALL_TO_ALL.values, **x.values}) for x in (PAIRS, KEPT_TOKENS))
    # The last switch decides on the dispatcher.
    return ALL_TO_ALL, *others, replace(TWO_HOPS, changes_memory=True)
