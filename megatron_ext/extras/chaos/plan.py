"""Draws when and on which rank faults strike, and adds the flags that a run with faults needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from megatron_ext.config.parser import read_words
from megatron_ext.config.run import Program
from megatron_ext.errors import ConfigError
from megatron_ext.extras.chaos.inject import KINDS, SLOW, Fault
from megatron_ext.extras.chaos.strikes import has_small_memory_limit
from megatron_ext.inspect.layouts import NamedLayout

TWELVE = (
    "SIGKILL", "SIGSTOP", "SIGSEGV", "exception", "slow rank", "memory", "full disk",
    "NaN gradient", "corrupt checkpoint", "bit flip", "failed fsync", "lost socket",
)  # fmt: skip
"""The faults that can be injected on every machine, in the order in which "all" injects them.

"memory kill" is missing, since it needs a control group with a limit. A failed save is reported
only some steps later, so "corrupt checkpoint" does not directly follow a fault that makes it fail.
"""
ENDING = {"SIGKILL", "SIGSTOP", "SIGSEGV", "exception", "memory", "memory kill", "lost socket"}
"""Faults that end or stop a rank whatever it is doing, so that they may strike at any moment."""
MOMENTS = ("step", "data", "forward", "backward", "reduce", "update")
_FIXED = {
    "full disk": "save",
    "failed fsync": "save",
    "NaN gradient": "end of backward",
    "bit flip": "step",
    SLOW: "step",
    "corrupt checkpoint": "forward",
}
FIRST = 6
"""The first step with a fault: by then the mean step time is known, and there is a save."""
APART = 5
"""Number of steps between two faults of a run."""


@dataclass(frozen=True)
class Case:
    """A run of ``steps`` steps, and the faults to inject into it, sorted by step.

    ``seed`` is the one that the faults were drawn with.
    """

    layout: NamedLayout
    seed: int
    faults: tuple[Fault, ...]
    steps: int


def parse_kinds(text: str) -> list[str]:
    """Parse comma-separated kinds of faults, or "all".

    "all" stands for every kind that does not need a Linux control group (cgroup).

    Raises:
        ConfigError: a kind is unknown.
    """
    kinds = list[str]()
    by_name = {kind.lower(): kind for kind in KINDS}
    for word in text.split(","):
        if word.strip() == "all":
            kinds += TWELVE
        elif word.strip().lower() in by_name:
            kinds.append(by_name[word.strip().lower()])
        else:
            raise ConfigError(
                f"`--faults` has `{word.strip()}`, which is no fault; name some of "
                f"{', '.join(KINDS)}, or all."
            )
    return kinds


def draw(
    kinds: Sequence[str], layout: NamedLayout, seed: int, *, step_seconds: float = 0.0
) -> Case:
    """Draw rank and moment of a fault for each entry of ``kinds``, every `APART` steps.

    The same arguments give the same case. Faults that end a rank happen at one of the `MOMENTS` of
    a step. If ``step_seconds``, the time of a step, is given, half of them happen at a random time
    within a step instead.
    """
    random = Random(f"{layout.name} {seed} {','.join(kinds)}")
    faults = []
    for index, kind in enumerate(kinds):
        event = _FIXED.get(kind, "step")
        seconds = 0.0
        if kind in ENDING:
            event = random.choice(MOMENTS)
            if step_seconds and random.random() < 0.5:
                event = "step"
                seconds = random.uniform(0.0, step_seconds)
        faults.append(
            Fault(
                kind=kind,
                iteration=FIRST + index * APART,
                rank=random.randrange(layout.ranks),
                at=event,
                seconds=seconds,
                steps=APART,
                generation=None,
                seed=random.randrange(1 << 30),
            )
        )
    return Case(layout, seed, tuple(faults), FIRST + len(kinds) * APART)


def draw_by_time(
    kinds: Sequence[str],
    layout: NamedLayout,
    seed: int,
    minutes: float,
    per_minute: float,
    *,
    step_seconds: float,
) -> Case:
    """Draw random faults, ``per_minute`` on average, for a run of ``minutes``.

    ``step_seconds``, the time of a step, converts times to steps. Faults that are close together
    are moved apart, so that each can be reported.
    """
    random = Random(f"{layout.name} {seed} by time")
    clock = 0.0
    kinds_and_times = []
    while (clock := clock + random.expovariate(per_minute / 60.0)) < 60.0 * minutes:
        kinds_and_times.append((random.choice(kinds), clock))
    drawn = draw([kind for kind, _ in kinds_and_times], layout, seed, step_seconds=step_seconds)
    faults = list[Fault]()
    after = FIRST
    for fault, (_, time) in zip(drawn.faults, kinds_and_times, strict=True):
        iteration = max(after, round(time / step_seconds))
        faults.append(dataclasses.replace(fault, iteration=iteration))
        after = iteration + APART
    return Case(layout, seed, tuple(faults), round(60.0 * minutes / step_seconds))


def own_layout(words: Sequence[str], program: Program) -> NamedLayout:
    """Return the layout that the user's flags ``words`` choose; it adds no flags to them."""
    given = read_words(words, program).values.get("parallel", {})
    return NamedLayout("as given", int(given.get("nproc_per_node") or 1), ())


DEFAULTS = {
    "--save-interval": "4",
    "--keep-last": "3",
    "--peer-checkpoint-interval": "1",
    "--rerun-mode": "validate_results",
    "--check-state-interval": "1",
    "--async-save": "",
}
"""Flags of a run with faults, unless the user gives them."""


def completed(
    program: Program, words: Sequence[str], case: Case, save: Path, *, bare: bool = False
) -> tuple[list[str], list[str]]:
    """Return all flags of a case's run, and those of them that were added to the user's ``words``.

    With ``bare``, no flags are added that protect the run, such as by snapshots or restarts.
    """
    sections = read_words(words, program).values
    given = {name for section in sections.values() for name in section}
    defaults = {"--log-interval": "1", "--train-iters": str(case.steps)}
    if not bare:
        defaults |= {**DEFAULTS, "--max-restarts": str(2 * len(case.faults) + 4)}
    added = []
    for flag, value in defaults.items():
        if flag[2:].replace("-", "_") not in given:
            added += [flag, value] if value else [flag]
    fixed = ["--nproc-per-node", str(case.layout.ranks), "--save", str(save)]
    return [*words, *case.layout.flags, *added, *fixed], [*added, *fixed]


def check_possible(program: Program, words: Sequence[str], case: Case) -> None:
    """Raise a ConfigError with a sentence for each fault that cannot happen in a case's run.

    Args:
        words: the completed flags of the run.
    """
    given = read_words(words, program).values
    values = {name: value for section in given.values() for name, value in section.items()}
    errors = [text for fault in case.faults for text in _obstacles(fault, values, case)]
    ending = sum(fault.kind in (*ENDING, "corrupt checkpoint") for fault in case.faults)
    restarts = _integer(values, "max_restarts")
    if restarts is not None and restarts < ending:
        errors.append(
            f"`--max-restarts` ({restarts}) is less than the {ending} faults that end a rank, so "
            "the later ones could not happen; give more, or leave the flag out."
        )
    if errors:
        raise ConfigError(list(dict.fromkeys(errors)))


def _obstacles(fault: Fault, values: Mapping[str, Any], case: Case) -> Iterator[str]:
    """Yield, as sentences, why a fault cannot happen in a run with the flags ``values``."""
    name = f"The fault `{fault.kind}` at step {fault.iteration}"
    last, flag = _last_step(values, case)
    if fault.iteration > last:
        yield (
            f"{name} comes after the last step of the run, {last} (`{flag}`); give a run of "
            f"{case.steps} steps or more, or leave the flag out."
        )
        return
    if fault.rank is not None and fault.rank >= case.layout.ranks:
        yield (
            f"{name} strikes rank {fault.rank}, but layout {case.layout.name} has "
            f"{case.layout.ranks} ranks, counted from 0; name another rank."
        )
    every = _integer(values, "save_interval") or last + 1
    if fault.at == "save" and -(-fault.iteration // every) * every > last:
        yield (
            f"{name} strikes a save, but `--save-interval` ({every}) brings none from there to the "
            f"last step, {last}; give a smaller one, or leave the flag out."
        )
    if fault.kind == "corrupt checkpoint" and every >= fault.iteration:
        yield (
            f"{name} damages a checkpoint, but `--save-interval` ({every}) brings none before it; "
            "give a smaller one, or leave the flag out."
        )
    if fault.kind == "lost socket" and case.layout.ranks == 1:
        yield f"{name} cuts a connection, but one rank has none; give a layout of several ranks."
    if fault.kind == "memory kill" and not has_small_memory_limit():
        yield (
            f"{name} needs a control group whose limit of memory is at most half of the machine's "
            'memory; set one (memory.max), or use the fault "memory".'
        )
    events = (*MOMENTS, "save", "start", "evaluate", "end of backward")
    if fault.at not in events and " of micro-batch " not in fault.at:
        yield f"{name} waits for `{fault.at}`, which never comes; use {', '.join(events)}."
    evaluations = _integer(values, "eval_interval") or 1000
    if fault.at == "evaluate" and -(-fault.iteration // evaluations) * evaluations > last:
        yield (
            f"{name} strikes an evaluation, but `--eval-interval` ({evaluations}) brings none from "
            f"there to the last step, {last}; give a smaller one."
        )


def _last_step(values: Mapping[str, Any], case: Case) -> tuple[int, str]:
    """Return the last step of a run, and the flag that determines it."""
    ends = {"--train-iters": _integer(values, "train_iters") or case.steps}
    if values.get("skip_train"):
        ends["--skip-train"] = 0
    samples = _integer(values, "train_samples")
    batch = _integer(values, "global_batch_size")
    if samples is not None:
        del ends["--train-iters"]
        if batch is not None:
            ends["--train-samples"] = samples // batch
    leaves = _integer(values, "exit_interval")
    if leaves is not None:
        ends["--exit-interval"] = leaves
    flag = min(ends, key=lambda name: ends[name], default="--train-iters")
    return ends.get(flag, case.steps), flag


def _integer(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    return None if value is None else int(value)
