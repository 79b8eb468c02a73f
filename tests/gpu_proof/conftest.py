"""Makes the fake GPU for these tests; they are collected only by ``run.sh``, which sets it up."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

WANTED = "GPU_PROOF_PRELOAD" in os.environ

if not WANTED:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megatron_ext.layers import compiled
    from tests.gpu_proof import budget, compiler, fake_cuda, fake_graphs, fake_ranks

    fake_cuda.install()
    fake_graphs.install()
    compiler.install()
    fake_ranks.install()
    compiled.compiler.strict = True

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table of each traced step."""
        for table in budget.TABLES:
            terminalreporter.write_line(table)

    @pytest.fixture
    def fake_tensors() -> Iterator[FakeTensorMode]:
        """Make every new tensor a fake one, and compile every function anew for its shapes."""
        torch._dynamo.reset()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
