"""Accumulation of weight gradients in the data-parallel buffer, and their deferral.

With ``--gradient-accumulation-fusion`` the matrix product that computes a weight gradient also adds
it to the float32 buffer. The sum over the tokens is then never rounded to 16 bits, and the buffer
is read and written once. Megatron-LM uses a kernel of NVIDIA apex for this; here cuBLAS does it.
Exceptions are grouped products of `experts`, and 8-bit products with scales per row: they round a
micro-batch's gradient to 16 bits before it is added.

For these weights and the output head, the buffer need not be zeroed before a step: the first
gradient of the step overwrites the old one (`StepGradients`). Old gradients that nothing has
overwritten are zeroed before the gradients are reduced (`zero_untouched`).

A zero-bubble schedule computes weight gradients when the rank would otherwise be idle
(arXiv:2401.10241), and ``--delay-wgrad-compute`` when the rank would otherwise wait for an exchange
of its experts' tokens. Until then `DeferredWeightGradients` queues their computation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

Key = tuple[int, int]
"""Index of a micro-batch and of a pipeline stage."""


def add_product(
    total: Tensor, gradient: Tensor, inputs: Tensor, *, overwrite: bool = False
) -> None:
    """Add ``gradient^T inputs`` to ``total`` in place; with ``overwrite`` replace ``total``.

    ``gradient`` is ``[tokens, out]``, ``inputs`` is ``[tokens, in]`` and ``total`` ``[out, in]``.
    """
    transposed = gradient.t()
    if total.dtype == inputs.dtype:
        total.addmm_(transposed, inputs, beta=0 if overwrite else 1)
    elif overwrite and multiplies_to_float32(total.device, inputs.dtype):
        torch.mm(transposed, inputs, out_dtype=total.dtype, out=total)
    elif overwrite:
        total.copy_(transposed.matmul(inputs))
    elif adds_in_float32(total.device, inputs.dtype):
        torch.addmm(total, transposed, inputs, out_dtype=total.dtype, out=total)
    elif multiplies_to_float32(total.device, inputs.dtype):
        total.add_(torch.mm(transposed, inputs, out_dtype=total.dtype))
    else:
        total.add_(transposed.matmul(inputs))


@functools.cache
def adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch adds a product of 16-bit matrices to a float32 matrix in one call.

    torch 2.11 and later do so on GPUs. Earlier releases refuse or ignore the float32 matrix. A
    small test product tells which.
    """
    return _computes(
        17, device, dtype, lambda total, ones, to: torch.addmm(total, ones, ones, **to)
    )


@functools.cache
def multiplies_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch multiplies 16-bit matrices to a float32 matrix without rounding.

    torch 2.8 and later do so on GPUs. A small test product checks it.
    """
    return _computes(16, device, dtype, lambda _, ones, to: torch.mm(ones, ones, **to))


def _computes(
    value: int,
    device: torch.device,
    dtype: torch.dtype,
    compute: Callable[[Tensor, Tensor, dict[str, Any]], object],
) -> bool:
    """Return whether ``compute(total, ones, options)`` fills the float32 ``total`` with ``value``.

    ``total`` is a 16 x 16 matrix of ones, and ``ones`` is the same in ``dtype``. ``options`` are
    the keyword arguments with which torch's functions write to ``total``. Return False if
    ``compute`` raises an error, and without calling it on a CPU or if ``dtype`` is float32.
    """
    if device.type != "cuda" or dtype == torch.float32:
        return False
    total = torch.ones(16, 16, device=device)
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        compute(total, ones, {"out_dtype": total.dtype, "out": total})
    except (RuntimeError, TypeError):
        return False
    return bool((total == value).all())


class StepGradients:
    """Prepares the gradient buffers of model chunks at the start of a step.

    If a linear layer adds its weight's gradient to the buffer itself, the old gradient need not be
    zeroed, since the first product of a step overwrites it. The same holds for the first gradient
    of the output head. Until the first product the weight has the attribute
    ``overwrite_main_grad``, a name from Transformer Engine.

    Args:
        chunks: model chunks that are wrapped for data parallelism.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = chunks

    @functools.cached_property
    def _weights(self) -> list[Tensor]:
        """Return the weights whose old gradient the first product of a step overwrites.

        Each gets a hook: if autograd produces a gradient of the weight before that product, the old
        gradient is zeroed first. Weights shared with other modules, such as an embedding, are left
        out.
        """
        modules = [module for chunk in self._chunks for module in chunk.modules()]
        holders = [m for m in modules if isinstance(getattr(m, "weight", None), Tensor)]
        overwriting = [m for m in holders if getattr(m, "overwrites", False)]
        shared = {m.weight for m in holders if not getattr(m, "overwrites", False)}
        own = dict.fromkeys(m.weight for m in overwriting if hasattr(m.weight, "main_grad"))
        weights = [weight for weight in own if weight not in shared]
        for weight in weights:
            weight.register_hook(functools.partial(_zero_stale, [weight]))
        return weights

    @functools.cached_property
    def _others(self) -> list[Tensor]:
        own = set(self._weights)
        trained = (parameter for chunk in self._chunks for parameter in chunk.params_with_grad)
        return [parameter.main_grad for parameter in trained if parameter not in own]

    def start(self, *, overwrite: bool) -> None:
        """Zero all gradients; with ``overwrite`` leave those that the step will overwrite."""
        if not overwrite or not self._weights:
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
            return
        for chunk in self._chunks:
            for parameter in chunk.params_with_grad:
                parameter.grad_added_to_main_grad = False
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                group.reset()
        if self._others:
            torch._foreach_zero_(self._others)
        for weight in self._weights:
            weight.overwrite_main_grad = True  # type: ignore[attr-defined]


def zero_untouched(chunk: Any) -> None:
    """Zero the old gradients that no product has overwritten, such as those of idle experts.

    Call this before the gradients of the model chunk are reduced.
    """
    _zero_stale(chunk.params_with_grad)


def _zero_stale(parameters: Iterable[Any], _gradient: Tensor | None = None) -> None:
    stale = [parameter.main_grad for parameter in parameters if takes_overwrite(parameter)]
    if stale:
        torch._foreach_zero_(stale)


def writable(main_grad: Tensor) -> Tensor:
    """Return ``main_grad``, after allocating its memory, filled with zeros, if it has none.

    Call this before writing to a ``main_grad``: if gradients are sharded, the memory of each bucket
    of gradients is freed while it is not in use (see `gradient_shards`). megatron-core's backward
    hooks need not call it, since `ShardedGradients` does so for them.
    """
    bucket = getattr(main_grad, "bucket", None)
    if bucket is not None:
        bucket.allocate()
    return main_grad


def takes_overwrite(weight: Tensor) -> bool:
    """Return whether the caller must overwrite a weight's ``main_grad`` instead of adding to it.

    This is so for the first caller in a step if ``main_grad`` still holds the last step's gradient.
    The call clears the attribute ``overwrite_main_grad``, so that later callers get False.
    """
    overwrites: bool = getattr(weight, "overwrite_main_grad", False)
    if overwrites:
        weight.overwrite_main_grad = False  # type: ignore[attr-defined]
    return overwrites


def add_weight_gradient(weight: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    """Add ``gradient^T inputs`` to ``weight.main_grad``.

    If ``main_grad`` still holds the last step's gradient, it is overwritten instead. Shapes are as
    in `add_product`.
    """
    total = writable(weight.main_grad)  # type: ignore[attr-defined]
    add_product(total, gradient, inputs, overwrite=takes_overwrite(weight))


def gradient_placeholder(weight: Tensor) -> Tensor:
    """Return a tensor ``[out, in]`` for autograd, in place of a gradient that is in ``main_grad``.

    Autograd must get some tensor, so that megatron-core's hooks run on the thread of the backward
    pass. The hooks do not add it to ``main_grad``, because the attribute
    ``grad_added_to_main_grad`` is set here; so its values are undefined. But they do add it, and it
    is zero, if the weight is also used elsewhere (attribute ``zero_out_wgrad``).
    """
    assert not getattr(weight, "overwrite_main_grad", False), "the gradient was added to an old one"
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    shared: Tensor | None = getattr(weight, "gradient_placeholder", None)  # set by layers.graphs
    if shared is not None:
        return shared
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight, requires_grad=False)


def expect_additions(weight: Tensor) -> None:
    """Let functions that add gradients of ``weight`` to ``main_grad`` return None to autograd.

    megatron-core's overlapped reduction waits until autograd produces a gradient of the weight. If
    all uses of the weight in a backward pass return None, a hook supplies zeros ``[out, in]``,
    which take no memory, and marks them so that they are not added. If any use returns a gradient,
    it is added as usual. Since the hook runs after all uses, a weight may be used in any number of
    places.
    """
    if getattr(weight, "expects_additions", False):
        return
    weight.expects_additions = True  # type: ignore[attr-defined]
    nothing = torch.zeros((), dtype=weight.dtype, device=weight.device).expand_as(weight)

    def decide(gradient: Tensor | None) -> None:
        weight.grad_added_to_main_grad = gradient is None  # type: ignore[attr-defined]
        if gradient is None:
            weight.zero_out_wgrad = False  # type: ignore[attr-defined]
            weight.grad = nothing

    weight.register_hook(decide)  # type: ignore[no-untyped-call]


def accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Add a gradient to ``weight.main_grad`` if that exists, else to ``weight.grad``."""
    if hasattr(weight, "main_grad"):
        if takes_overwrite(weight):
            weight.main_grad.copy_(gradient)
        else:
            writable(weight.main_grad).add_(gradient)
    elif weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)


class DeferredWeightGradients:
    """Queues of weight gradients to compute later, one per micro-batch and stage."""

    def __init__(self) -> None:
        self._waiting: dict[Key, list[Callable[[], object]]] = {}
        self._collecting: list[Callable[[], object]] | None = None

    def __deepcopy__(self, _memo: Any) -> DeferredWeightGradients:
        """Return this object: modules that copy their configuration must share its queues."""
        return self

    @contextmanager
    def collect(self, key: Key) -> Iterator[None]:
        """Queue under ``key`` the weight gradients of the backward passes inside the block."""
        self._collecting = self._waiting.setdefault(key, [])
        try:
            yield
        finally:
            self._collecting = None

    @property
    def collecting(self) -> bool:
        return self._collecting is not None

    def add(self, compute: Callable[[], object]) -> None:
        """Queue the computation of one weight gradient; outside `collect`, run it at once."""
        if self._collecting is None:
            compute()
        else:
            self._collecting.append(compute)

    def compute_collected(self) -> None:
        """Compute and remove what the backward pass inside `collect` has queued so far."""
        collected = self._collecting or []
        while collected:
            collected.pop(0)()

    def compute(self, key: Key) -> None:
        """Compute and remove the queued gradients of a micro-batch and stage."""
        with torch.no_grad():
            for compute in self._waiting.pop(key, ()):
                compute()


@dataclass(frozen=True)
class LinearCall:
    """The settings of one call of a linear layer.

    Attributes:
        parameter: the layer's weight.
        queue: queue for the weight's gradient; None computes it in the backward pass.
        in_place: whether to add the gradient to the weight's ``main_grad``, if it has one.
        tp_group: ranks over which the weight is sharded; None for a layer without communication.
        sequence_parallel: whether to gather the input along the sequence, and reduce-scatter its
            gradient.
        allreduce_dgrad: whether to sum the input's gradient over the ranks of ``tp_group``.
        scaling: scales of 8-bit matrix products (see `layers.fp8`).
        by_onednn: whether to multiply by `layers.onednn`.
    """

    parameter: Tensor
    queue: DeferredWeightGradients | None = None
    in_place: bool = False
    tp_group: ProcessGroup | None = None
    sequence_parallel: bool = False
    allreduce_dgrad: bool = False
    scaling: Any = None
    by_onednn: bool = False
