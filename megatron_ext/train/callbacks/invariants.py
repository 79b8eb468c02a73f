"""Checks that ranks hold equal values, and that no gradients are left over."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.errors import MegatronExtError
from megatron_ext.layers.chunks import named_parameters, own_elements
from megatron_ext.layers.expert_parameters import expert_parameters
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.callbacks.callback import Callback, due

Named = Sequence[tuple[str, Tensor]]
Parameters = Sequence[tuple[str, torch.nn.Parameter]]


class InvariantError(MegatronExtError):
    """Raised if ranks differ in values that must be equal, or if a step leaves a gradient over."""


class Invariants(Callback):
    """Checks every ``--check-invariants`` steps that replicas agree and gradients start at zero."""

    def before_step(self) -> None:
        coming = self.run.progress.iteration + 1
        checks = due(coming, self.run.config.training.check_invariants)
        self.run.runner.check_zeroed = partial(check_zeroed, iteration=coming) if checks else None

    def after_step(self) -> None:
        run = self.run
        if due(run.progress.iteration, run.config.training.check_invariants):
            with run.parameter_gather.paused():
                check_replicas(run.runner.trained_chunks, run.context, run.progress.iteration)


def check_replicas(
    chunks: Sequence[DistributedDataParallel], context: ParallelContext, iteration: int
) -> None:
    """Compare every parameter with its copies on other ranks; all ranks call this together.

    These tensors must be equal:

    - dense parameters, on all data- and context-parallel ranks;
    - experts, on all expert-data-parallel ranks;
    - dense parameters that tensor parallelism does not shard, on all tensor-parallel ranks;
    - a tied embedding, on all pipeline stages that hold a copy of it;
    - the amax histories of fp8, on all ranks that hold a shard or copy of the layer.

    Of weights that are sharded over data-parallel ranks, a rank compares its shards with those of
    the other tensor-parallel ranks and pipeline stages.

    Raises:
        InvariantError: two ranks differ; it names the ranks and the first tensor that differs.
    """
    named = named_parameters(chunks)
    expert_ids = {id(p) for chunk in chunks for p in expert_parameters(chunk)}
    dense = [(name, p) for name, p in named if id(p) not in expert_ids]
    experts = [(name, p) for name, p in named if id(p) in expert_ids]
    whole = [(name, p) for name, p in dense if not getattr(p, "tensor_model_parallel", False)]
    copies = [(name, p) for name, p in dense if getattr(p, "shared_embedding", False)]
    pgs = context.pgs
    _check_equal(_copied(dense), pgs.dp_cp, "data-parallel replicas", iteration)
    _check_equal(_copied(experts), pgs.expt_dp, "replicas of the experts", iteration)
    kept = [(name, own_elements(parameter)) for name, parameter in whole]
    _check_equal(kept, pgs.tp, "tensor-parallel ranks", iteration)
    if copies and getattr(pgs, "embd", None) is not None:
        one = [("the tied embedding", own_elements(copies[0][1]))]
        _check_equal(one, pgs.embd, "pipeline stages", iteration)
    _check_histories(chunks, iteration)


def _copied(named: Parameters) -> Parameters:
    """Leave out the parameters that are sharded over data-parallel ranks."""
    return [
        (name, parameter) for name, parameter in named if not hasattr(parameter, "weight_shard")
    ]


def _check_histories(chunks: Sequence[DistributedDataParallel], iteration: int) -> None:
    """Compare amax histories of delayed fp8 scaling between ranks with parts of the same layer."""
    from megatron_ext.layers.fp8.scaling import DelayedScaling

    scalings = [
        (f"{name}.amax_history", module)
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, DelayedScaling)
    ]
    for may_idle in (False, True):
        alike = [pair for pair in scalings if pair[1].parts.may_idle == may_idle]
        for group in alike[0][1].parts.of_step() if alike else ():
            named = [(name, module.amax_history) for name, module in alike]
            cause = "the largest magnitudes of a step were not completed over them"
            where = "ranks with parts of its layer"
            _check_equal(named, group, where, iteration, kind="history", cause=cause)


def check_zeroed(chunks: Sequence[DistributedDataParallel], iteration: int) -> None:
    """Check that no gradient is left over before step ``iteration``.

    Raises:
        InvariantError: a ``grad`` is not None, or a ``main_grad`` is not all zeros.
    """
    for name, parameter in named_parameters(chunks):
        buffer = getattr(parameter, "main_grad", None)
        if parameter.grad is not None or (buffer is not None and bool(buffer.any())):
            rank = torch.distributed.get_rank()
            raise InvariantError(
                f"Before iteration {iteration} the gradient of `{name}` on rank {rank} is not "
                "zero; a part of the last step would be added to this one."
            )


def _digest(tensor: Tensor) -> Tensor:
    """Return the plain and the position-weighted sum of a tensor's bytes, ``[2]`` int64."""
    bits = tensor.detach().contiguous().view(torch.uint8).reshape(-1).to(torch.int64)
    weights = torch.arange(1, bits.numel() + 1, device=bits.device) % 65521
    return torch.stack([bits.sum(), (bits * weights).sum()])


def _check_equal(
    named: Named,
    group: ProcessGroup,
    where: str,
    iteration: int,
    *,
    kind: str = "parameter",
    cause: str = "the gradients of one of them were not reduced",
) -> None:
    """Raise an InvariantError for the first tensor that differs between ranks of ``group``.

    Args:
        named: pairs of a name and a tensor.
        where: noun for the ranks of the group in the message, such as "data-parallel replicas".
        kind: noun for the tensors in the message.
        cause: clause in the message about the probable cause of a difference.
    """
    if not named or group.size() == 1:
        return
    digests = torch.stack([_digest(tensor) for _, tensor in named])
    extremes = torch.stack([digests, -digests])
    torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX, group=group)
    differing = (extremes[0] != -extremes[1]).any(dim=1).nonzero()
    if not len(differing):
        return
    index = int(differing[0])
    everyone = digests.new_empty(2 * group.size())
    torch.distributed.all_gather_into_tensor(everyone, digests[index].contiguous(), group=group)
    everyone = everyone.view(-1, 2)
    differs = (everyone != everyone[0]).any(dim=1)
    ranks = torch.distributed.get_process_group_ranks(group)
    apart = [rank for rank, bad in zip(ranks, differs.tolist(), strict=True) if bad]
    raise InvariantError(
        f"After iteration {iteration} the {kind} `{named[index][0]}` differs between {where}: "
        f"ranks {apart} do not hold what rank {ranks[0]} holds; {cause}."
    )
