"""The fixture of tests that follow the order of copies on streams."""

from collections.abc import Iterator

import pytest

from megatron_ext.device import cuda_shim
from tests.stream_order import StreamOrder
from tests.stream_stand_in import stream_order


@pytest.fixture
def order() -> Iterator[StreamOrder]:
    cuda_shim.install()
    with stream_order() as found:
        yield found
