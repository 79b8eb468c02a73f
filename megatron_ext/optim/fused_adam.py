"""AdamW that saves its step counts, and AdamW that updates in one pass over memory on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_ext.optim.adam import Counted, start_state


class CountedAdam(Counted, torch.optim.AdamW):
    """torch's Adam with the step count of each group in its state dict, as in apex's Adam."""


@dataclass(frozen=True)
class Entry:
    """The tensors that an update needs for one parameter: contiguous, with equally many elements.

    Attributes:
        gradient, weight: float32.
        exp_avg, exp_avg_sq: the moments, float32 or bfloat16.
        copy: the model's 16-bit weight, which the update overwrites with the rounded ``weight``;
            None if ``weight`` itself is the model's parameter.
    """

    gradient: Tensor
    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    copy: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors in the order of the attributes."""
        tensors = [self.gradient, self.weight, self.exp_avg, self.exp_avg_sq]
        return tensors if self.copy is None else [*tensors, self.copy]

    @property
    def num_bytes(self) -> int:
        """Return how many bytes of memory an update of this parameter reads and writes in total.

        It reads all tensors except ``copy``, and writes all except the gradient.
        """
        sizes = [tensor.numel() * tensor.element_size() for tensor in self.tensors]
        return sum(sizes[:4]) + sum(sizes[1:])

    @property
    def aligned(self) -> bool:
        """Return whether the address of each tensor is a multiple of 16 bytes."""
        return all(tensor.data_ptr() % 16 == 0 for tensor in self.tensors)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return the dtypes of all tensors, followed by `aligned`.

        One kernel launch can update only parameters of the same kind.
        """
        return (*[tensor.dtype for tensor in self.tensors], self.aligned)


@dataclass(frozen=True)
class Settings:
    """The hyperparameters and step-dependent factors with which a parameter group is updated.

    Attributes:
        scalars: float32 ``[4]`` on the device: 1 to skip the update, else 0; the divisor of the
            gradients; lr / (1 - beta1^t); and sqrt(1 - beta2^t), for update number t.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    scalars: Tensor


Kernel = Callable[[Sequence[Entry], Settings], None]
"""Updates the weights, moments and copies of a parameter group in place."""


class FusedAdam(CountedAdam):
    """AdamW that updates weights, moments and the model's 16-bit weights in one pass.

    An update reads and writes 30 bytes of memory per weight, or fewer with 16-bit moments. torch's
    fused AdamW with a separate copy to the 16-bit weight needs 38, because torch also writes back
    the scaled gradient. All weights of a parameter group are updated together and share one step
    count.

    Args:
        moments: dtypes of ``exp_avg`` and ``exp_avg_sq``.
        make_kernel: makes the function that updates a parameter group. If None, torch updates the
            weights, and megatron-core writes the 16-bit weights.

    Attributes:
        copies: maps each float32 weight to the model's 16-bit weight.
        found_inf: float32 ``[]``, 1 to skip the update, else 0; None means 0.
        grad_scale: float32 ``[]``, the divisor of the gradients; None means 1.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(
        self,
        params: Any,
        *,
        moments: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
        make_kernel: Callable[[], Kernel] | None = None,
        **defaults: Any,
    ) -> None:
        super().__init__(params, **defaults)
        self.moments = moments
        self.make_kernel = make_kernel
        self.copies: dict[Tensor, Tensor] = {}
        self._kernels: dict[int, Kernel] = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; cast moments to the dtypes of this run."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name, dtype in zip(("exp_avg", "exp_avg_sq"), self.moments, strict=True):
                if name in state:
                    state[name] = state[name].to(dtype)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        assert closure is None, "the gradients are computed before"
        start_state(self)
        if self.make_kernel is None:
            self._step_by_torch()
            return
        for number, group in enumerate(self.param_groups):
            entries = self.entries(group)
            if entries:
                if number not in self._kernels:
                    self._kernels[number] = self.make_kernel()
                self._kernels[number](entries, self._settings(group))

    def entries(self, group: dict[str, Any]) -> list[Entry]:
        """Return the tensors of a group's parameters that have gradients."""
        entries = []
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                copy = self.copies.get(parameter)
                moments = state["exp_avg"], state["exp_avg_sq"]
                entries.append(Entry(parameter.grad, parameter, *moments, copy))
        return entries

    def _settings(self, group: dict[str, Any]) -> Settings:
        """Advance a group's step counts on the device, and return the settings of its update.

        The counts do not advance if the update is skipped.
        """
        steps = [self.state[p]["step"] for p in group["params"] if p.grad is not None]
        one = torch.ones((), device=steps[0].device)
        skipped = torch.zeros_like(one) if self.found_inf is None else self.found_inf
        torch._foreach_add_(steps, [one - skipped] * len(steps))
        beta1, beta2 = group["betas"]
        # In single precision, 1 - beta2 would have only three correct digits.
        corrections = [1.0 - beta ** steps[0].double() for beta in (beta1, beta2)]
        divisor = one if self.grad_scale is None else self.grad_scale
        scalars = [skipped, divisor, group["lr"] / corrections[0], corrections[1].sqrt()]
        return Settings(
            group["lr"], beta1, beta2, group["eps"], group["weight_decay"],
            torch.stack([scalar.double() for scalar in scalars]).float(),
        )  # fmt: skip

    def _step_by_torch(self) -> None:
        """Let torch's AdamW update the weights.

        torch needs moments in the weight's dtype. 16-bit moments are cast for one weight at a time:
        casting all at once would take 8 more bytes for each weight of the model.
        """
        if self.moments == (torch.float32, torch.float32):
            super().step()
            return
        groups = self.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    state = self.state[parameter]
                    names = ("exp_avg", "exp_avg_sq")
                    kept = {name: state[name] for name in names if name in state}
                    state |= {name: moment.float() for name, moment in kept.items()}
                    self.param_groups = [{**group, "params": [parameter]}]
                    super().step()
                    for name, moment in kept.items():
                        state[name] = moment.copy_(state[name])
        finally:
            self.param_groups = groups


def replace_adam(
    part: Any,
    kind: type[FusedAdam],
    moments: tuple[torch.dtype, torch.dtype],
    make_kernel: Callable[[], Kernel] | None,
) -> None:
    """Replace the Adam of a single optimizer of megatron-core by one of the class ``kind``.

    It gets the parameter groups and settings of the old one, and the arguments ``moments`` and
    ``make_kernel``.
    """
    inner = part.optimizer
    names = ("lr", "betas", "eps", "weight_decay")
    defaults = {name: inner.defaults[name] for name in names}
    # torch refuses views as parameters, which shards are. So put them in afterwards, as
    # megatron-core does.
    adam = kind([torch.empty(0)], moments=moments, make_kernel=make_kernel, **defaults)
    adam.param_groups = [{**adam.defaults, **group} for group in inner.param_groups]
    adam.copies = model_weights(part)
    part.optimizer = adam


def model_weights(part: Any) -> dict[Tensor, Tensor]:
    """Map each float32 weight that the optimizer ``part`` updates to the model's 16-bit weight.

    With a distributed optimizer, keys and values are this rank's shards. Weights that the model
    itself keeps in float32 are left out.
    """
    names = "float16_groups", "fp32_from_float16_groups"
    if isinstance(part, DistributedOptimizer):
        names = "shard_float16_groups", "shard_fp32_from_float16_groups"
    models, mains = (getattr(part, name, ()) for name in names)
    return {
        main: model
        for model_group, main_group in zip(models, mains, strict=True)
        for model, main in zip(model_group, main_group, strict=True)
    }
