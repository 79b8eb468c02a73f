"""The table: what each name of ``torch.cuda`` answers on a machine without a GPU.

Three headings. TRUE ON A CPU: the answer holds (there is nothing to wait for, the current device
is number 0). REDIRECTED: the request is carried out on the CPU. UNTRUE: the answer is false, and
core needs it to be. Whatever would invent a measurement is denied. Every row names the file of
megatron-core 0.16.1 that asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from megatron_ext.device.redirect import claims_cuda_type, moves_to_cpu, on_cpu, stays
from megatron_ext.device.streams import CpuEvent, CpuStream
from megatron_ext.errors import DeviceNotSupported


class Heading(Enum):
    """How far the answer of a row is from what a GPU would say."""

    TRUE_ON_A_CPU = "true on a CPU"
    REDIRECTED = "redirected"
    UNTRUE = "untrue"
    DENIED = "denied"


@dataclass(frozen=True)
class Row:
    """One name and its answer.

    Attributes:
        owner: the module or class that holds the name.
        name: the attribute.
        heading: see `Heading`.
        needed_by: who asks, relative to ``megatron/core/``.
        make: from the original attribute to its stand-in.
    """

    owner: Any
    name: str
    heading: Heading
    needed_by: str
    make: Callable[[Any], Any]


def _answer(value: Any) -> Callable[[Any], Any]:
    """A function that gives the same answer whatever it is asked."""

    def make(original: Any) -> Any:
        def answer(*_args: Any, **_kwargs: Any) -> Any:
            return value

        return _named_like(original, answer)

    return make


def _instead(replacement: Any) -> Callable[[Any], Any]:
    return lambda original: replacement


def _named_like(original: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = getattr(original, "__name__", function.__name__)
    function.__doc__ = getattr(original, "__doc__", None)
    return function


def _denied(original: Any) -> Any:
    name = f"torch.cuda.{original.__name__}"

    def deny(*_args: Any, **_kwargs: Any) -> Any:
        raise DeviceNotSupported(
            f"`{name}` measures a GPU, but this run is on a CPU; print `n/a` instead."
        )

    return _named_like(original, deny)


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    """State of the CPU's generator, which is the only one."""
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    """Set the state of the CPU's generator."""
    torch.default_generator.set_state(new_state)


def _manual_seed(seed: int) -> None:
    """Seed the CPU's generator."""
    torch.default_generator.manual_seed(int(seed))


@contextlib.contextmanager
def _stream(stream: Any) -> Any:
    """All streams are the same one."""
    yield


def _run_at_once(original: Any) -> Any:
    def run(callback: Callable[[], Any], **_kwargs: Any) -> None:
        callback()

    return _named_like(original, run)


cuda = torch.cuda
TRUE, REDIRECTED = Heading.TRUE_ON_A_CPU, Heading.REDIRECTED

_STATE = [
    Row(cuda, "current_device", TRUE, "tensor_parallel/layers.py", _answer(0)),
    Row(cuda, "set_device", TRUE, "inference/utils.py", _answer(None)),
    Row(cuda, "synchronize", TRUE, "timers.py", _answer(None)),
    Row(cuda, "empty_cache", TRUE, "transformer/moe/moe_layer.py", _answer(None)),
    Row(cuda, "is_initialized", TRUE, "tensor_parallel/random.py (_lazy_call)", _answer(True)),
    Row(cuda, "_lazy_init", TRUE, "tensor_parallel/random.py", _answer(None)),
    Row(cuda, "_lazy_call", TRUE, "tensor_parallel/random.py", _run_at_once),
    Row(cuda, "Stream", TRUE, "distributed/param_and_grad_buffer.py", _instead(CpuStream)),
    Row(cuda, "Event", TRUE, "distributed/param_and_grad_buffer.py", _instead(CpuEvent)),
    Row(cuda, "stream", TRUE, "distributed/param_and_grad_buffer.py", _instead(_stream)),
    Row(cuda, "current_stream", TRUE, "distributed/param_and_grad_buffer.py",
        _answer(CpuStream())),
    Row(cuda, "default_stream", TRUE, "pipeline_parallel/utils.py", _answer(CpuStream())),
    Row(cuda.nvtx, "range_push", TRUE, "utils.py", _answer(0)),
    Row(cuda.nvtx, "range_pop", TRUE, "utils.py", _answer(0)),
]  # fmt: skip

_RANDOM = [
    Row(cuda, "default_generators", REDIRECTED, "tensor_parallel/random.py",
        lambda original: (torch.default_generator,)),
    *(
        Row(owner, name, REDIRECTED, "tensor_parallel/random.py", _instead(answer))
        for owner in (cuda, cuda.random)
        for name, answer in (
            ("get_rng_state", _get_rng_state),
            ("set_rng_state", _set_rng_state),
            ("manual_seed", _manual_seed),
        )
    ),
]  # fmt: skip

_TENSORS = [
    *(
        Row(torch, name, REDIRECTED, needed_by, on_cpu)
        for name, needed_by in (
            ("tensor", "optimizer/grad_scaler.py"),
            ("empty", "tensor_parallel/layers.py"),
            ("zeros", "pipeline_parallel/schedules.py"),
            ("ones", "transformer/utils.py"),
            ("full", "transformer/moe/moe_utils.py"),
            ("arange", "models/common/embeddings/rotary_pos_embedding.py"),
            ("as_tensor", "utils.py"),
            ("rand", "transformer/moe/moe_utils.py"),
            ("randn", "transformer/moe/moe_utils.py"),
            ("randint", "pipeline_parallel/utils.py"),
            ("eye", "transformer/utils.py"),
            ("empty_like", "tensor_parallel/layers.py"),
            ("zeros_like", "tensor_parallel/layers.py"),
            ("ones_like", "models/gpt/gpt_model.py"),
            ("full_like", "transformer/moe/moe_utils.py"),
        )
    ),
    Row(torch.Tensor, "to", REDIRECTED, "models/common/embeddings/rotary_pos_embedding.py",
        moves_to_cpu),
    Row(torch.Tensor, "cuda", REDIRECTED, "models/common/embeddings/rope_utils.py", stays),
    Row(torch.Tensor, "pin_memory", REDIRECTED, "models/common/embeddings/rope_utils.py", stays),
    Row(torch.Tensor, "new_zeros", REDIRECTED, "transformer/moe/token_dispatcher.py", on_cpu),
    Row(torch.Tensor, "new_empty", REDIRECTED, "tensor_parallel/mappings.py", on_cpu),
    Row(torch.Tensor, "new_tensor", REDIRECTED, "transformer/moe/token_dispatcher.py", on_cpu),
    Row(torch.nn.Module, "to", REDIRECTED, "transformer/module.py", moves_to_cpu),
    Row(torch.nn.Module, "cuda", REDIRECTED, "transformer/module.py", stays),
    # The distributed optimizer sorts parameters by this name and refuses any other.
    Row(torch.Tensor, "type", Heading.UNTRUE, "optimizer/distrib_optimizer.py:361",
        claims_cuda_type),
]  # fmt: skip

_MEASUREMENTS = [
    Row(cuda, name, Heading.DENIED, "would invent a measurement", _denied)
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "memory_stats",
        "memory_summary",
        "mem_get_info",
        "reset_peak_memory_stats",
        "get_device_properties",
        "get_device_name",
        "get_device_capability",
        "utilization",
        "temperature",
        "power_draw",
        "clock_rate",
    )
]

TABLE: tuple[Row, ...] = (*_STATE, *_RANDOM, *_TENSORS, *_MEASUREMENTS)
