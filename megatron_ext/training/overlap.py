"""Forward hooks that gather parameters while the forward pass runs (--overlap-param-gather)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer import TransformerConfig


class ParameterGather:
    """Switches the hooks off where the parameters must be whole.

    The first step also runs without them, so that an error in initial or loaded weights is not
    copied to all ranks by the first gather.
    """

    def __init__(
        self, chunks: list[DistributedDataParallel], core: TransformerConfig, *, overlap: bool
    ) -> None:
        self._chunks = chunks
        self._core = core
        self._overlap = overlap
        self._sync_func = core.param_sync_func
        self._on = overlap

    def switch_off(self, *, gather: bool) -> None:
        """Remove the hooks; with ``gather``, collect the latest parameters now."""
        if self._on:
            for chunk in self._chunks:
                chunk.disable_forward_pre_hook(param_sync=gather)
            self._core.param_sync_func = None
            self._on = False

    def switch_on(self) -> None:
        """Put the hooks back, where the run overlaps at all."""
        if self._overlap and not self._on:
            for chunk in self._chunks:
                chunk.enable_forward_pre_hook()
            self._core.param_sync_func = self._sync_func
            self._on = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Whole parameters inside the block, for evaluation and checkpoints."""
        was_on = self._on
        self.switch_off(gather=True)
        try:
            yield
        finally:
            if was_on:
                self.switch_on()
