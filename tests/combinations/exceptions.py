"""Differences between runs that the documentation allows, and how large rounding may be."""

from collections.abc import Callable, Sequence

from tests.combinations.layouts import Layout
from tests.combinations.options import Settings, settings_of

NOT_IN_LOGS = ("second", "throughput", "time", "memory", "tokens_per", "samples_per", "mfu", "ETA")
"""Parts of names of what the clock or the machine decides."""

_Rule = Callable[[Settings], bool]


def _on(name: str) -> _Rule:
    return lambda settings: settings.get(name, (False, ()))[0]


def _dropout(settings: Settings) -> bool:
    names = ("hidden_dropout", "attention_dropout", "lora_dropout")
    drops = any(float((settings.get(n, (True, ("0",)))[1] or ("0",))[0]) > 0 for n in names)
    return drops and not settings.get("deterministic_dropout", (False, ()))[0]


def _balances(*names: str) -> _Rule:
    return lambda settings: any(
        name in settings.get("moe_router_load_balancing_type", (True, ()))[1] for name in names
    )


def _masks(settings: Settings) -> bool:
    return any(_on(x)(settings) for x in ("eod_mask_loss", "mtp_num_layers", "ignore_index", "sft"))


LAYOUTS_DIFFER: tuple[tuple[str, _Rule], ...] = (
    ("dropout draws from a generator of each rank without --deterministic-dropout", _dropout),
    ("who shares a batch decides which tokens a capacity drops", _on("moe_expert_capacity_factor")),
    (
        "jitter is drawn on each rank without --deterministic-dropout",
        lambda s: _on("moe_input_jitter_eps")(s) and not _on("deterministic_dropout")(s),
    ),
    ("random logits are drawn on each rank", _on("moe_router_force_load_balancing")),
    ("each replica goes on with weights of its own", _on("data_parallel_random_init")),
    ("sinkhorn balances the tokens that a rank holds", _balances("sinkhorn")),
    ("global load balancing counts the tokens of all replicas", _balances("global_aux_loss")),
    (
        "each replica shuffles a share of its own",
        lambda s: (
            "cyclic" in s.get("dataloader_type", (True, ()))[1]
            and s.get("data_sharding", (True, ()))[0]
        ),
    ),
    (
        "a mean of micro-batches' means depends on which targets a rank holds",
        lambda s: s.get("calculate_per_token_loss", (True, ()))[0] is False and _masks(s),
    ),
)
"""Why layouts differ by more than rounding; docs/numerics.md, "What is not invariant"."""

NOT_IN_CHECKPOINTS: tuple[tuple[str, _Rule], ...] = (
    ("the optimizer is not kept", _on("no_save_optim")),
    ("random numbers are not kept", lambda s: _on("no_save_rng")(s) and _dropout(s)),
)
"""Why a checkpoint does not hold all that a run needs to go on."""

RESUME_DIFFERS: tuple[tuple[str, _Rule], ...] = (
    *NOT_IN_CHECKPOINTS,
    ("the optimizer is not loaded", _on("no_load_optim")),
    ("--finetune starts at step 0", _on("finetune")),
    ("random numbers are not loaded", lambda s: _on("no_load_rng")(s) and _dropout(s)),
    ("each --exit-interval ends a run", _on("exit_interval")),
    (
        "a rewind goes back within its own folder",
        lambda s: "rewind" in s.get("on_spike", ("", ()))[1],
    ),
)
"""Why a run that is continued differs from one that was not interrupted."""


def reason_layouts_differ(words: Sequence[str], layouts: Sequence[Layout]) -> str | None:
    """Return why these flags may train differently in these layouts; None if they must agree."""
    if all(layout == layouts[0] for layout in layouts):
        return None
    settings = settings_of(words)
    if len({_padded_vocab_size(settings, layout) for layout in layouts}) > 1:
        return "tensor parallelism pads the vocabulary further, and all its logits count"
    return next((text for text, rule in LAYOUTS_DIFFER if rule(settings)), None)


def _padded_vocab_size(settings: Settings, layout: Layout) -> int | None:
    """Return the size that a NullTokenizer's vocabulary is padded to; None if flags do not say."""
    given = [
        settings.get(name, (True, ()))[1] for name in ("vocab_size", "make_vocab_size_divisible_by")
    ]
    if "padded_vocab_size" in settings or not all(given):
        return None
    size, divisor = (int(values[0]) for values in given)
    tensor = int(settings_of(layout.words).get("tensor_model_parallel_size", (True, ("1",)))[1][0])
    # The NullTokenizer adds the end of a document.
    multiple = divisor * tensor
    return -(-(size + 1) // multiple) * multiple


def reason_starts_differ(words: Sequence[str], layouts: Sequence[Layout]) -> str | None:
    draws = _on("use_cpu_initialization")(settings_of(words))
    if not draws or all(layout == layouts[0] for layout in layouts):
        return None
    return "--use-cpu-initialization draws each stage's weights from a seed of its own"


def reason_resume_differs(words: Sequence[str]) -> str | None:
    settings = settings_of(words)
    return next((text for text, rule in RESUME_DIFFERS if rule(settings)), None)


def reason_restart_differs(words: Sequence[str], source: str, restored: int) -> str | None:
    """Return why a run of which a rank was killed may differ from an undisturbed one.

    A checkpoint may lack what a snapshot has, and the start lacks nothing.

    Args:
        source: what the run went on from, as its list of events says it.
        restored: the iteration of that state.
    """
    settings = settings_of(words)
    if _on("exit_interval")(settings) and restored:
        if restored % int(settings["exit_interval"][1][0]) == 0:
            return "each --exit-interval ends a run, also one that a fault keeps from ending"
    if source != "checkpoint":
        return None
    return next((text for text, rule in NOT_IN_CHECKPOINTS if rule(settings)), None)


def report_of_fewer_steps(words: Sequence[str], restored: int) -> int | None:
    """Return the report that averages fewer steps since a run was restarted; None for none.

    The steps before the restart in the same interval are missing from it. The first step counts
    again in the first full interval (`IntervalMetrics.report_if_due`).
    """
    interval = int(settings_of(words).get("log_interval", (True, ("1",)))[1][0])
    if restored % interval == 0 and restored != 1:
        return None
    return (restored // interval + 1) * interval


def is_averaged(name: str) -> bool:
    """Return whether a value of a report is a mean or a sum over the steps of an interval."""
    counts = name in ("skipped_iterations", "nan_iterations")
    # Streaming tuning reports norms beside its losses: "critic grad norm".
    norms = name.endswith((" grad norm", "_gradient_norm"))
    return counts or norms or ("loss" in name and name != "loss_scale")


def reason_replicas_differ(kind: str, layouts: Sequence[Layout]) -> str | None:
    if kind == "streaming" and len({layout.replicas for layout in layouts}) > 1:
        return "each replica has sequences of its own"
    return None


def reason_continuation_differs(shown: str) -> str | None:
    """Return why what a run printed as it went on lets its numbers differ, or None."""
    if "the cache of past frames is made anew" in shown:
        return "a cache of past frames that is made anew differs a little from the lost one"
    return None


def tolerance_of(words: Sequence[str], key: str, steps: int) -> float:
    """Return the largest relative difference of a logged value between layouts.

    In fp32 the first step is compared to 1e-6. Each update multiplies what rounding has left, since
    Adam divides a small gradient by its own size; a norm sums squares of small numbers.
    """
    settings = settings_of(words)
    if any(_on(name)(settings) for name in ("fp8_format",)):
        return 0.2
    if any(_on(name)(settings) for name in ("bf16", "fp16")):
        return 0.05
    loose = 10.0 if "norm" in key else 1.0
    return 1e-6 * loose * (1 + 3 * steps)
