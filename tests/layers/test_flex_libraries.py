"""megatron-core's dispatcher of DeepEP and HybridEP, with a stand-in for the library."""

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import fused_a2a, token_dispatcher
from torch import Tensor

from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.config.flex import has_flex_backend
from tests.layers import plain
from tests.layers.test_layers import B, H, S, same, torch_block
from tests.layers.test_moe import config
from tests.layers.test_two_hop_dispatcher import DROPPING, MOE, SHARED_EXPERT, E
from tests.ranks import on_ranks

STAND_INS = Path(__file__).parent / "stand_ins"
NAMES = "fused_dispatch fused_combine set_deepep_num_sms hybrid_ep_dispatch hybrid_ep_combine"
ONCE = ["layout", "dispatch", "combine", "dispatch again", "combine with weights"]
TWICE = [*ONCE[:3], *ONCE]
# The manager of HybridEP allocates a tensor on a GPU in some releases of megatron-core.
ON_GPU = "device='cuda'" in inspect.getsource(token_dispatcher._HybridEPManager.__init__)


def install() -> list[str]:
    """Let this rank import the stand-in; return the list of its calls."""
    sys.path.insert(0, str(STAND_INS))
    importlib.invalidate_caches()
    importlib.reload(fused_a2a)
    # The rank is a process of its own, in which the dispatcher's module holds the old names.
    for name in NAMES.split():
        setattr(token_dispatcher, name, getattr(fused_a2a, name))
    return importlib.import_module("deep_ep").CALLS  # type: ignore[no-any-return]


def outcome(context: ParallelContext, **changes: Any) -> dict[str, Tensor]:
    """Return output and gradients of a bf16 layer of experts by name."""
    block = torch_block(
        config(context, num_moe_experts=E, moe_router_dtype="fp32", **changes), context
    )
    plain.fill(block, context, E)
    block.bfloat16()
    generator = torch.Generator().manual_seed(context.dp_rank)
    own = torch.randn(S, B, H, generator=generator).bfloat16().requires_grad_()
    output = block(own, None)
    output.float().square().sum().backward()
    gradients = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return {"output": output, "input": own.grad, **gradients}


def check_library(context: ParallelContext, backend: str) -> None:
    assert not has_flex_backend(backend)
    calls = install()
    assert has_flex_backend(backend)
    for changes, wanted_calls in (({}, ONCE), ({**SHARED_EXPERT, **MOE}, TWICE), (DROPPING, ONCE)):
        wanted = outcome(context, moe_token_dispatcher_type="alltoall", **changes)
        calls.clear()
        found = outcome(
            context,
            moe_token_dispatcher_type="flex",
            moe_flex_dispatcher_backend=backend,
            **changes,
        )
        has_layout = backend == "deepep"
        assert calls == [call for call in wanted_calls if has_layout or call != "layout"]
        same(found, wanted, changes)


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_the_librarys_results_are_those_of_one_all_to_all(backend: str) -> None:
    if backend == "hybridep" and ON_GPU:
        pytest.skip("this release of megatron-core uses HybridEP on GPUs only")
    on_ranks(check_library, {"dp": 4, "ep": 4}, backend=backend)
