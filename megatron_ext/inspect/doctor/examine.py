"""The whole examination: one look at each thing, and what follows where there is no GPU.

The command line of tools/doctor.py.

An examination in words.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ext.inspect.doctor.findings import Examination, Finding, Gpu, Rates
from megatron_ext.inspect.doctor.gpus import ask_driver, link_findings, probe_findings
from megatron_ext.inspect.doctor.host import (
    Outcome,
    Surroundings,
    ThisMachine,
    host_findings,
    run_python,
)
from megatron_ext.inspect.doctor.packages import (
    apex_finding,
    compiler_findings,
    core_finding,
    extra_finding,
    extras,
    python_finding,
)
from megatron_ext.inspect.doctor.torch_facts import (
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


WORDS = {
    "found": "ok",
    "missing": "absent",
    "low": "LOW",
    "broken": "BROKEN",
    "unknown": "unknown",
    "not needed": "not needed",
}


def report(examination: Examination) -> list[str]:
    """The lines that a person reads."""
    width = max(len(finding.name) for finding in examination.findings)
    lines = [line for f in examination.findings for line in _finding(f, width)]
    for gpu in examination.gpus:
        lines += ["", *_gpu(gpu)]
    if examination.unknown:
        lines += ["", "Torch can use no GPU here, so this cannot be known:"]
        lines += [f"  - {text}" for text in examination.unknown]
    lines += ["", _verdict(examination)]
    return lines


def _finding(finding: Finding, width: int) -> Iterator[str]:
    words = [WORDS[finding.status], finding.version or "", finding.detail]
    yield f"{finding.name:<{width}}  {' '.join(word for word in words if word)}"
    indent = " " * (width + 2)
    if finding.cost:
        yield f"{indent}what it costs: {finding.cost}"
    if finding.install:
        yield f"{indent}mend by: {finding.install}"


def _gpu(gpu: Gpu) -> Iterator[str]:
    capability = ".".join(map(str, gpu.capability))
    yield (
        f"GPU {gpu.index}: {gpu.name}, compute capability {capability}, "
        f"{gpu.memory / 2**30:.1f} GiB"
    )
    if not gpu.has_bf16:
        yield "  bf16: its matrix units do not take it; `--fp16` is what they take"
    yield _recipes(gpu)
    if gpu.rates is None:
        yield f"  rates: {gpu.note}"
        return
    yield f"  bf16 matrix product, measured: {gpu.rates.bf16 / 1e12:.0f} TFLOP/s"
    if gpu.rates.fp8 is not None:
        yield f"  fp8 matrix product, measured: {gpu.rates.fp8 / 1e12:.0f} TFLOP/s"
    yield f"  copy within its memory, read and written: {gpu.rates.copy / 1e12:.2f} TB/s"


def _recipes(gpu: Gpu) -> str:
    if not gpu.has_fp8:
        return "  fp8: its matrix units do not take it"
    shown = "; ".join(f"{impl}: {', '.join(names)}" for impl, names in gpu.fp8_recipes.items())
    return f"  fp8 recipes by --transformer-impl: {shown}"


def _verdict(examination: Examination) -> str:
    stopping = [finding.name for finding in examination.findings if finding.stops_runs]
    if stopping:
        return f"No run can start: mend {', '.join(stopping)} first."
    if examination.gpus:
        return f"Runs compute on {len(examination.gpus)} GPU(s)."
    return "Runs compute on the CPU, and their ranks talk over gloo."


def main(argv: Sequence[str], here: Surroundings | None = None) -> int:
    """Examine a machine and print what was found.

    Args:
        argv: the flags.
        here: the machine; None for this one.

    Returns:
        1 if no run could start, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="doctor.py",
        description="Says what this machine has for training, what is missing, and what it costs.",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--out", type=Path, help="also write everything as JSON to this file")
    parser.add_argument(
        "--no-measure",
        action="store_true",
        help="do not measure the rates of the GPUs, nor try CUDA graphs and torch.compile",
    )
    args = parser.parse_args(argv)
    examination = examine(here or ThisMachine(), measure=not args.no_measure)
    found = json.dumps(examination.to_dict(), indent=2)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(f"{found}\n", encoding="utf-8")
    if args.json:
        print(found)
    else:
        print("\n".join(report(examination)))
    return int(examination.stops_runs)
