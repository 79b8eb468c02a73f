"""The ledger of a run: which documents it was trained on, when, and how often.

It joins three sources: the record of the run's steps (`step_record`), the order of samples, which
is a function (`megatron_ext.data.order`), and the boundaries of documents in the index files. So it
holds no list of samples, and costs the same for a run of any length.
"""

from __future__ import annotations

import functools
import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megatron_ext.config.run import section_name
from megatron_ext.config.sections import described, withheld_notes
from megatron_ext.data.indexed import is_address
from megatron_ext.data.lookup import samples_with
from megatron_ext.data.order import SampleOrder, check_recorded
from megatron_ext.data.packed_order import PackedOrder
from megatron_ext.data.packing import DocumentStarts
from megatron_ext.data.windows import Source
from megatron_ext.disk.reading import UnreadableFile, read_yaml
from megatron_ext.errors import ConfigError
from megatron_ext.extras.ledger.documents import Documents, Rows, joined, parts_of
from megatron_ext.extras.ledger.step_record import History, StepRecord, Steps
from megatron_ext.text.data.config import DataConfig
from megatron_ext.train.reporting.files import CONFIGURATION_FILE

Section = TypeVar("Section")

_KNOWN = {"kind", "seed", "window", "tokens", "stages", "first_tokens", "split", "packing"}
"""Keys of a recorded order of samples that this version knows; an order with others is refused."""


@dataclass(frozen=True)
class Read:
    """One reading of a document: ``sample`` holds the document's tokens ``begin`` to ``end`` - 1.

    ``reason`` says why the step's update is not part of the weights; None if it is. ``step`` is
    None if the record does not tell which step used the sample.
    """

    step: int | None
    sample: int
    begin: int
    end: int
    reason: str | None


class Ledger:
    """Tells what the run in a save folder was trained on.

    Args:
        folder: the save folder.
        iteration: last step of the run to take into account; None for the whole run.

    Raises:
        ConfigError: the folder has no record, or the record lacks that step.
    """

    def __init__(self, folder: str | Path, iteration: int | None = None) -> None:
        self.folder = Path(folder)
        self.record = StepRecord(folder)
        if not self.record.rows:
            raise ConfigError(
                f"{self.record.path} does not exist or is empty; give the save folder of a run "
                "with `--data-order direct`, which keeps it."
            )
        self.history: History = self.record.history(iteration)
        self.withheld: dict[type, list[str]] = {}
        self._first: dict[str, int] = {}
        for row in self.record.rows:
            self._first |= row.get("first_tokens", {})
        self._moved = _moves(row for row in self.record.rows if row["kind"] == "order")
        self._orders: dict[str, SampleOrder] = {}
        self.documents = functools.cache(self._documents)
        self.sources = sorted(self._first.keys() - self._moved.keys())

    def order_of(self, steps: Steps) -> SampleOrder:
        """Return the order of samples in ``steps``.

        Raises:
            ConfigError: the order was not recorded, or this version cannot read it.
        """
        if steps.order is None:
            raise ConfigError(
                f"Steps {steps.iteration + 1} to {steps.done} were in another order than the "
                "direct one, or ran before it was recorded, so that their documents are not known."
            )
        new = sorted(steps.order.keys() - _KNOWN)
        if steps.order.get("packing", "best_fit") != "best_fit":
            new.append(f"packing: {steps.order['packing']}")
        if new:
            raise ConfigError(
                f"{self.record.path} has an order with `{new[0]}`, which this version does not "
                "know; use the version that has written it."
            )
        key = json.dumps(steps.order)
        if key not in self._orders:
            self._orders[key] = self._order(steps.order)
        return self._orders[key]

    def _order(self, values: Mapping[str, Any]) -> SampleOrder:
        check_recorded(values, str(self.record.path))
        order = SampleOrder.from_dict(values)
        if "packing" not in values:
            return order
        documents = {source.name: self._starts_of(source) for source in order.sources}
        return PackedOrder(values["tokens"], order.stages, order.window, order.seed, documents)

    def _starts_of(self, source: Source) -> DocumentStarts:
        """Return `Documents.packed_starts` of a source; its files are opened at the first call."""
        name = self.name_of(source)
        return lambda begin, end: self.documents(name, source.tokens).packed_starts(begin, end)

    def _documents(self, prefix: str, tokens: int) -> Documents:
        if prefix not in self._first:
            raise ConfigError(
                f"{prefix} was no longer read when {self.record.path} began, which does not tell "
                "what its split was."
            )
        data = self.section(DataConfig) if is_address(prefix) else DataConfig()
        return Documents(prefix, self._first[prefix], tokens, data)

    def section(self, kind: type[Section]) -> Section:
        """Return a section of the run's configuration, read from the file in the save folder.

        Permissions in the file, such as to run code, are not granted: these settings get their
        defaults, and ``withheld[kind]`` gets a sentence on each.

        Raises:
            ConfigError: the file is missing, damaged or of another version.
        """
        path = self.folder / CONFIGURATION_FILE
        try:
            settings = read_yaml(path)
            self.withheld[kind] = withheld_notes(settings, [kind], ())
            return kind(**described(settings, [kind])[section_name(kind)])
        except (UnreadableFile, KeyError, TypeError, ValueError, AttributeError) as error:
            why = error.reason if isinstance(error, UnreadableFile) else error
            raise ConfigError(
                f"{path} cannot be read ({why}), but says how the data of the run is read; give "
                "a save folder with the configuration of its run."
            ) from None

    def name_of(self, source: Source) -> str:
        """Return the path prefix of a source's dataset; the newest one if the dataset was moved."""
        return self._moved.get(source.name, source.name)

    def documents_of(self, prefix: str) -> Documents:
        """Return the documents of the source with the path ``prefix`` (without suffix).

        Raises:
            ConfigError: the run has no such source.
        """
        for row in reversed(self.record.rows):
            if row["kind"] == "order" and prefix in row["tokens"]:
                return self.documents(prefix, row["tokens"][prefix])
        raise ConfigError(
            f"{prefix} is no source of the run; name one of {', '.join(self.sources)}, as there."
        )

    def steps(self, *, with_lost: bool) -> list[Steps]:
        """Return the steps whose updates are part of the weights.

        With ``with_lost``, include steps whose update was skipped, rewound or lost by a restart.
        """
        if not with_lost:
            return [each for each in self.history.steps if each.reason is None]
        return [*self.history.steps, *self.history.lost]

    def unknown(self, *, with_lost: bool) -> list[Steps]:
        """Return the steps whose order of samples was not recorded.

        ``with_lost`` is the argument of `steps`.
        """
        return [each for each in self.steps(with_lost=with_lost) if each.order is None]

    def rows(self, order: SampleOrder, first: int, end: int) -> Rows:
        """Return the parts of documents in the samples from ``first`` to ``end`` - 1."""
        pieces = order.locate(first, end)
        parts = []
        for source in np.unique(pieces.sources).tolist():
            own = order.sources[source]
            documents = self.documents(self.name_of(own), own.tokens)
            parts.append(parts_of(pieces, first, source, documents))
        return joined(parts)

    def step(self, iteration: int) -> tuple[Steps, int, int]:
        """Return the `Steps` that include step ``iteration``, and the range of that step's samples.

        The range is ``(first, end)``, where the last sample is ``end`` - 1.

        Raises:
            ConfigError: the run has no such step, or its samples or their order were not recorded.
        """
        for each in self.steps(with_lost=True):
            if each.iteration < iteration <= each.done:
                self.order_of(each)
                if each.batch is None:
                    raise ConfigError(
                        f"`--step` ({iteration}) is not recorded by itself, as steps "
                        f"{each.iteration + 1} to {each.done} ran before the record began."
                    )
                return each, each.sample_at(iteration - 1), each.sample_at(iteration)
        raise ConfigError(
            f"`--step` ({iteration}) was not trained; the run has steps from 1 to "
            f"{self.history.iteration}."
        )

    def steps_with(self, iteration: int, sample: int) -> Steps | None:
        """Return the last recorded `Steps` in which step ``iteration`` begins at this ``sample``.

        A restart may repeat a step, so the record may have several steps with this number. The
        result is None if none of them begins with this sample.
        """
        for each in reversed(self.steps(with_lost=True)):
            if each.batch is None or not each.iteration < iteration <= each.done:
                continue
            if each.sample_at(iteration - 1) == sample:
                return each
        return None

    def reads_of(self, prefix: str, document: int, *, with_lost: bool) -> list[Read]:
        """Return where the run read a document, in the order of the run's steps.

        Steps whose order of samples is unknown are left out (see `unknown`). With ``with_lost``,
        steps whose updates are not part of the weights are included.

        Raises:
            ConfigError: the run has no such source, or the source has no such document.
        """
        reads = list[Read]()
        begin, end = self.documents_of(prefix).range_of(document)
        if begin >= end:
            return reads
        steps = [each for each in self.steps(with_lost=with_lost) if each.order is not None]
        stop = max((each.stop for each in steps), default=0)
        in_order: dict[SampleOrder, list[int]] = {}
        for each in steps:
            order = self.order_of(each)
            names = [self.name_of(source) for source in order.sources]
            if prefix not in names:
                continue
            source = names.index(prefix)
            if order not in in_order:
                in_order[order] = samples_with(order, source, begin, end, stop)
            low, high = (
                bisect_left(in_order[order], boundary) for boundary in (each.sample, each.stop)
            )
            for sample in in_order[order][low:high]:
                step = None
                if each.batch is not None:
                    step = each.iteration + 1 + (sample - each.sample) // each.batch
                rows = self.rows(order, sample, sample + 1)
                own = rows.of((rows.sources == source) & (rows.documents == document))
                parts = zip(own.begins.tolist(), own.lengths.tolist(), strict=True)
                reads += [Read(step, sample, b, b + n, each.reason) for b, n in parts]
        return reads


def _moves(orders: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return a mapping from each older name of a source that was moved to its newest name.

    ``orders`` are the recorded orders of samples, oldest first. A source counts as moved if the
    folder in its name changes, but neither the rest of the name nor its number of tokens.
    """
    moves = dict[str, str]()
    before = dict[str, int]()
    for order in orders:
        tokens: dict[str, int] = order["tokens"]
        for old in before.keys() - tokens.keys():
            for new in tokens.keys() - before.keys():
                same_name = new.rpartition("/")[2] == old.rpartition("/")[2]
                if same_name and tokens[new] == before[old]:
                    moves |= {name: new for name, last in moves.items() if last == old}
                    moves[old] = new
                    moves.pop(new, None)
        before = tokens
    return moves
