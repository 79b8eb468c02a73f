"""A CUDA device without a GPU: fake tensors on it have shapes, dtypes and strides, but no memory.

`install` replaces functions of torch and Triton that would ask the driver. Together with the two
libraries of ``stubs/`` (see ``run.sh``) that lets a CUDA build of torch believe in one GPU of the
generation that ``GPU_PROOF_TARGET`` names. Kernels are compiled for it and never launched. Every
name that is replaced stands in one of the tables here, and megatron-core is left as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo.convert_frame
import torch._dynamo.device_interface
import torch._dynamo.utils
import torch._inductor.fx_passes.fuse_attention
import torch._inductor.fx_passes.pad_mm
import torch._inductor.runtime.triton_helpers
import torch._subclasses.fake_tensor
import torch.utils._triton
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver as triton_driver

NAMES = {90: "NVIDIA H200", 100: "NVIDIA B200"}
CAPABILITY = int(os.environ.get("GPU_PROOF_TARGET", "90"))
TARGET = GPUTarget("cuda", CAPABILITY, 32)
DEVICE = torch.device("cuda", 0)
MANY = 127
"""Number of devices that autograd is told: its threads also ask for the one after the last."""
SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a block may have on both generations."""

PROPERTIES = SimpleNamespace(
    name=NAMES[CAPABILITY],
    major=CAPABILITY // 10,
    minor=0,
    total_memory=143_771 * 2**20,
    multi_processor_count={90: 132, 100: 148}[CAPABILITY],
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65_536,
    warp_size=32,
    shared_memory_per_block=48 * 1024,
    shared_memory_per_block_optin=SHARED_MEMORY,
    shared_memory_per_multiprocessor=228 * 1024,
    L2_cache_size={90: 50, 100: 126}[CAPABILITY] * 2**20,
    memory_clock_rate=3_201_000,
    memory_bus_width=6144,
    clock_rate=1_980_000,
    gcnArchName="",
    is_integrated=0,
    is_multi_gpu_board=0,
    uuid="fake",
    pci_bus_id=0,
    pci_device_id=0,
    pci_domain_id=0,
)


def _always(value: Any) -> Callable[..., Any]:
    """Return a function that returns ``value`` whatever it is given."""
    return lambda *args, **kwargs: value


class Event:
    """Stands in for `torch.cuda.Event`; a fake device has no work, so that all of it is done."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    record = wait = synchronize = _always(None)
    query = _always(True)
    elapsed_time = _always(1.0)


class Stream:
    """Stands in for `torch.cuda.Stream`; all of them are the same."""

    cuda_stream = stream_id = device_index = 0
    device_type = 1
    device = DEVICE

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = _always(None)
    query = _always(True)

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_error: Any) -> None:
        pass


class Driver:
    """Stands in for Triton's driver: knows the target, and cannot launch."""

    launcher_cls = None
    utils = SimpleNamespace(
        get_device_properties=_always(
            {
                "max_shared_mem": SHARED_MEMORY,
                "multiprocessor_count": PROPERTIES.multi_processor_count,
                "sm_clock_rate": PROPERTIES.clock_rate,
                "mem_clock_rate": PROPERTIES.memory_clock_rate,
                "mem_bus_width": PROPERTIES.memory_bus_width,
                "max_num_regs": PROPERTIES.regs_per_multiprocessor,
                "warpSize": PROPERTIES.warp_size,
            }
        )
    )
    get_current_target = _always(TARGET)
    get_current_device = get_current_stream = _always(0)
    set_current_device = _always(None)
    get_active_torch_device = _always(DEVICE)
    get_device_interface = _always(torch.cuda)
    map_python_to_cpp_type = _always("void*")


_interface = torch._dynamo.device_interface.CudaInterface
_STREAM = Stream()

ANSWERS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (
        torch.cuda,
        {
            "is_available": True,
            "is_initialized": True,
            "device_count": 1,
            "current_device": 0,
            "get_device_capability": divmod(CAPABILITY, 10),
            "get_device_properties": PROPERTIES,
            "get_device_name": PROPERTIES.name,
            "is_bf16_supported": True,
            "is_current_stream_capturing": False,
            "current_stream": _STREAM,
            "default_stream": _STREAM,
            "set_device": None,
            "synchronize": None,
            "empty_cache": None,
            "manual_seed": None,
            "manual_seed_all": None,
            "reset_peak_memory_stats": None,
            "memory_allocated": 0,
            "memory_reserved": 0,
            "max_memory_allocated": 0,
            "_lazy_init": None,
            "_lazy_call": None,
            "_exchange_device": 0,
            "_maybe_exchange_device": 0,
        },
    ),
    (
        torch._C,
        {
            "_cuda_getCurrentRawStream": 0,
            "_cuda_exchangeDevice": 0,
            "_cuda_maybeExchangeDevice": 0,
            "_cuda_getDevice": 0,
            "_cuda_setDevice": None,
        },
    ),
    (torch.accelerator, {"is_available": False, "current_device_index": 0}),
    (torch._subclasses.fake_tensor, {"init_gpu_context": None}),
    (torch.utils._triton, {"has_triton": True, "has_triton_package": True}),
    # These run small products on the device to see what it does with them.
    (torch._inductor.fx_passes.fuse_attention, {"_sfdp_init": None}),
    (torch._inductor.fx_passes.pad_mm, {"_pad_mm_init": None}),
    (torch._inductor.runtime.triton_helpers, {"set_driver_to_gpu": None}),
)
"""Values that functions return, by the module that has them."""

INTERFACE: dict[str, Any] = {
    "current_device": 0,
    "device_count": 1,
    "exchange_device": 0,
    "get_compute_capability": CAPABILITY,
    "get_device_properties": PROPERTIES,
    "get_raw_stream": 0,
    "is_available": True,
    "is_bf16_supported": True,
    "is_triton_capable": True,
    "maybe_exchange_device": 0,
    "raise_if_triton_unavailable": None,
    "set_device": None,
    "synchronize": None,
}
"""Values that the compiler's view of CUDA returns."""

VALUES: tuple[tuple[Any, dict[str, Any]], ...] = (
    (
        torch.cuda,
        {
            "Stream": Stream,
            "Event": Event,
            "stream": contextlib.nullcontext,
            "default_generators": (torch.default_generator,),
            "get_rng_state": lambda *_: torch.default_generator.get_state(),
            "set_rng_state": lambda *_: None,
        },
    ),
    (torch._dynamo.convert_frame, {"preserve_rng_state": contextlib.nullcontext}),
    (torch._dynamo.utils, {"preserve_rng_state": contextlib.nullcontext}),
    (
        torch.Tensor,
        {
            "pin_memory": lambda self, *_args, **_kwargs: self,
            "record_stream": lambda self, _stream: None,
        },
    ),
)
"""Names that get another value than a function that returns a constant."""


class FakeMode(FakeTensorMode):
    """Makes new tensors fake ones; data of the host is copied to the device by an operation."""

    avoid_device_init = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)


def install() -> None:
    """Replace what the tables name; no process that did it can use a GPU again."""
    library = ctypes.CDLL(os.environ["GPU_PROOF_PRELOAD"])
    torch._C._ensureCUDADeviceGuardSet()
    ctypes.c_int.in_dll(library, "gpu_proof_device_count").value = MANY
    for owner, answers in ANSWERS:
        for name, value in answers.items():
            setattr(owner, name, _always(value))
    for owner, values in VALUES:
        for name, value in values.items():
            setattr(owner, name, value)
    for name, value in INTERFACE.items():
        setattr(_interface, name, staticmethod(_always(value)))
    for name in ("current_device", "set_device", "get_device_properties"):
        setattr(_interface.Worker, name, staticmethod(_always(INTERFACE[name])))
    for operator in (flex_attention, flex_attention_backward):
        rules = operator.python_key_table
        rules[FakeMode] = rules[FakeTensorMode]
    triton_driver.set_active(Driver())  # type: ignore[no-untyped-call]
