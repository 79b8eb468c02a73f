"""The latest collectives of a rank, from torch's flight recorder, in a file for other processes.

torch records each collective, with both gloo and NCCL: group, number, operation, time of the call,
and whether it has ended. Pipeline messages are left out, because ranks record them in shared memory
(`parallel.board`).
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ext.disk.writing import write_bytes


@dataclass(frozen=True)
class Collective:
    """One collective of a rank.

    Attributes:
        group: name of the process group, the same on all its ranks.
        label: description of the group, such as "TENSOR_MODEL_PARALLEL_GROUP".
        ranks: global ranks of the group; empty if unknown.
        number: index of the collective within the group, from 1.
        name: operation, such as "all_reduce".
        shape: shapes of the inputs.
        created: time of the call, in seconds of CLOCK_MONOTONIC.
        over: whether the collective has ended on this rank.
    """

    group: str
    label: str
    ranks: tuple[int, ...]
    number: int
    name: str
    shape: list[list[int]]
    created: float
    over: bool

    def __str__(self) -> str:
        members = f" (ranks {', '.join(map(str, self.ranks))})" if self.ranks else ""
        label = self.label if self.label not in ("", "undefined") else f"group {self.group}"
        return f"{self.name} number {self.number} of {label}{members}"


Flight = tuple[Collective, ...]
"""The latest collectives of a rank, in the order of their calls."""


def _groups() -> dict[str, tuple[int, ...]]:
    """Return the global ranks of all process groups of this process, by name."""
    world = torch.distributed.distributed_c10d._world
    return {
        str(name): tuple(torch.distributed.get_process_group_ranks(group))
        for group, name in list(world.pg_names.items())
        if group is not None
    }


def _collective(
    entry: Mapping[str, Any], behind: float, groups: Mapping[str, tuple[int, ...]]
) -> Collective:
    name, label = entry["process_group"]
    return Collective(
        group=name,
        label=label,
        ranks=groups.get(name, ()),
        number=entry["collective_seq_id"],
        name=entry["profiling_name"].rpartition(":")[2],
        shape=entry.get("input_sizes") or [],
        created=entry["time_created_ns"] / 1e9 - behind,
        over=bool(entry["retired"]) or entry["state"] == "completed",
    )


def write_flight(path: Path) -> None:
    """Write the latest collectives of this process to a file, atomically.

    The first line is JSON: the offset from CLOCK_MONOTONIC to wall-clock time, and the ranks of
    each process group. torch's own binary dump follows unchanged, so that a rank does as little
    work as possible. If torch does not record collectives, there is no dump.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    about: dict[str, Any] = {"behind": time.time() - time.monotonic(), "groups": {}}
    trace = b""
    if dump is not None and torch.distributed.is_initialized():
        # Stack traces would take seconds; faulthandler writes the important ones.
        trace = dump(includeStackTraces=False)
        about["groups"] = _groups()
    aside = path.with_suffix(".tmp")
    write_bytes(aside, json.dumps(about).encode() + b"\n" + trace)
    aside.replace(path)


def read_flight(path: Path) -> Flight | None:
    """Read the file of `write_flight`; return None if it is missing or damaged."""
    try:
        about, _, trace = path.read_bytes().partition(b"\n")
        given = json.loads(about)
        entries = pickle.loads(trace).get("entries", []) if trace else []
        groups = {name: tuple(ranks) for name, ranks in given["groups"].items()}
        behind = given["behind"]
        collectives = [
            _collective(each, behind, groups) for each in entries if not each.get("is_p2p")
        ]
    except (OSError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError):
        return None
    return tuple(sorted(collectives, key=lambda entry: entry.created))
