"""Noise is filtered by text; everything else still reaches the user."""

from __future__ import annotations

import warnings

import pytest

from megatron_ext.train.main import silence_known_warnings

COLLECTIVE = "`torch.distributed.all_gather_into_tensor` is deprecated. Please use another."
ORDER = (
    "When using sequence parallelism it is recommended to set the environment variable "
    "CUDA_DEVICE_MAX_CONNECTIONS to 1"
)


def heard(device: str, message: str, kind: type[Warning]) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        silence_known_warnings(device)
        warnings.warn(message, kind, stacklevel=1)
    return bool(caught)


@pytest.mark.parametrize(
    ("device", "message", "kind", "expected"),
    [
        ("cpu", COLLECTIVE, FutureWarning, False),
        ("cuda", COLLECTIVE, FutureWarning, False),
        ("cpu", ORDER, UserWarning, False),
        ("cuda", ORDER, UserWarning, True),
        ("cpu", "the data is odd", UserWarning, True),
    ],
)
def test_only_known_noise_is_silent(
    device: str, message: str, kind: type[Warning], expected: bool
) -> None:
    assert heard(device, message, kind) is expected
