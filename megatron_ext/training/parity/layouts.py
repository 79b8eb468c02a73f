"""Layouts by short names, such as ``tp2sp``, ``pp2vpp2`` or ``pp4zbh1``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_ext.errors import ConfigError

SIZES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "mbs": "--micro-batch-size",
    "dp": "",
}
WORDS = {
    "sp": "--sequence-parallel",
    "ag": "--cp-comm-type all_gather",
    "a2a": "--cp-comm-type a2a",
    "zbh1": "--pipeline-schedule zb-h1",
    "zbv": "--pipeline-schedule zb-v",
    "core1f1b": "--pipeline-schedule core-1f1b",
    "coreint": "--pipeline-schedule core-interleaved",
    "do": "--use-distributed-optimizer",
}
_TOKEN = re.compile(f"({'|'.join(sorted(SIZES, key=len, reverse=True))})(\\d+)|({'|'.join(WORDS)})")


@dataclass(frozen=True)
class NamedLayout:
    """A layout to compare.

    Attributes:
        name: as given.
        ranks: that it takes.
        flags: that it adds to the command line.
    """

    name: str
    ranks: int
    flags: tuple[str, ...]


def split_layouts(text: str) -> list[NamedLayout]:
    """Read comma-separated layouts; a comma in brackets belongs to the flags there.

    Raises:
        ConfigError: a part that is not known.
    """
    return [parse_layout(name) for name in re.split(r",(?![^\[]*\])", text) if name]


def parse_layout(name: str) -> NamedLayout:
    """Read a layout's name, which may end with more flags in brackets.

    Experts share the ranks of the other dimensions, so ``ep2`` alone takes two data-parallel ranks.

    Raises:
        ConfigError: a part that is not known.
    """
    position, sizes, flags = 0, dict.fromkeys(SIZES, 1), []
    end = name.index("[") if name.endswith("]") and "[" in name else len(name)
    while position < end:
        match = _TOKEN.match(name, position, end)
        if match is None:
            known = ", ".join([*(f"{key}N" for key in SIZES), *WORDS])
            raise ConfigError(
                f"`--layouts` has `{name}`, whose part `{name[position:]}` is not known; join "
                f"parts of {known}."
            )
        if match[3]:
            flags += WORDS[match[3]].split()
        else:
            sizes[match[1]] = int(match[2])
            flags += [SIZES[match[1]], match[2]] if SIZES[match[1]] else []
        position = match.end()
    dense = sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"]
    experts = sizes["ep"] * sizes["etp"] * sizes["pp"]
    flags += name[end:].strip("[]").split()
    return NamedLayout(name, max(dense, experts), tuple(flags))
