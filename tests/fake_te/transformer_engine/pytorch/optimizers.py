"""Adam with the arguments of the fused one, and the functions of gradient clipping."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.record import record


class FusedAdam(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101, algorithm 2) that, like the real one, counts steps by group."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        record("FusedAdam", adam_w_mode=adam_w_mode)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = count = group.get("step", 0) + 1
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["exp_avg"].lerp_(p.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                mean = state["exp_avg"] / (1 - first**count)
                root = (state["exp_avg_sq"] / (1 - second**count)).sqrt() + group["eps"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * mean / root)


class FusedSGD(torch.optim.SGD):
    """SGD by torch."""


def multi_tensor_applier(
    op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[Any], *args: Any
) -> Any:
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_l2norm(
    chunk_size: int, noop: Tensor, tensor_lists: Sequence[Any], per_tensor: bool = False
) -> tuple[Tensor, None]:
    norms = [torch.linalg.vector_norm(tensor.float()) for tensor in tensor_lists[0]]
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def multi_tensor_scale(
    chunk_size: int, noop: Tensor, tensor_lists: Sequence[Any], scale: float
) -> None:
    for source, target in zip(tensor_lists[0], tensor_lists[1], strict=True):
        target.copy_(source * scale)
