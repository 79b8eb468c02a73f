"""Setup of a rank for Transformer Engine's layers: fp8 support, environment, overlap buffers."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import is_te_min_version
from torch import Tensor

from megatron_ext.config.rules.transformer_engine import read_overlap_settings
from megatron_ext.config.run import RunConfig
from megatron_ext.device.gpus import FIRST, Capability, engine_recipes
from megatron_ext.errors import ConfigError

CUDA_OF_BLOCKWISE = (12, 9)


def recipe_error(
    recipe: str, capability: Capability, cuda: tuple[int, ...] | None = None
) -> str | None:
    """Return an error message if a GPU cannot run an fp8 recipe; None if it can.

    Args:
        recipe: a value of ``--fp8-recipe`` for Transformer Engine's layers.
        capability: the GPU's compute capability, such as (9, 0).
        cuda: the CUDA version with which torch was built; None if unknown.
    """
    first = FIRST.get(recipe)
    shown = ".".join(map(str, capability))
    if first is None:
        return None
    fitting = engine_recipes(capability)
    advice = f"use {' or '.join(fitting)}" if fitting else "leave out `--fp8-format`"
    if recipe not in fitting:
        limit = " and below 12.0" if recipe == "mxfp8" else " or above"
        return (
            f"`--fp8-recipe` ({recipe}) needs a GPU of compute capability {first[0]}.{first[1]}"
            f"{limit}, but this one has {shown}; {advice}."
        )
    if recipe == "blockwise" and cuda is not None and cuda < CUDA_OF_BLOCKWISE:
        return (
            f"`--fp8-recipe` ({recipe}) needs CUDA 12.9 or newer, but torch was built with "
            f"{'.'.join(map(str, cuda))}; use tensorwise, or another build of torch."
        )
    return None


def prepare_transformer_engine(config: RunConfig) -> None:
    """Set Transformer Engine's environment variables, check fp8, and set up the overlap buffers.

    All ranks call this together, before the model is built. The buffers are for
    ``--tp-comm-overlap``.

    Raises:
        ConfigError: the GPU or this build of torch does not support the fp8 recipe, or the build
            lacks the backend ``--tp-comm-bootstrap-backend``.
    """
    # Transformer Engine reads these options only from the environment.
    scaled = config.model.apply_query_key_layer_scaling
    os.environ["NVTE_APPLY_QK_LAYER_SCALING"] = str(int(scaled))
    if config.training.deterministic_mode:
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    if config.fp8.fp8_format is not None:
        cuda = torch.version.cuda
        built_with = None if cuda is None else tuple(map(int, cuda.split(".")))
        capability = torch.cuda.get_device_capability()
        error = recipe_error(config.fp8.fp8_recipe, capability, built_with)
        if error is not None:
            raise ConfigError(error)
    if not config.engine.tp_comm_overlap:
        return
    backend = config.engine.tp_comm_bootstrap_backend
    if not torch.distributed.is_backend_available(backend):
        raise ConfigError(
            f"`--tp-comm-bootstrap-backend` ({backend}) is not in this build of torch; use nccl."
        )
    base: Any = importlib.import_module("transformer_engine.pytorch.module.base")
    modes = base.UserBufferQuantizationMode if is_te_min_version("2.7.0") else None
    base.initialize_ub(**buffer_arguments(config, modes))


def buffer_arguments(config: RunConfig, modes: Any = None) -> dict[str, Any]:
    """Return the arguments of Transformer Engine's ``initialize_ub`` for ``--tp-comm-overlap``.

    Args:
        modes: Transformer Engine's ``UserBufferQuantizationMode``; None before version 2.7.
    """
    model = config.model
    engine = config.engine
    fp8 = config.fp8
    tokens = (model.seq_length or 0) * (config.training.micro_batch_size or 1)
    arguments: dict[str, Any] = {
        "shape": [tokens // config.parallel.context_parallel_size, model.hidden_size],
        "tp_size": config.parallel.tensor_model_parallel_size,
        "ub_cfgs": read_overlap_settings(engine.tp_comm_overlap_cfg),
        "bootstrap_backend": engine.tp_comm_bootstrap_backend,
    }
    in_fp8 = fp8.fp8_format is not None
    if modes is None:
        return {**arguments, "use_fp8": in_fp8}
    in_bf16 = not in_fp8 or (
        fp8.first_last_layers_bf16
        and max(fp8.num_layers_at_start_in_bf16, fp8.num_layers_at_end_in_bf16) > 0
    )
    chosen = [mode for mode, used in ((modes.FP8, in_fp8), (modes.NONE, in_bf16)) if used]
    return {**arguments, "quantization_modes": chosen}


class GradientAccumulatingLayer(TransformerLayer):  # type: ignore[misc]
    """megatron-core's layer with ``gradient_accumulation_fusion`` set only for this layer.

    Transformer Engine's matrix products then add weight gradients to ``main_grad``. The option is
    not set for the whole model, because megatron-core's own linear layers would need apex.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        accumulating = copy.copy(config)
        accumulating.gradient_accumulation_fusion = True
        super().__init__(accumulating, *args, **kwargs)


def accumulate_gradients(layers: Sequence[ModuleSpec]) -> None:
    """Replace megatron-core's layer by `GradientAccumulatingLayer` in layer specs, in place."""
    for layer in layers:
        if layer.module is TransformerLayer:
            layer.module = GradientAccumulatingLayer


def stage_quantized(
    chunk: torch.nn.Module, register: Callable[[Tensor, Any], None]
) -> dict[int, tuple[Any, Tensor]]:
    """Register a plain tensor for each parameter that Transformer Engine keeps in 8 bits.

    Initial values are drawn into the plain tensor, and the caller copies them to the parameter. The
    parameter's own registration was lost when quantization freed its storage; its initialization
    method is taken from the module, which still has it.

    Args:
        register: function of a tensor and the method that will fill it.

    Returns:
        By the id of an 8-bit parameter: the parameter, and the plain tensor.
    """
    staged: dict[int, tuple[Any, Tensor]] = {}
    for module in chunk.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not is_float8tensor(parameter):
                continue
            method = module.param_init_meta[name].init_fn  # type: ignore[index, union-attr]
            if hasattr(method, "marks"):
                like: Any = {"dtype": parameter.dtype, "device": parameter.device}
                values = torch.empty(parameter.shape, **like)
                register(values, method.method)
                staged[id(parameter)] = parameter, values
    return staged
