"""Short names of parallel layouts, such as ``tp2sp``, ``pp2vpp2`` or ``pp4zbh1``.

This module also decides which layouts draw the same random numbers; only those can be compared if
dropout is on.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.config.parallel import ABBREVIATIONS, V_SHAPED
from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.device import Device
from megatron_ext.errors import ConfigError, MegatronExtError
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.train.task import Task, TaskChoice

SIZES = {key: ABBREVIATIONS[key] for key in ("tp", "pp", "vpp", "cp", "ep", "etp", "mbs")} | {
    "dp": ""
}
WORDS = {
    "sp": ABBREVIATIONS["sp"],
    "ag": "--cp-comm-type all_gather",
    "a2a": "--cp-comm-type a2a",
    "zbh1": "--pipeline-schedule zb-h1",
    "zbv": "--pipeline-schedule zb-v",
    "dpv": "--pipeline-schedule dualpipe-v",
    "core1f1b": "--pipeline-schedule core-1f1b",
    "coreint": "--pipeline-schedule core-interleaved",
    "do": "--use-distributed-optimizer",
}
_TOKEN = re.compile(f"({'|'.join(sorted(SIZES, key=len, reverse=True))})(\\d+)|({'|'.join(WORDS)})")


@dataclass(frozen=True)
class NamedLayout:
    """A layout to compare, with the flags that it adds to the command line."""

    name: str
    ranks: int
    flags: tuple[str, ...]


def split_layouts(text: str) -> list[NamedLayout]:
    """Parse comma-separated layouts; a comma in brackets belongs to the flags inside them."""
    return [parse_layout(name) for name in re.split(r",(?![^\[]*\])", text) if name]


def parse_layout(name: str) -> NamedLayout:
    """Parse a layout's name, such as ``tp2sp``, which may end with more flags in brackets.

    Expert parallelism reuses the ranks of other dimensions, so ``ep2`` alone means two
    data-parallel ranks.
    """
    position = 0
    sizes = dict.fromkeys(SIZES, 1)
    flags = []
    end = name.index("[") if name.endswith("]") and "[" in name else len(name)
    while position < end:
        match = _TOKEN.match(name, position, end)
        if match is None:
            choices = ", ".join([*(f"{key}N" for key in SIZES), *WORDS])
            raise ConfigError(
                f"`--layouts` has `{name}`, whose part `{name[position:]}` is not known; join "
                f"parts of {choices}."
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


def refuse_random_draws(
    program: Task | TaskChoice,
    words: Sequence[str],
    truth: NamedLayout,
    layouts: Sequence[NamedLayout],
    steps: int,
    device: Device,
) -> None:
    """Raise an error if dropout or noise would make losses differ between layouts.

    Every layout must draw the same random numbers in its forward passes as ``truth``, the layout to
    compare with. A layout whose flags are invalid is skipped; `record` reports it.

    Raises:
        ConfigError: a layout draws other numbers for a dropout or noise that is on; the message
            names the layout and the flags.
    """
    reference, *others = (
        _config(program, flags_of_run(words, layout, steps), device) for layout in (truth, *layouts)
    )
    for layout, mine in zip(layouts, others, strict=True):
        if reference is None or mine is None or _places(mine) == _places(reference):
            continue
        drawn = {**_drawn(reference), **_drawn(mine)}
        if drawn:
            flags = " and ".join(f"`{flag}` ({value:g})" for flag, value in drawn.items())
            off = "turn them off" if len(drawn) > 1 else "turn it off"
            remedy = (
                off if "--lora-dropout" in drawn else f"add `--deterministic-dropout`, or {off}"
            )
            raise ConfigError(
                f"{flags} would change other elements in `{layout.name}` than in `{truth.name}`, "
                f"since each rank draws from a generator of its own, so losses would differ; "
                f"{remedy}."
            )


def flags_of_run(words: Sequence[str], layout: NamedLayout, steps: int) -> list[str]:
    """Return the command line that trains ``steps`` steps in a layout with the flags ``words``."""
    fixed = f"--train-iters {steps} --log-interval 1 --eval-iters 0 --nproc-per-node {layout.ranks}"
    return [*words, *layout.flags, *fixed.split()]


def _config(program: Task | TaskChoice, flags: Sequence[str], device: Device) -> RunConfig | None:
    try:
        return parse_args(flags, program, world_size=0, device=device.kind).config
    except MegatronExtError:
        return None


def _places(config: RunConfig) -> tuple[object, ...]:
    """Return the settings that decide on which ranks and in which order random numbers are drawn.

    Configurations for which the result is equal draw the same numbers in their forward passes.
    """
    # For the same chunks, a stage runs its forward passes in the same order in all schedules.
    schedule = "zb-v" if config.parallel.pipeline_schedule in V_SHAPED else None
    grid = dataclasses.replace(config.parallel, pipeline_schedule=schedule)
    return grid, config.training.micro_batch_size


def _drawn(config: RunConfig) -> dict[str, float]:
    """Return the values, by flag, of the dropout and noise whose numbers depend on the layout."""
    drawn = {
        "--hidden-dropout": config.model.hidden_dropout,
        "--attention-dropout": config.model.attention_dropout,
    }
    if config.has(MoEConfig) and (moe := config.section(MoEConfig)).num_experts:
        drawn["--moe-input-jitter-eps"] = moe.moe_input_jitter_eps or 0
    if config.model.deterministic_dropout:
        drawn = {}
    drawn["--lora-dropout"] = config.lora.lora_dropout if config.lora.lora_rank else 0
    return {flag: value for flag, value in drawn.items() if value}
