"""The truth for cross-entropy in blocks: torch's over whole logits in float64."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.losses.linear_cross_entropy import weighted_linear_cross_entropy

S, B, H, V = 24, 2, 16, 40
TOLERANCE = 1e-5
BLOCK_SIZES = (1, 7, 64, 1000)
ALONE: dict[str, Any] = {"tp_group": None, "sequence_parallel": False}
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
Result = tuple[Tensor, Tensor | None, Tensor | None]


def inputs(*, b: int = B) -> Inputs:
    """Return hidden states, weight, labels with five ignored ones, and weights of both signs."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, b, H, generator=generator)
    weight = torch.randn(V, H, generator=generator)
    labels = torch.randint(0, V, (b, S), generator=generator)
    labels.view(-1)[torch.tensor([0, 3, 4, S - 1, b * S - 1])] = -100
    weights = torch.randn(b, S, generator=generator)
    weights[0, 7] = 0
    return hidden, weight, labels, weights


def dense(
    values: Inputs,
    *,
    label_smoothing: float = 0.0,
    z_loss_coefficient: float = 0.0,
    softcap: float | None = None,
) -> Result:
    """Return the truth: whole logits in float64, torch's cross-entropy and its autograd."""
    hidden, weight, labels, weights = values
    hidden = hidden.detach().double().requires_grad_()
    weight = weight.detach().double().requires_grad_()
    logits = torch.einsum("sbh,vh->bsv", hidden, weight)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(
        logits.transpose(1, 2), labels, reduction="none", label_smoothing=label_smoothing
    )
    losses = losses + z_loss_coefficient * logits.logsumexp(-1).square() * (labels != -100)
    (losses * weights).sum().backward()
    return losses.detach(), hidden.grad, weight.grad


def weighted_sum(values: Inputs, **options: Any) -> Tensor:
    return weighted_linear_cross_entropy(*values, **options)[1]


def weighted(values: Inputs, *, scale: float = 1.0, **options: Any) -> Result:
    losses, total = weighted_linear_cross_entropy(*values, **options)
    assert not losses.requires_grad
    # Terms of either sign cancel, so torch's tolerance for float32 is taken of the terms' sizes.
    terms = values[3].double() * losses
    assert abs(total.item() - terms.sum().item()) <= 1.3e-6 * terms.abs().sum().item()
    (total * scale).backward()
    return losses, values[0].grad, values[1].grad


def leaves(values: Inputs, kind: torch.dtype = torch.float32) -> Inputs:
    hidden, weight, labels, weights = values
    return (
        hidden.to(kind, copy=True).requires_grad_(),
        weight.to(kind, copy=True).requires_grad_(),
        labels,
        weights,
    )


def error(found: Tensor | None, truth: Tensor | None) -> float:
    """Return the largest difference over the largest true value."""
    assert found is not None and truth is not None and found.shape == truth.shape
    return float((found.double() - truth).abs().max() / truth.abs().max())


def assert_close(found: Result, truth: Result) -> None:
    assert [error(f, t) <= TOLERANCE for f, t in zip(found, truth, strict=True)] == [True] * 3


def _num_bytes(reference: StorageWeakRef) -> int:
    """Return the bytes of a storage now; a storage may have given its memory back."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()


class Watch(TorchDispatchMode):
    """Bytes of the tensors alive that were made under it, and the operations that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.called: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._see([*args, *kwargs.values()], made=False)
        result = function(*args, **kwargs)
        self.called.add(function.name())
        self._see(result if isinstance(result, tuple | list) else [result], made=True)
        self.alive = {k: v for k, v in self.alive.items() if not v[0].expired()}
        sizes = [min(size, _num_bytes(reference)) for reference, size in self.alive.values()]
        self.peak = max(self.peak, sum(sizes))
        return result

    def _see(self, values: Sequence[Any], *, made: bool) -> None:
        for value in values:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                reference = StorageWeakRef(storage)
                size = storage.nbytes() if made else 0
                self.alive.setdefault(reference.cdata, (reference, size))
