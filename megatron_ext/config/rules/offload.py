"""Rules of optimizer state and activations in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import FlagError


def offload_errors(run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in the flags of what lies in host memory."""
    if run.offload.optimizer_cpu_offload:
        yield from _state_errors(run)


def _state_errors(run: RunConfig) -> Iterator[FlagError]:
    refused = partial(FlagError, "--optimizer-cpu-offload", None)
    rule = run.optimizer.optimizer
    if rule == "muon":
        yield refused(
            "does not go with `--optimizer muon`, whose products of matrices are a GPU's work",
            "use adam, or leave it out",
        )
    elif rule == "custom":
        yield refused(
            "does not go with `--optimizer-class`: it updates one weight at a time, which an "
            "optimizer of your own may count as a step each",
            "use adam or sgd, or leave it out",
        )
    if run.fp8.fp8_param_gather:
        yield refused(
            "does not go with `--fp8-param-gather`, whose weights only a GPU rounds to 8 bits",
            "leave one out",
        )
