"""What torch says about itself and its GPUs, asked in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_ext.inspect.doctor.findings import Finding, Gpu
from megatron_ext.inspect.doctor.gpus import Driver
from megatron_ext.inspect.doctor.host import Outcome, Surroundings, ask_python

QUESTIONS = """
import ctypes, json, torch
def driver_cuda():
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
facts["archs"] = torch.cuda.get_arch_list() if torch.version.cuda else []
facts["driver_cuda"] = driver_cuda() if torch.version.cuda else None
facts["usable"] = torch.cuda.is_available()
facts["nccl"] = facts["cudnn"] = None
facts["gpus"] = []
if facts["usable"]:
    if torch.distributed.is_nccl_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    facts["cudnn"] = torch.backends.cudnn.version()
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        facts["gpus"].append([device.name, device.major, device.minor, device.total_memory])
print(json.dumps(facts))
"""
CUDA_WHEELS = "https://download.pytorch.org/whl/cu{}"


@dataclass(frozen=True)
class TorchFacts:
    """What torch answered.

    Attributes:
        version: its own.
        cuda: version that it was built with, None for a build without.
        hip: likewise of AMD's ROCm.
        archs: GPU architectures that its kernels were compiled for, ``sm_90`` and the like.
        driver_cuda: newest CUDA version that the driver's library supports, 13000 for 13.0; 0
            where there is none, None where torch was built without CUDA.
        usable: it can compute on a GPU.
        nccl: version of NCCL in this build, None where it was not asked or there is none.
        cudnn: version of cuDNN, as one number.
        gpus: that it can use.
    """

    version: str
    cuda: str | None
    hip: str | None
    archs: tuple[str, ...]
    driver_cuda: int | None
    usable: bool
    nccl: str | None
    cudnn: int | None
    gpus: tuple[Gpu, ...]

    @property
    def driver_too_old(self) -> bool:
        """The driver supports no CUDA of this build's major version."""
        if self.cuda is None or not self.driver_cuda:
            return False
        return self.driver_cuda // 1000 < int(self.cuda.split(".")[0])


def ask_torch(here: Surroundings) -> TorchFacts | Outcome:
    """The facts, or how asking for them failed."""
    found = ask_python(here, QUESTIONS)
    if isinstance(found, Outcome):
        return found
    return TorchFacts(
        version=found["version"],
        cuda=found["cuda"],
        hip=found["hip"],
        archs=tuple(found["archs"]),
        driver_cuda=found["driver_cuda"],
        usable=found["usable"],
        nccl=found["nccl"],
        cudnn=found["cudnn"],
        gpus=tuple(_gpu(index, of) for index, of in enumerate(found["gpus"])),
    )


def _gpu(index: int, facts: Any) -> Gpu:
    name, major, minor, memory = facts
    return Gpu(index, name, (major, minor), memory)


def torch_finding(facts: TorchFacts | Outcome, installed: str | None) -> Finding:
    """Whether torch works, and whether this build can use a GPU at all."""
    if installed is None:
        return Finding(
            "torch",
            "missing",
            cost="Nothing runs.",
            install="pip install torch",
            required=True,
        )
    if isinstance(facts, Outcome):
        return Finding(
            "torch",
            "broken",
            installed,
            detail=f"Its import failed: {facts.reason}.",
            cost="Nothing runs.",
            install="pip install --force-reinstall torch",
            required=True,
        )
    if facts.cuda is None:
        built = f"for ROCm {facts.hip}" if facts.hip else "without CUDA"
        return Finding(
            "torch",
            "found",
            facts.version,
            detail=f"This build is {built}, so runs compute on the CPU.",
        )
    return Finding("torch", "found", facts.version, detail=f"Built for CUDA {facts.cuda}.")


def gpu_finding(here: Surroundings, facts: TorchFacts | Outcome, driver: Driver) -> Finding:
    """Whether torch can use GPUs, and if not, why."""
    cards = driver.cards
    if isinstance(facts, Outcome):
        seen = f"The driver shows {', '.join(cards)}. " if cards else ""
        return Finding("GPU", "unknown", detail=f"{seen}Torch, which would use it, does not work.")
    if facts.usable:
        return Finding("GPU", "found", detail=f"Torch can use {len(facts.gpus)}.")
    cost = "Runs compute on the CPU and talk over gloo: for tests and small models only."
    shown = f"The driver shows {', '.join(cards)}, but " if cards else ""
    if facts.cuda is None:
        newest = _number(driver.cuda) if driver.cuda else 13000
        detail = f"{shown or 'No driver shows one, and '}this torch was built without CUDA."
        install = _install(newest) if cards else ""
        return Finding("GPU", "broken" if cards else "missing", None, detail, cost, install)
    if not cards:
        return Finding("GPU", "missing", None, "No driver shows one.", cost)
    if facts.driver_too_old:
        supported = _dotted(facts.driver_cuda or 0)
        detail = (
            f"{shown}the driver supports CUDA up to {supported} and this torch was built for "
            f"{facts.cuda}."
        )
        install = _install(facts.driver_cuda or 0)
        return Finding("GPU", "broken", None, detail, cost, install)
    hidden = here.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        detail = f"{shown}`CUDA_VISIBLE_DEVICES` ({hidden!r}) hides them all."
        return Finding("GPU", "broken", None, detail, cost, "unset CUDA_VISIBLE_DEVICES")
    detail = f"{shown}torch cannot use any; `python -c 'import torch; torch.cuda.init()'` says why."
    return Finding("GPU", "broken", None, detail, cost)


def nccl_finding(facts: TorchFacts | Outcome) -> Finding:
    """NCCL as this build of torch brings it."""
    if isinstance(facts, Outcome) or not facts.usable:
        return Finding("NCCL", "unknown", detail="It can be asked only where torch can use a GPU.")
    if facts.nccl is None:
        return Finding(
            "NCCL",
            "missing",
            cost="Ranks on GPUs cannot talk but over gloo, through the memory of the host.",
            detail="This build of torch has none.",
        )
    return Finding("NCCL", "found", facts.nccl)


def arch_findings(facts: TorchFacts | Outcome) -> list[Finding]:
    """GPUs for which this build of torch has no kernels."""
    if isinstance(facts, Outcome) or not facts.archs:
        return []
    wrong = [gpu for gpu in facts.gpus if not _has_kernels(gpu.capability, facts.archs)]
    return [
        Finding(
            f"kernels for GPU {gpu.index}",
            "broken",
            detail=(
                f"{gpu.name} is sm_{_joined(gpu.capability)}; this torch has kernels for "
                f"{', '.join(facts.archs)}."
            ),
            cost="The first kernel on it fails.",
            install=_install(13000),
            required=True,
        )
        for gpu in wrong
    ]


def _has_kernels(capability: tuple[int, int], archs: tuple[str, ...]) -> bool:
    """Machine code runs on newer minor versions, and PTX on everything newer."""
    major, minor = capability
    for arch in archs:
        kind, _, number = arch.partition("_")
        digits = "".join(c for c in number if c.isdigit())
        theirs = int(digits[:-1]), int(digits[-1])
        if kind == "compute" and theirs <= capability:
            return True
        if kind == "sm" and theirs[0] == major and theirs[1] <= minor:
            return True
    return False


def _joined(capability: tuple[int, int]) -> str:
    return "".join(map(str, capability))


def _number(cuda: str) -> int:
    major, minor, *_ = (*cuda.split("."), "0")
    return 1000 * int(major) + 10 * int(minor)


def _dotted(cuda: int) -> str:
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def _install(cuda: int) -> str:
    """The line that installs torch for a driver that supports CUDA up to this, 12040 for 12.4.

    torch 2.11 to 2.13 are built for CUDA 12.6, which runs on every driver of CUDA 12, and 13.0.
    """
    index = CUDA_WHEELS.format("130" if cuda >= 13000 else "126")
    return f"pip install --force-reinstall torch --index-url {index}"
