"""Layouts of 1 to 8 ranks, drawn at random or counted one by one."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_ext.config.parallel import V_SHAPED

TP, PP, CP = (f"--{kind}-parallel-size" for kind in ("tensor-model", "pipeline-model", "context"))
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
PAIRS = "--overlap-moe-expert-parallel-comm"
DELAY = "--delay-wgrad-compute"
EARLY = "--ep-overlap-early-attn-memory-release"
_DENSE = (TP, PP, CP)
VPP = "--num-virtual-stages-per-pipeline-rank"


@dataclass(frozen=True)
class Layout:
    """The way in which ranks share a model: flags that belong together, one text each.

    `model` are flags that a run on one rank must share, to be the same run.
    """

    ranks: int
    pieces: tuple[str, ...] = ()
    model: str = ""

    @property
    def words(self) -> list[str]:
        return [*" ".join(self.pieces).split(), "--nproc-per-node", str(self.ranks)]

    @property
    def replicas(self) -> int:
        sizes = [p.split()[p.split().index(k) + 1] for p in self.pieces for k in _DENSE if k in p]
        return self.ranks // math.prod(int(size) for size in sizes)

    @property
    def unpaired(self) -> "Layout":
        """Return this layout with passes that run one after the other."""
        pieces = (
            piece.replace(f"{PAIRS} ", "") for piece in self.pieces if piece not in (DELAY, EARLY)
        )
        return replace(self, pieces=tuple(pieces))

    def __str__(self) -> str:
        return " ".join([*self.words, *self.model.split()])


ONE = Layout(1)


def _factors(ranks: int, limits: tuple[int, int, int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (tp, pp, cp, dp) whose product is ``ranks``; the first three have ``limits``."""
    sizes = [[size for size in (1, 2, 4, 8) if size <= limit] for limit in limits]
    for tp, pp, cp in itertools.product(*sizes):
        if ranks % (tp * pp * cp) == 0:
            yield tp, pp, cp, ranks // (tp * pp * cp)


def draw(
    dice: random.Random,
    *,
    ranks: tuple[int, ...] = (1, 2, 2, 2, 2, 4, 4, 4, 8),
    experts: bool = False,
    limits: tuple[int, int, int] = (4, 4, 4),
    stages: tuple[str, ...] = (),
) -> Layout:
    """Draw a layout, with experts shared out too if asked for.

    ``limits`` are the largest sizes of tensor, pipeline and context parallelism, ``stages`` ways
    of sharing out layers in the place of all.
    """
    count = dice.choice(ranks)
    choices = list(_factors(count, limits))
    # A size of its own for each kind of parallelism is as likely as several at once.
    tp, pp, cp, dp = dice.choice(choices)
    pieces, model = [], []
    if tp > 1:
        pieces.append(f"{TP} {tp}")
        if experts or dice.random() < 0.5:
            pieces.append("--sequence-parallel")
    if pp > 1:
        pieces += _pipeline(dice, pp, model, stages)
    if cp > 1:
        pieces.append(f"{CP} {cp}")
        kinds = ["", "", "all_gather", "p2p"] + (["a2a"] if cp * tp <= 4 else [])
        if kind := dice.choice(kinds):
            pieces.append(f"--cp-comm-type {kind}")
    if experts:
        pieces += _experts(dice, count // pp, tp, model)
        pieces += _pairs(dice, pieces)
    if dice.random() < 0.1:
        pieces.append("--use-tp-pp-dp-mapping")
    if dp > 4:
        model.append("--global-batch-size 8")
    return Layout(count, tuple(pieces), " ".join(model))


def _pipeline(dice: random.Random, pp: int, model: list[str], stages: tuple[str, ...]) -> list[str]:
    """Draw how the layers are shared out; adds to ``model`` the number of layers that it needs."""
    first = f"{PP} {pp}"
    kinds = [
        "plain",
        "plain",
        "vpp",
        "vpp",
        "zb-h1",
        "zb-v",
        "dualpipe-v",
        "core-1f1b",
        "core-interleaved",
    ]
    kinds += ["uneven", "pattern", "account"] if pp == 2 else []
    kind = dice.choice(stages or kinds)
    if kind == "plain":
        model.append(f"--num-layers {pp}")
        return [first]
    if kind == "uneven":
        model.append("--num-layers 3")
        return [first, f"--decoder-{dice.choice(['first', 'last'])}-pipeline-num-layers 1"]
    if kind == "pattern":
        model.append("--num-layers 2")
        pattern = dice.choice(["Et|tL", "Ett|L", "E|ttL", "E|t|t|L"])
        return [f"{first} --pipeline-model-parallel-layout {pattern}"]
    if kind == "account":
        model.append("--num-layers 3")
        end = dice.choice(["embedding", "loss"])
        return [f"{first} --account-for-{end}-in-pipeline-split"]
    if kind in ("vpp", "core-interleaved"):
        model.append(f"--num-layers {2 * pp}")
        pieces = [f"{first} {VPP} 2"]
        if kind == "core-interleaved":
            pieces.append("--pipeline-schedule core-interleaved")
        elif dice.random() < 0.3:
            pieces = [f"{first} --num-layers-per-virtual-pipeline-stage 1"]
        if dice.random() < 0.2:
            pieces.append(f"--microbatch-group-size-per-vp-stage {pp}")
        return pieces
    model.append(f"--num-layers {2 * pp if kind in V_SHAPED else pp}")
    if kind in V_SHAPED:
        model.append("--untie-embeddings-and-output-weights")
    return [first, f"--pipeline-schedule {kind}"]


def _experts(dice: random.Random, ranks: int, tp: int, model: list[str]) -> list[str]:
    pairs = [(ep, etp) for ep in (1, 2, 4) for etp in (1, 2, 4) if ranks % (ep * etp) == 0]
    choices = [pair for pair in pairs if pair != (1, tp)]
    if not choices:
        return []
    ep, etp = dice.choice(choices)
    pieces = [f"{EP} {ep}"] if ep > 1 else []
    if etp != tp or dice.random() < 0.2:
        pieces.append(f"{ETP} {etp}")
    if etp > 1 and dice.random() < 0.9:
        model.append("--disable-bias-linear")  # experts with biases are refused there
    return pieces


_UNPAIRED = ("zb-", "core-")
"""The schedules that have no pairs begin so."""


def _pairs(dice: random.Random, pieces: list[str]) -> list[str]:
    """Draw whether passes run in pairs that hide the exchange of experts, if these pieces can."""
    words = " ".join(pieces)
    if EP not in words or any(f"schedule {name}" in words for name in _UNPAIRED):
        return []
    if dice.random() < 0.4:
        return []
    kind = dice.choice(["alltoall", "alltoall", "flex --moe-ranks-per-node 1"])
    paired = f"{PAIRS} --moe-token-dispatcher-type {kind}"
    return [paired, *(flag for flag in (DELAY, EARLY) if dice.random() < 0.5)]


SIMPLE = (
    ONE,
    Layout(2, (f"{TP} 2",)),
    Layout(2, (f"{TP} 2", "--sequence-parallel")),
    Layout(2, (f"{PP} 2",)),
    Layout(2, (f"{CP} 2",)),
    Layout(2),
    Layout(2, (f"{EP} 2",)),
    Layout(2, (f"{EP} 2", f"{PAIRS} --moe-token-dispatcher-type alltoall")),
    Layout(2, (f"{PP} 2 {VPP} 2",), "--num-layers 4"),
    Layout(2, (f"{TP} 2", "--sequence-parallel", f"{ETP} 1")),
    Layout(2, (f"{TP} 2", "--sequence-parallel", f"{EP} 2", f"{ETP} 1")),
)
"""Layouts on which a failure is tried first, the simplest one first."""
