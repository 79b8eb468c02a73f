"""Streams and events of a device that does one thing after the other."""

from __future__ import annotations

from typing import Any

from megatron_ext.errors import DeviceNotSupported


class CpuStream:
    """A CUDA stream on a CPU: all streams are the same one, and their work is done already."""

    cuda_stream = 0
    stream_id = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Takes a device and a priority, as CUDA's does."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuStream)

    def __hash__(self) -> int:
        return hash(CpuStream)

    def wait_stream(self, stream: CpuStream) -> None:
        """Nothing is outstanding."""

    def wait_event(self, event: CpuEvent) -> None:
        """Nothing is outstanding."""

    def synchronize(self) -> None:
        """Nothing is outstanding."""

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """An event that has happened already."""
        return event if event is not None else CpuEvent()

    def __enter__(self) -> CpuStream:
        return self

    def __exit__(self, *_exception: object) -> None:
        return None


class CpuEvent:
    """A CUDA event on a CPU: it has happened, but when is not known."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Takes timing and blocking options, as CUDA's does."""

    def record(self, stream: CpuStream | None = None) -> None:
        """All earlier work is done."""

    def wait(self, stream: CpuStream | None = None) -> None:
        """Nothing is outstanding."""

    def synchronize(self) -> None:
        """Nothing is outstanding."""

    def query(self) -> bool:
        """Whether the event has happened."""
        return True

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Would be an invented measurement.

        Raises:
            DeviceNotSupported: always.
        """
        raise DeviceNotSupported(
            "`torch.cuda.Event.elapsed_time` times a GPU, but this run is on a CPU; use "
            "`time.perf_counter`."
        )
