"""The budgets of traced steps: a file with kernels and bytes by class, and the table of a step.

``GPU_PROOF_BUDGET=write`` before ``run.sh`` writes what it finds into the file, for whoever has
made a step cheaper or must make it dearer.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_ext.planning.kernels import KINDS

FILE = Path(__file__).parent / "budget.json"
WRITES = os.environ.get("GPU_PROOF_BUDGET") == "write"
PER_WEIGHT = ("optimizer", "plumbing", "communication")
"""Classes whose bytes follow the number of weights; those of the others follow the tokens."""
SLACK = 1.005

Rows = dict[str, list[float]]
"""Kernels, and bytes per weight or per token, by class."""


def rows_of(totals: dict[str, tuple[int, int]], num_weights: int, num_tokens: int) -> Rows:
    """Return the rows of a step's table, in the order of `KINDS`."""
    found: Rows = {}
    for kind in (kind for kind in KINDS if kind in totals):
        kernels, num_bytes = totals[kind]
        unit = num_weights if kind in PER_WEIGHT else num_tokens
        found[kind] = [kernels, round(num_bytes / unit, 2)]
    return found


TABLES: list[str] = []
"""Tables of the steps that ran, which are printed at the end."""


def table(name: str, rows: Rows, budget: Rows) -> str:
    """Return a step's table as text."""
    lines = [f"{name:24}{'kernels':>9}{'bytes':>12} per      (budget)"]
    for kind, (kernels, num_bytes) in rows.items():
        unit = "weight" if kind in PER_WEIGHT else "token"
        allowed = "({:.0f}, {:.2f})".format(*budget.get(kind, [0, 0]))
        lines.append(f"  {kind:22}{kernels:9.0f}{num_bytes:12.2f} {unit:8} {allowed}")
    return "\n".join(lines)


def exceeded(rows: Rows, budget: Rows) -> list[str]:
    """Return a sentence for each class that takes more than its budget."""
    found = []
    for kind, (kernels, num_bytes) in rows.items():
        allowed = budget.get(kind, [0, 0])
        if kernels > allowed[0]:
            found.append(f"{kind}: {kernels:.0f} kernels for {allowed[0]:.0f}")
        if num_bytes > allowed[1] * SLACK:
            found.append(f"{kind}: {num_bytes:.2f} bytes for {allowed[1]:.2f}")
    return found


def of_step(name: str, rows: Rows) -> Rows:
    """Return the budget of a step; print its table at the end, and write it where asked to."""
    if WRITES:
        write("steps", name, rows)
    known: Rows = read("steps", name)
    TABLES.append(table(name, rows, known))
    return known


def of_operations(name: str, found: Counter[str]) -> dict[str, int]:
    """Return the operations of a step over the vocabulary; write them where asked to."""
    if WRITES:
        write("operations over the vocabulary", name, dict(sorted(found.items())))
    known: dict[str, int] = read("operations over the vocabulary", name)
    return known


def read(section: str, name: str) -> Any:
    """Return the entry of a step; an empty one where there is none."""
    return json.loads(FILE.read_text(encoding="utf-8")).get(section, {}).get(name, {})


def write(section: str, name: str, entry: Any) -> None:
    """Set the entry of a step in the file."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    found.setdefault(section, {})[name] = entry
    FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
