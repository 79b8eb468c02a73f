"""Makes the fake GPU for these tests; they are collected only by ``run.sh``, which sets it up."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

WANTED = "GPU_PROOF_PRELOAD" in os.environ

if not WANTED:
    collect_ignore_glob = ["test_*.py"]
else:
    from megatron_ext.layers import compiled
    from tests.gpu_proof import compiler, fake_cuda

    fake_cuda.install()
    compiler.install()
    compiled._compiler.strict = True

    @pytest.fixture
    def fake_tensors() -> Iterator[fake_cuda.FakeMode]:
        """Make every new tensor a fake one."""
        with fake_cuda.FakeMode() as mode:
            yield mode
