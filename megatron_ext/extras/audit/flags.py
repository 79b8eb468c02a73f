"""Reads the values of flags as Megatron-LM does, including its defaults."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_REPEATED = re.compile(r"\(([^()]*)\)\*(\d+)")
"""Matches a repeated piece of ``--pipeline-model-parallel-layout``, such as ``(tt|)*3``."""


class Undecided(Exception):
    """Raised if a value that decides whether a defect is triggered cannot be read."""


class Flags:
    """The flags of one command line of a training program.

    As in argparse, the last value of a repeated flag counts. Names may contain underscores, as in
    this package's own programs.

    Args:
        words: the words after the name of the program.
        program: the program, such as ``pretrain_gpt.py``.
    """

    def __init__(self, words: Sequence[str], program: str) -> None:
        self.program = program.rsplit("/", 1)[-1]
        self.values: dict[str, tuple[str, ...]] = {}
        self.used: list[str] = []
        current = ""
        for word in _split(words):
            name, sign, value = word.partition("=")
            if word.startswith("--"):
                current = name.replace("_", "-")
                self.values[current] = (value,) if sign else ()
            elif current:
                self.values[current] = (*self.values[current], word)

    def has(self, *names: str) -> bool:
        """Return whether any of the flags ``names`` is given.

        Those given are added to the list ``used``, from which the audit takes the flags to blame.
        """
        given = [name for name in names if name in self.values]
        self.used += given
        return bool(given)

    def text(self, name: str, default: str = "") -> str:
        """Return the values of a flag, joined by spaces; ``default`` if the flag is not given.

        Raises:
            Undecided: the value contains a shell variable such as ``$SIZE``, as in some recipes of
                Megatron-LM's tests.
        """
        if name not in self.values:
            return default
        self.used.append(name)
        value = " ".join(self.values[name])
        if "$" in value:
            raise Undecided(f"`{name}` ({value}) is a variable; give its value.")
        return value.strip("'\"")

    def number(self, name: str, default: float) -> float:
        """Return the first value of a flag as a number; ``default`` if the flag is not given.

        Raises:
            Undecided: the value is not a number.
        """
        text = self.text(name).split()
        if not text:
            return default
        try:
            return float(text[0].strip("[],"))
        except ValueError:
            raise Undecided(f"`{name}` ({text[0]}) must be a number; give one.") from None

    def size(self, name: str, default: int = 1) -> int:
        """Return the first value of a flag as an integer, or ``default``; see `number`."""
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
        """Whether sequences are sharded over tensor-parallel ranks."""
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
        """Whether ``--calculate-per-token-loss`` is given: each token weighs the same in the loss.

        By default, each micro-batch does.
        """
        return self.has("--calculate-per-token-loss")

    @property
    def masked(self) -> bool:
        """Whether some targets are masked: ends of documents, or prompts in fine-tuning."""
        return self.has("--eod-mask-loss", "--sft")

    @property
    def interleaved(self) -> bool:
        """Whether pipeline stages have several chunks (interleaved schedule)."""
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
        """Whether the run loads the optimizer's state from a checkpoint."""
        return self.has("--load") and not self.has("--no-load-optim", "--finetune")

    @property
    def biases(self) -> bool:
        """Whether linear layers have biases, which is the default."""
        return not self.has("--disable-bias-linear")


def _split(words: Sequence[str]) -> list[str]:
    """Return the words of a command line; split any word that holds a flag and its values.

    For example, the single word ``--lr 0.1`` becomes two words.
    """
    result: list[str] = []
    for word in words:
        split = word.split()
        several = word.startswith("--") and len(split) > 1 and "=" not in split[0]
        result += split if several else [word]
    return result


def holds(*conditions: Callable[[], bool]) -> bool:
    """Return whether all conditions return True; any False decides, even if others are undecided.

    Raises:
        Undecided: no condition returns False, but one raised this error.
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
