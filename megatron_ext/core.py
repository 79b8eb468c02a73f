"""Differences between the releases of megatron-core, each settled by what the installed one offers.

Everything else in the package calls megatron-core as if there were one release.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core import utils
from megatron.core.enums import ModelType
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import TransformerConfig, multi_token_prediction
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

HAS_HYBRID_MODEL = importlib.util.find_spec("megatron.core.models.hybrid") is not None
"""Whether there is a HybridModel of attention, MLP and other layers, in any order."""


@functools.cache
def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name, from a cache: each step asks."""
    return name in inspect.signature(function).parameters


def backward_step(
    entering: Tensor | None, output: Tensor, gradient: Tensor | None, config: TransformerConfig
) -> Any:
    """Run the backward pass of a micro-batch in a chunk; return the gradient of its input."""
    kind = [ModelType.encoder_or_decoder] if takes(schedules.backward_step, "model_type") else []
    return schedules.backward_step(entering, output, gradient, *kind, config)


def slice_batch(batch: dict[str, Any], cp_group: Any) -> dict[str, Any]:
    """Return the slice of every tensor ``[b, s, ...]`` that a rank of ``cp_group`` reads.

    ``attention_mask`` is sliced along its axis of queries, ``[b, 1, s, s]``.
    """
    cut = utils.get_batch_on_this_cp_rank
    plain = {"is_hybrid_cp": False} if takes(cut, "is_hybrid_cp") else {}
    own: dict[str, Any] = cut(batch, cp_group=cp_group, **plain)
    return own


def gradients_for_norm(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return the gradients that this rank counts in the norm; each is counted on one rank."""
    names = "get_main_grads_for_grad_norm", "get_grads_for_grad_norm"
    gradients: list[Tensor] = next(getattr(optimizer, x) for x in names if hasattr(optimizer, x))()
    return gradients


def mtp_on_this_chunk(config: TransformerConfig, vp_stage: int | None) -> bool:
    """Return whether the chunk ``vp_stage`` of this rank holds multi-token prediction."""
    function = multi_token_prediction.mtp_on_this_rank
    here: dict[str, Any] = {"ignore_virtual": False, "vp_stage": vp_stage}
    if takes(function, "config"):
        return bool(function(config, **here))
    layout = config.pipeline_model_parallel_layout
    return bool(function(layout, config.mtp_num_layers, **here))


def scale_mtp_losses(scale: Tensor) -> None:
    """Set the gradient with which the MTP losses that megatron-core's own models attach start."""
    multi_token_prediction.MTPLossAutoScaler.set_loss_scale(scale)


def take_mtp_losses() -> Tensor | None:
    """Return the losses ``[depths]`` that core's own models logged since the last call, and reset.

    Each is the mean over the tokens of a micro-batch on this rank. None if no model logged one.
    """
    tracker = multi_token_prediction.MTPLossLoggingHelper.tracker
    values = tracker.get("values", tracker.get("loss_values"))
    if values is None:
        return None
    taken: Tensor = values.clone()
    values.zero_()
    return taken


MTP_LAYER = next(
    name
    for name in ("mtp_model_layer", "transformer_layer")
    if takes(MultiTokenPredictionLayerSubmodules, name)
)
"""Attribute of a depth of multi-token prediction that holds its transformer layer.

In checkpoints, and so for `Shard.name`, it is called ``transformer_layer`` in all releases.
"""


def numbered_after_the_decoder(
    config: TransformerConfig, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a layer's arguments, so that the layers of depths are numbered after the decoder's.

    Newer releases number them from 1 and pass ``is_mtp_layer``; dropout, scaling by layer and logs
    depend on the number.
    """
    numbered = dict(arguments)
    if numbered.pop("is_mtp_layer", False):
        numbered["layer_number"] = numbered.get("layer_number", 1) + config.num_layers
        numbered["add_layer_offset"] = False
    return numbered


def kinds_by_layer(kinds: list[str], config: TransformerConfig) -> list[str]:
    """Return the decoder layers' kinds of context parallelism as megatron-core looks them up.

    Layers are numbered from 1, which older releases forget when they take a kind by a layer's
    number. Layers of multi-token prediction follow the decoder's, and communicate like the last.
    """
    forgets = "cp_comm_type[self.layer_number]" in inspect.getsource(TransformerLayer.__init__)
    return [*kinds[: int(forgets)], *kinds, *kinds[-1:] * (config.mtp_num_layers or 0)]


TAKES_SHORT_GROUPS = not hasattr(TransformerBlock, "_checkpointed_forward")
"""Whether the last group of recomputed layers may have fewer than ``--recompute-num-layers``."""


RECOMPUTES_DEPTHS = any(
    takes(MultiTokenPredictionLayer._checkpointed_forward, name)
    for name in ("padding_mask", "kwargs")
)
"""Whether full recomputation takes the arguments that megatron-core calls it with for a depth."""


def moe_submodules(mlp: Any) -> Any:
    """Return the submodules of a spec of experts, with its router; None for other specs."""
    bound = mlp.keywords if isinstance(mlp, functools.partial) else vars(mlp or object)
    submodules = bound.get("submodules")
    return submodules if hasattr(submodules, "router") else None


def experts_builder(module: type, submodules: MLPSubmodules) -> Any:
    """Return what a spec provider's `grouped_mlp_modules` returns for these modules."""
    if takes(TransformerLayer.__init__, "is_mtp_layer"):
        return functools.partial(module, submodules=submodules)
    return module, submodules


def log_auxiliary_loss(router: Router, name: str, loss: Tensor) -> None:
    """Add an auxiliary loss ``[]`` of a layer's router to the log of this step."""
    config = router.config
    num_layers = config.num_layers + (config.mtp_num_layers or 0)
    is_mtp_layer = getattr(router, "is_mtp_layer", False)
    layer_number = router.layer_number + (config.num_layers if is_mtp_layer else 0)
    if hasattr(moe_utils, "save_to_aux_losses_tracker"):
        moe_utils.save_to_aux_losses_tracker(name, loss, layer_number, num_layers)
    else:
        _metrics_tracker().record(name, loss, layer_number, num_layers)


def take_auxiliary_losses() -> dict[str, Tensor]:
    """Return this rank's part of each auxiliary loss by layer ``[layers]``; empty the log."""
    if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker"):
        entries = moe_utils.get_moe_layer_wise_logging_tracker()
        logged = {name: entry["values"] for name, entry in entries.items()}
    else:
        logged = {name: entry.values for name, entry in _metrics_tracker().metrics.items()}
    taken = {name: values.clone() for name, values in logged.items()}
    # In place, since a CUDA graph adds to the same tensors when it runs again.
    for values in logged.values():
        values.zero_()
    return taken


def _metrics_tracker() -> Any:
    return importlib.import_module(f"{moe_utils.__package__}.moe_logging").get_moe_metrics_tracker()
