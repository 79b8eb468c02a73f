"""Measured rates of a GPU lie near its datasheet; the doctor finds them; the benchmarks run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from megatron_ext.device.gpus import peak_flops
from megatron_ext.device.rates import copy_rate, has_fp8, matrix_rate
from megatron_ext.inspect.doctor.examine import examine
from megatron_ext.inspect.doctor.host import ThisMachine
from tests.gpu.runs import ROOT, SECONDS

pytestmark = pytest.mark.gpu

SCRIPTS = ("gpu_throughput", "gpu_peers", "attention", "fp8_linear", "mmdit_block")


def test_the_matrix_rate_is_a_share_of_the_datasheets() -> None:
    sheet = peak_flops(torch.cuda.get_device_name())
    if sheet is None:
        pytest.skip(f"no datasheet of {torch.cuda.get_device_name()} is known")
    device = torch.device("cuda", 0)
    assert 0.4 * sheet < matrix_rate(device) < 1.1 * sheet
    if has_fp8(device):
        fp8 = matrix_rate(device, torch.float8_e4m3fn)
        assert 0.4 * 2 * sheet < fp8 < 1.1 * 2 * sheet


def test_copies_take_the_time_of_their_bytes() -> None:
    device = torch.device("cuda", 0)
    half, whole = (copy_rate(device, size) for size in (2**29, 2**30))
    assert half == pytest.approx(whole, rel=0.2)
    assert whole > 2e11


def test_the_doctor_finds_this_gpu() -> None:
    found = examine(ThisMachine())
    assert found.unknown == ()
    assert [gpu.name for gpu in found.gpus] == [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]
    assert all(gpu.rates is not None and gpu.rates.bf16 > 1e12 for gpu in found.gpus)
    for name in ("NCCL", "CUDA graphs", "torch.compile"):
        assert found.finding(name).status == "found", found.finding(name)


@pytest.mark.parametrize("script", SCRIPTS)
def test_benchmarks_run_at_a_tiny_size(script: str) -> None:
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}.py", "--tiny"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) > 2
