"""Flags that do not apply to a run, and the note or error that the user gets about them.

Each entry, an `Inapplicable`, is about one or more flags. `megatron_flags.yaml` has entries for
flags of Megatron-LM that this package lacks, and `ENGINE` for the engine's own flags that do
nothing in some runs. A task adds entries in `Task.inapplicable`. If several entries apply to one
flag, the first one counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.config.flags import flags_of
from megatron_ext.disk.reading import read_yaml
from megatron_ext.errors import FlagError

Values = Mapping[str, Any]
"""The values of all fields of a configuration by field name, and the device under "device"."""


@dataclass(frozen=True)
class Inapplicable:
    """An entry about flags that do not apply, either always or only in some runs.

    If ``instead`` is set, it replaces the flag on the command line, and a note says so. Otherwise,
    if ``remedy`` is set, the flag is refused with an error. Otherwise it is accepted, and a note
    says that it has no effect.

    Attributes:
        flags: names without leading dashes, separated by spaces.
        reason: why the flags do not apply; "" if ``says`` is enough.
        remedy: what the error tells the user to do, such as "leave it out".
        says: the words of the note or error between flag and reason, such as "has no effect".
        holds: takes the values of a run and returns whether the entry applies there; None if it
            always does.
        instead: the words that replace the flag, such as `--fp8-format`.
        defaults: name of a refused flag -> its default value, which is accepted because the run
            does the same without the flag.
        source: the program that has the refused flags, such as Megatron-LM.
    """

    flags: str
    reason: str = ""
    remedy: str = ""
    says: str = "has no effect"
    holds: Callable[[Values], bool] | None = None
    instead: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def is_idle(self) -> bool:
        """Return whether the flags are accepted and do nothing."""
        return not self.instead and not self.remedy

    def sentence(self, named: str) -> str:
        """Return the sentence about one of the flags: a note, or an error if the flag is refused.

        ``named`` is the flag as it appears in the sentence, in backticks.
        """
        if self.instead:
            return f"{named} is spelled `{self.instead}` now."
        says = f"{self.says}: {self.reason}" if self.reason else self.says
        return FlagError(named, None, says, self.remedy) if self.remedy else f"{named} {says}."


def without(needed: str, flags: str, reason: str = "") -> Inapplicable:
    """Return an entry that says that ``flags`` have no effect unless the flag ``needed`` is given.

    Args:
        needed: the flag, such as `--fp16`, or the flag with all values that suffice, such as
            `--optimizer adam or muon`.
        flags: names without leading dashes, separated by spaces.
        reason: why ``flags`` need the flag ``needed``; "" if that is obvious.
    """
    name, _, accepted = needed.removeprefix("--").partition(" ")
    name = name.replace("-", "_")

    def holds(values: Values) -> bool:
        value = values[name]
        return str(value) not in accepted.split(" or ") if accepted else value in (None, False)

    return Inapplicable(flags, reason, says=f"has no effect without `{needed}`", holds=holds)


on_cpu = functools.partial(
    Inapplicable, says="has no effect on a CPU", holds=lambda values: values["device"] == "cpu"
)
without_engine = functools.partial(
    Inapplicable,
    says="has no effect without Transformer Engine",
    holds=lambda values: values["transformer_impl"] != "transformer_engine",
)


def names_of(*kinds: type, but: Iterable[str] = ()) -> str:
    """Return the spellings of all flags in the sections ``kinds``, separated by spaces.

    Flags whose fields are in ``but`` are left out.
    """
    spellings = (
        (*flag.positive, *flag.negative)
        for kind in kinds
        for flag in flags_of("", kind)
        if flag.field not in but
    )
    return " ".join(name.removeprefix("--") for names in spellings for name in names)


def of_program(name: str, kinds: Iterable[type]) -> Inapplicable:
    """Return an entry that refuses all flags in ``kinds``, section classes of another program.

    ``name`` is that program's name, for the error.
    """
    return Inapplicable(
        names_of(*kinds),
        remedy="leave it out",
        says=f"is a flag of {name}, not of this program",
        defaults={
            flag.positive[0].removeprefix("--"): flag.default
            for kind in kinds
            for flag in flags_of("", kind)
        },
    )


def by_flag(
    entries: Iterable[Inapplicable], values: Values | None = None
) -> dict[str, Inapplicable]:
    """Return, for each flag's spelling, the first entry that applies in a run.

    ``values`` are the values of that run; if None, only entries that always apply are considered.
    """
    found: dict[str, Inapplicable] = {}
    for entry in entries:
        if entry.holds is None or (values is not None and entry.holds(values)):
            for name in entry.flags.split():
                found.setdefault(f"--{name}", entry)
    return found


def answer_to(word: str, table: Mapping[str, Inapplicable]) -> Inapplicable | None:
    """Return the table's entry for the flag ``word``, or None if there is none.

    If ``--disable-x`` is not in the table, ``--no-x`` and then ``--x`` are looked up; for
    ``--no-x``, only ``--x``. Megatron-LM gives each switch that is on by default both
    negative spellings.
    """
    for prefix in ("--disable-", "--no-"):
        if word not in table and word.startswith(prefix):
            bare = word.removeprefix(prefix)
            word = next((x for x in (f"--no-{bare}", f"--{bare}") if x in table), word)
    return table.get(word)


@functools.cache
def megatron_flags() -> dict[str, Inapplicable]:
    """Return, by spelling, the entries for flags of Megatron-LM that this package lacks."""
    tables = read_yaml(Path(__file__).with_name("megatron_flags.yaml"))
    accepted = tables.pop("replaced") + tables.pop("without effect")
    entries = [Inapplicable(**entry) for entry in accepted]
    for source, refused in tables.items():
        says = f"is known from {source} but refused here"
        entries += [Inapplicable(**entry, says=says, source=source) for entry in refused]
    return by_flag(entries)


_NOT_BESIDE = "communication on a CPU does not run beside computation"

ENGINE = (
    on_cpu(
        "bias-dropout-fusion persist-layer-norm gradient-accumulation-fusion "
        "cross-entropy-loss-fusion cross-entropy-fusion-impl",
        "a fused kernel of a GPU",
    ),
    on_cpu(
        "overlap-grad-reduce overlap-param-gather align-grad-reduce align-param-gather "
        "tp-comm-overlap tp-comm-overlap-cfg tp-comm-overlap-ag tp-comm-overlap-rs "
        "tp-comm-overlap-rs-dgrad tp-comm-bulk-dgrad tp-comm-bulk-wgrad tp-comm-bootstrap-backend "
        "tp-comm-overlap-disable-qkv tp-comm-overlap-disable-fc1",
        _NOT_BESIDE,
    ),
    on_cpu(
        "ddp-bucket-size ddp-num-buckets",
        _NOT_BESIDE,
        # Buckets also say which gradients are summed together where ranks keep shares of them.
        holds=lambda values: (
            values["device"] == "cpu" and values["data_parallel_sharding_strategy"] != "optim_grads"
        ),
    ),
    on_cpu("ddp-average-in-collective", "gloo cannot average"),
    on_cpu(
        "cuda-graph-impl cuda-graph-warmup-steps",
        "the launches of kernels that graphs save are a GPU's",
    ),
    on_cpu(
        "attention-backend",
        "attention is computed there as megatron-core's own layers do or by torch's SDPA",
    ),
    on_cpu("compile", "nothing is compiled there"),
    on_cpu("log-memory-to-tensorboard", "memory of a GPU"),
    on_cpu("muon-fp32-matmul-prec", "a CPU multiplies in float32"),
    on_cpu("empty-unused-memory-level", "a CPU keeps no memory cache"),
    without_engine("fp8-param-gather", "the torch layers keep and gather their weights in bf16"),
    without("--recompute-granularity selective", "recompute-modules"),
    without("--fp16", "loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis"),
    without("--exit-signal-handler", "exit-signal"),
    without("--on-spike", "spike-window spike-factor"),
    without("--profile", "profile-step-start profile-step-end profile-ranks"),
    without("--optimizer sgd", "sgd-momentum"),
    without(
        "--optimizer adam or muon",
        "adam-beta1 adam-beta2 adam-eps use-precision-aware-optimizer exp-avg-dtype "
        "exp-avg-sq-dtype",
    ),
    without(
        "--optimizer muon",
        "muon-momentum muon-use-nesterov muon-split-qkv muon-scale-mode muon-extra-scale-factor "
        "muon-coefficient-type muon-num-ns-steps muon-fp32-matmul-prec muon-tp-mode "
        "muon-scalar-optimizer",
    ),
    without("--lr-decay-style WSD", "lr-wsd-decay-style lr-wsd-decay-iters lr-wsd-decay-samples"),
)
"""The entries about the engine's own flags that have no effect in some runs."""
