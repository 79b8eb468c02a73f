"""The doctor on what surrounds the GPUs: the host, their links, and what is tried on them."""

import dataclasses
import os
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext.device import host as host_module
from megatron_ext.device.host import Host, this_host
from megatron_ext.inspect.doctor.examine import examine
from megatron_ext.inspect.doctor.gpus import parse_topology
from megatron_ext.inspect.doctor.host import Outcome, ThisMachine, report
from tests.inspect.doctor.machines import H200, NO_CUDA, SERVER, Machine

TWO = {**H200, "gpus": 2 * H200["gpus"]}
HEAD = "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
TOPOLOGY = (
    HEAD + "GPU0\t X \tNV18\tSYS\tPXB\t0-47\t0\t\tN/A\nGPU1\tNV18\t X \tNV18\tSYS\t0-47\t0\t\tN/A\n"
    "GPU2\tSYS\tNV18\t X \tSYS\t48-95\t1\t\tN/A\nNIC0\tPXB\tSYS\tSYS\t X \n\nLegend:\n\n"
    "  X    = Self\n  SYS  = Connection traversing PCIe\n"
)


@pytest.mark.parametrize(
    ("field", "value", "name", "status", "words"),
    [
        ("cores", 3.0, "host", "low", "2 ranks launch kernels from one core each"),
        ("cores", 4.0, "host", "found", "4 core(s), 2048.0 GiB of memory."),
        ("shared_memory", 64 * 2**20, "/dev/shm", "low", "--ipc=host, or --shm-size=16g"),
        ("shared_memory", 2**30 - 1, "/dev/shm", "low", "It holds 1.00 GiB."),
        ("shared_memory", 2**30, "/dev/shm", "found", "It holds 1.00 GiB."),
        ("shared_memory", None, "/dev/shm", "missing", "die of SIGBUS"),
        ("open_files", 1024, "open files", "low", "ulimit -n 65536"),
        ("open_files", 4095, "open files", "low", "4,095 in a process"),
        ("open_files", 4096, "open files", "found", "4,096 in a process"),
        ("open_files", None, "open files", "found", "without a limit"),
        ("rdma", (), "RDMA network", "missing", "between machines NCCL's messages go through TCP"),
        ("locked_memory", 2**16, "RDMA network", "low", "ulimit -l unlimited"),
        ("locked_memory", None, "RDMA network", "found", "mlx5_0, mlx5_1."),
    ],
)
def test_limits_of_the_host(field: str, value: object, name: str, status: str, words: str) -> None:
    host = dataclasses.replace(SERVER, **{field: value})  # type: ignore[arg-type]
    finding = examine(Machine(TWO, host=host), measure=False).finding(name)
    assert finding.status == status
    assert words in " ".join([finding.detail, finding.cost, finding.install])
    assert not finding.stops_runs


def test_a_container_limits_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = this_host()
    assert host.cores > 0 and host.memory > 2**28
    assert ThisMachine().host() == host
    monkeypatch.setattr(host_module, "CGROUP", tmp_path)
    whole = this_host()
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2**27}\n")
    assert (this_host().cores, this_host().memory) == (0.5, 2**27)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5})
    for quota, cores in (("150000 100000", 1.5), ("900000 100000", 3.0), ("max 100000", 3.0)):
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
        assert this_host().cores == cores
    monkeypatch.undo()
    monkeypatch.setattr(host_module, "CGROUP", tmp_path)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert this_host() == whole


def test_limits_are_those_that_hold_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft limits, all of the shared memory whoever uses it, and cards by name."""
    soft = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_MEMLOCK: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft[kind], 4096))
    usage = SimpleNamespace(total=64, used=60, free=4)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(host_module, "SHARED", str(tmp_path))
    for name in ("mlx5_1", "mlx5_10", "mlx5_0", "mlx5_2"):
        (tmp_path / name).touch()
    monkeypatch.setattr(host_module, "RDMA", tmp_path)
    found = this_host()
    assert (found.open_files, found.locked_memory, found.shared_memory) == (1024, None, 64)
    assert found.rdma == ("mlx5_0", "mlx5_1", "mlx5_10", "mlx5_2")
    monkeypatch.setattr(host_module, "SHARED", str(tmp_path / "none"))
    monkeypatch.setattr(host_module, "RDMA", tmp_path / "none")
    assert (this_host().shared_memory, this_host().rdma) == (None, ())


def test_pairs_without_nvlink_cost_tensor_parallelism() -> None:
    assert parse_topology(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "NV18"}
    assert parse_topology("nothing of the kind") == {}
    mixed = examine(Machine(TWO, topology=TOPOLOGY), measure=False).finding("links of GPUs")
    assert (mixed.status, mixed.detail) == ("low", "NV18 between 2 pair(s), SYS between 1 pair(s).")
    assert "without NVLink, GPU 0 and GPU 2 for one" in mixed.cost
    whole = examine(Machine(TWO, topology=TOPOLOGY.replace("SYS", "NV18")), measure=False)
    assert whole.finding("links of GPUs").detail == ("NVLink joins all 3: NV18 between 3 pair(s).")


def test_links_that_nobody_tells_are_unknown_and_one_gpu_has_none() -> None:
    denied = Outcome(6, errors="no permission\n")
    for said, why in ((denied, "no permission"), ("", "it printed no table")):
        finding = examine(Machine(TWO, topology=said), measure=False).finding("links of GPUs")
        assert finding.status == "unknown"
        assert finding.detail == f"`nvidia-smi topo -m` failed: {why}."
    with pytest.raises(KeyError):
        examine(Machine(topology=TOPOLOGY), measure=False).finding("links of GPUs")


def test_graphs_and_the_compiler_are_tried() -> None:
    found = examine(Machine())
    assert found.finding("CUDA graphs").detail == "A small one was recorded and replayed."
    assert found.finding("torch.compile").detail == (
        "A small function was compiled and ran, in 12 s."
    )
    failed = Outcome(1, errors="Traceback\nRuntimeError: Failed to find C compiler\n")
    found = examine(Machine(probes={"compile": failed, "graph": Outcome(None)}))
    compiler, graphs = found.finding("torch.compile"), found.finding("CUDA graphs")
    assert compiler.status == graphs.status == "broken"
    assert compiler.detail == "It failed: RuntimeError: Failed to find C compiler."
    assert "kernel by kernel" in compiler.cost
    assert graphs.detail == "It failed: it ran out of time."
    assert not found.stops_runs
    machine = Machine()
    examine(machine, measure=False)
    assert not any("CUDAGraph" in code for code in machine.ran)


def test_each_gpu_is_measured_and_told() -> None:
    class Unequal(Machine):
        def _python(self, code: str) -> Outcome:
            for index in range(2):
                if f'"--index", "{index}"' in code:
                    return Outcome(0, f'{{"bf16": {index + 1}e14, "fp8": 9e14, "copy": 1e12}}')
            return super()._python(code)

    gpus = [["NVIDIA A100", 8, 0, 2 * 10**10], ["NVIDIA H200", 9, 0, 10**11]]
    found = examine(Unequal({**H200, "gpus": gpus}))
    assert [gpu.rates and gpu.rates.bf16 for gpu in found.gpus] == [1e14, 2e14]
    shown = found.to_dict()["gpus"]
    assert [bool(gpu["fp8_recipes"]["torch"]) for gpu in shown] == [False, True]
    text = "\n".join(report(found))
    assert "GPU 0: NVIDIA A100, compute capability 8.0, 18.6 GiB" in text
    assert "GPU 1: NVIDIA H200, compute capability 9.0, 93.1 GiB" in text
    assert "fp8 matrix product, measured: 900 TFLOP/s" in text
    assert "--fp16" not in text and text.endswith("Runs compute on 2 GPU(s).")
    old = examine(Machine({**H200, "gpus": [["V100", 7, 5, 10**10]]}), measure=False)
    assert "bf16: its matrix units do not take it; `--fp16` is" in "\n".join(report(old))


@pytest.mark.parametrize(
    ("modes", "words"),
    [
        ("Disabled Disabled", "It supports CUDA up to 13.0."),
        ("Enabled Disabled", "It supports CUDA up to 13.0. 1 device(s) are cut in parts (MIG)."),
        ("[N/A] [N/A]", "It supports CUDA up to 13.0."),
    ],
)
def test_gpus_that_are_cut_in_parts_are_counted(modes: str, words: str) -> None:
    smi = "\n".join(f"NVIDIA H200, 580.65.06, {mode}" for mode in modes.split())
    finding = examine(Machine(TWO, smi=smi), measure=False).finding("NVIDIA driver")
    assert (finding.version, finding.detail) == ("580.65.06", words)


def test_compilers_are_those_that_the_environment_names() -> None:
    class Answering(Machine):
        def program(self, *names: str) -> str | None:
            self.asked = [*getattr(self, "asked", []), names]
            return super().program(*names)

        def run(self, command: Sequence[str], seconds: float = 30.0) -> Outcome:
            outcome = super().run(command, seconds)
            failed = Outcome(3, outcome.output) if "nvcc" in command[0] else outcome
            return failed if self.environ.get("FAIL") else outcome

    machine = Answering(environ={"CC": "icx", "CUDA_HOME": "/opt/cuda"}, programs=("icx", "gcc"))
    found = examine(machine, measure=False)
    assert found.finding("C compiler").detail == "/usr/bin/icx"
    assert ("nvcc", "/opt/cuda/bin/nvcc", "/usr/local/cuda/bin/nvcc") in machine.asked
    assert found.finding("nvcc").status == "missing"
    broken = examine(Answering(environ={"FAIL": "1"}), measure=False).finding("nvcc")
    assert (broken.status, broken.detail) == (
        "broken", "`/usr/bin/nvcc` failed: it left with exit code 3.",
    )  # fmt: skip


def test_headers_of_python_are_asked_for_on_a_gpu_only() -> None:
    finding = examine(Machine(headers=False), measure=False).finding("Python headers")
    assert finding.status == "missing"
    assert finding.install.startswith("apt-get install python3.")
    with pytest.raises(KeyError):
        examine(Machine(NO_CUDA, smi=None)).finding("Python headers")


def test_a_host_without_a_gpu_is_not_held_against_ranks() -> None:
    host = Host(1.0, 2**33, 2**31, 1024, None, ())
    found = examine(Machine(NO_CUDA, smi=None, host=host))
    assert found.finding("host").status == "found"
