"""Reads the file of ``--data-schedule``: mixtures that change during training.

    stages:
      - tokens: 20B                  # or samples: 5000000; the last stage needs neither
        weights: {data/web: 0.8, data/code: 0.2}
      - tokens: 5B
        ramp: true                   # linearly from the weights before to these
        weights: {data/web: 0.5, data/code: 0.4, data/math: 0.1}
      - seq_length: 8192             # --seq-length by default and at most
        weights: {data/code: 1, data/math: 1}
    max_epochs: {data/math: 4}
    when_exhausted: reweight         # the other sources take its share; or stop: the run ends

Sources are dataset prefixes. A source that a stage does not name pauses. If a later stage names it
again, it continues where it stopped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NoReturn

from megatron_ext.data.mixture import Planned
from megatron_ext.disk.reading import UnreadableFile, read_yaml
from megatron_ext.errors import DataError
from megatron_ext.text.data.prefixes import plain_prefix

_KEYS = {"stages", "max_epochs", "when_exhausted"}
_STAGE_KEYS = {"tokens", "samples", "seq_length", "ramp", "weights"}
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Schedule:
    """The planned stages of a run, and the limits on how often a source is repeated.

    Attributes:
        limits: the largest number of epochs of a source, by the source's name.
        stops: whether the run ends when the first source reaches its limit. Otherwise the other
            sources take its share.
    """

    stages: tuple[Planned, ...]
    limits: Mapping[str, Fraction] = field(default_factory=dict)
    stops: bool = False


class _Reader:
    """Reads the schedule in the file at ``path``, which every error names."""

    def __init__(self, path: str, seq_length: int) -> None:
        self._path = path
        self._seq_length = seq_length

    def fail(self, fault: str) -> NoReturn:
        raise DataError.about("--data-schedule", self._path, fault)

    def schedule(self, content: Any) -> Schedule:
        if not isinstance(content, dict) or not isinstance(content.get("stages"), list):
            self.fail("must be a YAML mapping with a list of `stages`; see docs/data_order.md")
        if not content["stages"]:
            self.fail("has no stage; give at least one with `weights`")
        self._know(content, _KEYS, "it")
        stages = [self._stage(number, values) for number, values in enumerate(content["stages"], 1)]
        self._check_ends(stages)
        names = {name for stage in stages for name in stage.weights}
        limits = self._fractions(content.get("max_epochs", {}), "`max_epochs`")
        for name, limit in limits.items():
            if name not in names:
                self.fail(f"limits the source {name}, which no stage names; name it as there")
            if limit <= 0:
                self.fail(f"limits {name} to {limit} epochs, which must be above 0")
        ending = content.get("when_exhausted", "reweight")
        if ending not in ("reweight", "stop"):
            self.fail(f"has `when_exhausted` ({ending}), which must be reweight or stop")
        return Schedule(tuple(stages), limits, stops=ending == "stop")

    def _know(self, values: Mapping[str, Any], keys: set[str], where: str) -> None:
        unknown = sorted(set(map(str, values)) - keys)
        if unknown:
            self.fail(f"has the key `{unknown[0]}` in {where}, which must be one of "
                      f"{', '.join(sorted(keys))}")  # fmt: skip

    def _stage(self, number: int, values: Any) -> Planned:
        where = f"stage {number}"
        if not isinstance(values, dict) or not values.get("weights"):
            self.fail(f"must give `weights` in {where}, such as {{data/web: 0.8, data/code: 0.2}}")
        self._know(values, _STAGE_KEYS, where)
        weights = self._fractions(values["weights"], f"the weights of {where}")
        if min(weights.values()) < 0 or not any(weights.values()):
            self.fail(f"has weights in {where} that must be at least 0 and not all 0")
        if "tokens" in values and "samples" in values:
            self.fail(f"gives both `tokens` and `samples` in {where}; give one")
        ramp = values.get("ramp", False)
        if not isinstance(ramp, bool):
            self.fail(f"has `ramp` ({ramp}) in {where}, which must be true or false")
        if ramp and number == 1:
            self.fail("has a ramp in stage 1, but there is no stage before it to start from")
        counts = {name: self._count(values, name, where) for name in ("tokens", "samples")}
        length = self._count(values, "seq_length", where) or self._seq_length
        if length > self._seq_length:
            self.fail(f"has `seq_length` ({length}) in {where}, which must be at most "
                      f"`--seq-length` ({self._seq_length}); raise that flag")  # fmt: skip
        if self._seq_length % length:
            self.fail(f"has `seq_length` ({length}) in {where}, which must divide `--seq-length` "
                      f"({self._seq_length}), so that windows are cut evenly")  # fmt: skip
        return Planned(weights, length, counts["samples"], counts["tokens"], ramp)

    def _count(self, values: Mapping[str, Any], name: str, where: str) -> int | None:
        given = values.get(name)
        if given is None:
            return None
        text = str(given).replace("_", "").upper()
        scale = _SUFFIXES.get(text[-1:], 1)
        try:
            count = Fraction(text[:-1] if scale > 1 else text) * scale
        except (ValueError, ZeroDivisionError):
            count = Fraction(0)
        if count < 1 or count.denominator != 1:
            self.fail(f"has `{name}` ({given}) in {where}, which must be a whole number of at "
                      "least 1, such as 500M")  # fmt: skip
        return int(count)

    def _fractions(self, values: Any, what: str) -> dict[str, Fraction]:
        if not isinstance(values, dict):
            self.fail(f"must give {what} as a mapping from sources to numbers")
        fractions = {}
        for given, value in values.items():
            name = plain_prefix(str(given))
            if name in fractions:
                self.fail(f"names {name} twice in {what}; name each source once")
            try:
                fractions[name] = Fraction(str(value))
            except (ValueError, ZeroDivisionError):
                self.fail(f"gives {value} for {name} in {what}, which must be a number")
        return fractions

    def _check_ends(self, stages: list[Planned]) -> None:
        for number, stage in enumerate(stages, 1):
            if stage.size is None and number < len(stages):
                self.fail(f"must say in stage {number} how long it lasts, since stage "
                          f"{number + 1} follows; give `tokens` or `samples`")  # fmt: skip
            if stage.ramp and stage.size is None:
                self.fail(f"has a ramp in stage {number} without an end; give `tokens` or "
                          "`samples`, and a stage after it")  # fmt: skip


def read_schedule(path: str, seq_length: int) -> Schedule:
    """Read the file of ``--data-schedule``; stages without a ``seq_length`` get the given one.

    Raises:
        DataError: the file cannot be read, or is not a schedule.
    """
    reader = _Reader(path, seq_length)
    try:
        content = read_yaml(path)
    except UnreadableFile as error:
        reader.fail(f"cannot be read ({error.reason}); give a YAML file of stages, as in "
                    "docs/data_order.md")  # fmt: skip
    return reader.schedule(content)
