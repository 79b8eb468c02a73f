"""Made-up machines for the doctor."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.device.host import Host
from megatron_ext.inspect.doctor.host import Outcome, ThisMachine

SMI = "/usr/bin/nvidia-smi"
REQUIRES = ["megatron-core<0.17,>=0.16.1", 'transformer-engine[pytorch]>=2.4; extra == "te"']
H200 = {
    "version": "2.11.0+cu130",
    "cuda": "13.0",
    "hip": None,
    "archs": ["sm_80", "sm_90", "sm_100", "compute_120"],
    "driver_cuda": 13000,
    "usable": True,
    "nccl": "2.28.9",
    "cudnn": 91501,
    "gpus": [["NVIDIA H200", 9, 0, 150_000_000_000]],
}
NOTHING = {"version": "2.13.0+cpu", "archs": [], "usable": False, "gpus": []}
NO_CUDA: dict[str, Any] = {**dict.fromkeys(H200), **NOTHING}
SERVER = Host(192.0, 2**41, 2**40, 2**20, None, ("mlx5_0", "mlx5_1"))
RATES = {"bf16": 7.9e14, "fp8": 1.4e15, "copy": 4.1e12}


def _outcome(answer: str | Outcome) -> Outcome:
    return answer if isinstance(answer, Outcome) else Outcome(0, answer)


class Machine(ThisMachine):
    """Answers what the doctor asks from tables, and fails at whatever is in none of them."""

    def __init__(
        self,
        torch: Mapping[str, Any] | Outcome = H200,
        *,
        smi: str | Outcome | None = "NVIDIA H200, 580.65.06, Disabled",
        environ: Mapping[str, str] | None = None,
        programs: Sequence[str] = ("gcc", "nvcc"),
        modules: Sequence[str] = ("amp_C", "fused_weight_gradient_mlp_cuda"),
        folders: Mapping[str, Path] | None = None,
        broken: Mapping[str, Outcome] | None = None,
        rates: Mapping[str, float | None] | Outcome = RATES,
        topology: str | Outcome = "",
        probes: Mapping[str, Outcome] | None = None,
        host: Host = SERVER,
        headers: bool = True,
        **versions: str | None,
    ) -> None:
        self.torch, self.smi, self.rates = torch, smi, rates
        self.topology, self.probes = topology, probes or {}
        self.on, self.headers = host, headers
        self.environ: Mapping[str, str] = environ or {}
        self.programs = [*programs, *(["nvidia-smi"] if smi is not None else [])]
        self.modules, self.folders = modules, folders or {}
        self.broken = broken or {}
        self.versions = {
            "megatron-ext": "0.1.0",
            "megatron-core": "0.16.1",
            "torch": "2.11.0",
            "transformer-engine": "2.11.0",
            "flash-attn": "2.8.3",
            "flash-attn-3": "3.0.0",
            "triton": "3.6.0",
            **{name.replace("_", "-"): version for name, version in versions.items()},
        }
        self.ran: list[str] = []

    def version(self, distribution: str) -> str | None:
        return self.versions.get(distribution)

    def requirements(self, distribution: str) -> list[str] | None:
        return REQUIRES if self.versions.get(distribution) else None

    def folder(self, module: str) -> Path | None:
        return self.folders.get(module)

    def has_module(self, module: str) -> bool:
        return module in self.modules

    def program(self, *names: str) -> str | None:
        return next((f"/usr/bin/{name}" for name in names if name in self.programs), None)

    def file(self, path: Path) -> bool:
        return self.headers and path.name == "Python.h"

    def host(self) -> Host:
        return self.on

    def run(self, command: Sequence[str], seconds: float = 30.0) -> Outcome:
        if command[0] == SMI:
            if "topo" in command:
                return _outcome(self.topology)
            shown = self.smi if len(command) > 1 else "| Driver: 580   CUDA Version: 13.0   |"
            return self.smi if isinstance(self.smi, Outcome) else Outcome(0, f"{shown}\n")
        if command[0].endswith("nvcc"):
            return Outcome(0, "Cuda compilation tools, release 13.0, V13.0.88\n")
        return self._python(command[-1])

    def _python(self, code: str) -> Outcome:
        self.ran.append(code)
        answers: dict[str, Any] = {
            "device.rates": self.rates,
            "cuDriverGetVersion": self.torch,
            "CUDAGraph": self.probes.get("graph", {"seconds": 0.0}),
            "torch.compile": self.probes.get("compile", {"seconds": 12.3}),
        }
        for word, answer in answers.items():
            if word in code:
                return _outcome(answer if isinstance(answer, Outcome) else json.dumps(answer))
        for module, outcome in self.broken.items():
            if f"import {module}" in code:
                return outcome
        return Outcome(0)
