"""Answering megatron-core's questions to ``torch.cuda`` on a machine without a GPU.

megatron-core addresses ``torch.cuda`` by name. This module puts the answers of `answers.TABLE` in
the place of those names, on request only, and takes them away again.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from megatron_ext.device.answers import TABLE
from megatron_ext.errors import ConfigError

logger = logging.getLogger(__name__)

_MISSING = object()
_saved: list[tuple[Any, str, Any]] = []


class _OneGenerator(logging.Filter):
    """Drops core's warning that the CPU's random state moved: here it is the device's own."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


_filter = _OneGenerator()
_random_logger = logging.getLogger("megatron.core.tensor_parallel.random")


def install() -> None:
    """Put the answers in place; a second call does nothing.

    Also makes ``torch.compile`` run its functions eagerly: core compiles small functions at import,
    which on a CPU costs minutes and wins nothing.

    Raises:
        ConfigError: this machine has a GPU, where the answers would be wrong.
    """
    if _saved:
        return
    if torch.cuda.is_available():
        raise ConfigError(
            "`cuda_on_cpu.install` was called on a machine with a GPU, where its answers would be "
            "wrong; use `device.select()`, or hide the GPU with `CUDA_VISIBLE_DEVICES=`."
        )
    for row in TABLE:
        original = getattr(row.owner, row.name)
        _saved.append((row.owner, row.name, vars(row.owner).get(row.name, _MISSING)))
        setattr(row.owner, row.name, row.make(original))
    torch.compiler.set_stance("force_eager")
    _random_logger.addFilter(_filter)
    logger.info("no GPU: torch.cuda is answered on the CPU, and all timings are CPU timings")


def uninstall() -> None:
    """Restore torch as it was; without an earlier `install` this does nothing."""
    if not _saved:
        return
    while _saved:
        owner, name, original = _saved.pop()
        if original is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    torch.compiler.set_stance("default")
    _random_logger.removeFilter(_filter)


def is_installed() -> bool:
    """Whether the answers are in place."""
    return bool(_saved)
