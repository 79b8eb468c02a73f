"""Drawing combinations: pairs that no case has had come first, and anything may meet anything."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.combinations.layouts import ONE, Layout
from tests.combinations.options import Option, joined, settings_of, words_of
from tests.combinations.programs import PROGRAMS, Program

CANDIDATES = 16
"""Options that are looked at for the next place of a case."""


@dataclass(frozen=True)
class Case:
    """One combination: texts of options in a layout, and names of further comparisons.

    `other` is the layout that the checkpoint is continued in, and `strike` the seed that says when
    a rank is killed.
    """

    number: int
    kind: str
    options: tuple[str, ...] = ()
    layout: Layout = ONE
    judges: tuple[str, ...] = ()
    other: Layout | None = None
    strike: int = 0

    @property
    def program(self) -> Program:
        return PROGRAMS[self.kind]

    def words(self, data: str, layout: Layout | None = None) -> list[str]:
        """Return the command line in its own layout or another; the model stays the same."""
        options = [words_of(text, data) for text in self.options]
        base, model = words_of(self.program.base, data), self.layout.model.split()
        # The layout's model comes before the options: an option about layers is what is tried.
        return joined([base, model, *options, (layout or self.layout).words])


@dataclass
class Draws:
    """Draws the cases of a program; `seen` holds pairs that an earlier case had."""

    program: Program
    dice: random.Random
    max_ranks: int = 8
    seen: set[tuple[str, str]] = field(default_factory=set)

    def case(self, number: int) -> Case:
        """Draw the next case: six options that bring new pairs, or two to five at random.

        The first one names a network, if the program has several.
        """
        dice = self.dice
        wide = dice.random() < 0.6
        first = dice.choice(self.program.networks or self._pool())
        chosen, settings = [first], dict(first.settings)
        count = 6 if wide else dice.randint(2, 5)
        experts = "num_experts" in settings or dice.random() < 0.15
        while len(chosen) < count:
            candidates = [dice.choice(self._pool()) for _ in range(CANDIDATES if wide else 1)]
            fitting = [
                option
                for option in candidates
                if option.agrees_with(settings) and not option.settings.keys() <= settings.keys()
            ]
            if not fitting:
                count -= 1
                continue
            best = max(fitting, key=lambda option: self._new(option, chosen))
            chosen.append(best)
            settings |= best.settings
        experts = experts or "num_experts" in settings
        if "moe" not in (*self.program.sections, *self.program.others):
            experts = False
        layout = self.layout(experts)
        if experts:
            layout = replace(layout, model=f"{layout.model} --num-experts 4".strip())
        case = Case(number, self.program.name, tuple(o.text for o in chosen), layout)
        names = [*case.options, *layout.pieces, f"{layout.ranks} ranks"]
        self.seen |= {(a, b) for a in names for b in names if a < b}
        return case

    def layout(self, experts: bool) -> Layout:
        while True:
            layout = self.program.layout(self.dice, experts)
            if layout.ranks <= self.max_ranks:
                return layout

    def other_layout(self, case: Case) -> Layout:
        """Draw a layout that a checkpoint of the case fits, which has its layers and experts."""
        given = settings_of(case.words(""))
        for _ in range(50):
            layout = self.layout("num_experts" in given)
            wanted = settings_of(layout.model.split()).items()
            if all(given.get(name) == value for name, value in wanted):
                return replace(layout, model="")
        return ONE

    def _pool(self) -> Sequence[Option]:
        """Return the options of the program's own sections three times out of four, else all."""
        options = self.program.options
        own = [option for option in options if option.section in self.program.sections]
        return own if self.dice.random() < 0.75 else options

    def _new(self, option: Option, chosen: Sequence[Option]) -> int:
        pairs = {tuple(sorted((option.text, other.text))) for other in chosen}
        return len(pairs - self.seen)


def as_pattern(case: Case) -> Case:
    """Return a case of GPT whose layers are spelled by a pattern, as far as its options allow.

    Half of the patterns are those of the GPT itself; the others have mixers and single parts.
    """
    given = settings_of(case.words(""))
    layers, depths, experts = (
        int(given.get(name, (True, ("0",)))[1][0])
        for name in ("num_layers", "mtp_num_layers", "num_experts")
    )
    dice = random.Random(case.number)
    latent = given.get("multi_latent_attention", (False, ()))[0]
    mixers = "*MGK" + "D" * bool(latent)
    mlps = ("E", "-", "") if experts else ("-", "-", "")
    kinds = ["*E" if experts else "*-"] * layers
    flags = f" --num-experts {experts}" if experts else ""
    if dice.random() < 0.5:
        kinds = [dice.choice(mixers) + dice.choice(mlps) for _ in kinds]
        if experts and not any("E" in kind for kind in kinds):
            kinds[-1] = kinds[-1][:1] + "E"
        flags += SIZES + SPARSE * bool(latent)
    pattern = "".join(kinds) + f"/{kinds[-1]}" * depths
    options = [x for x in case.options if not settings_of(x.split()).keys() & _NOT_BESIDE_PATTERNS]
    model = f"{case.layout.model} --num-layers {layers} --hybrid-layer-pattern {pattern}{flags}"
    return replace(case, options=tuple(options), layout=replace(case.layout, model=model))


SIZES = (
    " --linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 8"
    " --linear-value-head-dim 8 --mamba-num-heads 8 --mamba-num-groups 4 --mamba-head-dim 8"
    " --mamba-state-dim 8"
)
SPARSE = " --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 8 --dsa-indexer-topk 4"
_NOT_BESIDE_PATTERNS = {"hybrid_layer_pattern", "moe_layer_freq", "cuda_graph_impl"}


def has(words: Sequence[str], *fields: str) -> bool:
    settings = settings_of(words)
    return any(settings.get(name, (False, ()))[0] for name in fields)


def cases_of(
    kind: str, seed: int, count: int, judged: Mapping[str, int], max_ranks: int = 8
) -> list[Case]:
    """Draw all cases of a search, with so many of each comparison by its name in `judge.py`."""
    dice = random.Random(seed)
    draws = Draws(PROGRAMS[kind], dice, max_ranks=max_ranks)
    wanted, cases = dict(judged), []
    for number in range(count):
        case = draws.case(number)
        names = [name for name in wanted if dice.random() < wanted[name] / (count - number)]
        for name in names:
            wanted[name] -= 1
        other = draws.other_layout(case) if "relayout" in names else None
        strike = dice.randrange(10**6) if "kill" in names else 0
        names += ["unpaired"] if case.layout.unpaired != case.layout else []
        cases.append(replace(case, judges=tuple(names), other=other, strike=strike))
    return cases
