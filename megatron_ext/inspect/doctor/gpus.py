"""GPUs as the driver and torch see them: whether torch can use them, and how they are linked."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

from megatron_ext.inspect.doctor.host import Finding, Gpu, Outcome, ThisMachine, ask_python

QUERY = ("--query-gpu=name,driver_version,mig.mode.current", "--format=csv,noheader")
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
LINKS = "links of GPUs"
_NVLINK = re.compile(r"^NV\d+$")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Driver:
    """The driver as ``nvidia-smi`` shows it: its state, GPUs, and newest supported CUDA."""

    finding: Finding
    cards: list[str] = field(default_factory=list)
    cuda: str | None = None


def ask_driver(here: ThisMachine) -> Driver:
    """Ask ``nvidia-smi`` about the driver; without that program the status is "unknown"."""
    path = here.program("nvidia-smi")
    if path is None:
        detail = "`nvidia-smi` was not found, so the driver cannot be asked."
        return Driver(Finding("NVIDIA driver", "unknown", detail=detail))
    outcome = here.run([path, *QUERY])
    rows = [[cell.strip() for cell in line.split(",")] for line in outcome.output.splitlines()]
    rows = [row for row in rows if len(row) == 3]
    if outcome.code != 0 or not rows:
        said = outcome.output.strip().splitlines()
        reason = said[0].rstrip(".") if said else outcome.reason
        detail = f"failed: {reason}." if outcome.code != 0 else "shows no device."
        detail = f"`nvidia-smi` {detail}"
        cost = "No GPU can be used."
        return Driver(Finding("NVIDIA driver", "broken", None, detail, cost))
    summary = here.run([path]).output
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", summary)
    supported = f"It supports CUDA up to {cuda[1]}." if cuda else ""
    parts = sum(row[2] == "Enabled" for row in rows)
    shared = f" {parts} device(s) are cut in parts (MIG)." if parts else ""
    finding = Finding("NVIDIA driver", "found", rows[0][1], (supported + shared).strip())
    return Driver(finding, [row[0] for row in rows], cuda[1] if cuda else None)


@dataclass(frozen=True)
class TorchFacts:
    """Properties of the installed torch and of the GPUs that it can use.

    Attributes:
        cuda, hip: CUDA and ROCm versions that torch was built with, None if built without them.
        archs: GPU architectures that its kernels were compiled for, ``sm_90`` and the like.
        driver_cuda: newest CUDA version that the driver supports, 13000 for 13.0; 0 without a
            driver, None if torch was built without CUDA.
        usable: whether torch can compute on a GPU.
        cudnn: version of cuDNN, as one number.
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


def ask_torch(here: ThisMachine) -> TorchFacts | Outcome:
    """Return the facts that torch reports in a separate process, or how that process failed."""
    facts = ask_python(here, QUESTIONS)
    if isinstance(facts, Outcome):
        return facts
    gpus = tuple(
        Gpu(index, name, (major, minor), memory)
        for index, (name, major, minor, memory) in enumerate(facts["gpus"])
    )
    return TorchFacts(**{**facts, "archs": tuple(facts["archs"]), "gpus": gpus})


def torch_finding(facts: TorchFacts | Outcome, installed: str | None) -> Finding:
    cost = "Nothing runs."
    if installed is None:
        return Finding("torch", "missing", None, "", cost, "pip install torch", required=True)
    if isinstance(facts, Outcome):
        detail = f"Its import failed: {facts.reason}."
        mend = "pip install --force-reinstall torch"
        return Finding("torch", "broken", installed, detail, cost, mend, required=True)
    detail = f"Built for CUDA {facts.cuda}."
    if facts.cuda is None:
        built = f"for ROCm {facts.hip}" if facts.hip else "without CUDA"
        detail = f"This build is {built}, so runs compute on the CPU."
    return Finding("torch", "found", facts.version, detail)


def gpu_finding(here: ThisMachine, facts: TorchFacts | Outcome, driver: Driver) -> Finding:
    cards = driver.cards
    if isinstance(facts, Outcome):
        seen = f"The driver shows {', '.join(cards)}. " if cards else ""
        return Finding("GPU", "unknown", detail=f"{seen}Torch, which would use it, does not work.")
    if facts.usable:
        return Finding("GPU", "found", detail=f"Torch can use {len(facts.gpus)}.")
    cost = "Runs compute on the CPU and talk over gloo: for tests and small models only."
    shown = f"The driver shows {', '.join(cards)}, but " if cards else ""
    if facts.cuda is None:
        major, minor, *_ = map(int, [*(driver.cuda or "13.0").split("."), "0"])
        newest = 1000 * major + 10 * minor
        detail = f"{shown or 'No driver shows one, and '}this torch was built without CUDA."
        install = _install(newest) if cards else ""
        return Finding("GPU", "broken" if cards else "missing", None, detail, cost, install)
    if not cards:
        return Finding("GPU", "missing", None, "No driver shows one.", cost)
    newest = facts.driver_cuda or 0
    if newest and newest // 1000 < int(facts.cuda.split(".")[0]):
        detail = (
            f"{shown}the driver supports CUDA up to {newest // 1000}.{newest % 1000 // 10} and "
            f"this torch was built for {facts.cuda}."
        )
        return Finding("GPU", "broken", None, detail, cost, _install(newest))
    hidden = here.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        detail = f"{shown}`CUDA_VISIBLE_DEVICES` ({hidden!r}) hides them all."
        return Finding("GPU", "broken", None, detail, cost, "unset CUDA_VISIBLE_DEVICES")
    detail = f"{shown}torch cannot use any; `python -c 'import torch; torch.cuda.init()'` says why."
    return Finding("GPU", "broken", None, detail, cost)


def nccl_finding(facts: TorchFacts | Outcome) -> Finding:
    if isinstance(facts, Outcome) or not facts.usable:
        return Finding("NCCL", "unknown", detail="It can be asked only where torch can use a GPU.")
    if facts.nccl is None:
        cost = "Ranks on GPUs cannot talk but over gloo, through the memory of the host."
        return Finding("NCCL", "missing", None, "This build of torch has none.", cost)
    return Finding("NCCL", "found", facts.nccl)


def arch_findings(facts: TorchFacts | Outcome) -> list[Finding]:
    """Report the GPUs for which this build of torch has no kernels."""
    if isinstance(facts, Outcome) or not facts.archs:
        return []
    findings = []
    cost = "The first kernel on it fails."
    install = _install(13000)
    for gpu in facts.gpus:
        if not _has_kernels(gpu.capability, facts.archs):
            arch = "sm_" + "".join(map(str, gpu.capability))
            detail = f"{gpu.name} is {arch}; this torch has kernels for {', '.join(facts.archs)}."
            name = f"kernels for GPU {gpu.index}"
            findings.append(Finding(name, "broken", None, detail, cost, install, required=True))
    return findings


def _has_kernels(capability: tuple[int, int], archs: tuple[str, ...]) -> bool:
    """Return whether kernels compiled for ``archs`` run on a GPU of this compute capability.

    A binary (``sm_80``) runs on 8.0 and later minor versions, PTX (``compute_80``) on all from 8.0.
    """
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


def _install(cuda: int) -> str:
    """Return the command that installs torch for a driver up to CUDA ``cuda``; 12040 means 12.4."""
    # torch 2.11 to 2.13 are built for CUDA 12.6, which any driver for CUDA 12 supports, and for
    # 13.0.
    index = CUDA_WHEELS.format("130" if cuda >= 13000 else "126")
    return f"pip install --force-reinstall torch --index-url {index}"


def link_findings(here: ThisMachine, num_gpus: int) -> list[Finding]:
    """Report whether NVLink joins all GPUs.

    Return no finding if there are fewer than two GPUs or ``nvidia-smi`` is missing.
    """
    path = here.program("nvidia-smi")
    if num_gpus < 2 or path is None:
        return []
    outcome = here.run([path, "topo", "-m"])
    links = parse_topology(outcome.output) if outcome.code == 0 else {}
    if not links:
        said = outcome.reason if outcome.code != 0 else "it printed no table"
        return [Finding(LINKS, "unknown", None, f"`nvidia-smi topo -m` failed: {said}.")]
    kinds = Counter(links.values())
    shown = ", ".join(f"{kind} between {count} pair(s)" for kind, count in kinds.most_common())
    slow = sorted(pair for pair, kind in links.items() if not _NVLINK.match(kind))
    if not slow:
        detail = f"NVLink joins all {len({*chain(*links)})}: {shown}."
        return [Finding(LINKS, "found", None, detail)]
    one, other = slow[0]
    cost = (
        f"Tensor parallelism over pairs without NVLink, GPU {one} and GPU {other} for one, waits "
        "for PCIe in every layer; keep it within GPUs that NVLink joins."
    )
    return [Finding(LINKS, "low", None, f"{shown}.", cost)]


def parse_topology(table: str) -> dict[tuple[int, int], str]:
    """Return the link of each GPU pair, such as NV18, from the text of ``nvidia-smi topo -m``."""
    lines = [_ESCAPES.sub("", line).split() for line in table.splitlines()]
    head = next((line for line in lines if line[:1] == ["GPU0"]), [])
    columns = [name for name in head if re.fullmatch(r"GPU\d+", name)]
    # The header has no column for the row names, so it may also begin with the first GPU's name.
    rows = {x[0]: x[1:] for x in lines if x and x[0] in columns and x[1:2] != ["GPU1"]}
    return {
        (int(one[3:]), int(columns[j][3:])): rows[one][j]
        for i, one in enumerate(columns)
        for j in range(i + 1, min(len(columns), len(rows.get(one, ()))))
    }
