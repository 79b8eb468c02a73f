"""Print the rank grid of a layout and each of its groups, without starting a process."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

from rich.console import Console
from rich.table import Table

from megatron_ext.config.flags import SIZE
from megatron_ext.errors import ConfigError, run_program
from megatron_ext.parallel.grid import DENSE_GROUPS, EXPERT_GROUPS, Layout

TITLES = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline", "ep": "expert"}


def grid_table(layout: Layout) -> Table:
    """Return a table with one row per rank: its index along each axis of the grid."""
    axes = [axis for axis in layout.order.split("-") if axis != "ep"]
    table = Table("rank", *(f"{TITLES[a]} ({layout.sizes()[a]})" for a in axes), title="ranks")
    for rank in range(layout.world_size):
        position = layout.position(rank)
        table.add_row(str(rank), *(str(position[axis]) for axis in axes))
    return table


def group_table(layout: Layout) -> Table:
    """Return a table of the process groups; kinds with one rank per group are left out."""
    table = Table("group", "size", "ranks of each group", title="process groups")
    kinds = [(axes, layout.groups(axes)) for axes in DENSE_GROUPS]
    if layout.expert_model_parallel_size > 1 or layout.expert_tp != layout.sizes()["tp"]:
        kinds += [(f"expert {axes}", layout.expert_groups(axes)) for axes in EXPERT_GROUPS]
    for name, groups in kinds:
        if len(groups[0]) > 1:
            table.add_row(name, str(len(groups[0])), " ".join(map(_short, groups)))
    return table


def _short(ranks: list[int]) -> str:
    """Return ranks as ``[0-3]`` if more than two and consecutive, else as ``[0,4,8]``."""
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"[{ranks[0]}-{ranks[-1]}]"
    return f"[{','.join(map(str, ranks))}]"


def main(argv: list[str]) -> int:
    """Print the grid and the groups of the layout that the flags name; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatron_ext.parallel", description=__doc__)
    for field in fields(Layout):
        flag = "--" + field.name.replace("_", "-")
        needed = field.name == "world_size"
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            default = None if needed else field.default
            parser.add_argument(
                flag, type=SIZE.integer, required=needed, default=default, metavar="RANKS"
            )
    try:
        layout = Layout(**vars(parser.parse_args(argv)))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    for table in (grid_table(layout), group_table(layout)):
        Console(highlight=False, markup=False).print(table)
    return 0


if __name__ == "__main__":
    run_program(main)
