"""`torch.compile` of the pointwise parts of a model, on GPUs only.

A function marked with `compiled` runs eagerly on CPU tensors. On CUDA tensors, its first call
compiles it into one forward and one backward graph. Intermediate results inside a graph are never
written to memory.

A function is compiled separately for every combination of its arguments' dtypes, widths (last
axes), ``requires_grad``, floats and booleans. Within one combination, the first two axes (sequence
and batch, or frames and tokens) and integers may vary: the function is compiled for the lengths of
the first call, and once more, for arbitrary lengths, when other lengths occur.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch._inductor.config
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.utils._triton import has_triton

logger = logging.getLogger(__name__)

R = TypeVar("R")
Backend = str | Callable[..., Any]

MAX_VARIANTS = 64
"""Largest number of compiled versions of one function; a caller that exceeds it has a bug."""


@dataclass
class Compiler:
    """The settings of compilation.

    Attributes:
        backend: torch.compile's backend; None runs everything eagerly.
        alike: whether all ranks must compile the same kernels; see `compile_alike`.
        on_cpu: whether functions are also compiled for CPU tensors.
        strict: whether to raise an error of the compiler instead of running the function eagerly.
        checked: whether `compiles` has looked for what inductor needs.
    """

    backend: Backend | None = "inductor"
    alike: bool = False
    on_cpu: bool = False
    strict: bool = False
    checked: bool = False


compiler = Compiler()


@dataclass(frozen=True)
class Fusions:
    """The parts of a layer that may be compiled, according to Megatron-LM's flags.

    Attributes:
        norm: False with ``--no-persist-layer-norm``, which uses torch's own kernel for the norm.
        activation: False with ``--no-bias-swiglu-fusion`` for SwiGLU, and with
            ``--no-bias-gelu-fusion`` for all other activations.
        rotary: rotary embedding and norm of queries and keys; False with ``--no-rope-fusion``.
        bias_dropout: bias-dropout-add and the norm after it; False with
            ``--no-bias-dropout-fusion``.
    """

    norm: bool = True
    activation: bool = True
    rotary: bool = True
    bias_dropout: bool = True


def fusions_of(transformer_config: TransformerConfig) -> Fusions:
    """Return the config's ``fusions``; all are allowed if it has no such attribute."""
    return getattr(transformer_config, "fusions", Fusions())


def compile_nothing() -> None:
    """Turn `torch.compile` off for this process, for all code (``--no-compile``)."""
    compiler.backend = None
    torch.compiler.set_stance("force_eager")


def compile_alike() -> None:
    """Make every rank compile the same kernels, so that equal tensors stay bitwise equal.

    By default inductor tries several block sizes for a reduction, and keeps the one that is fastest
    on this rank's GPU. The block size determines the order of a sum, so ranks may round
    differently. This function turns the search off by inductor's option ``deterministic``. With
    versions of torch that lack it this does nothing; they do not search for the norms' sums.
    """
    compiler.alike = hasattr(torch._inductor.config, "deterministic")


@contextmanager
def compiled_on_cpu(backend: Backend = "aot_eager", *, strict: bool = True) -> Iterator[None]:
    """Inside the block, also compile `Compiled` functions that are called with CPU tensors.

    ``backend`` is torch.compile's backend. With ``strict`` an error of the compiler is raised;
    without it the function runs eagerly instead.
    """
    before = dict(vars(compiler))
    vars(compiler).update(backend=backend, on_cpu=True, strict=strict, checked=True)
    try:
        with torch.compiler.set_stance("default"):
            yield
    finally:
        vars(compiler).update(before)


def compiles(x: Tensor) -> bool:
    """Return whether a `Compiled` function runs compiled code if ``x`` is its first argument.

    It does if ``x`` is not empty, compilation is enabled for the device of ``x``, and the machine
    has what inductor needs. If something is missing, the first call logs a warning.
    """
    if compiler.backend is None or not (x.is_cuda or compiler.on_cpu):
        return False
    if not compiler.checked:
        compiler.checked = True
        missing = _missing()
        if missing is not None:
            compiler.backend = None
            logger.warning(
                "`torch.compile` needs %s; without it the pointwise parts of the model run kernel "
                "by kernel.",
                missing,
            )
    return compiler.backend is not None and x.numel() > 0


def _missing() -> str | None:
    """Return a requirement of inductor that this machine lacks; None if it lacks none."""
    if not has_triton():
        return "Triton and a GPU of compute capability 7.0 or newer; `pip install triton`"
    chosen = os.environ.get("CC")
    names = [chosen] if chosen else ["gcc", "clang", "cc"]
    if not any(shutil.which(name) for name in names):
        return "a C compiler; `apt-get install gcc python3-dev`, or set `CC`"
    return None


def _signature(arg: Any, by_shape: bool) -> Any:
    """Return the key of an argument; a function is compiled once for each combination of keys.

    A tensor's key holds its dtype, number of axes, widths (sizes of the last axes) and
    ``requires_grad``; with ``by_shape`` also its shape and strides. The key of every integer is
    ``int``, so that compiled code serves all integers. The key of any other argument is the
    argument itself.
    """
    if not isinstance(arg, Tensor):
        return int if type(arg) is int else arg
    widths = arg.shape[2:] if arg.dim() > 2 else arg.shape[-1:]
    properties = arg.dtype, arg.dim(), arg.requires_grad, tuple(widths)
    return (*properties, tuple(arg.shape), arg.stride()) if by_shape else properties


class _Plain(torch.autograd.Function):
    """Returns a contiguous tensor with the strides that a new tensor of its shape would have.

    The output shares the input's memory, but autograd does not see it as a view. If it were a view,
    `torch.compile` would also specialize the code to properties of the view's base tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        strides = torch.empty(x.shape, device="meta").stride()
        # With a detached tensor, autograd would count this as a change of ``x`` and refuse it for
        # views that were made together.
        return x.data.as_strided_(x.shape, strides)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def with_plain_strides(arg: Any) -> Any:
    """Give a contiguous tensor the strides of a new tensor; return other arguments unchanged.

    If an axis has size 1, its stride may be any number, but `torch.compile` compiles again for each
    stride. With one sample, for example, a transposed embedding ``[s, 1, h]`` has other strides
    than later hidden states.
    """
    if not isinstance(arg, Tensor) or 1 not in arg.shape or not arg.is_contiguous():
        return arg
    stride = 1
    for size, given in zip(reversed(arg.shape), reversed(arg.stride()), strict=True):
        if given != stride:
            return _Plain.apply(arg)  # type: ignore[no-untyped-call]
        stride *= size
    return arg


class Compiled(Generic[R]):
    """A pure function that is compiled for GPU tensors and runs eagerly on CPU tensors.

    Args:
        function: takes tensors, None, numbers, strings and booleans; its first argument is a
            tensor. It must not branch on values of tensors. It must not return an argument or a
            view of one, whose gradients would be summed outside the graph.
        by_shape: whether to compile each shape separately, into specialized kernels.
        kind_of: takes an argument that is no tensor and returns a hashable value; the function is
            compiled once per value. By default this is the argument itself.

    Attributes:
        eager: the uncompiled function, for calls from other compiled functions.
    """

    def __init__(
        self,
        function: Callable[..., R],
        *,
        by_shape: bool = False,
        kind_of: Callable[[Any], Any] = lambda arg: arg,
    ) -> None:
        functools.update_wrapper(self, function)
        self.eager = function
        self._by_shape = by_shape
        self._kind_of = kind_of
        self._variants: dict[Any, Callable[..., R]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Call the compiled function if the first argument is a GPU tensor, else the eager one."""
        first = args[0]
        assert isinstance(first, Tensor)
        if torch.compiler.is_compiling() or not compiles(first):
            return self.eager(*args, **kwargs)
        args = tuple(map(with_plain_strides, args))
        kwargs = {name: with_plain_strides(x) for name, x in kwargs.items()}
        given = [
            _signature(arg if isinstance(arg, Tensor) else self._kind_of(arg), self._by_shape)
            for arg in (*args, *kwargs.values())
        ]
        key = (compiler.backend, compiler.alike, torch.is_grad_enabled(), *given)
        variant = self._variants.get(key)
        if variant is None:
            variant = self._variants[key] = self._compile()
        try:
            return variant(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            if compiler.strict:
                raise
            cause = getattr(error, "inner_exception", error)
            reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
            self._variants[key] = self.eager
            logger.warning(
                "`torch.compile` failed on `%s` (%s), which now runs kernel by kernel; "
                "`--no-compile` compiles nothing.",
                self.eager.__name__,
                reason,
            )
            return self.eager(*args, **kwargs)

    def _compile(self) -> Callable[..., R]:
        """Return a compiled copy of the function, or the eager one after `MAX_VARIANTS` copies.

        Each copy has its own code object, because `torch.compile` has a cache and a limit per code
        object.
        """
        count = len(self._variants)
        function = self.eager
        if count >= MAX_VARIANTS:
            if count == MAX_VARIANTS:
                logger.warning(
                    "`%s` has been compiled for %d kinds of arguments; further kinds run kernel by "
                    "kernel.",
                    function.__name__,
                    count,
                )
            return function
        assert isinstance(function, types.FunctionType) and compiler.backend is not None
        name = f"{function.__name__}_{count}"
        bound = (function.__defaults__, function.__closure__)
        code = function.__code__.replace(co_name=name)
        copy = types.FunctionType(code, function.__globals__, name, *bound)
        backend = compiler.backend
        alike = compiler.alike and backend == "inductor"
        options: dict[str, Any] | None = {"deterministic": True} if alike else None
        made: Callable[..., R] = torch.compile(
            copy, backend=backend, fullgraph=True, options=options
        )
        return made


compiled = Compiled
