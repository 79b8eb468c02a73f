"""Flags that do not apply to a run, and the note or error that the user gets about them.

Each entry, an `Inapplicable`, is about one or more flags. `megatron_flags.yaml` has entries for
flags of Megatron-LM that this package lacks, and `ENGINE` for the engine's own flags that do
nothing in some runs. A task adds entries in `Task.inapplicable`. If several entries apply to one
flag, the first one counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.config.flags import flags_of
from megatron_ext.config.output import TRACKERS
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
        settled_by: flags, separated by spaces; beside one of them the refused flags are accepted,
            because it already says what they would.
        program: the other program of this package that has the refused flags.
    """

    flags: str
    reason: str = ""
    remedy: str = ""
    says: str = "has no effect"
    holds: Callable[[Values], bool] | None = None
    instead: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    settled_by: str = ""
    program: str = ""

    def beside(self, given: Collection[str]) -> Inapplicable:
        """Return the entry on a command line with the flags ``given``.

        This is the entry itself, or one that accepts its flags if ``settled_by`` is given.
        """
        other = next((flag for flag in self.settled_by.split() if flag in given), None)
        if other is None:
            return self
        return Inapplicable(self.flags, self.reason, says=f"has no effect with `{other}`")

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
        needed: what must be given, as `_Condition` reads it, such as `--save`.
        flags: names without leading dashes, separated by spaces.
        reason: why ``flags`` need it; "" if that is obvious.
    """
    condition = _Condition(needed)
    says = f"has no effect without {condition.shown}"
    return Inapplicable(flags, reason, says=says, holds=lambda values: not condition.is_met(values))


def beside(other: str, flags: str, reason: str = "") -> Inapplicable:
    """Return an entry that says that ``flags`` have no effect if the flag ``other`` is given.

    The arguments are those of `without`.
    """
    condition = _Condition(other)
    says = f"has no effect with {condition.shown}"
    return Inapplicable(flags, reason, says=says, holds=condition.is_met)


def longer_than_run(flag: str, says: str = "has no effect: the run ends before") -> Inapplicable:
    """Return an entry that says that ``flag``, an interval of steps, is longer than the run."""
    field = flag.replace("-", "_")

    def holds(values: Values) -> bool:
        steps = values["train_iters"]
        return steps is not None and values[field] is not None and steps < values[field]

    return Inapplicable(flag, says=says, holds=holds)


class _Condition:
    """A condition on the values of a run, read from words.

    The words are a flag, such as `--fp16`, which is met if the flag has a value other than None,
    False, 0 or an empty one; a flag with all values that meet it, such as
    `--optimizer adam or muon`; a flag with a lower limit, such as
    `--tensor-model-parallel-size above 1`; or several of these, joined by "or".

    Attributes:
        shown: the condition as a sentence shows it, with each flag in backticks.
    """

    def __init__(self, words: str) -> None:
        first, *others = words.split(" or --")
        self._flags = [first, *(f"--{other}" for other in others)]
        self.shown = " or ".join(f"`{flag}`" for flag in self._flags).replace(
            " above 1`", "` above 1"
        )

    def is_met(self, values: Values) -> bool:
        """Return whether a run with these values meets the condition."""
        return any(self._has(flag, values) for flag in self._flags)

    def _has(self, flag: str, values: Values) -> bool:
        name, _, accepted = flag.removeprefix("--").partition(" ")
        value = values.get(name.replace("-", "_"))
        if accepted == "above 1":
            return value is not None and value > 1
        return str(value) in accepted.split(" or ") if accepted else bool(value)


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
        program=name,
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


def _loads_nothing(values: Values) -> bool:
    """Return whether a run starts with random weights."""
    return not (
        values["load"]
        or values["pretrained_checkpoint"]
        or values["resume_mode"] == "auto"
        or values["starts_others"]
        or values.get("load_hf")
        or values.get("load_weights")
    )


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
    on_cpu(
        "disable-bf16-reduced-precision-matmul",
        "it is a setting of cuBLAS, and a CPU adds up products in float32",
    ),
    Inapplicable(
        "distributed-backend",
        says="(nccl) is gloo on a CPU, which has no NCCL",
        holds=lambda values: values["device"] == "cpu" and values["distributed_backend"] == "nccl",
    ),
    on_cpu(
        "pin-cpu-grads pin-cpu-params overlap-cpu-optimizer-d2h-h2d "
        "use-torch-optimizer-for-cpu-offload",
        "memory and optimizer are the host's anyway",
    ),
    on_cpu("muon-fp32-matmul-prec", "a CPU multiplies in float32"),
    on_cpu("empty-unused-memory-level", "a CPU keeps no memory cache"),
    without_engine("fp8-param-gather", "the torch layers keep and gather their weights in bf16"),
    without_engine(
        "moe-router-padding-for-quantization",
        "the torch layers pad the tokens of an expert themselves",
    ),
    without("--recompute-granularity selective", "recompute-modules"),
    without("--fp16", "loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis"),
    without("--exit-signal-handler", "exit-signal"),
    longer_than_run("log-layer-norms-interval"),
    longer_than_run("log-interval", "reports no step but the first: the run ends before"),
    without("--on-spike", "spike-window spike-factor"),
    without("--profile", "profile-step-start profile-step-end profile-ranks"),
    without("--optimizer sgd", "sgd-momentum"),
    without(
        "--optimizer adam or muon",
        "adam-beta1 adam-beta2 adam-eps use-precision-aware-optimizer exp-avg-dtype "
        "exp-avg-sq-dtype",
    ),
    Inapplicable(
        "use-precision-aware-optimizer",
        says="has no effect with moments in float32, which Transformer Engine's layers get anyway",
        holds=lambda values: (
            values["transformer_impl"] == "transformer_engine"
            and values["exp_avg_dtype"] == values["exp_avg_sq_dtype"] == "fp32"
        ),
    ),
    without(
        "--optimizer muon",
        "muon-momentum muon-use-nesterov muon-split-qkv muon-scale-mode muon-extra-scale-factor "
        "muon-coefficient-type muon-num-ns-steps muon-fp32-matmul-prec muon-tp-mode "
        "muon-scalar-optimizer",
    ),
    without(
        "--optimizer-cpu-offload",
        "optimizer-offload-fraction overlap-cpu-optimizer-d2h-h2d "
        "use-torch-optimizer-for-cpu-offload pin-cpu-grads pin-cpu-params",
    ),
    without(
        "--cpu-offloading-num-layers or --fine-grained-activation-offloading",
        "min-offloaded-tensor-size",
    ),
    without("--lr-decay-style WSD", "lr-wsd-decay-style lr-wsd-decay-iters lr-wsd-decay-samples"),
    beside("--lr-decay-style constant", "min-lr decoupled-min-lr", "the rate never falls"),
    beside(
        "--weight-decay-incr-style linear or cosine",
        "weight-decay",
        "`--start-weight-decay` and `--end-weight-decay` say it",
    ),
    Inapplicable(
        "lr-warmup-init",
        says="has no effect without a warm-up",
        holds=lambda values: (
            values["lr_warmup_iters"] == 0
            and not values["lr_warmup_samples"]
            and not values["lr_warmup_fraction"]
        ),
    ),
    without("--bf16", "grad-reduce-in-bf16 disable-bf16-reduced-precision-matmul"),
    Inapplicable(
        "accumulate-allreduce-grads-in-fp32",
        says="has no effect with `--grad-reduce-in-bf16`",
        holds=lambda values: values["bf16"] and values["grad_reduce_in_bf16"],
    ),
    without("--cross-entropy-loss-fusion", "cross-entropy-fusion-impl"),
    without("--recompute-granularity full", "recompute-num-layers distribute-saved-activations"),
    without(
        "--pipeline-model-parallel-size above 1",
        "num-microbatches-with-partial-activation-checkpoints",
        "one micro-batch is in flight at a time",
    ),
    without(
        "--tensor-model-parallel-size above 1", "sequence-parallel distribute-saved-activations"
    ),
    without("--context-parallel-size above 1", "cp-comm-type"),
    without(
        "--pipeline-model-parallel-size above 1",
        "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split "
        "use-tp-pp-dp-mapping",
    ),
    Inapplicable(
        "microbatch-group-size-per-vp-stage",
        says="has no effect without `--num-virtual-stages-per-pipeline-rank` above 1",
        holds=lambda values: (values["virtual_pipeline_model_parallel_size"] or 1) == 1,
    ),
    beside(
        "--data-parallel-sharding-strategy optim_grads_params",
        "ddp-bucket-size ddp-num-buckets",
        "a layer is a bucket",
    ),
    beside(
        "--data-parallel-sharding-strategy optim_grads_params",
        "align-param-gather",
        "each layer's weights are gathered before it computes",
    ),
    without(
        "--overlap-grad-reduce or --data-parallel-sharding-strategy optim_grads",
        "ddp-bucket-size ddp-num-buckets",
    ),
    without("--overlap-grad-reduce", "align-grad-reduce"),
    without("--overlap-param-gather", "align-param-gather"),
    Inapplicable(
        "eval-interval",
        "nothing is evaluated, as `--eval-iters` is 0",
        holds=lambda values: not (values["eval_iters"] or values["full_validation"]),
    ),
    without("--load", "ckpt-step finetune exit-on-missing-checkpoint"),
    without(
        "--load or --resume-mode auto",
        "no-load-optim no-load-rng override-opt-param-scheduler use-checkpoint-opt-param-scheduler",
    ),
    beside(
        "--finetune or --no-load-optim",
        "override-opt-param-scheduler use-checkpoint-opt-param-scheduler",
        "the schedule starts anew",
    ),
    Inapplicable(
        "dist-ckpt-strictness ckpt-fully-parallel-load",
        says="has no effect without a checkpoint to load",
        holds=_loads_nothing,
    ),
    beside("--skip-train", "freeze freeze-all-but freeze-base-for-mtp", "nothing is trained"),
    Inapplicable(
        "lora-rank",
        "`--pretrained-checkpoint`, `--load-hf` and `--load` load weights",
        says="trains adapters beside random weights that stay as they are",
        holds=_loads_nothing,
    ),
    without(
        "--save",
        "no-save-optim no-save-rng ckpt-fully-parallel-save dist-ckpt-optim-fully-reshardable "
        "log-progress",
    ),
    without(
        " or ".join(f"--{name.replace('_', '-')}" for name in TRACKERS),
        "log-throughput tensorboard-log-interval log-loss-scale-to-tensorboard "
        "log-validation-ppl-to-tensorboard log-timers-to-tensorboard log-memory-to-tensorboard "
        "log-world-size-to-tensorboard tracker-artifacts",
    ),
    without("--tensorboard-dir", "tensorboard-queue-size"),
    without("--wandb-project", "wandb-exp-name wandb-entity wandb-save-dir"),
    without("--mlflow-experiment", "mlflow-run-name mlflow-tracking-uri"),
    without("--trackio-project", "trackio-run-name"),
)
"""The entries about the engine's own flags that have no effect in some runs."""
