"""Turning a request for a CUDA device into one for the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")


def as_cpu(device: Any) -> Any:
    """The CPU where a CUDA device is named (an integer names one), else the argument itself."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return CPU
    if isinstance(device, str) and device.split(":")[0] == "cuda":
        return CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return CPU
    return device


def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor factory whose ``device=`` may name a GPU, and which never pins memory."""

    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = as_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapper


def moves_to_cpu(move: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.to`` or ``Module.to`` whose first argument or ``device=`` may name a GPU."""

    @functools.wraps(move)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (as_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = as_cpu(kwargs["device"])
        return move(self, *args, **kwargs)

    return wrapper


def stays(move: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.cuda``, ``Module.cuda`` and ``Tensor.pin_memory``: already there."""

    @functools.wraps(move)
    def wrapper(self: Any, *_args: Any, **_kwargs: Any) -> Any:
        return self

    return wrapper


def claims_cuda_type(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type()`` that names a CUDA type; with an argument it converts as ever."""

    @functools.wraps(type_of)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = type_of(self, *args, **kwargs)
        if isinstance(name, str) and not name.startswith("torch.cuda."):
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    return wrapper
