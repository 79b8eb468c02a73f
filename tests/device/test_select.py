"""Which device and library the ranks of a machine take, and what is read of its GPUs."""

import ctypes
import json
import logging
from typing import Any

import pytest
import torch

from megatron_ext import device as devices
from megatron_ext.device import Device, gpus, rates, select
from megatron_ext.errors import ConfigError


def test_a_cpu_talks_over_gloo_and_says_so_where_nccl_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO):
        assert select() == select("gloo") == Device("cpu", "gloo")
        assert caplog.messages == []
        assert select("nccl") == Device("cpu", "gloo")
    assert caplog.messages == ["no GPU was found: the ranks talk over gloo instead of nccl"]
    with pytest.raises(ConfigError, match=r"`--distributed-backend` \(mpi\) must be nccl or gloo"):
        select("mpi")


def test_a_gpu_talks_over_nccl_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert select() == select("nccl") == Device("cuda", "nccl")
    assert select("gloo") == Device("cuda", "gloo")


def test_each_rank_takes_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device = Device("cuda", "nccl")
    assert [device.activate(rank) for rank in (0, 1)] == [
        torch.device("cuda", 0),
        torch.device("cuda", 1),
    ]
    with pytest.raises(ConfigError, match="Local rank 2 has no GPU: this machine shows 2; start"):
        device.activate(2)
    assert chosen == [0, 1]


class Nvml:
    """Stands in for NVIDIA's management library; ``fails`` names a function that fails."""

    def __init__(self, fails: str | None = None) -> None:
        self.fails = fails

    def nvmlInit_v2(self) -> int:
        return int(self.fails == "init")

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        return int(self.fails == "handle" or index != 0)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value = 8
        minor._obj.value = 9
        return int(self.fails == "capability")


@pytest.mark.parametrize(
    ("fails", "generation"), [(None, 8), ("init", None), ("handle", None), ("capability", None)]
)
def test_the_generation_is_the_major_compute_capability(
    fails: str | None, generation: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml(fails))
    assert devices._generation() == generation


def test_without_the_library_the_generation_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert devices._generation() is None


def test_eight_bit_units_begin_with_ada(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for capability, has in (((8, 6), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, has=capability: has)
        assert rates.has_fp8(gpu) is has


def test_the_rates_of_the_chosen_gpu_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(rates, "rates", lambda device: {"bf16": 1.0 + device.index})
    assert rates.main(["--index", "3"]) == 0
    assert json.loads(capsys.readouterr().out) == {"bf16": 4.0}
    assert chosen == [torch.device("cuda", 3)]


def test_peaks_are_those_of_the_width_of_a_number() -> None:
    """Rates of the datasheets, dense and without TF32."""
    h100 = gpus.GPUS["H100"]
    assert [h100.peak(width) for width in (1, 2, 4)] == [1979e12, 989e12, 67e12]
    with pytest.raises(ConfigError, match="The GPU A100 has no fp8 products, but `--fp8-format`"):
        gpus.GPUS["A100"].peak(1)


FIGURES = {
    "A100-40GB": (312, None, 19.5, 42.2, 1555, 300, 25),
    "A100": (312, None, 19.5, 84.9, 2039, 300, 25),
    "L40S": (362, 733, 91.6, 47.6, 864, 32, 25),
    "H100": (989, 1979, 67, 84.9, 3350, 450, 50),
    "H200": (989, 1979, 67, 150, 4800, 450, 50),
    "B200": (2250, 4500, 80, 191.5, 8000, 900, 50),
}
"""Dense TFLOP/s in bf16, fp8 and fp32, GB that torch reports, GB/s of memory, link and network."""


def test_figures_are_those_of_the_datasheets_and_of_torch() -> None:
    assert FIGURES.keys() == gpus.GPUS.keys()
    for name, gpu in gpus.GPUS.items():
        rates = (gpu.bf16, gpu.fp8, gpu.fp32)
        sizes = (gpu.memory, gpu.memory_bandwidth, gpu.link, gpu.network)
        found = [None if x is None else x / 1e12 for x in rates] + [x / 1e9 for x in sizes]
        assert found == pytest.approx(list(FIGURES[name])), name
        assert gpu.per_node == 8
    others = {
        "H100 PCIe": 756, "H800": 989, "GB200": 2500, "A800": 312, "A40": 150, "A10G": 70,
        "RTX 4090": 165,
    }  # fmt: skip
    wanted = {name: bf16 for name, (bf16, *_) in FIGURES.items()} | others
    assert {name: peak / 1e12 for name, peak in gpus.PEAK_FLOPS_BF16.items()} == wanted


def test_cublas_takes_more_memory_from_hopper_on() -> None:
    assert {name for name, gpu in gpus.GPUS.items() if gpu.hopper} == {"H100", "H200", "B200"}
