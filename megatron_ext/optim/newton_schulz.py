"""Newton–Schulz iterations, which orthogonalize matrices by matrix products only.

Start from a matrix ``M = U S V^T`` divided by its Frobenius norm, and repeat ``X <- a X + (b A + c
A^2) X`` with the Gram matrix ``A = X X^T``. This converges to about ``U V^T``: each step applies
the odd polynomial ``a s + b s^3 + c s^5`` to the singular values (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

Coefficients = tuple[float, float, float]

POLYNOMIALS: dict[str, tuple[Coefficients, ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
"""The coefficients (a, b, c) of successive steps for each ``--muon-coefficient-type``.

simple: Jordan et al. 2024. quintic: fitted step by step for a steep slope at zero
(https://leloykun.github.io/ponder/muon-opt-coeffs/, and the modded-nanogpt record). polar_express:
Amsel et al. 2025 (arXiv:2505.16932), with their safety factor of 1.01.
"""

TINY = 1e-7
"""Lower limit of the norm by which a matrix is divided."""


def polynomials(kind: str, steps: int) -> list[Coefficients]:
    """Return the coefficients for each of ``steps`` Newton–Schulz steps.

    ``kind`` is the ``--muon-coefficient-type``. If it has fewer coefficients than steps,
    polar_express repeats the last ones, and the other kinds begin again with the first.
    """
    coefficients = POLYNOMIALS[kind]
    last = len(coefficients) - 1
    if kind == "polar_express":
        return [coefficients[min(step, last)] for step in range(steps)]
    return [coefficients[step % len(coefficients)] for step in range(steps)]


def orthogonalize(
    matrices: Tensor,
    coefficients: Sequence[Coefficients],
    *,
    group: ProcessGroup | None = None,
    dim: int = 0,
) -> Tensor:
    """Return the orthogonalized ``matrices``, in their shape ``[k, m, n]`` and dtype.

    With ``group``, each rank holds an equal share of the rows (``dim`` 0) or columns (``dim`` 1).
    The ranks sum norms and Gram matrices, so that each gets its share of the whole result.
    """
    turned = matrices.size(1) > matrices.size(2) if group is None else dim == 0
    x = matrices.mT if turned else matrices
    squares = x.float().square().sum((1, 2), keepdim=True)
    _sum(squares, group)
    x = (x.float() / squares.sqrt().clamp(min=TINY)).to(matrices.dtype)
    for a, b, c in coefficients:
        gram = x @ x.mT
        _sum(gram, group)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if turned else x


def _sum(tensor: Tensor, group: ProcessGroup | None) -> None:
    if group is not None:
        torch.distributed.all_reduce(tensor, group=group)


def scale_of(mode: str, rows: int, columns: int) -> float:
    """Return the factor that multiplies an orthogonalized matrix ``[rows, columns]``.

    ``mode`` is the ``--muon-scale-mode``:

    - spectral: sqrt(max(rows, columns)), so that the elements of the scaled matrix have a root mean
      square of 1 (Liu et al. 2025, arXiv:2502.16982, who multiply by another 0.2 to match AdamW);
    - unit_rms_norm: sqrt(rows / columns), so that the scaled matrix maps inputs of root mean square
      1 to outputs of root mean square 1 (Bernstein,
      https://jeremybernste.in/writing/deriving-muon);
    - shape_scaling: sqrt(max(1, rows / columns)), Jordan's rule.
    """
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    ratio = rows / columns
    return math.sqrt(ratio if mode == "unit_rms_norm" else max(1.0, ratio))
