"""megatron-core's optimizer, built from a run's configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import optimizer as core
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.layers.compiled import compiles
from megatron_ext.layers.transformer_config import params_dtype
from megatron_ext.optim.adam import ADAMS, Custom, start_state
from megatron_ext.optim.update import parts_of

if TYPE_CHECKING:
    from megatron_ext.optim.fused_adam import Kernel

OPTIMIZERS = {
    "adam": ("adam", core.AdamOptimizerConfig),
    "sgd": ("sgd", core.SGDOptimizerConfig),
    "custom": ("adam", core.AdamOptimizerConfig),
}
"""megatron-core's optimizer name and configuration class for each ``--optimizer`` except muon.

An optimizer of the user's own replaces an Adam, since megatron-core's distributed optimizer accepts
nothing else.
"""

MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The dtype for each value of ``--exp-avg-dtype`` and ``--exp-avg-sq-dtype``."""


def build_optimizer(
    config: RunConfig, chunks: list[DistributedDataParallel], groups: ProcessGroupCollection
) -> MegatronOptimizer:
    """Build the optimizer of this rank's chunks; biases and norm weights have no weight decay."""
    uses_muon = config.optimizer.optimizer == "muon"
    name = config.optimizer.muon_scalar_optimizer if uses_muon else config.optimizer.optimizer
    rule, cls = OPTIMIZERS[name]
    ours: dict[str, Any] = {**vars(config.precision), **vars(config.optimizer), **vars(config.fp8)}
    ours |= {"optimizer": rule, "params_dtype": params_dtype(config.precision)}
    fields = {field.name for field in dataclasses.fields(cls)}
    # Otherwise megatron-core would require Transformer Engine's Adam.
    fields -= {"use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype"}
    core_config = cls(**{name: ours[name] for name in fields & ours.keys()})
    overrides = core.get_standard_config_overrides(core_config)
    for override in overrides.values():
        if "max_lr" in override:
            # megatron-core matches the groups of a checkpoint by this mark, but does not set it.
            override["is_decoupled_lr"] = True
    if config.lora.lora_plus_lr_ratio is not None:
        from megatron_ext.optim.lora_plus import lora_plus_override

        overrides |= lora_plus_override(config.optimizer, config.lora.lora_plus_lr_ratio)
    optimizer = core.get_megatron_optimizer(
        core_config, chunks, config_overrides=overrides, use_gloo_process_groups=False
    )
    if config.optimizer.shards_weights:
        from megatron_ext.optim.shards import take_sharded_weights

        take_sharded_weights(optimizer)
    if name == "custom":
        from megatron_ext.optim.custom import take_custom

        take_custom(optimizer, config.optimizer, groups)
    elif uses_muon or (rule == "adam" and _takes_torchs_adam(config)):
        moments = (
            MOMENTS[config.optimizer.exp_avg_dtype],
            MOMENTS[config.optimizer.exp_avg_sq_dtype],
        )
        weight = next(weight for chunk in chunks for weight in chunk.parameters())
        own_kernel = not config.offload.use_torch_optimizer_for_cpu_offload
        take_torchs_adam(
            optimizer, moments, kernel_for(weight) if own_kernel else None, muon=uses_muon
        )
    if uses_muon:
        from megatron_ext.optim.muon import give_matrices

        give_matrices(optimizer, chunks, groups, config.optimizer)
    choose_kernels(optimizer, fused=True, host_decides=config.device == "cpu")
    if config.optimizer.shards_gradients:
        from megatron_ext.optim.shards import take_sharded_gradients

        take_sharded_gradients(optimizer)
    if config.offload.optimizer_cpu_offload:
        from megatron_ext.optim.offload import offload_state

        offload_state(optimizer, config.offload)
    for part in parts_of(optimizer):
        if isinstance(getattr(part, "optimizer", None), (*ADAMS, torch.optim.SGD, Custom)):
            # megatron-core has no such function for SGD, and its function for Adam leaves out the
            # step count.
            part.init_state_fn = start_state
    return optimizer


def _takes_torchs_adam(config: RunConfig) -> bool:
    return config.model.transformer_impl == "torch" or config.offload.optimizer_cpu_offload


def take_torchs_adam(
    optimizer: MegatronOptimizer,
    moments: tuple[torch.dtype, torch.dtype],
    make_kernel: Callable[[], Kernel] | None,
    *,
    muon: bool = False,
) -> None:
    """Replace each Adam in a chain of optimizers by `FusedAdam`, or by `Muon` if ``muon`` is True.

    Call this before the first update. torch's own Adam is kept if both moments are float32 and
    there is neither a kernel nor Muon. Other Adams, such as apex's, are always replaced, since they
    cannot let the device decide to skip an update.

    Args:
        moments: dtypes of Adam's two moments.
        make_kernel: makes a parameter group's update kernel; with None, torch updates the weights.
    """
    plain = make_kernel is None and moments == (torch.float32, torch.float32) and not muon
    adams = [part for part in parts_of(optimizer) if getattr(part, "optimizer", None) is not None]
    if plain:
        adams = [part for part in adams if not isinstance(part.optimizer, ADAMS)]
    if not adams:
        return
    from megatron_ext.optim.fused_adam import FusedAdam, replace_adam

    kind: type[FusedAdam] = FusedAdam
    if muon:
        from megatron_ext.optim.muon import Muon

        kind = Muon
    for part in adams:
        replace_adam(part, kind, moments, make_kernel)


def kernel_for(weight: Tensor) -> Callable[[], Kernel] | None:
    """Return the argument ``make_kernel`` of `FusedAdam` for weights on the device of ``weight``.

    It is None, so that torch updates the weights, on a CPU and if compilation is impossible or
    switched off.
    """
    if not (weight.is_cuda and compiles(weight)):
        return None
    from megatron_ext.optim.adam_kernel import GroupUpdate  # Triton may be missing.

    return GroupUpdate


def choose_kernels(
    optimizer: MegatronOptimizer, *, fused: bool, host_decides: bool = False
) -> None:
    """Make torch's Adam update all parameters in one kernel (``fused``) or one by one.

    One kernel may skip an update by itself, unless ``host_decides``, as where the host does not
    wait for a device.

    The choice also holds after a checkpoint is loaded, whatever the checkpoint says. Group settings
    that the checkpoint lacks, because another optimizer wrote it, get the optimizer's defaults.
    """
    for part in parts_of(optimizer):
        inner = getattr(part, "optimizer", None)
        if inner is None:
            continue
        inner.host_decides = host_decides
        is_adam = isinstance(inner, ADAMS) and not isinstance(inner, Custom)
        choice: dict[str, Any] = {"fused": fused or None, "foreach": None} if is_adam else {}
        for group in (inner.defaults, *inner.param_groups):
            group.update(choice)

        def keep(inner: torch.optim.Optimizer, state: dict[str, Any], choice: Any = choice) -> None:
            groups = state["param_groups"]
            state["param_groups"] = [{**inner.defaults, **group, **choice} for group in groups]

        inner.register_load_state_dict_pre_hook(keep)
