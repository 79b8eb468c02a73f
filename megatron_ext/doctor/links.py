"""How the GPUs of a machine reach each other, by ``nvidia-smi topo -m``."""

from __future__ import annotations

import re
from collections import Counter

from megatron_ext.doctor.findings import Finding
from megatron_ext.doctor.surroundings import Surroundings

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
