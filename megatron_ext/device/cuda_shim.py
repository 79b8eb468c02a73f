"""The shim that stands in for ``torch.cuda`` on a machine without a GPU.

megatron-core uses attributes of ``torch.cuda`` directly. `install` replaces them by the stand-ins
of `TABLE`, and `uninstall` restores them. Each row of the table names a file of megatron-core that
uses the attribute (with the line in 0.16.1), and says how the stand-in differs from a GPU
(`Heading`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from megatron_ext.errors import ConfigError, DeviceNotSupported

CPU = torch.device("cpu")


class _Done:
    """Stands in for asynchronous work on a device; it is always finished."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Accept and ignore the arguments of CUDA's streams and events."""

    def synchronize(self, *_awaited: Any) -> None:
        """Return at once, since nothing is outstanding."""

    def query(self) -> bool:
        """Return True, since all work is done."""
        return True


class CpuStream(_Done):
    """Stands in for a CUDA stream; all streams are equal."""

    cuda_stream = 0
    stream_id = 0
    wait_stream = wait_event = _Done.synchronize

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuStream)

    def __hash__(self) -> int:
        return hash(CpuStream)

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Return ``event``, or a new event if it is None; either has already happened."""
        return event if event is not None else CpuEvent()

    def __enter__(self) -> CpuStream:
        return self

    def __exit__(self, *_exception: object) -> None:
        return None


class CpuEvent(_Done):
    """Stands in for a CUDA event that has already happened, at an unknown time."""

    record = wait = _Done.synchronize

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Raise an error, since no GPU time was measured.

        Raises:
            DeviceNotSupported: always.
        """
        raise DeviceNotSupported(
            "`torch.cuda.Event.elapsed_time` times a GPU, but this run is on a CPU; use "
            "`time.perf_counter`."
        )


def as_cpu(device: Any) -> Any:
    """Return the CPU for a CUDA device or a device index; return any other argument unchanged."""
    is_index = isinstance(device, int) and not isinstance(device, bool)
    if is_index or (isinstance(device, str) and device.split(":")[0] == "cuda"):
        return CPU
    return CPU if isinstance(device, torch.device) and device.type == "cuda" else device


def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor factory: redirect a CUDA ``device=`` to the CPU and ignore ``pin_memory=``."""

    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = as_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapper


def moves_to_cpu(move: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.to``: redirect a CUDA device, positional or ``device=``, to the CPU."""
    moved = on_cpu(move)

    @functools.wraps(move)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return moved(self, *map(as_cpu, args[:1]), *args[1:], **kwargs)

    return wrapper


def stays(move: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.cuda`` or ``Tensor.pin_memory`` in a method that returns the tensor itself."""

    @functools.wraps(move)
    def wrapper(self: Any, *_args: Any, **_kwargs: Any) -> Any:
        return self

    return wrapper


def claims_cuda_type(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Tensor.type`` to name CUDA types, which megatron-core's optimizer expects.

    For example, a CPU tensor in fp32 has the type "torch.cuda.FloatTensor".
    """

    @functools.wraps(type_of)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = type_of(self, *args, **kwargs)
        if isinstance(name, str) and not name.startswith("torch.cuda."):
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    return wrapper


class Heading(Enum):
    """How a stand-in differs from the attribute on a GPU.

    TRUE_ON_A_CPU: the result is right; for example, no work is outstanding.
    REDIRECTED: the CPU does the work.
    UNTRUE: the result is wrong, but megatron-core needs it.
    DENIED: a call raises an error, since any result would be an invented measurement.
    """

    TRUE_ON_A_CPU = "true on a CPU"
    REDIRECTED = "redirected"
    UNTRUE = "untrue"
    DENIED = "denied"


@dataclass(frozen=True)
class Row:
    """A row of `TABLE`: the attribute ``name`` of ``owner`` (a part of torch), and its stand-in.

    Attributes:
        heading: how the stand-in differs from the attribute on a GPU.
        needed_by: a file in ``megatron/core/`` that uses the attribute; for a DENIED attribute, the
            reason why it is denied.
        make: takes the original attribute and returns its stand-in.
    """

    owner: Any
    name: str
    heading: Heading
    needed_by: str
    make: Callable[[Any], Any]


def _answer(value: Any) -> Callable[[Any], Any]:
    """Return a function for `Row.make` that replaces any attribute by a constant function.

    The constant function accepts all arguments and returns ``value``.
    """

    def make(original: Any) -> Any:
        return functools.wraps(original)(lambda *_args, **_kwargs: value)

    return make


def _instead(replacement: Any) -> Callable[[Any], Any]:
    return lambda original: replacement


def _denied(original: Any) -> Any:
    @functools.wraps(original)
    def deny(*_args: Any, **_kwargs: Any) -> Any:
        raise DeviceNotSupported(
            f"`torch.cuda.{original.__name__}` measures a GPU, but this run is on a CPU; print "
            "`n/a` instead."
        )

    return deny


cuda = torch.cuda
generator = torch.default_generator
TRUE = Heading.TRUE_ON_A_CPU
REDIRECTED = Heading.REDIRECTED

_STATE = [
    Row(cuda, "current_device", TRUE, "rerun_state_machine.py:525", _answer(0)),
    Row(cuda, "set_device", TRUE, "dist_checkpointing/strategies/async_utils.py:488",
        _answer(None)),
    Row(cuda, "synchronize", TRUE, "parallel_state.py:198", _answer(None)),
    Row(cuda, "empty_cache", TRUE, "optimizer/optimizer.py:362", _answer(None)),
    Row(cuda, "is_initialized", TRUE, "tensor_parallel/random.py:111", _answer(True)),
    Row(cuda, "_lazy_init", TRUE, "tensor_parallel/random.py:57", _answer(None)),
    Row(cuda, "_lazy_call", TRUE, "tensor_parallel/random.py:111",
        _instead(lambda callback, **_kwargs: callback())),
    Row(cuda, "Stream", TRUE, "pipeline_parallel/utils.py:157", _instead(CpuStream)),
    Row(cuda, "Event", TRUE, "utils.py:1347", _instead(CpuEvent)),
    Row(cuda, "stream", TRUE, "pipeline_parallel/utils.py:213", _instead(contextlib.nullcontext)),
    Row(cuda, "current_stream", TRUE, "pipeline_parallel/utils.py:332", _answer(CpuStream())),
    Row(cuda, "default_stream", TRUE, "transformer/cuda_graphs.py:471",
        _answer(CpuStream())),
    Row(cuda.nvtx, "range_push", TRUE, "utils.py:2186", _answer(0)),
    Row(cuda.nvtx, "range_pop", TRUE, "utils.py:2215", _answer(0)),
]  # fmt: skip

_RANDOM = [
    Row(cuda, "default_generators", REDIRECTED, "tensor_parallel/random.py:66",
        _instead((generator,))),
    *(
        Row(owner, name, REDIRECTED, needed_by, _instead(answer))
        for owner in (cuda, cuda.random)
        for name, needed_by, answer in (
            ("get_rng_state", "tensor_parallel/random.py:55",
             lambda device=None: generator.get_state()),
            ("set_rng_state", "tensor_parallel/random.py:80",
             lambda new_state, device=None: generator.set_state(new_state)),
            ("manual_seed", "tensor_parallel/random.py:237",
             lambda seed: generator.manual_seed(int(seed))),
        )
    ),
]  # fmt: skip

_TENSORS = [
    *(
        Row(torch, name, REDIRECTED, needed_by, on_cpu)
        for name, needed_by in (
            ("tensor", "optimizer/grad_scaler.py:15"),
            ("empty", "tensor_parallel/layers.py"),
            ("zeros", "pipeline_parallel/schedules.py:596"),
            ("ones", "transformer/utils.py:35"),
            ("arange", "models/common/embeddings/rotary_pos_embedding.py:80"),
            ("empty_like", "tensor_parallel/mappings.py:436"),
        )
    ),
    Row(torch.Tensor, "new_empty", REDIRECTED, "tensor_parallel/mappings.py:439", on_cpu),
    Row(torch.Tensor, "to", REDIRECTED, "models/common/embeddings/rotary_pos_embedding.py:162",
        moves_to_cpu),
    Row(torch.Tensor, "cuda", REDIRECTED, "models/common/embeddings/rope_utils.py:63", stays),
    Row(torch.Tensor, "pin_memory", REDIRECTED, "models/common/embeddings/rope_utils.py:63",
        stays),
    # The distributed optimizer sorts parameters by this type name, and accepts only CUDA's names.
    Row(torch.Tensor, "type", Heading.UNTRUE, "optimizer/distrib_optimizer.py:361",
        claims_cuda_type),
]  # fmt: skip

_MEASUREMENTS = [
    Row(cuda, name, Heading.DENIED, "would invent a measurement", _denied)
    for name in (
        *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
        *("memory_stats", "memory_summary", "mem_get_info", "reset_peak_memory_stats"),
        *("get_device_properties", "get_device_name", "get_device_capability"),
        *("utilization", "temperature", "power_draw", "clock_rate"),
    )
]

TABLE: tuple[Row, ...] = (*_STATE, *_RANDOM, *_TENSORS, *_MEASUREMENTS)

logger = logging.getLogger(__name__)
_random_logger = logging.getLogger("megatron.core.tensor_parallel.random")
_MISSING = object()
_saved: list[tuple[Any, str, Any]] = []


def _filter(record: logging.LogRecord) -> bool:
    """Return False for a log record that warns that the CPU's random state changed, else True.

    The warning is pointless here, since the CPU's random generator stands in for the GPU's.
    """
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def install() -> None:
    """Install the stand-ins of `TABLE`, and make ``torch.compile`` run functions eagerly.

    Raises:
        ConfigError: this machine has a GPU, for which the stand-ins would be wrong.
    """
    if _saved:
        return
    if torch.cuda.is_available():
        raise ConfigError(
            "`cuda_shim.install` was called on a machine with a GPU, where its answers would be "
            "wrong; use `device.select()`, or hide the GPU with `CUDA_VISIBLE_DEVICES=`."
        )
    # When a device is first used as a context, torch makes a fixed list of its factory functions.
    # The list must have the original ones, or models built on "meta" would keep buffers on the CPU.
    with CPU:
        torch.empty(0)
    for row in TABLE:
        original = getattr(row.owner, row.name)
        _saved.append((row.owner, row.name, vars(row.owner).get(row.name, _MISSING)))
        setattr(row.owner, row.name, row.make(original))
    torch.compiler.set_stance("force_eager")
    _random_logger.addFilter(_filter)
    logger.info("no GPU: torch.cuda is answered on the CPU, and all timings are CPU timings")


def uninstall() -> None:
    """Restore torch; do nothing if `install` was not called."""
    if not _saved:
        return
    while _saved:
        owner, name, original = _saved.pop()
        if original is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    torch.compiler.set_stance("default")
    _random_logger.removeFilter(_filter)
