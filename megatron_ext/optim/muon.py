"""Muon: moves each matrix in the direction of its momentum, orthogonalized.

See Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/). Weight decay and scale follow
Liu et al. 2025 (arXiv:2502.16982). For a matrix W with gradient G, momentum M and learning rate r:

    M <- beta M + (1 - beta) G
    D  = M, or with Nesterov's momentum beta M + (1 - beta) G
    W <- (1 - r * weight_decay) W - r * scale * orthogonalized(D)

AdamW updates the other weights. `dealing` (data parallelism) and `Direction` (tensor parallelism)
describe how matrices get to the ranks that orthogonalize them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from megatron_ext.config.optimizer import OptimizerConfig
from megatron_ext.optim.adam import start_state
from megatron_ext.optim.dealing import Dealt, deal, gather, scatter
from megatron_ext.optim.fused_adam import FusedAdam
from megatron_ext.optim.matrices import Matrix, matrices_of
from megatron_ext.optim.newton_schulz import Coefficients, orthogonalize, polynomials, scale_of
from megatron_ext.optim.shards import Shard, shards_of
from megatron_ext.optim.update import parts_of


@dataclass(frozen=True)
class Direction:
    """Orthogonalizes and scales momenta; the results are the directions in which weights move.

    Attributes:
        coefficients: (a, b, c) of the polynomial of each Newton–Schulz step.
        scale_mode: ``--muon-scale-mode``, see `scale_of`.
        factor: ``--muon-extra-scale-factor``, which multiplies all directions.
        tp_mode: how tensor-parallel ranks that each hold a part of a matrix share the work.
            "duplicated": each rank gathers and orthogonalizes the whole matrix. "distributed": each
            rank handles its part, and the ranks sum their Gram matrices. "blockwise": each rank
            orthogonalizes its part as if it were a whole matrix, so the update depends on the
            layout.
        precision: the precision of float32 products on a GPU, in the words of
            `torch.set_float32_matmul_precision`; "medium" multiplies in bfloat16. A CPU always
            multiplies in float32.
    """

    coefficients: Sequence[Coefficients]
    scale_mode: str
    factor: float
    tp_mode: str
    precision: str

    @classmethod
    def of(cls, flags: OptimizerConfig) -> Direction:
        """Return a `Direction` with the settings of the flags."""
        return cls(
            polynomials(flags.muon_coefficient_type, flags.muon_num_ns_steps),
            flags.muon_scale_mode,
            flags.muon_extra_scale_factor,
            flags.muon_tp_mode,
            flags.muon_fp32_matmul_prec,
        )

    def dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype in which matrices are sent and multiplied on a device."""
        narrow = device.type == "cuda" and self.precision == "medium"
        return torch.bfloat16 if narrow else torch.float32

    @contextmanager
    def products(self, device: torch.device) -> Iterator[None]:
        """Within the context, multiply float32 matrices on a GPU with the precision `precision`.

        Nothing changes on a CPU, or for "medium", for which `dtype` is bfloat16.
        """
        before = torch.get_float32_matmul_precision()
        if device.type == "cuda" and self.precision != "medium":
            torch.set_float32_matmul_precision(self.precision)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def of_all(self, matrices: Sequence[Matrix], momenta: Sequence[Tensor]) -> list[Tensor]:
        """Return the direction in which each weight moves, as a flat tensor.

        Matrices of the same shape are orthogonalized in one batch.

        Args:
            matrices: the weights.
            momenta: the flat momentum of each weight.
        """
        parts = [matrix.parts(flat) for matrix, flat in zip(matrices, momenta, strict=True)]
        batches: dict[Any, list[tuple[int, int]]] = {}
        for i, (matrix, own) in enumerate(zip(matrices, parts, strict=True)):
            for j, part in enumerate(own):
                batches.setdefault((part.shape, matrix.dim, matrix.group), []).append((i, j))
        for (_, dim, group), places in batches.items():
            directions = self.of_batch(torch.stack([parts[i][j] for i, j in places]), dim, group)
            for (i, j), one in zip(places, directions, strict=True):
                parts[i][j] = one
        return [matrix.joined(own) for matrix, own in zip(matrices, parts, strict=True)]

    def of_batch(self, momenta: Tensor, dim: int, group: ProcessGroup | None) -> Tensor:
        """Return the directions for the momenta ``[k, m, n]`` of k matrices, in the same shape.

        With ``group``, each of its ranks holds only a part of the rows (``dim`` 0) or columns
        (``dim`` 1), and gets the same part of the directions.
        """
        if group is None or self.tp_mode == "blockwise":
            return self._scaled(orthogonalize(momenta, self.coefficients), momenta.shape)
        sizes = list(momenta.shape)
        sizes[dim + 1] *= group.size()
        if self.tp_mode == "distributed":
            directions = orthogonalize(momenta, self.coefficients, group=group, dim=dim)
            return self._scaled(directions, sizes)
        shares = [torch.empty_like(momenta) for _ in range(group.size())]
        torch.distributed.all_gather(shares, momenta.contiguous(), group=group)
        directions = orthogonalize(torch.cat(shares, dim=dim + 1), self.coefficients)
        return self._scaled(directions.chunk(group.size(), dim=dim + 1)[group.rank()], sizes)

    def _scaled(self, matrices: Tensor, sizes: Sequence[int]) -> Tensor:
        return matrices * (scale_of(self.scale_mode, sizes[1], sizes[2]) * self.factor)


class Muon(FusedAdam):
    """Muon for matrices and AdamW for all other weights, in the same parameter groups.

    The state of a matrix is its momentum, under the name ``exp_avg``, and its step count.

    Attributes:
        matrices: maps each tensor that this rank updates by Muon to the `Matrix` of its weight. The
            tensor is the whole weight or a shard of it.
        weights: the model parameters that Muon updates on any rank of the data-parallel group.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.matrices: dict[Tensor, Matrix] = {}
        self.weights: set[Parameter] = set()

    def take(
        self,
        shards: Sequence[Shard],
        matrices: Mapping[Parameter, Matrix],
        flags: OptimizerConfig,
    ) -> None:
        """Let Muon update the shards whose parameters are keys of ``matrices``.

        All ranks that share the optimizer's state call this together.
        """
        pairs = [(matrices[x.parameter], x) for x in shards if x.parameter in matrices]
        self.weights = {shard.parameter for _, shard in pairs}
        self.matrices = {shard.main: matrix for matrix, shard in pairs if shard.main.numel()}
        self._group = pairs[0][1].group if pairs else None
        self._rounds = deal(pairs, self._group)
        self._direction = Direction.of(flags)
        self._beta = flags.muon_momentum
        self._nesterov = flags.muon_use_nesterov

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        start_state(self)
        gradients = {main: main.grad for main in self.matrices}
        for main in gradients:
            main.grad = None
        super().step(closure)
        for main, gradient in gradients.items():
            main.grad = gradient
        groups = {main: group for group in self.param_groups for main in group["params"]}
        for dealt in self._rounds:
            self._step_together(dealt, groups)

    def _step_together(self, dealt: list[Dealt], groups: Mapping[Tensor, dict[str, Any]]) -> None:
        """Update the matrices of one round, whose pieces are communicated together (see `deal`).

        ``groups`` maps each updated tensor to its parameter group.
        """
        device = dealt[0].shard.main.device
        dtype = self._direction.dtype(device)
        momenta = [self._momentum(each.shard.main).to(dtype).flatten() for each in dealt]
        owned = [each.matrix for each in dealt]
        if self._group is not None:
            owned = [each.matrix for each in dealt if each.owner == self._group.rank()]
            momenta = gather(dealt, momenta, self._group)
        with self._direction.products(device):
            directions = self._direction.of_all(owned, momenta)
        if self._group is not None:
            directions = scatter(dealt, directions, self._group, dtype)
        for each, direction in zip(dealt, directions, strict=True):
            main = each.shard.main
            if main.numel():
                self._move(main, direction.view(main.shape).to(main.dtype), groups[main])

    def _momentum(self, main: Tensor) -> Tensor:
        """Update a weight's momentum with its gradient; return the tensor to orthogonalize.

        ``main`` is this rank's shard of the weight. The result is the momentum, or with Nesterov's
        momentum a weighted mean of gradient and momentum. For an empty shard it is ``main``.
        """
        if not main.numel():
            return main
        assert main.grad is not None
        kept = self.state[main]["exp_avg"]
        gradient = main.grad.float()
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        momentum = kept.float().lerp(gradient, 1 - self._beta)
        kept.copy_(self._if_finite(momentum, kept))
        return gradient.lerp(momentum, self._beta) if self._nesterov else momentum

    def _move(self, main: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
        """Apply weight decay and move a weight by lr times ``direction``; advance its step count.

        Also write the model's 16-bit weight. If the update must be skipped, nothing changes.
        """
        moved = main * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * direction
        main.copy_(self._if_finite(moved, main))
        self.state[main]["step"] += 1 if self.found_inf is None else 1 - self.found_inf
        if self.make_kernel is not None and main in self.copies:
            self.copies[main].copy_(main)

    def _if_finite(self, new: Tensor, old: Tensor) -> Tensor:
        """Return ``new``, or ``old`` if this update is skipped (`found_inf` is 1)."""
        return new if self.found_inf is None else torch.where(self.found_inf > 0, old, new)


def give_matrices(
    optimizer: MegatronOptimizer,
    chunks: list[DistributedDataParallel],
    groups: ProcessGroupCollection,
    flags: OptimizerConfig,
) -> None:
    """Tell each `Muon` in ``optimizer`` which weights it updates itself; AdamW updates the others.

    ``chunks`` are this rank's chunks of the model; ``flags`` has the settings of Muon.
    """
    matrices: dict[Parameter, Matrix] = {}
    for chunk in chunks:
        matrices |= matrices_of(chunk, groups, split_qkv=flags.muon_split_qkv)
    for part in parts_of(optimizer):
        if isinstance(getattr(part, "optimizer", None), Muon):
            part.optimizer.take(list(shards_of(part)), matrices, flags)
