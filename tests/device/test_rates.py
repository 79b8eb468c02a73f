"""Measuring a device: on a CPU, whose rates are only checked for what they must be."""

from __future__ import annotations

import time

import pytest
import torch

from megatron_ext.device import rates
from megatron_ext.device.rates import copy_rate, has_fp8, matrix_rate, seconds_of
from megatron_ext.errors import DeviceNotSupported

CPU = torch.device("cpu")


def test_time_is_the_median_after_the_warm_up() -> None:
    pauses = iter([0.3, 0.0, 0.5, 0.0])
    calls = []

    def work() -> None:
        calls.append(1)
        time.sleep(next(pauses))

    found = seconds_of(work, CPU, repeats=3, warm_ups=1)
    assert len(calls) == 4
    assert found < 0.2


def test_rates_count_operations_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def took_a_second(work: object, device: torch.device) -> float:
        assert callable(work)
        work()
        return 1.0

    monkeypatch.setattr(rates, "seconds_of", took_a_second)
    assert matrix_rate(CPU, torch.float32, 16) == 2 * 16**3
    assert matrix_rate(CPU, torch.bfloat16, 16) == 2 * 16**3
    assert copy_rate(CPU, 1000) == 2000
    assert rates.rates(CPU, 16, 1000) == {"bf16": 2 * 16**3, "fp8": None, "copy": 2000}


def test_a_cpu_has_no_8_bit_rate() -> None:
    assert not has_fp8(CPU)
    with pytest.raises(DeviceNotSupported, match="compute capability 8.9 or newer"):
        matrix_rate(CPU, torch.float8_e4m3fn, 16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert rates.main(["--index", "0"]) == 1
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", "torch can use no GPU here\n")
