"""Activations of a GPT that wait in host memory, layer by layer.

The bytes that stay on the device are counted from below the moved tensors' real number, those on
the host from above: a plan must not promise more room than there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_ext.config.layers import ATTENTION, has_experts, mixer_of, mlp_of
from megatron_ext.planning.stages import FP32, INT64, LayerBytes, Stage

OF_MIXER = "qkv_linear", "core_attn", "attn_proj"
"""Values of ``--offload-modules`` that name parts of attention."""

Activations = Any
"""A `text.cost.activations.Activations`, which imports this module."""


def with_moved(run: Activations, layers: Sequence[LayerBytes], stage: Stage) -> list[LayerBytes]:
    """Return the device memory of a stage's layers, or recomputed groups of layers."""
    if run.config.offload.fine_grained_activation_offloading:
        away = [_parts(run, run.sizes.kinds[number])[0] for number in stage.layers]
        return _without(layers, away)
    count = _count(run, stage, len(layers))
    again = _recomputed(run, stage)
    away = [
        run.residual * _moves_inputs(run)
        if index < again
        else max(0, layer.kept - _stays(run, layer))
        for index, layer in enumerate(layers[:count])
    ]
    if count and not stage.embedding:
        # The schedule holds the message that is the first layer's input.
        away[0] = max(0, away[0] - run.residual)
    return _without(layers, [*away, *[0] * (len(layers) - count)])


def hosted(run: Activations, layers: Sequence[LayerBytes], stage: Stage) -> int:
    """Return the bytes on the host for a micro-batch; for ``layers`` see `with_moved`."""
    if run.config.offload.fine_grained_activation_offloading:
        kinds = [*(run.sizes.kinds[n] for n in stage.layers), *[run.sizes.depth] * stage.depths]
        return sum(_parts(run, kind)[1] for kind in kinds)
    again = _recomputed(run, stage)
    moved = layers[: _count(run, stage, len(layers))]
    return sum(run.residual if i < again else layer.kept for i, layer in enumerate(moved))


def _without(layers: Sequence[LayerBytes], away: Sequence[int]) -> list[LayerBytes]:
    """Return the layers without bytes that are ``away`` between the two passes.

    While a layer runs forward it still has them; before it runs backward they are back, and so are
    those of the layer before.
    """
    before = [0, *away]
    return [
        replace(layer, kept=layer.kept - own, transient=layer.transient + own + ahead)
        for layer, own, ahead in zip(layers, away, before, strict=False)
    ]


def _count(run: Activations, stage: Stage, groups: int) -> int:
    """Return how many layers, or groups of recomputed layers, of a stage are moved."""
    count: int = run.config.offload.cpu_offloading_num_layers
    size: int = run.group_size
    # A group is moved if its last layer is.
    return groups if count >= len(stage.layers) else count // size


def _recomputed(run: Activations, stage: Stage) -> int:
    """Return how many layers, or groups of layers, of a stage are recomputed as wholes."""
    size: int = run.group_size
    return -(-len(run.run_again(stage)) // size)


def _moves_inputs(run: Activations) -> bool:
    """Return whether the input of a layer is large enough to be moved."""
    sizes = run.sizes
    minimum: int = run.config.offload.min_offloaded_tensor_size
    return bool(sizes.residual_tokens * sizes.h >= minimum)


def _stays(run: Activations, layer: LayerBytes) -> int:
    """Return the bytes of a layer's tensors that are too small to be moved."""
    sizes = run.sizes
    minimum = run.config.offload.min_offloaded_tensor_size
    rows = sizes.residual_tokens
    if not _moves_inputs(run):
        return layer.kept
    small = [(rows, FP32), (rows, FP32)] * 4  # means and deviations of up to four norms
    small.append((sizes.tokens * sizes.n // sizes.tp, FP32))  # the log-sum-exp of attention
    if any(map(has_experts, sizes.kinds)):
        count = run.moe.num_experts or 1
        small += [(rows * count, 2 * FP32), (rows * run.moe.moe_router_topk, INT64 + FP32)]
        small += [(run.routed, INT64 + FP32), (rows * sizes.ep * sizes.etp * count, FP32 + 1)]
    least: int = sum(number * width for number, width in small if number < minimum)
    return min(layer.kept, least)


def _parts(run: Activations, kind: str) -> tuple[int, int]:
    """Return the bytes that the named parts of a layer of a kind move: at least, and at most."""
    sizes = run.sizes
    names = run.config.offload.offload_modules
    residual = run.residual
    experts = has_experts(kind)
    letter = mixer_of(kind)
    normed = residual + run.norm(sizes.residual_tokens, sizes.h)
    of_head = sizes.tokens * sizes.d * sizes.width
    queries = of_head * sizes.n // sizes.tp
    keys = of_head * sizes.g // sizes.tp
    latent = 0 if sizes.latent is None else run.qk()
    out = queries if "attn_proj" in names else 0
    inner = 0
    if experts:
        hidden = run.routed_hidden
        inner = run._inner(run.routed, run.expert_width, scaled=True, hidden=hidden).kept
    permuted = run.routed * run.routed_hidden * sizes.width if experts else 0
    activated = run.routed * run.expert_width * sizes.width if experts else 0
    bounds = {
        "attn_norm": (residual, normed),
        "mlp_norm": (residual, normed),
        "qkv_linear": (0 if latent else residual, residual + latent),
        "core_attn": (0 if latent else queries + 2 * keys, run.qk() + run.scores() + 2 * queries),
        "attn_proj": (out if "core_attn" in names else 0, queries),
        "expert_fc1": (permuted, permuted),
        "moe_act": (activated, inner + activated),
    }
    if letter != ATTENTION:
        for name in OF_MIXER:
            bounds[name] = run.mixers[letter].hosted(run, name) if letter else (0, 0)
        bounds["attn_norm"] = (residual, normed) if letter else (0, 0)
    if not mlp_of(kind):
        bounds["mlp_norm"] = (0, 0)
    chosen = [bounds[name] for name in names]
    least = sum(low for low, _ in chosen)
    if not _moves_inputs(run):
        least = 0
    return least, sum(high for _, high in chosen)
