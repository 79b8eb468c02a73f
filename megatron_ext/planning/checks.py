"""megatron-core's own rules on a model, asked before any rank is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.errors import ConfigError
from megatron_ext.models.transformer_config import build_transformer_config

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig


def check_core(config: RunConfig) -> None:
    """Build megatron-core's configuration, which checks itself by assertions.

    Raises:
        ConfigError: with the first rule of megatron-core that the run breaks.
    """
    try:
        build_transformer_config(config)
    except (AssertionError, ValueError) as error:
        said = " ".join(str(error).split()) or "an assertion without a message"
        raise ConfigError(
            f"megatron-core refuses this model: {said.rstrip('.')}; change the flags that it names."
        ) from error
