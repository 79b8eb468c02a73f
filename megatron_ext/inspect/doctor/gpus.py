"""What NVIDIA's driver says, through ``nvidia-smi``.

How the GPUs of a machine reach each other, by ``nvidia-smi topo -m``.

Whether what speeds a GPU up really works on it: a CUDA graph, and a compiled function.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from megatron_ext.inspect.doctor.findings import Finding
from megatron_ext.inspect.doctor.host import Surroundings, ask_python

QUERY = ("--query-gpu=name,driver_version,mig.mode.current", "--format=csv,noheader")


@dataclass(frozen=True)
class Driver:
    """What the driver shows.

    Attributes:
        finding: on the driver itself.
        cards: names of all its devices, hidden ones included.
        cuda: newest CUDA version that it supports.
    """

    finding: Finding
    cards: list[str] = field(default_factory=list)
    cuda: str | None = None


def ask_driver(here: Surroundings) -> Driver:
    """Ask ``nvidia-smi``; its absence only says that it could not be asked."""
    path = here.program("nvidia-smi")
    if path is None:
        detail = "`nvidia-smi` was not found, so the driver cannot be asked."
        return Driver(Finding("NVIDIA driver", "unknown", detail=detail))
    outcome = here.run([path, *QUERY])
    if outcome.code != 0:
        said = outcome.output.strip().splitlines()
        reason = said[0].rstrip(".") if said else outcome.reason
        detail = f"`nvidia-smi` failed: {reason}."
        return Driver(Finding("NVIDIA driver", "broken", None, detail, "No GPU can be used."))
    rows = [[cell.strip() for cell in line.split(",")] for line in outcome.output.splitlines()]
    rows = [row for row in rows if len(row) == 3]
    if not rows:
        detail = "`nvidia-smi` shows no device."
        return Driver(Finding("NVIDIA driver", "broken", None, detail, "No GPU can be used."))
    summary = here.run([path]).output
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", summary)
    supported = f"It supports CUDA up to {cuda[1]}." if cuda else ""
    parts = sum(row[2] == "Enabled" for row in rows)
    shared = f" {parts} device(s) are cut in parts (MIG)." if parts else ""
    version = rows[0][1]
    return Driver(
        Finding("NVIDIA driver", "found", version, (supported + shared).strip()),
        [row[0] for row in rows],
        cuda[1] if cuda else None,
    )


NAME = "links of GPUs"
_NVLINK = re.compile(r"^NV\d+$")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def link_findings(here: Surroundings, num_gpus: int) -> list[Finding]:
    """Whether NVLink joins all GPUs; nothing where there are fewer than two."""
    path = here.program("nvidia-smi")
    if num_gpus < 2 or path is None:
        return []
    outcome = here.run([path, "topo", "-m"])
    links = parse(outcome.output) if outcome.code == 0 else {}
    if not links:
        said = outcome.reason if outcome.code != 0 else "it printed no table"
        return [Finding(NAME, "unknown", None, f"`nvidia-smi topo -m` failed: {said}.")]
    kinds = Counter(links.values())
    shown = ", ".join(f"{kind} between {count} pair(s)" for kind, count in kinds.most_common())
    slow = sorted(pair for pair, kind in links.items() if not _NVLINK.match(kind))
    if not slow:
        return [Finding(NAME, "found", None, f"NVLink joins all {_count(links)}: {shown}.")]
    one, other = slow[0]
    cost = (
        f"Tensor parallelism over pairs without NVLink, GPU {one} and GPU {other} for one, waits "
        "for PCIe in every layer; keep it within GPUs that NVLink joins."
    )
    return [Finding(NAME, "low", None, f"{shown}.", cost)]


def parse(table: str) -> dict[tuple[int, int], str]:
    """Kinds of links by pairs of GPUs, as the table names them: NV18, PIX, PXB, PHB, NODE, SYS."""
    lines = [_ESCAPES.sub("", line).split() for line in table.splitlines()]
    head = next((line for line in lines if line[:1] == ["GPU0"]), [])
    columns = [name for name in head if re.fullmatch(r"GPU\d+", name)]
    # The head lacks the column of names, so that it may begin with the name of the first GPU too.
    rows = {
        line[0]: line[1:] for line in lines if line and line[0] in columns and line[1:2] != ["GPU1"]
    }
    found = {}
    for i, one in enumerate(columns):
        for j, other in enumerate(columns):
            if i < j and one in rows and j < len(rows[one]):
                found[_index(one), _index(other)] = rows[one][j]
    return found


def _index(name: str) -> int:
    return int(name.removeprefix("GPU"))


def _count(links: dict[tuple[int, int], str]) -> int:
    return len({gpu for pair in links for gpu in pair})


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
