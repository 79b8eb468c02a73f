"""Every answer of the table, the denials, and torch as it was after `uninstall`."""

import importlib.util
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch._dynamo.testing import CompileCounter

from megatron_ext.device import cuda_shim
from megatron_ext.device.cuda_shim import TABLE, Heading
from megatron_ext.errors import ConfigError, DeviceNotSupported

SURFACE = {
    Heading.TRUE_ON_A_CPU: "Event Stream _lazy_call _lazy_init current_device current_stream "
    "default_stream empty_cache is_initialized range_pop range_push set_device stream synchronize",
    Heading.REDIRECTED: "arange cuda default_generators empty empty_like get_rng_state "
    "get_rng_state manual_seed manual_seed new_empty ones pin_memory set_rng_state set_rng_state "
    "tensor to zeros",
    Heading.UNTRUE: "type",
    Heading.DENIED: "clock_rate get_device_capability get_device_name get_device_properties "
    "max_memory_allocated max_memory_reserved mem_get_info memory_allocated memory_reserved "
    "memory_stats memory_summary power_draw reset_peak_memory_stats temperature utilization",
}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the answers are for a CPU")


@pytest.fixture
def installed() -> Iterator[None]:
    cuda_shim.install()
    yield
    cuda_shim.uninstall()


def test_the_surface_is_frozen_and_each_row_names_a_file_of_core_that_mentions_it() -> None:
    for heading, names in SURFACE.items():
        assert sorted(row.name for row in TABLE if row.heading is heading) == names.split()
    spec = importlib.util.find_spec("megatron.core")
    core = Path(spec.origin).parent
    for row in TABLE:
        if row.heading is Heading.DENIED:
            continue
        file = core / row.needed_by.split(":")[0].split(" ")[0]
        assert file.is_file(), row
        assert row.name in file.read_text(), row


def test_uninstall_restores_torch(caplog: pytest.LogCaptureFixture) -> None:
    def state() -> list[Any]:
        return [vars(row.owner).get(row.name) for row in TABLE]

    before = state()
    with caplog.at_level(logging.INFO):
        cuda_shim.install()
        cuda_shim.install()
    assert sum("CPU timings" in record.message for record in caplog.records) == 1
    assert state() != before
    cuda_shim.uninstall()
    assert state() == before
    cuda_shim.uninstall()


def test_it_refuses_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="was called on a machine with a GPU"):
        cuda_shim.install()


@pytest.mark.usefixtures("installed")
def test_state_and_streams() -> None:
    assert torch.cuda.current_device() == 0
    assert torch.cuda.synchronize() is None
    assert torch.cuda.Stream() == torch.cuda.current_stream() == torch.cuda.default_stream()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    assert event.query()
    assert torch.cuda.current_stream().record_event(event) is event
    assert torch.cuda.current_stream().record_event().query()
    with pytest.raises(DeviceNotSupported, match="elapsed_time"):
        event.elapsed_time(torch.cuda.Event())
    ran: list[int] = []
    torch.cuda._lazy_call(lambda: ran.append(1))
    assert ran == [1]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda"), "cpu", None])
def test_tensors_are_made_on_the_cpu(device: Any) -> None:
    made = [
        torch.tensor([1.0], device=device),
        torch.empty(2, device=device, pin_memory=True),
        torch.arange(3, device=device),
        torch.zeros(2).to(device) if device is not None else torch.zeros(2),
        torch.empty_like(torch.ones(2), device=device),
        torch.ones(2).new_empty(3, device=device),
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}


def test_a_device_is_a_context_for_all_factories() -> None:
    """Build on "meta", as transformers does before it reads the weights of a model."""
    program = (
        "import torch; from megatron_ext.device import cuda_shim; cuda_shim.install()\n"
        "with torch.device('meta'): print(torch.tensor([1]).device, torch.empty(1).device)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["meta", "meta"], done.stderr


@pytest.mark.usefixtures("installed")
def test_moves_keep_the_object() -> None:
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor
    assert tensor.pin_memory() is tensor
    assert tensor.to("cuda") is tensor
    assert tensor.to(torch.bfloat16).dtype is torch.bfloat16
    assert tensor.to("cuda", torch.bfloat16).dtype is torch.bfloat16
    assert tensor.to(device="cuda", dtype=torch.bfloat16).dtype is torch.bfloat16
    # The same dtype, but the third argument asks for a copy.
    assert tensor.to("cuda:0", torch.float32, False, True) is not tensor


@pytest.mark.usefixtures("installed")
def test_what_stays_honest_and_the_one_untruth() -> None:
    assert not torch.cuda.is_available()
    assert not torch.zeros(1).is_cuda
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type(torch.int64).dtype is torch.int64


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", SURFACE[Heading.DENIED].split())
def test_no_measurement_is_invented(name: str) -> None:
    with pytest.raises(DeviceNotSupported, match=rf"`torch.cuda.{name}` measures a GPU"):
        getattr(torch.cuda, name)()


@pytest.mark.usefixtures("installed")
def test_random_numbers_are_the_cpu_generators(caplog: pytest.LogCaptureFixture) -> None:
    initialize_rng_tracker(force_reset=True)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.add("test", 77)
    torch.manual_seed(5)
    with tracker.fork("test"):
        forked = torch.rand(3)
    after = torch.rand(3)
    initialize_rng_tracker(force_reset=True)
    assert torch.equal(forked, torch.rand(3, generator=torch.Generator().manual_seed(77)))
    assert torch.equal(after, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert "CPU RNG state changed" not in caplog.text
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    logger.warning("another warning")
    cuda_shim.uninstall()
    logger.warning("CPU RNG state changed within GPU RNG context")
    assert caplog.messages == ["another warning", "CPU RNG state changed within GPU RNG context"]


@pytest.mark.usefixtures("installed")
def test_compiled_functions_run_eagerly() -> None:
    backend = CompileCounter()

    @torch.compile(backend=backend)
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert float(double(torch.ones(1))) == 2.0 and backend.frame_count == 0
    cuda_shim.uninstall()
    assert float(double(torch.ones(1))) == 2.0 and backend.frame_count == 1
