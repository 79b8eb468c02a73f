"""Judges a case: it must train, or be refused, and then resume and agree with other layouts."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.extras.chaos.inject import as_variable, record_file
from tests.checkpoint.tiny import whole_tensors
from tests.combinations import kills
from tests.combinations.draw import Case, has
from tests.combinations.exceptions import (
    NOT_IN_LOGS,
    is_averaged,
    reason_continuation_differs,
    reason_layouts_differ,
    reason_replicas_differ,
    reason_restart_differs,
    reason_resume_differs,
    reason_starts_differ,
    report_of_fewer_steps,
    tolerance_of,
)
from tests.combinations.execute import Ended, execute
from tests.combinations.layouts import ONE, Layout
from tests.combinations.options import settings_of
from tests.ranks import slowdown

CHANCE_ZEROS = 10
"""Gradients of a tiny model that rounding makes zero in one layout and not in another."""


@dataclass
class Verdict:
    """The result of a case: "trained", "refused", or the kind of failure, and what tells of it.

    `excused` holds comparisons that were left out with the reason from the documentation,
    `largest` the largest relative difference of a loss in fp32 by comparison.
    """

    kind: str
    text: str = ""
    commands: list[str] = field(default_factory=list)
    excused: dict[str, str] = field(default_factory=dict)
    compared: list[str] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.kind not in ("trained", "refused")

    @property
    def signature(self) -> tuple[str, str]:
        """Return what failures of one cause share, as far as their last line tells."""
        last = self.text.strip().splitlines()[-1:] or [""]
        return self.kind, re.sub(r"[\d.e+-]+|0x\w+", "#", last[0])[:160]


class _Failed(Exception):
    """A failure: its kind and its text."""


@dataclass
class Bench:
    """The place where the runs of one case happen; one hangs after ``limit`` seconds."""

    case: Case
    data: Path
    folder: Path
    limit: float
    verdict: Verdict = field(default_factory=lambda: Verdict("trained"))

    def run(
        self,
        name: str,
        more: Sequence[str] = (),
        layout: Layout | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Ended:
        words = self.case.words(str(self.data), layout)
        saved = "--save-interval" in words
        interval = [] if saved else ["--save-interval", str(self.case.program.saved_at)]
        words = [*words, "--save", name, *interval, *more]
        self.verdict.commands.append(shown(self.case, words, environment or {}))
        ranks = (layout or self.case.layout).ranks
        limit = self.limit * (1 + ranks / 4) * slowdown()
        return execute(
            lambda: self.case.program.main(words), self.folder, name=name, limit=limit,
            pictures=self.case.number % 16 == 0, environment=environment,
        )  # fmt: skip

    def trained(self, ended: Ended, *, goes_on: bool = False) -> bool:
        """Return whether the run trained; False if it was refused as it should be.

        A run that goes on from a checkpoint may have no step left. Losses and norms must be
        numbers, except where fp16 skips a step.
        """
        if ended.code == 2 and not ended.started:
            check_sentences(ended)
            return False
        check_end(ended)
        if not _trains(self.case.words(str(self.data))):
            return True
        rows = steps(ended)
        if not rows and not goes_on:
            raise _Failed("no rows", "metrics.jsonl holds no step")
        for row in rows:
            for name, value in row.items():
                counts = not row.get("skipped_iterations") and ("loss" in name or "norm" in name)
                if counts and isinstance(value, float) and not math.isfinite(value):
                    raise _Failed("not finite", f"step {row['iteration']}: {name} is {value}")
        return True


def judge(case: Case, data: Path, folder: Path, limit: float = 30.0) -> Verdict:
    bench = Bench(case, data, folder, limit)
    begin = time.monotonic()
    try:
        first = bench.run("a")
        if not bench.trained(first):
            bench.verdict.kind, bench.verdict.text = "refused", first.err.strip()
        elif _trains(case.words(str(data))):
            for name in case.judges:
                _JUDGES[name](bench, first)
    except _Failed as found:
        bench.verdict.kind, bench.verdict.text = found.args
    bench.verdict.seconds = time.monotonic() - begin
    return bench.verdict


def check_sentences(ended: Ended) -> None:
    """Check that a refusal is one sentence for each error, and nothing else."""
    lines = [x for x in ended.err.strip().splitlines() if not x.startswith(("WARNING:", "> "))]
    if "Traceback" in ended.err:
        raise _Failed("traceback", tail(ended))
    odd = [x for x in lines if not x.startswith("error: ") or not x.rstrip().endswith((".", "."))]
    if odd or not lines:
        raise _Failed("refused without a sentence", "\n".join(odd[:5]) or "nothing is printed")
    if ended.left:
        raise _Failed("left behind", "; ".join(ended.left))


def check_end(ended: Ended) -> None:
    if ended.code is None:
        blocks = re.split(r"(?:Current thread|Thread) 0x\w+ \(most recent call first\):", ended.err)
        stacks = {"\n".join(block.strip().splitlines()[:5]) for block in blocks[1:]}
        raise _Failed("hang", "\n--\n".join(sorted(stacks)) + "\nhang")
    if "Traceback" in ended.err:
        raise _Failed("traceback", tail(ended))
    if ended.code == 2 and ended.started:
        raise _Failed("refused late", tail(ended))
    if ended.code != 0:
        raise _Failed(f"exit code {ended.code}", tail(ended))
    if ended.left:
        raise _Failed("left behind", "; ".join(ended.left))


def tail(ended: Ended, lines: int = 12) -> str:
    """Return the last lines that say something; the exception's own line comes last."""
    text = [x for x in ended.err.splitlines() if x.strip() and "Warning" not in x]
    errors = [x for x in text if re.match(r"^(\[rank \d+\] )?[\w.]*(Error|Exception|Exit)\b", x)]
    return "\n".join([*text[-lines:], *errors[:1]])


def steps(ended: Ended) -> list[dict[str, Any]]:
    return [row for row in ended.rows if row["kind"] == "train"]


def _trains(words: Sequence[str]) -> bool:
    return not has(words, "dry_run", "skip_train", "print_config")


def logged(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if not any(word in k for word in NOT_IN_LOGS)}


def goes_on(bench: Bench, step: int) -> list[str]:
    mode = "resume_mode" in settings_of(bench.case.words(str(bench.data)))
    return [*["--resume-mode", "path"] * mode, "--load", "a", "--ckpt-step", str(step)]


def _resume(bench: Bench, first: Ended) -> None:
    """Continue from the middle; neither the rows nor the last checkpoint may differ in a bit."""
    at = bench.case.program.saved_at
    if not (bench.folder / "a" / f"iter_{at:07d}").is_dir():
        bench.verdict.excused["resume"] = "the flags keep no checkpoint of that step"
        return
    second = bench.run("b", goes_on(bench, at))
    if not bench.trained(second, goes_on=True):
        raise _Failed("resume refused", second.err.strip())
    if reason := reason_resume_differs(bench.case.words(str(bench.data))):
        bench.verdict.excused["resume"] = reason
        return
    wanted = {row["iteration"]: logged(row) for row in steps(first) if row["iteration"] > at}
    got = {row["iteration"]: logged(row) for row in steps(second)}
    _equal(bench, "resume", "b", got, wanted)
    bench.verdict.compared.append("resume")


def _relayout(bench: Bench, first: Ended) -> None:
    at = bench.case.program.saved_at
    if (bench.folder / "a" / f"iter_{at:07d}").is_dir():
        _elsewhere(bench, "relayout", first, bench.case.other or ONE, at)
    else:
        bench.verdict.excused["relayout"] = "the flags keep no checkpoint of that step"


def _one_rank(bench: Bench, first: Ended) -> None:
    if bench.case.layout.ranks > 1:
        _elsewhere(bench, "one rank", first, ONE)


def _unpaired(bench: Bench, first: Ended) -> None:
    """Train without pairs of passes; neither the rows nor the last checkpoint may differ."""
    layout = bench.case.layout
    if layout.unpaired == layout:
        return
    second = bench.run("u", layout=layout.unpaired)
    if not bench.trained(second):
        raise _Failed("unpaired refused", second.err.strip())
    wanted, got = ({row["iteration"]: logged(row) for row in steps(x)} for x in (second, first))
    _equal(bench, "unpaired", "u", got, wanted)
    bench.verdict.compared.append("unpaired")


def _elsewhere(bench: Bench, name: str, first: Ended, layout: Layout, at: int = 0) -> None:
    """Train in another layout, from the checkpoint of a step or from the start, and compare."""
    words, pair = bench.case.words(str(bench.data)), [bench.case.layout, layout]
    reason = reason_layouts_differ(words, pair) or reason_replicas_differ(bench.case.kind, pair)
    reason = (reason_resume_differs(words) if at else reason_starts_differ(words, pair)) or reason
    # What goes on must run even where its numbers may differ.
    if at or not reason:
        second = bench.run("c" if at else "d", goes_on(bench, at) if at else (), layout)
        if not bench.trained(second, goes_on=at > 0):
            reason = f"refused: {second.err.strip()}"
        reason = reason or reason_continuation_differs(second.out)
    if reason:
        bench.verdict.excused[name] = reason
    elif not _vocabularies_differ(bench, name, first, second):
        mine, theirs = (
            {row["iteration"]: logged(row) for row in steps(ended) if row["iteration"] > at}
            for ended in (first, second)
        )
        _close(bench, name, *((theirs, mine) if at else (mine, theirs)))


def _kill(bench: Bench, first: Ended) -> None:
    """Kill a rank; the run goes on, and neither the rows nor the last checkpoint may differ."""
    words, strike = bench.case.words(str(bench.data)), bench.case.strike
    folders = [bench.folder / name for name in ("k.faults", "a", "k")]
    folders[0].mkdir()
    fault = kills.draw(strike, steps(first))
    more = kills.flags(strike, words)
    second = bench.run("k", more, environment=as_variable([fault], folders[0]))
    if not bench.trained(second):
        raise _Failed("kill refused", second.err.strip())
    if not record_file(folders[0], 0).exists():
        bench.verdict.excused["kill"] = f"the run has no {fault.at} to be killed in"
        return
    if problems := kills.problems(*folders):
        raise _Failed("kill untold or unfinished", "\n".join(problems))
    source, restored = kills.restart_of(folders[2])
    if reason := reason_restart_differs(words, source, restored):
        bench.verdict.excused["kill"] = reason
        return
    wanted, got = ({row["iteration"]: logged(row) for row in steps(x)} for x in (first, second))
    short = report_of_fewer_steps(words, restored)
    for rows in (wanted, got):
        if short in rows:
            rows[short] = {k: v for k, v in rows[short].items() if not is_averaged(k)}
    _equal(bench, "kill", "k", got, wanted)
    bench.verdict.compared.append(f"kill, restarted from {source}")


_JUDGES = {
    "resume": _resume,
    "relayout": _relayout,
    "one rank": _one_rank,
    "kill": _kill,
    "unpaired": _unpaired,
}


def _vocabularies_differ(bench: Bench, name: str, a: Ended, b: Ended) -> bool:
    """Excuse the comparison if two layouts pad the vocabulary to two sizes."""
    sizes = [re.findall(r"padded[_-]vocab[_-]size:? (\d+)", x.out)[:1] for x in (a, b)]
    if sizes[0] != sizes[1]:
        bench.verdict.excused[name] = "the padding of the vocabulary takes part in the softmax"
    return sizes[0] != sizes[1]


def _close(bench: Bench, name: str, got: dict[int, Any], wanted: dict[int, Any]) -> None:
    """Check that losses and gradient norms agree to the tolerance of their precision and step."""
    if got.keys() != wanted.keys():
        raise _Failed(f"{name} differs", f"steps {sorted(got)} instead of {sorted(wanted)}")
    words = bench.case.words(str(bench.data))
    start = min(wanted, default=0)
    for step in sorted(wanted):
        for key, want in wanted[step].items():
            if not isinstance(want, float) or "loss_scale" in key:
                continue
            if "attention_logit" in key:
                continue  # one product of many, which is less exact than a mean
            have = got[step].get(key, math.nan)
            if not math.isfinite(want) and not math.isfinite(have):
                continue  # a step of fp16 that is skipped
            if "num_zeros" in key and abs(have - want) <= CHANCE_ZEROS:
                continue
            limit = tolerance_of(words, key, step - start)
            if "loss" in key and limit < 1e-4:
                size = abs(have - want) / max(abs(want), 1e-3)
                bench.verdict.largest[name] = max(size, bench.verdict.largest.get(name, 0.0))
            if not abs(have - want) <= limit * max(abs(want), 1e-3):
                size = abs(have - want) / max(abs(want), 1e-30)
                text = f"step {step}: {key} is {have!r} for {want!r} ({size:.1e} > {limit:.0e})"
                raise _Failed(f"{name} differs", text)
    bench.verdict.compared.append(name)


def _equal(bench: Bench, name: str, run: str, got: dict[int, Any], wanted: dict[int, Any]) -> None:
    """Check that the rows are equal, and the last checkpoint of a run to that of the first run."""
    if wanted != got:
        raise _Failed(f"{name} differs", _first_difference(got, wanted))
    if names := differing_last(bench, run):
        raise _Failed(f"{name} differs", f"in the last checkpoint: {', '.join(names[:5])}")


def _first_difference(got: dict[int, Any], wanted: dict[int, Any]) -> str:
    if got.keys() != wanted.keys():
        return f"steps {sorted(got)} instead of {sorted(wanted)}"
    for step in sorted(wanted):
        for key in sorted(wanted[step].keys() | got[step].keys()):
            have, want = got[step].get(key), wanted[step].get(key)
            if have != want:
                return f"step {step}: {key} is {have!r} for {want!r}"
    return ""


def differing_last(bench: Bench, name: str) -> list[str]:
    """Return tensors in which the last checkpoint of a run differs from that of the first run."""
    last = f"iter_{bench.case.program.iterations:07d}"
    folders = [bench.folder / run / last for run in ("a", name)]
    if not folders[0].is_dir():
        return []
    return differing_tensors(*folders) if folders[1].is_dir() else ["all, for there is none"]


def differing_tensors(a: Path, b: Path) -> list[str]:
    """Return names of tensors that only one of two checkpoints has, or that differ in bits."""
    mine, theirs = (whole_tensors(path, path.with_suffix(".whole")) for path in (a, b))
    return [
        name
        for name in sorted(mine.keys() | theirs.keys())
        # Padding of these buffers is whatever memory held before; what they hold decides the rows.
        if "dp_group_idx" not in name
        and not (name in mine and name in theirs and _same(mine[name], theirs[name]))
    ]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


def shown(case: Case, words: Sequence[str], environment: Mapping[str, str]) -> str:
    import shlex

    before = "".join(f"{name}={shlex.quote(value)} " for name, value in environment.items())
    return f"{before}python {case.program.script} {shlex.join(words)}"
