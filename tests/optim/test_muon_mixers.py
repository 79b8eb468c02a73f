"""Muon on the weights of sequence mixers: each fused matrix by itself, as in plain torch."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.layers.chunks import wrap_chunks
from megatron_ext.optim.builder import build_optimizer
from megatron_ext.optim.schedule import build_scheduler
from megatron_ext.optim.update import parts_of, update_parameters
from megatron_ext.parallel.context import ParallelContext
from tests.layers import plain
from tests.layers.mixers import test_delta_mixers as delta
from tests.layers.mixers import test_mamba as mamba
from tests.layers.mixers import test_sparse_attention as sparse
from tests.layers.test_lora import CONSTANT, near
from tests.numerics.stock import gpt_config
from tests.optim.test_muon import QUINTIC, SHARED, plain_direction
from tests.ranks import on_ranks

STEPS = 3
MUON = "--optimizer muon --muon-use-nesterov --muon-extra-scale-factor 0.2".split()
ROWS = {
    "G": {"q": 8, "k": 8, "v": 24, "z": 24, "b": 2, "a": 2},
    "K": {"q": 8, "k": 8, "v": 12, "beta": 1},
    "M": {"z": 16, "x": 16, "B": 16, "C": 16, "dt": 2},
}
"""Rows of each matrix in the fused projection of a mixer, for one head of its keys or group."""
VECTORS = re.compile(r"conv|norm|A_log|dt_bias|^D$")
"""Names of the parameters that are no matrices."""


class Truth:
    """Muon and AdamW in plain torch, on the whole matrices of all ranks.

    A parameter is a list of matrices that it fuses, of which Muon updates each by itself.
    """

    def __init__(self, parameters: dict[str, list[Tensor]], vectors: Sequence[str]) -> None:
        self.parameters = parameters
        self.momenta = {
            name: [torch.zeros_like(x) for x in parts]
            for name, parts in parameters.items()
            if name not in vectors
        }
        decayed, others = (
            [parameters[name][0] for name in vectors if (parameters[name][0].dim() == 2) is two]
            for two in (True, False)
        )
        groups: Any = [{"params": decayed}, {"params": others, "weight_decay": 0}]
        self.adam = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)

    def step(self, gradients: dict[str, list[Tensor]]) -> None:
        for name, parts in self.parameters.items():
            for index, (weight, gradient) in enumerate(zip(parts, gradients[name], strict=True)):
                if name not in self.momenta:
                    weight.grad = gradient.clone()
                    continue
                momentum = self.momenta[name][index]
                momentum.mul_(0.9).add_(gradient, alpha=0.1)
                ahead = 0.9 * momentum + 0.1 * gradient
                weight.mul_(1 - 1e-2 * 0.1)
                weight.sub_(1e-2 * 0.2 * plain_direction(ahead, QUINTIC, "spectral"))
        self.adam.step()


def _check(
    context: ParallelContext,
    module: Any,
    transformer_config: Any,
    whole: dict[str, list[Tensor]],
    own: Callable[[str, Sequence[Tensor]], Tensor],
    vectors: Sequence[str],
    flags: Sequence[str],
) -> None:
    """Take three steps and compare each weight with plain torch.

    ``whole`` holds the matrices of each parameter, and ``own`` cuts a rank's parameter from them.
    """
    sizes = ["--tensor-model-parallel-size", str(context.pgs.tp.size())]
    run = gpt_config(
        *MUON, *CONSTANT, "--weight-decay", "0.1", *sizes, *flags,
        world_size=context.layout.world_size,
    )  # fmt: skip
    named = dict(module.named_parameters())
    assert named.keys() == whole.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(own(name, whole[name]))
    (ddp,) = wrap_chunks([module], run, transformer_config, context, torch.device("cpu"))
    optimizer = build_optimizer(run, [ddp], context.pgs)
    build_scheduler(run, optimizer)
    truth = Truth({name: [x.double() for x in parts] for name, parts in whole.items()}, vectors)
    updated = set().union(*(part.optimizer.weights for part in parts_of(optimizer)))
    assert {name for name, x in named.items() if x in updated} == named.keys() - set(vectors)
    for step in range(STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        gradients = {
            name: [plain.full_weight(f"{step} {name} {i}", tuple(x.shape)) for i, x in enumerate(y)]
            for name, y in whole.items()
        }
        for name, parameter in named.items():
            parameter.main_grad.copy_(own(name, gradients[name]))
        assert update_parameters(optimizer, 0.0).applied
        truth.step(gradients)
    for name, parameter in named.items():
        near(parameter, own(name, truth.parameters[name]), name, 2e-6)


def _mixer(context: ParallelContext, *, kind: str, flags: str) -> None:
    module: Any
    if kind == "M":
        transformer_config = mamba.configured(context)
        module = mamba.built(context, transformer_config)
        heads = mamba.GROUPS
    else:
        transformer_config = delta.configured(context, kind)
        module = delta.built(context, kind, transformer_config)
        heads = delta.key_heads(kind)
    shards = {name: plain.shard_of(name, x, context) for name, x in module.named_parameters()}
    whole = {name: [plain.full_weight(name, shard.shape)] for name, shard in shards.items()}
    whole["in_proj.weight"] = [
        plain.full_weight(name, (rows * heads, delta.H)) for name, rows in ROWS[kind].items()
    ]
    vectors = [name for name in whole if VECTORS.search(name)]

    def own(name: str, parts: Sequence[Tensor]) -> Tensor:
        # The rows of a head or group follow those of another one.
        turns = [part.chunk(heads)[head] for head in range(heads) for part in parts]
        return shards[name].of(torch.cat(turns) if len(parts) > 1 else parts[0])

    _check(context, module, transformer_config, whole, own, vectors, flags.split())


@pytest.mark.parametrize(
    ("kind", "sizes", "flags"),
    [
        ("G", {"tp": 2}, ""),
        ("K", {"tp": 2}, "--muon-tp-mode distributed"),
        ("M", {"tp": 2}, ""),
        pytest.param("G", {}, "", marks=pytest.mark.slow),
        pytest.param("K", {"tp": 2, "dp": 2}, SHARED, marks=pytest.mark.slow),
    ],
)
def test_each_fused_matrix_of_a_mixer_is_updated_by_itself(
    kind: str, sizes: dict[str, int], flags: str
) -> None:
    on_ranks(_mixer, sizes, kind=kind, flags=flags)


def _sparse(context: ParallelContext) -> None:
    transformer_config = sparse.configured(context)
    module = sparse.built(context, transformer_config)
    shards = {name: plain.shard_of(name, x, context) for name, x in module.named_parameters()}
    whole = {name: [plain.full_weight(name, shard.shape)] for name, shard in shards.items()}
    vectors = [name for name in whole if VECTORS.search(name)]
    projections = [name for name in whole if "indexer.linear" in name]
    assert len(projections) == 3 and not set(projections) & set(vectors)

    def own(name: str, parts: Sequence[Tensor]) -> Tensor:
        return shards[name].of(parts[0])

    _check(context, module, transformer_config, whole, own, vectors, [])


def test_projections_of_an_indexer_are_matrices() -> None:
    on_ranks(_sparse, {"tp": 2})
