"""Draws combinations of flags, runs them, and shrinks what fails to one command.

python tests/combinations/run.py --seed 7 --cases 100
python tests/combinations/run.py --seed 7 --cases 1000 --resume 200 --relayout 200 --jobs 2
python tests/combinations/run.py --seed 7 --cases 100 --kill 100
python tests/combinations/run.py --seed 7 --cases 200 --patterns
python tests/combinations/run.py --replay 'CASE'    # as a failure prints it
"""

import argparse
import dataclasses
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.combinations import conversion, experts, inputs, preprocess
from tests.combinations.draw import Case, as_pattern, cases_of
from tests.combinations.execute import load, side_by_side, work_directory
from tests.combinations.judge import Verdict, judge
from tests.combinations.layouts import Layout
from tests.combinations.programs import PROGRAMS
from tests.combinations.shrink import shrink

OTHERS = {"experts": experts, "preprocess": preprocess, "conversion": conversion}
"""Kinds of searches that are no training runs of drawn flags."""


@dataclasses.dataclass
class Result:
    """The result of one draw: a verdict for each set of options that was tried; the last counts.

    `case` is the case without the options that were dropped.
    """

    case: Case
    verdicts: list[Verdict]
    shrunk: Case | None = None


def settle(
    case: Case, data: Path, limit: float, known: list[dict[str, object]], *, shrinks: bool = True
) -> Result:
    """Judge a case; if it is refused, drop one option after the other until it trains."""
    dice = random.Random(case.number)
    verdicts = []
    while True:
        with work_directory(data) as folder:
            verdict = judge(case, data, folder, limit)
        verdicts.append(verdict)
        if verdict.failed:
            alike = [entry for entry in known if entry["signature"] == list(verdict.signature)]
            # A known failure of the same kind may need no more than what this case has.
            if not shrinks or any(set(entry["options"]) <= set(case.options) for entry in alike):
                return Result(case, verdicts)
            print(f"{case.number}: {verdict.kind}, is shrunk:\n{verdict.text}", flush=True)
            small, final = shrink(case, verdict, data, limit)
            verdicts[-1] = final
            return Result(case, verdicts, small)
        if verdict.kind == "trained" or not case.options:
            return Result(case, verdicts)
        drop = dice.choice(blamed(case, verdict.text))
        case = dataclasses.replace(case, options=tuple(x for x in case.options if x != drop))


def blamed(case: Case, sentences: str) -> list[str]:
    """Return the options of which a refusal names the most flags."""
    named = set(re.findall(r"--[\w-]+", sentences))
    hits = {text: len(named & set(text.split())) for text in case.options}
    return [text for text in case.options if hits[text] == max(hits.values())]


def search(cases: list[Case], arguments: argparse.Namespace) -> int:
    data = inputs.make(arguments.data)
    load()
    counts: Counter[str] = Counter()
    largest: dict[str, float] = {}
    known: list[dict[str, object]] = []
    begin = time.monotonic()
    output = arguments.output.open("a") if arguments.output else None

    def work() -> Iterator[Any]:
        for case in cases:
            if arguments.minutes and time.monotonic() - begin > 60 * arguments.minutes:
                return
            yield settle, (case, data, arguments.limit, list(known))

    done = 0
    for result in side_by_side(work(), arguments.jobs):
        done += 1
        if arguments.verbose:
            print(line_of(result), flush=True)
        entry = count(result, counts, known)
        for name, size in result.verdicts[-1].largest.items():
            largest[name] = max(size, largest.get(name, 0.0))
        if entry is not None:
            if output:
                print(json.dumps(entry), file=output, flush=True)
            report(entry)
        if done % 25 == 0:
            print(f"{done}/{len(cases)} in {time.monotonic() - begin:.0f} s", flush=True)
    print(f"\n{done} cases in {time.monotonic() - begin:.0f} s")
    for name, size in largest.items():
        print(f"{name}: losses in fp32 differ by {size:.1e} at most")
    for name, number in sorted(counts.items()):
        print(f"{number:7d}  {name}")
    return int(any(name.startswith("failed") for name in counts))


def count(
    result: Result, counts: Counter[str], known: list[dict[str, object]]
) -> dict[str, object] | None:
    """Count the verdicts of a case, and return the record of a failure that is new."""
    for verdict in result.verdicts:
        counts[verdict.kind if not verdict.failed else f"failed: {verdict.kind}"] += 1
        counts.update(f"compared: {name}" for name in verdict.compared)
        counts.update(f"excused: {name}: {text[:90]}" for name, text in verdict.excused.items())
    last = result.verdicts[-1]
    if not last.failed or result.shrunk is None:
        return None
    entry = {
        "number": len(known) + 1,
        "kind": last.kind,
        "signature": list(last.signature),
        "options": list(result.shrunk.options),
        "layout": str(result.shrunk.layout),
        "other": str(result.shrunk.other or ""),
        "replay": replay_text(result.shrunk),
        "commands": last.commands,
        "text": last.text,
    }
    again = any(e["signature"] == entry["signature"] and e["options"] == entry["options"]
                for e in known)  # fmt: skip
    known.append(entry)
    return None if again else entry


def line_of(result: Result) -> str:
    refusals = "".join(f"\n    {x.text}" for x in result.verdicts if x.kind == "refused")
    last = result.verdicts[-1]
    passed = ", ".join(last.compared)
    shown = f"{last.kind} {last.seconds:.1f} s [{passed}] {result.case.layout}"
    return f"{result.case.number}: {shown}{refusals}"


def report(entry: dict[str, object]) -> None:
    print(f"\nFAILED {entry['number']}: {entry['kind']}: {entry['options']} {entry['layout']}")
    for command in entry["commands"]:  # type: ignore[attr-defined]
        print(f"  {command}")
    print("  | " + "\n  | ".join(str(entry["text"]).splitlines()[-14:]))
    print(f"  replay: python tests/combinations/run.py --replay '{entry['replay']}'\n", flush=True)


def replay_text(case: Case) -> str:
    return json.dumps(dataclasses.asdict(case))


def replayed(text: str) -> Case:
    entry = json.loads(text)
    for name in ("layout", "other"):
        if entry[name] is not None:
            entry[name] = Layout(**{**entry[name], "pieces": tuple(entry[name]["pieces"])})
    lists = {name: tuple(entry[name]) for name in ("options", "judges")}
    return Case(**{**entry, **lists})


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=[*PROGRAMS, *OTHERS], default="gpt")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, help="default: 100, of experts every layout")
    parser.add_argument("--start", type=int, default=0, help="cases of the seed to leave out")
    parser.add_argument("--resume", type=int, help="cases that are resumed; default: a fifth")
    parser.add_argument("--relayout", type=int, help="cases continued in another layout")
    parser.add_argument("--one", type=int, help="cases compared with one rank; default: half")
    parser.add_argument("--kill", type=int, help="cases in which a rank is killed")
    parser.add_argument("--having", default="", help="a flag; leave out layouts without it")
    parser.add_argument(
        "--patterns", action="store_true", help="spell the layers of GPTs by patterns of all kinds"
    )
    parser.add_argument("--max-ranks", type=int, default=8, help="of a layout")
    parser.add_argument("--jobs", type=int, default=1, help="cases side by side")
    parser.add_argument("--minutes", type=float, help="start no case after this")
    parser.add_argument("--limit", type=float, default=30, help="seconds of a run that hangs")
    parser.add_argument("--output", type=Path, help="a file that failures are appended to")
    parser.add_argument("--data", type=Path, default=inputs.USUAL_PLACE, help="folder of inputs")
    parser.add_argument("--verbose", action="store_true", help="a line for each case")
    parser.add_argument("--replay", help="one case, as a failure prints it")
    arguments = parser.parse_args(argv)
    if arguments.kind in OTHERS:
        load()
        return OTHERS[arguments.kind].search(arguments, inputs.make(arguments.data))
    arguments.cases = 100 if arguments.cases is None else arguments.cases
    for name, share in (("resume", 5), ("relayout", 5), ("one", 2), ("kill", 5)):
        if getattr(arguments, name) is None:
            setattr(arguments, name, arguments.cases // share)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments.replay is not None:
        return search([replayed(arguments.replay)], arguments)
    judged = {"resume": arguments.resume, "relayout": arguments.relayout, "one rank": arguments.one}
    judged["kill"] = arguments.kill
    number = arguments.start + arguments.cases
    cases = cases_of(arguments.kind, arguments.seed, number, judged, arguments.max_ranks)
    cases = [case for case in cases[arguments.start :] if arguments.having in str(case.layout)]
    if arguments.patterns:
        cases = [as_pattern(case) for case in cases]
    return search(cases, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
