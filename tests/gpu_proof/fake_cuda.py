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

import numpy as np
import torch
import torch._dynamo.convert_frame
import torch._dynamo.device_interface
import torch._dynamo.utils
import torch._inductor.fx_passes.fuse_attention
import torch._inductor.fx_passes.pad_mm
import torch._inductor.runtime.triton_helpers
import torch._subclasses.fake_tensor
import torch.utils._triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend
from triton.backends.compiler import GPUTarget
from triton.runtime import driver as triton_driver
from triton.runtime.jit import JITFunction

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


on_wait: list[Callable[[str], None]] = []
"""Functions that are told when the host waits for the device, and by what."""


last_data: list[Any] = []
"""The numbers that `torch.tensor` got last; tensors of the host are fake as well."""
on_pin: list[Callable[[], None]] = []
"""Functions that are told when memory of the host is pinned, which no graph may capture."""
on_launch: list[Callable[[str, int, list[torch.Tensor]], None]] = []
"""Functions that are told of a Triton kernel that would run: its name, bytes and tensors."""


def _launch(kernel: JITFunction[Any], *args: Any, **kwargs: Any) -> None:
    """Stands in for `JITFunction.run`: tell of the launch; each tensor is read or written once."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    tensors = [x for x in given.values() if isinstance(x, torch.Tensor)]
    count = BYTES_BY_ADDRESS.get(kernel.__name__)
    num_bytes = (
        sum(x.numel() * x.element_size() for x in tensors) if count is None else count(given)
    )
    for tell in on_launch:
        tell(kernel.__name__, num_bytes, tensors)


def _updated_bytes(given: dict[str, Any]) -> int:
    """Return the bytes of `optim.adam_kernel.adam_kernel`, from its number of whole chunks."""
    numel = given["chunks"].size(0) * given["CHUNK"]
    moments = given["EXP_AVG"].primitive_bitwidth + given["EXP_AVG_SQ"].primitive_bitwidth
    copy = given["COPY"].primitive_bitwidth if given["HAS_COPY"] else 0
    return int(numel * (4 + 2 * 4 + (2 * moments + copy) // 8))


BYTES_BY_ADDRESS: dict[str, Callable[[dict[str, Any]], int]] = {"adam_kernel": _updated_bytes}
"""Bytes of kernels that get their tensors as addresses."""


def _address(tensor: torch.Tensor) -> int:
    """Stands in for `data_ptr`: an address that no other storage of fake tensors has."""
    offset = tensor.storage_offset() * tensor.element_size()
    return int(tensor.untyped_storage()._cdata) // 512 * 512 + offset  # type: ignore[attr-defined]


def _wait(name: str) -> Callable[..., None]:
    """Return a function that only says that it was called."""

    def waited(*_args: Any, **_kwargs: Any) -> None:
        for tell in on_wait:
            tell(name)

    return waited


class Event:
    """Stands in for `torch.cuda.Event`; a fake device has no work, so that all of it is done."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    record = wait = _always(None)
    synchronize = _wait("Event.synchronize")
    query = _always(True)
    elapsed_time = _always(1.0)


class Stream:
    """Stands in for `torch.cuda.Stream`; all of them are the same."""

    cuda_stream = stream_id = device_index = 0
    device_type = 1
    device = DEVICE

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    wait_stream = wait_event = _always(None)
    synchronize = _wait("Stream.synchronize")
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


def _pinned(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """Stands in for `Tensor.pin_memory`, which needs a driver."""
    for tell in on_pin:
        tell()
    return tensor


def _unpinned(*args: Any, _original: Any = torch.tensor, **kwargs: Any) -> torch.Tensor:
    """Stands in for `torch.tensor`: memory of the host can be pinned for a driver only."""
    last_data[:] = args[:1]
    if kwargs.pop("pin_memory", False):
        _pinned(torch.empty(()))
    found: torch.Tensor = _original(*args, **kwargs)
    return found


def _numbers(tensor: torch.Tensor, *, _original: Any = torch.Tensor.numpy) -> np.ndarray:
    """Stands in for `Tensor.numpy`: asks a fake tensor for its values one by one."""
    if not isinstance(tensor, FakeTensor):
        return _original(tensor)  # type: ignore[no-any-return]
    return np.array([x.item() for x in tensor.flatten()]).reshape(tensor.shape)


def _moved(parameter: Any, applied: Any) -> None:
    """Stands in for `swap_tensors`, by which a module moves its parameters, keeping attributes."""
    parameter.data, parameter.fake_device = applied.detach(), applied.fake_device


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stands in for `scaled_dot_product_attention`, which asks the driver for a kernel.

    Takes the first kernel of the order that `torch.nn.attention.sdpa_kernel` has set.
    """
    del enable_gqa  # both kernels have it
    first = SDPBackend(torch._C._get_sdp_priority_order()[0])
    like = {"scale": scale}
    if first == SDPBackend.CUDNN_ATTENTION:
        settings = (attn_mask, True, dropout_p, is_causal, False)
        kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    else:
        assert attn_mask is None, "flash attention takes no mask"
        settings = (dropout_p, is_causal, False)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
    found: torch.Tensor = kernel(query, key, value, *settings, **like)[0]
    return found


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
            "current_stream": _STREAM,
            "default_stream": _STREAM,
            "set_device": None,
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
            "_can_use_cudnn_attention": True,
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
            "synchronize": _wait("torch.cuda.synchronize"),
            "default_generators": (torch.default_generator,),
            "get_rng_state": lambda *_: torch.default_generator.get_state(),
            "set_rng_state": lambda *_: None,
        },
    ),
    (torch._dynamo.convert_frame, {"preserve_rng_state": contextlib.nullcontext}),
    (torch._dynamo.utils, {"preserve_rng_state": contextlib.nullcontext}),
    (JITFunction, {"run": _launch}),
    # Data of the host is then copied to the device by an operation, which can be seen.
    (FakeTensorMode, {"avoid_device_init": True}),
    (torch, {"tensor": _unpinned}),
    (torch.utils, {"swap_tensors": _moved}),
    (torch.nn.functional, {"scaled_dot_product_attention": _attention}),
    (
        torch.Tensor,
        {
            "data_ptr": _address,
            "numpy": _numbers,
            "pin_memory": _pinned,
            "record_stream": lambda self, _stream: None,
        },
    ),
)
"""Names that get another value than a function that returns a constant."""


_library = torch.library.Library("aten", "IMPL")


def _scaled_mm_out(
    a: torch.Tensor, b: torch.Tensor, *scales: Any, out: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Return the result of `_scaled_mm` on fake tensors where it is written, which torch lacks."""
    made = torch.ops.aten._scaled_mm(a, b, *scales, **options)
    assert (made.shape, made.dtype) == (out.shape, out.dtype), (made.shape, made.dtype)
    return out


def install() -> None:
    """Replace what the tables name; no process that did it can use a GPU again."""
    _library.impl("_scaled_mm.out", _scaled_mm_out, "Meta")
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
    triton_driver.set_active(Driver())  # type: ignore[no-untyped-call]
