"""The packages and compilers that a run needs or benefits from: found, absent or broken."""

from __future__ import annotations

import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from megatron_ext.inspect.doctor.host import Finding, ThisMachine, run_python

OURS = "megatron-ext"
APEX_BUILD = (
    "git clone https://github.com/NVIDIA/apex && cd apex && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 "
    "pip install -v --no-build-isolation ."
)
APEX_COST = (
    "Nothing: norms, Adam, the gradient norm and the sums of weight gradients run on kernels of "
    "torch and of this project, which move no more bytes than apex's; only megatron-core would use "
    "it, for `--optimizer sgd` and for whole logits beside Transformer Engine's layers."
)
TE_COST = (
    "`--transformer-impl transformer_engine` is refused, and with it fp8 by its recipes, its fused "
    "norms, attention over packed sequences and `--tp-comm-overlap`; runs take the torch layers."
)
FLASH_COST = (
    "Nothing with the torch layers, whose attention is torch's SDPA with flash kernels of its own; "
    "Transformer Engine takes cuDNN's attention instead."
)
FLASH_3_COST = (
    "On Hopper GPUs attention of the torch layers takes cuDNN's kernels instead; nothing on others."
)
TRITON_COST = (
    "`torch.compile` cannot make GPU kernels: norms, activations, rotary positions, dropout and "
    "the loss run kernel by kernel."
)
CC_COST = "Triton cannot build its launchers; see triton."
NVCC_COST = (
    "Nothing for a run; Transformer Engine's and apex's extensions cannot be built from source."
)
_ONLY_ON_GPU = "Whether it works can be told only where torch can use a GPU."


def requirement_of(here: ThisMachine, name: str) -> Requirement | None:
    """Return this project's requirement on a package; None if the installed project lists none."""
    for line in here.requirements(OURS) or ():
        requirement = Requirement(line)
        if requirement.name.lower().replace("_", "-") == name:
            return requirement
    return None


def core_finding(here: ThisMachine) -> Finding:
    """Report whether megatron-core is installed, in a version that this project supports."""
    name = "megatron-core"
    version = here.version("megatron-core")
    requirement = requirement_of(here, name)
    specifier = str(requirement.specifier) if requirement is not None else ""
    install = f'pip install "{name}{specifier}"'
    if version is None:
        return Finding(name, "missing", None, "", "Nothing runs.", install, required=True)
    if requirement is None:
        detail = f"{OURS} is not installed, so what it asks for is not known."
        return Finding(name, "unknown", version, detail, install="pip install -e .")
    if not requirement.specifier.contains(version, prereleases=True):
        detail = f"This project supports {specifier}."
        cost = "It uses parts of megatron-core that change between versions."
        return Finding(name, "broken", version, detail, cost, install, required=True)
    imported = run_python(here, "import megatron.core")
    if imported.code != 0:
        detail = f"Its import failed: {imported.reason}."
        return Finding(name, "broken", version, detail, "Nothing runs.", install, required=True)
    return Finding(name, "found", version, f"This project supports {specifier}.")


@dataclass(frozen=True)
class Extra:
    """An optional package.

    Attributes:
        distribution: the name under which the package is installed.
        module: the module whose import proves that the package works.
        minimum: the name by which this project's requirements limit its version; None if they do
            not.
    """

    name: str
    distribution: str
    module: str
    cost: str
    install: str
    minimum: str | None = None


def extras(cuda: str | None) -> tuple[Extra, ...]:
    major = cuda.split(".")[0] if cuda else "12"
    return (
        Extra(
            "Transformer Engine",
            "transformer-engine",
            "transformer_engine.pytorch",
            TE_COST,
            f'pip install --no-build-isolation "transformer-engine[pytorch,core_cu{major}]"',
            "transformer-engine",
        ),
        Extra(
            "flash-attn",
            "flash-attn",
            "flash_attn",
            FLASH_COST,
            "pip install --no-build-isolation flash-attn",
        ),
        Extra(
            "flash-attn 3",
            "flash-attn-3",
            "flash_attn_interface",
            FLASH_3_COST,
            'pip install --no-build-isolation "git+https://github.com/Dao-AILab/flash-attention.git'
            '#subdirectory=hopper"',
        ),
        Extra("triton", "triton", "triton", TRITON_COST, "pip install triton"),
    )


def extra_finding(here: ThisMachine, extra: Extra, *, on_gpu: bool) -> Finding:
    version = here.version(extra.distribution)
    if version is None:
        if not on_gpu:
            return Finding(extra.name, "not needed", detail="It works on NVIDIA GPUs only.")
        return Finding(extra.name, "missing", None, "", extra.cost, extra.install)
    requirement = requirement_of(here, extra.minimum) if extra.minimum else None
    if requirement is not None and not requirement.specifier.contains(version, prereleases=True):
        detail = f"This project supports {requirement.specifier}."
        return Finding(extra.name, "broken", version, detail, extra.cost, extra.install)
    if not on_gpu:
        return Finding(extra.name, "unknown", version, _ONLY_ON_GPU)
    imported = run_python(here, f"import {extra.module}")
    if imported.code != 0:
        detail = f"`import {extra.module}` failed: {imported.reason}."
        install = extra.install.replace("pip install", "pip install --force-reinstall", 1)
        return Finding(extra.name, "broken", version, detail, extra.cost, install)
    return Finding(extra.name, "found", version)


def apex_finding(here: ThisMachine, *, on_gpu: bool) -> Finding:
    """Report whether NVIDIA's apex is installed, recognized by its folder of fused optimizers.

    The project of that name on PyPI is an unrelated web toolkit. If ``on_gpu`` is
    false, apex is not imported, so that it stays unknown whether it works.
    """
    folder = here.folder("apex")
    version = here.version("apex")
    if folder is None:
        if not on_gpu:
            return Finding("apex", "not needed", detail="It works on NVIDIA GPUs only.")
        return Finding("apex", "not needed", detail=APEX_COST)
    if not is_nvidia_apex(folder):
        detail = (
            f"What is installed at {folder} is not NVIDIA's apex but an unrelated project of the "
            "same name, as PyPI has one."
        )
        cost = "megatron-core looks for `apex` and may take it for NVIDIA's."
        return Finding("apex", "broken", version, detail, cost, "pip uninstall -y apex")
    if not here.has_module("amp_C"):
        detail = "It was built without its extensions (`amp_C` is absent)."
        return Finding("apex", "broken", version, detail, APEX_COST, APEX_BUILD)
    if not on_gpu:
        return Finding("apex", "unknown", version, _ONLY_ON_GPU)
    imported = run_python(here, "import apex, amp_C, torch; from apex.optimizers import FusedAdam")
    if imported.code != 0:
        detail = f"Its import failed: {imported.reason}."
        return Finding("apex", "broken", version, detail, APEX_COST, APEX_BUILD)
    fused = here.has_module("fused_weight_gradient_mlp_cuda")
    detail = "" if fused else "It has no kernel that adds weight gradients in place."
    return Finding("apex", "found", version, detail)


def is_nvidia_apex(folder: Path) -> bool:
    return (folder / "optimizers" / "fused_adam.py").is_file()


def compiler_findings(here: ThisMachine, *, on_gpu: bool) -> list[Finding]:
    """Report whether nvcc, and the C compiler and Python headers that Triton needs, are installed.

    A run without a GPU compiles nothing, so nothing counts as missing if ``on_gpu`` is false.
    """
    cc = here.environ.get("CC")
    path = here.program(*([cc] if cc else []), "gcc", "clang", "cc")
    compiler = Finding("C compiler", "found", None, path or "")
    if path is None:
        compiler = Finding("C compiler", "missing", None, "", CC_COST, "apt-get install gcc")
        if not on_gpu:
            compiler = Finding("C compiler", "not needed", None, "Runs on a CPU do not compile.")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    headers = Finding("Python headers", "found", None, str(header))
    if not here.file(header):
        major, minor = sys.version_info[:2]
        install = f"apt-get install python{major}.{minor}-dev"
        headers = Finding("Python headers", "missing", None, f"No {header}.", CC_COST, install)
    return [_nvcc(here, on_gpu=on_gpu), compiler, *([headers] if on_gpu else [])]


def _nvcc(here: ThisMachine, *, on_gpu: bool) -> Finding:
    homes = [here.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    path = here.program("nvcc", *(f"{home}/bin/nvcc" for home in homes if home))
    if path is None:
        if not on_gpu:
            return Finding("nvcc", "not needed", detail="It compiles for NVIDIA GPUs only.")
        install = "apt-get install cuda-toolkit  # from NVIDIA's repository"
        return Finding("nvcc", "missing", None, "", NVCC_COST, install)
    outcome = here.run([path, "--version"])
    match = re.search(r"release ([\d.]+)", outcome.output)
    if outcome.code != 0 or match is None:
        return Finding("nvcc", "broken", None, f"`{path}` failed: {outcome.reason}.", NVCC_COST)
    return Finding("nvcc", "found", match[1], path)


def python_finding() -> Finding:
    return Finding("Python", "found", ".".join(map(str, sys.version_info[:3])), sys.executable)
