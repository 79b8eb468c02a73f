"""Whether what speeds a GPU up really works on it: a CUDA graph, and a compiled function."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.doctor.findings import Finding
from megatron_ext.doctor.surroundings import Surroundings, ask_python

SECONDS = 180.0
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
found = torch.compile(gated)(gate, up)
torch.cuda.synchronize()
seconds = time.perf_counter() - start
torch.testing.assert_close(found, gated(gate, up))
print(json.dumps({"seconds": seconds}))
"""


@dataclass(frozen=True)
class Probe:
    """Some lines that fail where a thing does not work.

    Attributes:
        name: of the thing.
        code: the lines; they print their seconds as JSON.
        works: what to say where they went well, with ``{seconds}``.
        cost: what a run loses where they did not.
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


def probe_findings(here: Surroundings) -> list[Finding]:
    """Try each on the first GPU, in a process of its own."""
    return [_tried(here, probe) for probe in PROBES]


def _tried(here: Surroundings, probe: Probe) -> Finding:
    outcome = ask_python(here, probe.code, SECONDS)
    if isinstance(outcome, dict):
        return Finding(probe.name, "found", None, probe.works.format(seconds=outcome["seconds"]))
    return Finding(probe.name, "broken", None, f"It failed: {outcome.reason}.", probe.cost)
