"""Compares every layout of experts with one rank: losses, norms, and each parameter's gradient."""

import argparse
import random
import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from megatron_ext.device import select
from megatron_ext.inspect.layouts import NamedLayout, parse_layout
from megatron_ext.inspect.parity import (
    Parity,
    Recording,
    Tolerances,
    compare,
    record,
)
from megatron_ext.text.task import TEXT
from tests.combinations.execute import execute, work_directory

STEPS = 2
SIZES = (1, 2, 4, 8)
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 8 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --lr 1 --adam-eps 1 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 16 "
    "--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1 --num-workers 0 "
    "--num-experts 8 --disable-bias-linear --untie-embeddings-and-output-weights"
)
KINDS = {
    "plain": "",
    "alltoall": "--moe-token-dispatcher-type alltoall",
    "two hops": "--moe-token-dispatcher-type flex --moe-ranks-per-node 2 --moe-router-topk 3",
    "kept": "--moe-token-dispatcher-type alltoall --moe-keep-dispatched-tokens "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "kept in two hops": "--moe-token-dispatcher-type flex --moe-ranks-per-node 2 "
    "--moe-keep-dispatched-tokens --moe-layer-recompute",
    "balanced": "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 "
    "--moe-z-loss-coeff 0.001",
    "shared": "--moe-shared-expert-intermediate-size 24 --moe-token-dispatcher-type alltoall",
    "swiglu": "--swiglu --use-distributed-optimizer --moe-router-score-function sigmoid",
}
"""Kinds of experts; each has every layout."""


def layouts(max_ranks: int) -> Iterator[str]:
    for ranks in (size for size in SIZES if size <= max_ranks):
        for tp, cp, pp, ep, etp in product(SIZES, SIZES, SIZES[:3], SIZES, SIZES):
            if ranks % (tp * cp * pp) == 0 and ranks // pp % (ep * etp) == 0:
                sp = "sp" if tp > 1 else ""
                yield f"tp{tp}{sp}etp{etp}ep{ep}cp{cp}pp{pp}dp{ranks // (tp * cp * pp)}"


def check(layout: NamedLayout, words: list[str], truth: Recording, folder: Path) -> Parity:
    mine = record(TEXT, words, layout, STEPS, folder, select())
    return compare(mine, truth, Tolerances(loss=1e-5, gradient=1e-5))


def search(arguments: argparse.Namespace, data: Path) -> int:
    """Compare every layout of each kind, or as many as are asked for; print what differs."""
    names = [(kind, name) for kind in KINDS for name in layouts(arguments.max_ranks)]
    if arguments.cases is not None and arguments.cases < len(names):
        names = random.Random(arguments.seed).sample(names, arguments.cases)
    failures = refused = 0
    for kind in KINDS:
        mine = [name for of, name in names if of == kind]
        if not mine:
            continue
        words = f"{MODEL} {KINDS[kind]}".split()
        with work_directory(data) as folder:
            truth = record(TEXT, words, parse_layout("dp1"), STEPS, folder / "one", select())
            for number, name in enumerate(mine):
                verdict = _in_a_process(name, words, truth, folder, number, arguments.limit)
                failures += verdict not in ("right", "refused")
                refused += verdict == "refused"
                if verdict not in ("right", "refused"):
                    print(f"FAILED {kind} {name}: {verdict}\n  {command(name, words)}", flush=True)
                elif arguments.verbose:
                    print(f"{kind} {name}: {verdict}", flush=True)
    print(f"\n{len(names)} layouts of experts: {failures} failed, {refused} refused")
    return int(failures > 0)


def _in_a_process(
    name: str, words: list[str], truth: Recording, folder: Path, number: int, limit: float
) -> str:
    layout, answer = parse_layout(name), folder / f"answer_{number}"

    def main() -> int:
        parity = check(layout, words, truth, folder / f"run_{number}")
        answer.write_text(_sentence(parity))
        return 0

    ended = execute(main, folder, name=f"r{number}", limit=limit * (1 + layout.ranks))
    if ended.code is None:
        return "hang"
    if not answer.exists():
        return f"exit code {ended.code}: {ended.err.strip().splitlines()[-1:]}"
    return answer.read_text()


def _sentence(parity: Parity) -> str:
    if parity.recording.failure is not None and "rank ended" not in parity.recording.failure:
        return "refused"
    if parity.problem is not None:
        return parity.problem
    if parity.first is not None:
        first = parity.first
        return f"step {first.step}: {first.name} differs by {first.size:.1e}"
    return "right"


def command(name: str, words: list[str]) -> str:
    return f"python tools/parity.py --steps {STEPS} --layouts {name} -- {shlex.join(words)}"
