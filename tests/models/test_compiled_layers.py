"""Whole GPT layers with their pointwise parts compiled: the same arithmetic in every layout."""

from __future__ import annotations

import pytest

from megatron_ext.layout import ParallelContext
from megatron_ext.models.compiled import compiled_on_cpu
from tests.models.test_layers import check_block
from tests.ranks import ranks


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@ranks()
def test_one_rank(context: ParallelContext, normalization: str) -> None:
    with compiled_on_cpu():
        check_block(context, normalization=normalization)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@ranks(tp=2)
def test_tensor_and_sequence_parallel(context: ParallelContext, sequence_parallel: bool) -> None:
    with compiled_on_cpu():
        check_block(context, sequence_parallel=sequence_parallel)
