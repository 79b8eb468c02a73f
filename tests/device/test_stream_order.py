"""Copies to a GPU and from it are in order; the stand-in for streams finds what is not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_ext.device import streams
from megatron_ext.device.streams import HostCopy, to_device
from tests.stream_order import OutOfOrder, Stream, StreamOrder

GPU = torch.device("cuda", 0)


def test_batches_are_sent_in_order_and_kept(order: StreamOrder) -> None:
    for number in range(3):
        batch = to_device(torch.full((4, 8), float(number)), GPU)
        assert float((batch * 2).sum()) == 64 * number
        del batch
        order.check_freed()
    assert len(order.streams) == 2  # copies share one stream
    assert order.current is order.default


def test_what_is_on_the_gpu_is_not_sent_again(order: StreamOrder) -> None:
    batch = to_device(torch.ones(4), GPU)
    assert to_device(batch, GPU) is batch


def test_a_copy_that_is_not_waited_for_is_found(
    order: StreamOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stream, "wait_stream", lambda self, other: None)
    batch = to_device(torch.ones(4, 8), GPU)
    said = (
        r"mul on the default stream \(tests/.*\) reads \[4, 8\], which copy to the GPU on a side "
        r"stream \(megatron_ext/device/streams.py:to_device\) wrote, without waiting for it"
    )
    with pytest.raises(OutOfOrder, match=said):
        batch * 2


def test_memory_that_is_given_back_too_early_is_found(
    order: StreamOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    batch = to_device(torch.ones(4, 8), GPU)
    batch * 2
    del batch
    said = r"\[4, 8\] of a side stream was given back while mul on the default stream .*record_str"
    with pytest.raises(OutOfOrder, match=said):
        order.check_freed()


def numbers() -> Tensor:
    """Return three numbers that the GPU has computed."""
    return to_device(torch.arange(3.0), GPU) + 1


def test_the_host_reads_what_has_arrived(order: StreamOrder) -> None:
    copy = HostCopy(numbers())
    later = numbers()
    assert copy.read() == [1.0, 2.0, 3.0]
    # Work that was launched after the copy is not waited for.
    assert order.host[order.default] < order.default.clock[order.default]
    assert later.tolist() == [1.0, 2.0, 3.0]
    assert order.host == order.default.clock


def test_numbers_that_the_host_does_not_wait_for_are_found(order: StreamOrder) -> None:
    copy = HostCopy(numbers())
    copy._arrived = None
    said = (
        r"the host \(tolist, .*:read\) uses \[3\] without waiting for copy_ on the default stream"
    )
    with pytest.raises(OutOfOrder, match=said):
        copy.read()


def test_pinned_memory_that_is_still_read_must_not_change(order: StreamOrder) -> None:
    pinned = torch.ones(3).pin_memory()
    pinned.to(GPU, non_blocking=True)
    with pytest.raises(OutOfOrder, match=r"the host \(fill_, .*\) uses \[3\] without waiting"):
        pinned.fill_(2)
    torch.cuda.synchronize()
    pinned.fill_(2)


def side_by_side(order: StreamOrder, wait: Callable[[Stream], None]) -> None:
    """Write on a side stream what the default stream wrote, after ``wait``; read it there."""
    total = to_device(torch.zeros(8), GPU) * 1
    side = torch.cuda.Stream()
    wait(side)  # type: ignore[arg-type]
    with torch.cuda.stream(side):
        total[:4] += 1
        total.record_stream(side)
    total[4:] += 1  # other bytes
    order.default.wait_stream(side)  # type: ignore[arg-type]
    assert float(total.sum()) == 8


@pytest.mark.parametrize(
    "wait",
    [
        lambda side: side.wait_stream(torch.cuda.current_stream()),
        lambda side: side.wait_event(torch.cuda.current_stream().record_event()),
        lambda side: torch.cuda.current_stream().record_event().wait(side),
        lambda side: torch.cuda.current_stream().synchronize(),
        lambda side: torch.cuda.synchronize(),
    ],
)
def test_every_way_of_waiting_counts(order: StreamOrder, wait: Callable[[Stream], None]) -> None:
    side_by_side(order, wait)


@pytest.mark.parametrize(
    "wait", [lambda side: None, lambda side: side.wait_event(torch.cuda.Event())]
)
def test_a_missing_wait_is_found(order: StreamOrder, wait: Callable[[Stream], None]) -> None:
    with pytest.raises(
        OutOfOrder, match=r"add_ on a side stream .* overwrites \[4\], which mul on"
    ):
        side_by_side(order, wait)


def test_one_stream_of_copies_serves_all(order: StreamOrder) -> None:
    assert streams._stream_of_copies(GPU) is streams._stream_of_copies(GPU)
