"""Muon on the weights of sequence mixers: each fused matrix by itself, as in plain torch."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.layers.chunks import wrap_chunks
from megatron_ext.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ext.layers.transformer_config import build_transformer_config
from megatron_ext.optim.builder import build_optimizer
from megatron_ext.optim.schedule import build_scheduler
from megatron_ext.optim.update import parts_of, update_parameters
from megatron_ext.parallel.context import ParallelContext
from tests.layers import plain
from tests.layers.mixers import test_sparse_attention as sparse
from tests.layers.test_lora import CONSTANT, near
from tests.numerics.stock import gpt_config
from tests.optim.test_muon import QUINTIC, plain_direction
from tests.ranks import on_ranks

HIDDEN, GROUPS, STEPS = 32, 2, 3
MUON = "--optimizer muon --muon-use-nesterov --muon-extra-scale-factor 0.2".split()
PARTS = {
    # Two value heads for each key head, of 12 and 8 channels; two numbers for each value head.
    "gated delta": {"q": 16, "k": 16, "v": 48, "z": 48, "b": 4, "a": 4},
    "mamba": {"z": 64, "x": 64, "B": 16, "C": 16, "dt": 8},
}
"""Rows of the matrices in a mixer's fused projection, on all tensor-parallel ranks together."""
Cut = Callable[[Sequence[Tensor], int, int], Tensor]


def by_group(parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
    """Return a rank's fused weight, in which the rows of a group follow those of another one."""
    own = range(rank * GROUPS // size, (rank + 1) * GROUPS // size)
    return torch.cat([part.chunk(GROUPS)[group] for group in own for part in parts])


def by_rank(parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
    """Return a rank's fused weight, in which a rank's rows of a matrix follow those of another."""
    return torch.cat([part.chunk(size)[rank] for part in parts])


class Mixer(MegatronModule):  # type: ignore[misc]
    """The parameters of a recurrent mixer, without its recurrence."""

    def __init__(self, config: Any, context: ParallelContext, rows: Sequence[int]) -> None:
        super().__init__(config)
        given: Any = {
            "config": config, "init_method": config.init_method, "bias": False,
            "skip_bias_add": False, "is_expert": False, "tp_group": context.pgs.tp,
        }  # fmt: skip
        self.in_proj = ColumnParallelLinear(HIDDEN, sum(rows), gather_output=False, **given)
        self.out_proj = RowParallelLinear(64, HIDDEN, input_is_parallel=True, **given)
        for name, shape in (("conv1d", (24, 4)), ("A_log", (8,)), ("dt_bias", (8,)), ("D", (8,))):
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape)))
        self.conv1d.is_table = True  # type: ignore[attr-defined]


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


def _fused_as_in(context: ParallelContext, *, kind: str, cut: Cut, flags: str) -> None:
    rank, size = context.tp_rank, context.pgs.tp.size()
    transformer_config = build_transformer_config(
        gpt_config("--tensor-model-parallel-size", str(size), world_size=context.layout.world_size)
    )
    rows = list(PARTS[kind].values())
    module = Mixer(transformer_config, context, rows)
    turns = GROUPS if cut is by_group else size
    module.in_proj.matrix_rows = tuple(number // turns for number in rows)
    whole = {
        "in_proj.weight": [plain.full_weight(k, (n, HIDDEN)) for k, n in PARTS[kind].items()],
        "out_proj.weight": [plain.full_weight("out", (HIDDEN, 64))],
    }
    vectors = ["conv1d", "A_log", "dt_bias", "D"]
    whole |= {name: [plain.full_weight(name, tuple(getattr(module, name).shape))]
              for name in vectors}  # fmt: skip

    def own(name: str, parts: Sequence[Tensor]) -> Tensor:
        if name == "in_proj.weight":
            return cut(parts, rank, size)
        return parts[0].chunk(size, dim=1)[rank] if name == "out_proj.weight" else parts[0]

    _check(context, module, transformer_config, whole, own, vectors, flags.split())


@pytest.mark.parametrize(
    ("kind", "cut", "sizes", "flags"),
    [
        ("gated delta", by_group, {}, ""),
        ("gated delta", by_group, {"tp": 2}, ""),
        ("mamba", by_rank, {"tp": 2}, "--muon-tp-mode distributed"),
        ("mamba", by_rank, {"tp": 2, "dp": 2}, "--use-distributed-optimizer"),
    ],
)
def test_each_fused_matrix_of_a_mixer_is_updated_by_itself(
    kind: str, cut: Cut, sizes: dict[str, int], flags: str
) -> None:
    on_ranks(_fused_as_in, sizes, kind=kind, cut=cut, flags=flags)


def _sparse(context: ParallelContext) -> None:
    transformer_config = sparse.configured(context)
    module = sparse.built(context, transformer_config)
    shards = {name: plain.shard_of(name, x, context) for name, x in module.named_parameters()}
    whole = {name: [plain.full_weight(name, shard.shape)] for name, shard in shards.items()}
    vectors = [name for name in whole if re.search("norm", name)]
    projections = [name for name in whole if "indexer.linear" in name]
    assert len(projections) == 3 and not set(projections) & set(vectors)

    def own(name: str, parts: Sequence[Tensor]) -> Tensor:
        return shards[name].of(parts[0])

    _check(context, module, transformer_config, whole, own, vectors, [])


@pytest.mark.parametrize("sizes", [{"tp": 2}])
def test_projections_of_an_indexer_are_matrices(sizes: dict[str, int]) -> None:
    on_ranks(_sparse, sizes)
