"""Defines a defect of megatron-core: its state by release, and the flags that hit it.

The table in docs/numerics.md and the audit of flags are both made of defects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.extras.audit.flags import Flags, holds

RELEASES = ("0.16", "0.17", "0.18", "0.19")
"""Minor releases of megatron-core whose defects were measured: 0.16.1, 0.17.1, 0.18.2, 0.19.2."""


Condition = Callable[[Flags], bool]
Sentence = Callable[[Flags], str] | str


@dataclass(frozen=True)
class State:
    """The state of a defect in a release.

    Attributes:
        kind: ``there``, ``fixed`` or ``changed`` (there in another form).
        figure: what was measured on it.
    """

    kind: str
    figure: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.figure}" if self.figure else self.kind


@dataclass(frozen=True)
class Rule:
    """The flags that hit a defect.

    Attributes:
        all_of: conditions that hold together.
        error: the size of the error on these flags.
        advice: what to do.
        only: the releases, with blanks between, that have it in this form; empty for all.
        depends: what it further depends on that no flag says; such a defect is no finding.
    """

    all_of: tuple[Condition, ...]
    error: Sentence
    advice: str
    only: str = ""
    depends: str = ""

    def hit(self, flags: Flags) -> bool:
        """Return whether the flags hit the defect.

        Raises:
            Undecided: that hangs on a value that cannot be read.
        """
        return holds(*(lambda c=condition: bool(c(flags)) for condition in self.all_of))

    def size(self, flags: Flags) -> str:
        """Return the sentence about the size of the error."""
        return self.error if isinstance(self.error, str) else self.error(flags)


@dataclass(frozen=True)
class Defect:
    """One row of the table in docs/numerics.md.

    Attributes:
        stock: what megatron-core 0.16 does, with measured figures.
        since: the state on 0.19, as measured by `tools/audit.py --reproduce`.
        began: the release from which that state holds; the ones before it are as 0.16.
        between: states of releases before 0.19 that are neither.
        ours: what this package does instead.
        test: the tests of that.
        rules: the flags that hit it, the first that holds decides; empty if no flag decides.
    """

    number: str
    affected: str
    stock: str
    since: State
    ours: str
    test: str
    rules: tuple[Rule, ...] = ()
    began: str = "0.19"
    between: tuple[tuple[str, State], ...] = ()

    def state(self, release: str) -> State:
        """Return the state on a minor release such as ``0.16``."""
        before = State("there", self.stock)
        return dict(self.between).get(release, self.since if release >= self.began else before)

    def row(self) -> str:
        """Return the row of the table in docs/numerics.md."""
        cells = self.number, self.affected, self.stock, str(self.since), self.ours, self.test
        return f"| {' | '.join(cells)} |"


NEWER = "Use megatron-core 0.19"
BY_MEAN = "leave --calculate-per-token-loss out"


def auxiliary(x: Flags) -> bool:
    """Return whether the router has an auxiliary loss with a coefficient that is not 0."""
    kinds = x.text("--moe-router-load-balancing-type", "aux_loss").split()
    balanced = any("aux_loss" in kind for kind in kinds) and positive(x, "--moe-aux-loss-coeff")
    return balanced or positive(x, "--moe-z-loss-coeff")


def positive(x: Flags, name: str) -> bool:
    """Return whether a flag has a number above 0, be it one of several."""
    return x.number(name, 0) > 0 or any(word.strip("[],0.") for word in x.text(name).split()[1:])


def sequence_loss(x: Flags) -> bool:
    """Return whether experts are balanced by sequence."""
    kinds = x.text("--moe-router-load-balancing-type", "aux_loss").split()
    return "seq_aux_loss" in kinds and positive(x, "--moe-aux-loss-coeff")


def split_tokens(x: Flags) -> int:
    """Return over how many ranks the tokens of a sequence are split."""
    return x.cp * (x.tp if x.sequence_parallel else 1)


def depth_weight(x: Flags) -> str:
    """Return how far the weight of the last depth is off on 0.16."""
    length = x.size("--seq-length", 0)
    if x.masked or not length:
        return "A depth weighs by the targets it keeps; 12 % off with ragged masks as measured."
    share = 1 - x.mtp / length
    return f"Depth {x.mtp} weighs {share:.6f} of what it should with full masks."


def local(x: Flags) -> bool:
    """Return whether the layers are megatron-core's own."""
    return x.text("--transformer-impl") == "local"


def learned(x: Flags) -> bool:
    """Return whether positions are learned, as they are by default."""
    kind = x.text("--position-embedding-type", "learned_absolute")
    return kind == "learned_absolute" and not x.has("--use-rotary-position-embeddings")


def uneven_pieces(x: Flags) -> bool:
    """Return whether recomputed pieces do not divide the layers of a stage."""
    layers = x.size("--num-layers", 0)
    piece = x.size("--recompute-num-layers", 1)
    chunks = x.pp * (x.size("--num-virtual-stages-per-pipeline-rank"))
    return (
        x.text("--recompute-granularity") == "full"
        and x.text("--recompute-method") == "uniform"
        and piece > 0
        and (layers // max(chunks, 1)) % piece != 0
    )


def bias_recomputed(x: Flags) -> bool:
    """Return whether an MLP with biases is recomputed."""
    selective = x.text("--recompute-granularity") == "selective" or x.has("--recompute-activations")
    return selective and "mlp" in x.text("--recompute-modules").split() and x.biases


def depth_pieces(x: Flags) -> bool:
    """Return whether depths are recomputed in pieces of several layers."""
    full = x.text("--recompute-granularity") == "full"
    return full and x.mtp > 0 and x.size("--recompute-num-layers", 1) > 1


def misread_vocabulary(x: Flags) -> bool:
    """Return whether the vocabulary has a size of which core errs about the type of ids."""
    size = x.size("--vocab-size", 0) or x.size("--padded-vocab-size", 0)
    return 65_500 <= size < 65_536


def no_vocabulary_size(x: Flags) -> bool:
    """Return whether no flag says the size of the vocabulary."""
    return not x.has("--vocab-size", "--padded-vocab-size")


def whole_query_norm(x: Flags) -> bool:
    """Return whether tensor-parallel ranks have a norm of whole compressed queries."""
    latent = x.has("--multi-latent-attention") and x.has("--q-lora-rank")
    return latent and x.has("--qk-layernorm") and x.tp > 1 and not x.sequence_parallel


def modelopt(x: Flags) -> bool:
    """Return whether a flag asks for the layers of NVIDIA's Model Optimizer."""
    return x.has("--modelopt-enabled", "--export-kd-teacher-load")
