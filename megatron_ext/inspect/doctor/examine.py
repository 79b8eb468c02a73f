"""The doctor: checks whether a machine can train, and how fast."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.inspect.doctor import gpus, packages
from megatron_ext.inspect.doctor.gpus import TorchFacts
from megatron_ext.inspect.doctor.host import (
    Examination,
    Finding,
    Gpu,
    Outcome,
    Rates,
    ThisMachine,
    ask_python,
    host_findings,
    report,
)

ROOT = Path(__file__).resolve().parents[3]
MEASURING_SECONDS = 180.0
TRYING_SECONDS = 180.0
MEASURE = """
import sys
sys.path.insert(0, {root!r})
from megatron_ext.device.rates import main
sys.exit(main(["--index", "{index}"]))
"""
GRAPH = """
import json, torch
x = torch.ones(64, device="cuda")
y = x + 1
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x + 1
x.fill_(2)
graph.replay()
assert y.tolist() == [3.0] * 64, "a replayed graph gave other numbers"
print(json.dumps({"seconds": 0.0}))
"""
COMPILE = """
import json, time, torch
import torch.nn.functional as F
def gated(gate, up):
    return F.silu(gate) * up
gate, up = (torch.randn(256, 256, device="cuda") for _ in range(2))
start = time.perf_counter()
output = torch.compile(gated)(gate, up)
torch.cuda.synchronize()
seconds = time.perf_counter() - start
torch.testing.assert_close(output, gated(gate, up))
print(json.dumps({"seconds": seconds}))
"""


@dataclass(frozen=True)
class Probe:
    """A snippet of Python code that tries a feature of torch.

    Attributes:
        code: either fails, or prints as JSON how many seconds it took.
        works: the sentence that reports success.
        cost: what a run loses without the feature.
    """

    name: str
    code: str
    works: str
    cost: str


PROBES = (
    Probe(
        "CUDA graphs",
        GRAPH,
        "A small one was recorded and replayed.",
        "Runs that record their layers as graphs fail at their start; all others launch each "
        "kernel from the host.",
    ),
    Probe(
        "torch.compile",
        COMPILE,
        "A small function was compiled and ran, in {seconds:.0f} s.",
        "Norms, activations, rotary positions, dropout and the loss run kernel by kernel; runs "
        "that ask for compiled parts fail at their first step.",
    ),
)
WITHOUT_GPU = (
    "the matrix rate and the copy bandwidth of a GPU",
    "NCCL's version, how GPUs reach each other (NVLink or PCIe), and whether ranks can talk",
    "whether fp8 can be used, which takes compute capability 8.9 or newer",
    "whether CUDA graphs, torch.compile, or an extension made for GPUs work",
    "how much memory a run may take on a GPU",
)


def examine(here: ThisMachine, *, measure: bool = True) -> Examination:
    """Run all checks; with ``measure``, also time the GPUs, CUDA graphs and torch.compile."""
    driver = gpus.ask_driver(here)
    installed = here.version("torch")
    host = here.host()
    facts = gpus.ask_torch(here) if installed is not None else Outcome(1, errors="not installed")
    usable = facts.gpus if isinstance(facts, TorchFacts) and facts.usable else ()
    on_gpu = (isinstance(facts, TorchFacts) and facts.usable) or bool(driver.cards)
    cuda = facts.cuda if isinstance(facts, TorchFacts) and facts.cuda else driver.cuda
    findings = [
        packages.python_finding(),
        driver.finding,
        gpus.gpu_finding(here, facts, driver),
        gpus.torch_finding(facts, installed),
        *gpus.arch_findings(facts),
        gpus.nccl_finding(facts),
        *gpus.link_findings(here, len(usable)),
        *_cudnn(facts),
        packages.core_finding(here),
        *(packages.extra_finding(here, extra, on_gpu=on_gpu) for extra in packages.extras(cuda)),
        packages.apex_finding(here, on_gpu=on_gpu),
        *packages.compiler_findings(here, on_gpu=on_gpu),
        *(_tried(here, probe) for probe in PROBES if usable and measure),
        *host_findings(host, len(usable)),
    ]
    measured = tuple(_measured(here, gpu, measure=measure) for gpu in usable)
    return Examination(tuple(findings), host, measured, () if usable else WITHOUT_GPU)


def _cudnn(facts: TorchFacts | Outcome) -> list[Finding]:
    if isinstance(facts, Outcome) or not facts.usable:
        return []
    if facts.cudnn is None:
        cost = "Attention cannot take cuDNN's kernels, the fastest ones on Hopper and newer."
        return [Finding("cuDNN", "missing", cost=cost)]
    major, rest = divmod(facts.cudnn, 10_000)
    return [Finding("cuDNN", "found", f"{major}.{rest // 100}.{rest % 100}")]


def _tried(here: ThisMachine, probe: Probe) -> Finding:
    outcome = ask_python(here, probe.code, TRYING_SECONDS)
    if isinstance(outcome, dict):
        return Finding(probe.name, "found", None, probe.works.format(seconds=outcome["seconds"]))
    return Finding(probe.name, "broken", None, f"It failed: {outcome.reason}.", probe.cost)


def _measured(here: ThisMachine, gpu: Gpu, *, measure: bool) -> Gpu:
    if not measure:
        return dataclasses.replace(gpu, note="not measured (`--no-measure`)")
    measured = ask_python(here, MEASURE.format(root=str(ROOT), index=gpu.index), MEASURING_SECONDS)
    if isinstance(measured, Outcome):
        return dataclasses.replace(gpu, note=f"the measurement failed: {measured.reason}")
    rates = Rates(bf16=measured["bf16"], fp8=measured["fp8"], copy=measured["copy"])
    return dataclasses.replace(gpu, rates=rates)


def main(argv: Sequence[str], here: ThisMachine | None = None) -> int:
    """Run the command line of ``tools/doctor.py``; return 1 if no run could start, else 0."""
    about = "Says what this machine has for training, what is missing, and what it costs."
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--out", type=Path, help="also write everything as JSON to this file")
    unmeasured = "do not measure the rates of the GPUs, nor try CUDA graphs and torch.compile"
    parser.add_argument("--no-measure", action="store_true", help=unmeasured)
    args = parser.parse_args(argv)
    examination = examine(here or ThisMachine(), measure=not args.no_measure)
    content = json.dumps(examination.to_dict(), indent=2)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(f"{content}\n", encoding="utf-8")
    print(content if args.json else "\n".join(report(examination)))
    return int(examination.stops_runs)
