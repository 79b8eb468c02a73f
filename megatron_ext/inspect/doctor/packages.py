"""Packages and compilers that make runs possible or faster: there, absent, or others by name."""

from __future__ import annotations

import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from megatron_ext.inspect.doctor.findings import Finding
from megatron_ext.inspect.doctor.host import Surroundings, run_python

OURS = "megatron-ext"
APEX_BUILD = (
    "git clone https://github.com/NVIDIA/apex && cd apex && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 "
    "pip install -v --no-build-isolation ."
)
APEX_COST = (
    "Nothing with Transformer Engine, which has the same kernels; without it Adam and the clipping "
    "of gradients go through torch's own, and weight gradients are added in a pass of their own."
)
TE_COST = (
    "`--transformer-impl transformer_engine` is refused, and with it fp8 by its recipes, its fused "
    "norms, attention over packed sequences and `--tp-comm-overlap`; runs take the torch layers."
)
FLASH_COST = (
    "Nothing with the torch layers, whose attention is torch's SDPA with flash kernels of its own; "
    "Transformer Engine takes cuDNN's attention instead."
)
TRITON_COST = (
    "`torch.compile` cannot make GPU kernels: norms, activations, rotary positions, dropout and "
    "the loss run kernel by kernel."
)
CC_COST = "Triton cannot build its launchers; see triton."
NVCC_COST = (
    "Nothing for a run; Transformer Engine's and apex's extensions cannot be built from source."
)


def requirement_of(here: Surroundings, name: str) -> Requirement | None:
    """What this project asks of another one; None where this project is not installed."""
    for line in here.requirements(OURS) or ():
        requirement = Requirement(line)
        if requirement.name.lower().replace("_", "-") == name:
            return requirement
    return None


def core_finding(here: Surroundings) -> Finding:
    """megatron-core, and whether its version is one that this project supports."""
    name, version = "megatron-core", here.version("megatron-core")
    requirement = requirement_of(here, name)
    wanted = str(requirement.specifier) if requirement is not None else ""
    install = f'pip install "{name}{wanted}"'
    if version is None:
        return Finding(name, "missing", None, "", "Nothing runs.", install, required=True)
    if requirement is None:
        detail = f"{OURS} is not installed, so what it asks for is not known."
        return Finding(name, "unknown", version, detail, install="pip install -e .")
    if not requirement.specifier.contains(version, prereleases=True):
        detail = f"This project supports {wanted}."
        cost = "It uses parts of megatron-core that change between versions."
        return Finding(name, "broken", version, detail, cost, install, required=True)
    imported = run_python(here, "import megatron.core")
    if imported.code != 0:
        detail = f"Its import failed: {imported.reason}."
        return Finding(name, "broken", version, detail, "Nothing runs.", install, required=True)
    return Finding(name, "found", version, f"This project supports {wanted}.")


@dataclass(frozen=True)
class Extra:
    """A package that a run can do without.

    Attributes:
        name: as its makers write it.
        distributions: names under which it is installed, the usual one first.
        module: whose import proves that it works.
        cost: what a run loses.
        install: the line that installs it.
        minimum: name in this project's requirements that says which versions fit.
    """

    name: str
    distributions: tuple[str, ...]
    module: str
    cost: str
    install: str
    minimum: str | None = None


def extras(cuda: str | None) -> tuple[Extra, ...]:
    """Packages for a build of torch with a version of CUDA."""
    major = cuda.split(".")[0] if cuda else "12"
    return (
        Extra(
            "Transformer Engine",
            ("transformer-engine",),
            "transformer_engine.pytorch",
            TE_COST,
            f'pip install --no-build-isolation "transformer-engine[pytorch,core_cu{major}]"',
            "transformer-engine",
        ),
        Extra(
            "flash-attn",
            ("flash-attn", "flash-attn-3"),
            "flash_attn",
            FLASH_COST,
            "pip install --no-build-isolation flash-attn",
        ),
        Extra("triton", ("triton",), "triton", TRITON_COST, "pip install triton"),
    )


def extra_finding(here: Surroundings, extra: Extra, *, on_gpu: bool) -> Finding:
    """Whether a package is there and its import works."""
    found = ((name, here.version(name)) for name in extra.distributions)
    distribution, version = next(((n, v) for n, v in found if v is not None), (None, None))
    if distribution is None or version is None:
        if not on_gpu:
            return Finding(extra.name, "not needed", detail="It works on NVIDIA GPUs only.")
        return Finding(extra.name, "missing", None, "", extra.cost, extra.install)
    requirement = requirement_of(here, extra.minimum) if extra.minimum else None
    if requirement is not None and not requirement.specifier.contains(version, prereleases=True):
        detail = f"This project supports {requirement.specifier}."
        return Finding(extra.name, "broken", version, detail, extra.cost, extra.install)
    if not on_gpu:
        detail = "Whether it works can be told only where torch can use a GPU."
        return Finding(extra.name, "unknown", version, detail)
    module = "flash_attn_interface" if distribution == "flash-attn-3" else extra.module
    imported = run_python(here, f"import {module}")
    if imported.code != 0:
        detail = f"`import {module}` failed: {imported.reason}."
        install = extra.install.replace("pip install", "pip install --force-reinstall", 1)
        return Finding(extra.name, "broken", version, detail, extra.cost, install)
    return Finding(extra.name, "found", version)


def apex_finding(here: Surroundings, *, on_gpu: bool) -> Finding:
    """NVIDIA's apex; a package of the same name on PyPI is another project.

    They are told apart by what lies in the folder: NVIDIA's has fused optimizers. That of PyPI is
    a toolkit for web pages, whose import fails or gives megatron-core a module without kernels.
    """
    folder, version = here.folder("apex"), here.version("apex")
    if folder is None:
        if not on_gpu:
            return Finding("apex", "not needed", detail="It works on NVIDIA GPUs only.")
        return Finding("apex", "missing", None, "", APEX_COST, APEX_BUILD)
    if not is_nvidia_apex(folder):
        return Finding(
            "apex",
            "broken",
            version,
            f"What is installed at {folder} is not NVIDIA's apex but an unrelated project of the "
            "same name, as PyPI has one.",
            "megatron-core looks for `apex` and may take it for NVIDIA's.",
            f"pip uninstall -y apex && {APEX_BUILD}" if on_gpu else "pip uninstall -y apex",
        )
    if not here.has_module("amp_C"):
        detail = "It was built without its extensions (`amp_C` is absent)."
        return Finding("apex", "broken", version, detail, APEX_COST, APEX_BUILD)
    if not on_gpu:
        detail = "Whether it works can be told only where torch can use a GPU."
        return Finding("apex", "unknown", version, detail)
    imported = run_python(here, "import apex, amp_C, torch; from apex.optimizers import FusedAdam")
    if imported.code != 0:
        detail = f"Its import failed: {imported.reason}."
        return Finding("apex", "broken", version, detail, APEX_COST, APEX_BUILD)
    fused = here.has_module("fused_weight_gradient_mlp_cuda")
    detail = "" if fused else "It has no kernel that adds weight gradients in place."
    return Finding("apex", "found", version, detail)


def is_nvidia_apex(folder: Path) -> bool:
    """Whether a package folder is NVIDIA's."""
    return (folder / "optimizers" / "fused_adam.py").is_file()


def compiler_findings(here: Surroundings, *, on_gpu: bool) -> list[Finding]:
    """nvcc, and the C compiler and headers of Python that `torch.compile` and Triton need."""
    found = [_nvcc(here, on_gpu=on_gpu), _c_compiler(here, on_gpu=on_gpu)]
    return [*found, _python_headers(here)] if on_gpu else found


def _nvcc(here: Surroundings, *, on_gpu: bool) -> Finding:
    homes = [here.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    path = here.program("nvcc", *(f"{home}/bin/nvcc" for home in homes if home))
    if path is None:
        if not on_gpu:
            return Finding("nvcc", "not needed", detail="It compiles for NVIDIA GPUs only.")
        install = "apt-get install cuda-toolkit  # from NVIDIA's repository"
        return Finding("nvcc", "missing", None, "", NVCC_COST, install)
    outcome = here.run([path, "--version"])
    found = re.search(r"release ([\d.]+)", outcome.output)
    if outcome.code != 0 or found is None:
        return Finding("nvcc", "broken", None, f"`{path}` failed: {outcome.reason}.", NVCC_COST)
    return Finding("nvcc", "found", found[1], path)


def _c_compiler(here: Surroundings, *, on_gpu: bool) -> Finding:
    wanted = here.environ.get("CC")
    path = here.program(*([wanted] if wanted else []), "gcc", "clang", "cc")
    if path is not None:
        return Finding("C compiler", "found", None, path)
    if not on_gpu:
        detail = "Runs on a CPU do not compile."
        return Finding("C compiler", "not needed", None, detail)
    return Finding("C compiler", "missing", None, "", CC_COST, "apt-get install gcc")


def _python_headers(here: Surroundings) -> Finding:
    path = Path(sysconfig.get_path("include")) / "Python.h"
    if here.file(path):
        return Finding("Python headers", "found", None, str(path))
    major, minor = sys.version_info[:2]
    install = f"apt-get install python{major}.{minor}-dev"
    return Finding("Python headers", "missing", None, f"No {path}.", CC_COST, install)


def python_finding() -> Finding:
    """The Python that runs this."""
    return Finding("Python", "found", ".".join(map(str, sys.version_info[:3])), sys.executable)
