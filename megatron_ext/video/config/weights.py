"""Flags that name published weights, from which `video.convert.training` starts a run.

The functions here import that module only for runs that have such a flag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_ext.config.flags import Changeable, derived, flag
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import FlagError
from megatron_ext.train.task import later

if TYPE_CHECKING:
    import torch

    from megatron_ext.parallel.context import ParallelContext

_TRAINING = "megatron_ext.video.convert.training"
_ADAPTERS = "megatron_ext.video.convert.adapter_training"
FILL = later(f"{_TRAINING}:fill_network")
"""Loads published weights under adapters, as `checkpoint.conversion.Network.fill`."""


@dataclass(frozen=True)
class PublishedConfig(Changeable):
    """The flags for starting a run from published weights.

    Attributes:
        weights_origin: path, form and digest of the published weights from which the run started;
            None for a run that started otherwise. It is stored in checkpoints.
    """

    SECTION: ClassVar[str] = "weights"

    load_weights: str | None = flag(
        None,
        "folder or file of published weights, such as diffusers or ComfyUI have; it gives the "
        "sizes of the network and, where no checkpoint is loaded, the initial weights",
        from_checkpoint=False,
    )
    load_weights_entry: str | None = flag(
        None,
        "entry of a .pt file of --load-weights, such as generator_ema; default: the only one",
        from_checkpoint=False,
    )
    adapter_path: str | None = flag(
        None,
        "folder or file of LoRA adapters to go on from, of peft, diffusers, kohya or ComfyUI; it "
        "gives --lora-rank and the other flags of adapters",
        from_checkpoint=False,
    )
    weights_origin: dict[str, Any] | None = derived()


def is_published(path: str) -> bool:
    """Return whether a path is that of published weights, and not of a folder of checkpoints."""
    described = ("config.json", "model_index.json", "*.safetensors.index.json")
    return Path(path).is_file() or any(any(Path(path).glob(name)) for name in described)


def model_of_weights(config: RunConfig) -> Mapping[str, Mapping[str, Any]]:
    """Return the values of flags that ``--load-weights`` determines; {} without the flag."""
    if config.section(PublishedConfig).load_weights is None:
        return {}
    values: Mapping[str, Mapping[str, Any]] = later(f"{_TRAINING}:model_of_weights")(config)
    return values


def starting(config: RunConfig) -> RunConfig:
    """Return the configuration with what follows from ``--load-weights``, if it is given."""
    if config.section(PublishedConfig).load_weights is None:
        return config
    resolved: RunConfig = later(f"{_TRAINING}:resolve_weights")(config)
    return resolved


def weights_errors(config: RunConfig, resolved: RunConfig) -> list[FlagError]:
    """Return an error for each fault in ``--load-weights`` and the flags beside it.

    ``config`` has the flags as given, ``resolved`` also values derived from them.
    """
    given = config.section(PublishedConfig)
    if (given.load_weights, given.load_weights_entry) == (None, None):
        return []
    errors: list[FlagError] = later(f"{_TRAINING}:weights_errors")(config, resolved)
    return errors


def with_adapters(config: RunConfig) -> RunConfig:
    """Return the configuration with the flags of adapters that ``--adapter-path`` determines.

    The network's sizes must be known. Nothing changes without the flag.
    """
    if config.section(PublishedConfig).adapter_path is None:
        return config
    resolved: RunConfig = later(f"{_ADAPTERS}:with_adapters")(config)
    return resolved


def adapter_errors(config: RunConfig, resolved: RunConfig) -> list[FlagError]:
    """Return an error for each fault in ``--adapter-path`` and the flags of adapters beside it.

    ``config`` has the flags as given, ``resolved`` also values derived from them.
    """
    if (config.lora.lora_rank, config.section(PublishedConfig).adapter_path) == (None, None):
        return []
    errors: list[FlagError] = later(f"{_ADAPTERS}:adapter_errors")(config, resolved)
    return errors


def check_sizes(config: RunConfig) -> RunConfig:
    """Return ``config``, whose network must have the sizes of ``--load-weights``, if it is given.

    Raises:
        ConfigError: the flags or the data give the network other sizes.
    """
    if config.section(PublishedConfig).load_weights is not None:
        later(f"{_TRAINING}:check_sizes")(config)
    return config


def weights_inputs(config: RunConfig) -> list[Callable[[], Any]]:
    """Return a check of the folder or file of ``--load-weights``, if it is given."""
    if config.section(PublishedConfig).load_weights is None:
        return []
    return [partial(later(f"{_TRAINING}:described"), config)]


def initial_weights(
    config: RunConfig, context: ParallelContext, chunks: Sequence[torch.nn.Module], loaded: Any
) -> list[str] | None:
    """Load the weights of ``--load-weights`` and ``--adapter-path`` into this rank's model chunks.

    If a checkpoint's weights are ``loaded``, only the adapters are. Return notes for the user, or
    None if neither flag gives any.
    """
    given = config.section(PublishedConfig)
    notes = list[str]()
    if given.load_weights is not None and loaded is None:
        notes += later(f"{_TRAINING}:load_initial_weights")(config, chunks)
    if given.adapter_path is not None:
        notes += later(f"{_ADAPTERS}:load_adapters")(config, chunks)
        if given.load_weights is None and loaded is None:
            notes.append(
                "warning: the weights under the adapters are random; give those that the adapters "
                "were trained on by `--load-weights` or `--pretrained-checkpoint`."
            )
    return notes or None
