"""Warnings of the packages below us that a user can do nothing about, said by every rank."""

from __future__ import annotations

import warnings

EVERYWHERE = (
    # megatron-core's own default of a field that it deprecates.
    "full scope is deprecated. Use empty cuda_graph_scope",
    # megatron-core asks every parameter for `.grad`; of the distributed optimizer's it is None.
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    # megatron-core calls collectives by names that torch 2.13 gives up later.
    r"`torch\.distributed\.\w+` is deprecated",
    # megatron-core's and torch's own readers of checkpoints.
    "`load_state_dict` is deprecated and will be removed in future versions",
    "Please use DTensor instead and we are deprecating ShardedTensor",
)
ON_A_CPU = (
    # About the order of GPU kernels.
    "When using async grad allreduce it is recommended to set the environment variable",
    "When using sequence parallelism it is recommended to set the environment variable",
)


def silence_known_warnings(device: str) -> None:
    """Filter them in this process and in the ranks that it forks.

    Args:
        device: ``cuda`` or ``cpu``.
    """
    for message in EVERYWHERE + (ON_A_CPU if device == "cpu" else ()):
        warnings.filterwarnings("ignore", message=message)
