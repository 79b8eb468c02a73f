"""Gives the values of flags as Megatron-LM takes them, its defaults included."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from megatron_ext.inspect.audit.expand import readable, unknowns
from megatron_ext.inspect.audit.launches import Launch

_REPEATED = re.compile(r"\(([^()]*)\)\*(\d+)")
"""A repeated piece of a layout, such as ``(tt|)*3``."""


_SWITCH = re.compile(
    r"--(?:no-|use-(?!cpu-init)|overlap-|disable-|untie-|eod-|reset-|bf16$|fp16$|swiglu$|sft$"
    r"|sequence-parallel$|calculate-per-token-loss$|mock-data$|group-query-attention$"
    r"|manual-gc$|log-throughput$|moe-grouped-gemm$|override-opt|moe-permute-fusion$)"
)
"""Flags without a value: an open word behind one may hold further flags."""


class Undecided(Exception):
    """A value that the script leaves open and that decides whether a defect is hit."""

    def __init__(self, flag: str, value: str) -> None:
        super().__init__(f"`{flag}` is `{readable(value)}`, which the script leaves open")
        self.names = unknowns(value)


class Flags:
    """The flags of one launch.

    A flag that is given twice has its last value, as in argparse.
    """

    def __init__(self, launch: Launch) -> None:
        self.program = launch.program.rsplit("/", 1)[-1]
        self.values: dict[str, tuple[str, ...]] = {}
        self.open: list[str] = []
        current = ""
        for word in _words(launch.words):
            name, sign, value = word.partition("=")
            if word.startswith("--"):
                current = name
                self.values[current] = (value,) if sign else ()
            elif unknowns(word) and (not current or self._complete(current)):
                self.open.append(word)
            elif current:
                self.values[current] = (*self.values[current], word)
        self.used: list[str] = []

    def _complete(self, name: str) -> bool:
        """Return whether a flag takes no further value, as far as its name and values tell."""
        return bool(_SWITCH.match(name) or (self.values[name] and "data" not in name))

    def has(self, *names: str) -> bool:
        """Return whether one of the flags is given, and keep it as used."""
        found = [name for name in names if name in self.values]
        self.used += found
        return bool(found)

    def text(self, name: str, default: str = "") -> str:
        """Return the values of a flag, joined by blanks.

        Raises:
            Undecided: the script leaves the value open.
        """
        if name not in self.values:
            return default
        self.used.append(name)
        value = " ".join(self.values[name])
        if unknowns(value):
            raise Undecided(name, value)
        return value.strip("'\"")

    def number(self, name: str, default: float) -> float:
        """Return the first value of a flag as a number.

        Raises:
            Undecided: the script leaves the value open, or it is no number.
        """
        text = self.text(name).split()
        if not text:
            return default
        try:
            return float(text[0].strip("[],"))
        except ValueError:
            raise Undecided(name, " ".join(self.values[name])) from None

    def size(self, name: str, default: int = 1) -> int:
        """Return the value of a flag as an integer; see `number`."""
        return int(self.number(name, default))

    @property
    def tp(self) -> int:
        """The tensor-parallel size."""
        return self.size("--tensor-model-parallel-size")

    @property
    def pp(self) -> int:
        """The pipeline-parallel size."""
        return self.size("--pipeline-model-parallel-size")

    @property
    def cp(self) -> int:
        """The context-parallel size."""
        return self.size("--context-parallel-size")

    @property
    def ep(self) -> int:
        """The expert-parallel size."""
        return self.size("--expert-model-parallel-size")

    @property
    def etp(self) -> int:
        """The expert-tensor-parallel size, by default the tensor-parallel size."""
        return self.size("--expert-tensor-parallel-size", self.tp)

    @property
    def sequence_parallel(self) -> bool:
        """Whether sequences are split over tensor-parallel ranks."""
        return self.has("--sequence-parallel") and self.tp > 1

    @property
    def experts(self) -> bool:
        """Whether the model has experts."""
        return self.size("--num-experts", 0) > 0

    @property
    def mtp(self) -> int:
        """The number of depths of multi-token prediction."""
        return self.size("--mtp-num-layers", 0)

    @property
    def per_token(self) -> bool:
        """Whether the loss is divided by the tokens of the global batch; not by default."""
        return self.has("--calculate-per-token-loss")

    @property
    def masked(self) -> bool:
        """Whether targets are masked: ends of documents, or prompts of fine-tuning."""
        return self.has("--eod-mask-loss", "--sft")

    @property
    def interleaved(self) -> bool:
        """Whether pipeline stages have several chunks."""
        layout = self.text("--pipeline-model-parallel-layout")
        if layout:
            whole = _REPEATED.sub(lambda x: x[1] * int(x[2]), layout)
            return whole.count("|") + 1 > self.pp
        if self.has("--num-virtual-stages-per-pipeline-rank"):
            return self.size("--num-virtual-stages-per-pipeline-rank") > 1
        if self.has("--num-layers-per-virtual-pipeline-stage"):
            layers = self.size("--num-layers", 0) or self.size("--decoder-num-layers", 0)
            each = self.size("--num-layers-per-virtual-pipeline-stage")
            return layers == 0 or layers // self.pp > each
        return False

    @property
    def resumes(self) -> bool:
        """Whether the optimizer's state is loaded."""
        return self.has("--load") and not self.has("--no-load-optim", "--finetune")

    @property
    def biases(self) -> bool:
        """Whether linear layers have biases, as they have by default."""
        return not self.has("--disable-bias-linear")


def _words(words: Sequence[str]) -> list[str]:
    """Return words; one that holds a flag and its values, in quotes, is split."""
    found: list[str] = []
    for word in words:
        split = word.split()
        several = word.startswith("--") and len(split) > 1 and "=" not in split[0]
        found += split if several else [word]
    return found


def holds(*conditions: Callable[[], bool]) -> bool:
    """Return whether all conditions hold; one that fails decides, whatever others leave open.

    Raises:
        Undecided: none fails, but one is open.
    """
    undecided: Undecided | None = None
    for condition in conditions:
        try:
            if not condition():
                return False
        except Undecided as error:
            undecided = undecided or error
    if undecided:
        raise undecided
    return True
