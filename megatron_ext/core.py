"""Functions and constants that hide the differences between releases of megatron-core.

They go by the features of the installed release, not its version. The rest of the package calls
megatron-core as if there were a single release.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
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


@functools.cache
def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name; cached for use in each step."""
    return name in inspect.signature(function).parameters


def backward_step(
    entering: Tensor | None, output: Tensor, gradient: Tensor | None, config: TransformerConfig
) -> Any:
    """Run the backward pass of a micro-batch through a chunk.

    Return the gradient of the chunk's input.

    Args:
        entering: the chunk's input; None for the first chunk of the model.
        output: the chunk's output; the loss for the last chunk.
        gradient: the gradient of ``output``; None for the last chunk.
    """
    kind = [ModelType.encoder_or_decoder] if takes(schedules.backward_step, "model_type") else []
    return schedules.backward_step(entering, output, gradient, *kind, config)


def slice_batch(batch: dict[str, Any], cp_group: Any) -> dict[str, Any]:
    """Return this rank's part of a batch that is split over the context-parallel group.

    Each tensor ``[b, s, ...]`` is sliced along s; ``attention_mask``, ``[b, 1, s, s]``, along the
    axis of queries.
    """
    cut = utils.get_batch_on_this_cp_rank
    plain = {"is_hybrid_cp": False} if takes(cut, "is_hybrid_cp") else {}
    own: dict[str, Any] = cut(batch, cp_group=cp_group, **plain)
    return own


def gradients_for_norm(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return the gradients that this rank adds to the global norm; no other rank adds them."""
    names = "get_main_grads_for_grad_norm", "get_grads_for_grad_norm"
    gradients: list[Tensor] = next(getattr(optimizer, x) for x in names if hasattr(optimizer, x))()
    return gradients


def mtp_on_this_chunk(config: TransformerConfig, vp_stage: int | None) -> bool:
    """Return whether this rank's chunk ``vp_stage`` (None for its only one) holds MTP modules."""
    function = multi_token_prediction.mtp_on_this_rank
    here: dict[str, Any] = {"ignore_virtual": False, "vp_stage": vp_stage}
    if takes(function, "config"):
        return bool(function(config, **here))
    layout = config.pipeline_model_parallel_layout
    return bool(function(layout, config.mtp_num_layers, **here))


def scale_mtp_losses(scale: Tensor) -> None:
    """Set the factor by which megatron-core's own models multiply the gradients of MTP losses."""
    multi_token_prediction.MTPLossAutoScaler.set_loss_scale(scale)


def take_mtp_losses() -> Tensor | None:
    """Return the multi-token-prediction losses that megatron-core has logged, and clear its log.

    The result ``[depths]`` has, for each MTP depth, the mean loss over this rank's tokens of a
    micro-batch, summed over the micro-batches since the last call. It is None if this process has
    never logged one.
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
"""The release's name for the transformer layer in a module of multi-token prediction.

In names of checkpointed parameters (`Shard.name`), it is ``transformer_layer`` in all releases.
"""


def numbered_after_the_decoder(
    config: TransformerConfig, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return constructor arguments for a multi-token-prediction layer, numbered after the decoder.

    ``arguments`` are the arguments that megatron-core passes. Newer releases pass ``is_mtp_layer``
    and number these layers from 1. The result continues the numbers of the decoder layers, as older
    releases do, because dropout, scaling by layer and logs depend on the number.
    """
    numbered = dict(arguments)
    if numbered.pop("is_mtp_layer", False):
        numbered["layer_number"] = numbered.get("layer_number", 1) + config.num_layers
        numbered["add_layer_offset"] = False
    return numbered


def kinds_by_layer(kinds: list[str], config: TransformerConfig) -> list[str]:
    """Return the list in which megatron-core looks up each layer's ``cp_comm_type``.

    ``kinds`` has one kind of context-parallel communication for each decoder layer. The result adds
    the last one once more for each multi-token-prediction layer. Some releases index the list by a
    layer number that counts from 1; for them the first kind is repeated at the front.
    """
    forgets = "cp_comm_type[self.layer_number]" in inspect.getsource(TransformerLayer.__init__)
    return [*kinds[: int(forgets)], *kinds, *kinds[-1:] * (config.mtp_num_layers or 0)]


TAKES_SHORT_GROUPS = not hasattr(TransformerBlock, "_checkpointed_forward")
"""Whether in this release the last group of ``--recompute-num-layers`` layers may be shorter."""


RECOMPUTES_DEPTHS = any(
    takes(MultiTokenPredictionLayer._checkpointed_forward, name)
    for name in ("padding_mask", "kwargs")
)
"""Whether multi-token-prediction modules can be fully recomputed in this release.

In some releases the recomputation fails on arguments that megatron-core itself passes.
"""


def moe_submodules(mlp: Any) -> Any:
    """Return the submodules of ``mlp`` if it is the spec of an MoE layer, else None."""
    bound = mlp.keywords if isinstance(mlp, functools.partial) else vars(mlp or object)
    submodules = bound.get("submodules")
    return submodules if hasattr(submodules, "router") else None


def with_module(spec: Any, module: type) -> Any:
    """Return ``spec`` for another class of modules, which gets the same submodules."""
    if isinstance(spec, functools.partial):
        return functools.partial(module, *spec.args, **spec.keywords)
    return dataclasses.replace(spec, module=module)


def experts_builder(module: type, submodules: MLPSubmodules) -> Any:
    """Return what the spec of an MoE layer must have as ``experts``: ``module`` and its submodules.

    For newer releases of megatron-core this is a function that builds the experts, for older ones
    the pair ``(module, submodules)``.
    """
    if takes(TransformerLayer.__init__, "is_mtp_layer"):
        return functools.partial(module, submodules=submodules)
    return module, submodules


def log_auxiliary_loss(router: Router, name: str, loss: Tensor) -> None:
    """Add a router's auxiliary loss ``name``, a scalar, to megatron-core's log of this step."""
    config = router.config
    num_layers = config.num_layers + (config.mtp_num_layers or 0)
    is_mtp_layer = getattr(router, "is_mtp_layer", False)
    layer_number = router.layer_number + (config.num_layers if is_mtp_layer else 0)
    if hasattr(moe_utils, "save_to_aux_losses_tracker"):
        moe_utils.save_to_aux_losses_tracker(name, loss, layer_number, num_layers)
    else:
        _metrics_tracker().record(name, loss, layer_number, num_layers)


def take_auxiliary_losses() -> dict[str, Tensor]:
    """Return the auxiliary losses that this rank has logged, by name, and empty the log.

    Each is a tensor ``[layers]``, summed over micro-batches, with 0 for the layers of other ranks.
    """
    if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker"):
        entries = moe_utils.get_moe_layer_wise_logging_tracker()
        logged = {name: entry["values"] for name, entry in entries.items()}
    else:
        logged = {name: entry.values for name, entry in _metrics_tracker().metrics.items()}
    taken = {name: values.clone() for name, values in logged.items()}
    # In place, since a replayed CUDA graph adds to the same tensors.
    for values in logged.values():
        values.zero_()
    return taken


def _metrics_tracker() -> Any:
    return importlib.import_module(f"{moe_utils.__package__}.moe_logging").get_moe_metrics_tracker()


def one_or_list(items: list[Any]) -> Any:
    """Return the only item of a list, or the list if it is longer, as megatron-core expects."""
    return items[0] if len(items) == 1 else items
