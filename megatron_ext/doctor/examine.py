"""The whole examination: one look at each thing, and what follows where there is no GPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from megatron_ext.doctor.driver import ask_driver
from megatron_ext.doctor.findings import Examination, Finding, Gpu, Rates
from megatron_ext.doctor.host import host_findings
from megatron_ext.doctor.links import link_findings
from megatron_ext.doctor.packages import (
    apex_finding,
    compiler_findings,
    core_finding,
    extra_finding,
    extras,
    python_finding,
)
from megatron_ext.doctor.probes import probe_findings
from megatron_ext.doctor.surroundings import Outcome, Surroundings, run_python
from megatron_ext.doctor.torch_facts import (
    TorchFacts,
    arch_findings,
    ask_torch,
    gpu_finding,
    nccl_finding,
    torch_finding,
)

ROOT = Path(__file__).resolve().parents[2]
MEASURING_SECONDS = 180.0
MEASURE = """
import sys
sys.path.insert(0, {root!r})
from megatron_ext.device.rates import main
sys.exit(main(["--index", "{index}"]))
"""
WITHOUT_GPU = (
    "the matrix rate and the copy bandwidth of a GPU",
    "NCCL's version, how GPUs reach each other (NVLink or PCIe), and whether ranks can talk",
    "whether fp8 can be used, which takes compute capability 8.9 or newer",
    "whether CUDA graphs, torch.compile, or an extension made for GPUs work",
    "how much memory a run may take on a GPU",
)


def examine(here: Surroundings, *, measure: bool = True) -> Examination:
    """Look at everything.

    Args:
        here: the machine.
        measure: measure the rates of each GPU, which takes a minute for each at most, and try
            CUDA graphs and torch.compile.
    """
    driver = ask_driver(here)
    installed = here.version("torch")
    facts = ask_torch(here) if installed is not None else Outcome(1, errors="not installed")
    usable = isinstance(facts, TorchFacts) and facts.usable
    gpus = facts.gpus if isinstance(facts, TorchFacts) and usable else ()
    host = here.host()
    on_gpu = usable or bool(driver.cards)
    cuda = facts.cuda if isinstance(facts, TorchFacts) and facts.cuda else driver.cuda
    findings = [
        python_finding(),
        driver.finding,
        gpu_finding(here, facts, driver),
        torch_finding(facts, installed),
        *arch_findings(facts),
        nccl_finding(facts),
        *link_findings(here, len(gpus)),
        *_cudnn(facts),
        core_finding(here),
        *(extra_finding(here, extra, on_gpu=on_gpu) for extra in extras(cuda)),
        apex_finding(here, on_gpu=on_gpu),
        *compiler_findings(here, on_gpu=on_gpu),
        *(probe_findings(here) if gpus and measure else ()),
        *host_findings(host, len(gpus)),
    ]
    return Examination(
        tuple(findings),
        host,
        tuple(_measured(here, gpu, measure=measure) for gpu in gpus),
        () if gpus else WITHOUT_GPU,
    )


def _cudnn(facts: TorchFacts | Outcome) -> list[Finding]:
    """cuDNN, one of the sources of attention kernels."""
    if isinstance(facts, Outcome) or not facts.usable:
        return []
    if facts.cudnn is None:
        cost = "Attention cannot take cuDNN's kernels, the fastest ones on Hopper and newer."
        return [Finding("cuDNN", "missing", cost=cost)]
    major, rest = divmod(facts.cudnn, 10_000)
    return [Finding("cuDNN", "found", f"{major}.{rest // 100}.{rest % 100}")]


def _measured(here: Surroundings, gpu: Gpu, *, measure: bool) -> Gpu:
    """The GPU with its rates, measured in a process of its own."""
    if not measure:
        return dataclasses.replace(gpu, note="not measured (`--no-measure`)")
    outcome = run_python(here, MEASURE.format(root=str(ROOT), index=gpu.index), MEASURING_SECONDS)
    if outcome.code != 0:
        return dataclasses.replace(gpu, note=f"the measurement failed: {outcome.reason}")
    try:
        found = json.loads(outcome.output.splitlines()[-1])
        rates = Rates(bf16=found["bf16"], fp8=found["fp8"], copy=found["copy"])
    except (IndexError, KeyError, json.JSONDecodeError):
        return dataclasses.replace(gpu, note="the measurement printed nothing that could be read")
    return dataclasses.replace(gpu, rates=rates)
