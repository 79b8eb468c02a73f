"""What NVIDIA's driver says, through ``nvidia-smi``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from megatron_ext.doctor.findings import Finding
from megatron_ext.doctor.surroundings import Surroundings

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
