"""One import of torch and megatron-core for the whole session; ranks are forked from it."""

import os
from collections.abc import Iterator
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import megatron.core.dist_checkpointing
import megatron.core.models.gpt
import megatron.core.optimizer
import megatron.core.pipeline_parallel  # noqa: F401 - all four, for their side effects
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    """Undo what a test sets: megatron-core's models choose `NVTE_*` for their whole process."""
    with mock.patch.dict(os.environ):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is none, and say so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
