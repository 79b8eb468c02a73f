"""Rules of Transformer Engine: which runs its layers refuse, and which version a run needs.

The versions are those that megatron-core 0.16.1 asks for (its uses of ``is_te_min_version``), but
where Transformer Engine's own source says more; what is older than `MINIMUM` has no row.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

from megatron_ext.config.acceleration import TE_IMPL, TransformerEngineConfig
from megatron_ext.config.flags import changed_fields
from megatron_ext.config.precision import TORCH_RECIPES
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError

OVERLAPPED = tuple(
    f"{layer}_{part}"
    for layer in ("qkv", "proj", "fc1", "fc2")
    for part in ("fprop", "dgrad", "wgrad")
)
"""Products that a file of ``--tp-comm-overlap-cfg`` may set up."""


BACKENDS = {
    "auto": (1, 1, 1),
    "flash": (1, 0, 0),
    "fused": (0, 1, 0),
    "unfused": (0, 0, 1),
    "local": (0, 0, 0),
}
"""`--attention-backend` -> the values of `SWITCHES` that megatron-core sets for it."""


SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def transformer_engine_errors(run: RunConfig, *, found_version: str | None) -> list[str]:
    """Return a sentence for everything that cannot be run.

    Args:
        run: all of it.
        found_version: of Transformer Engine; None where it is unknown or absent.
    """
    found = [*_environment_errors(run), *_overlap_errors(run), *_context_errors(run)]
    if run.model.transformer_impl == TE_IMPL:
        found += [*_layer_errors(run), *_attention_errors(run)]
    return found if found_version is None else [*found, *version_errors(run, found_version)]


def _overlap_errors(run: RunConfig) -> list[str]:
    changed = [
        name
        for name in changed_fields(run.engine)
        if name.startswith("tp_comm_") and name != "tp_comm_overlap"
    ]
    if not run.engine.tp_comm_overlap:
        return [
            f"`{_spelled(run.engine, name)}` needs `--tp-comm-overlap`; give it too."
            for name in changed
        ]
    use = "" if needs_torch_layers(run) else "use `--transformer-impl transformer_engine`, or "
    rules = (
        (
            run.model.transformer_impl != TE_IMPL,
            f"is done by Transformer Engine's layers; {use}leave it out",
        ),
        (
            not run.parallel.sequence_parallel,
            "needs `--sequence-parallel` and `--tensor-model-parallel-size` above 1, whose "
            "communication it hides; give both",
        ),
    )
    found = [f"`--tp-comm-overlap` {reason}." for broken, reason in rules if broken]
    try:
        read_overlap_settings(run.engine.tp_comm_overlap_cfg)
    except ConfigError as error:
        found += error.messages
    return found


def _context_errors(run: RunConfig) -> list[str]:
    sizes, cp = run.engine.hierarchical_context_parallel_sizes, run.parallel.context_parallel_size
    kinds = run.parallel.cp_comm_type
    uses = "a2a+p2p" in kinds
    if sizes is None:
        if uses and cp > 1 and run.model.transformer_impl == TE_IMPL:
            return [
                "`--cp-comm-type` (a2a+p2p) needs `--hierarchical-context-parallel-sizes`; "
                f"give two sizes whose product is `--context-parallel-size` ({cp})."
            ]
        return []
    given = " ".join(map(str, sizes))
    if not uses:
        return [
            f"`--hierarchical-context-parallel-sizes` ({given}) has an effect with "
            "`--cp-comm-type a2a+p2p` only; give that, or leave it out."
        ]
    if find_spec("einops") is None:
        return [
            f"`--hierarchical-context-parallel-sizes` ({given}) needs the package einops, by "
            "which megatron-core makes the groups; run `pip install einops`."
        ]
    if len(sizes) != 2 or min(sizes) < 1 or prod(sizes) != cp:
        return [
            f"`--hierarchical-context-parallel-sizes` ({given}) must be two sizes whose "
            f"product is `--context-parallel-size` ({cp})."
        ]
    return []


def needs_torch_layers(run: RunConfig) -> bool:
    """Return whether ``auto`` takes the torch layers also where Transformer Engine is installed.

    These are the runs that its layers would refuse.
    """
    return (
        run.model.blocks_dealt_by_cost
        or run.lora.lora_rank is not None
        or run.model.deterministic_dropout
        or run.model.fp32_residual_connection
        or _recomputes_biases(run)
        or run.model.attention_backend == "local"
        or run.model.document_masks
        or (run.parallel.pipeline_schedule or "").startswith("zb-")
        or (run.fp8.fp8_format is not None and run.fp8.fp8_recipe in TORCH_RECIPES)
        or not run.fp8.fp8_wgrad
        or run.cuda_graphs.cuda_graph_impl == "local"
    )


def _recomputes_biases(run: RunConfig) -> bool:
    """Return whether an MLP with biases is recomputed, which megatron-core's does for ever.

    Core returns the bias, a parameter, from what is recomputed; our MLP adds it within.
    """
    model = run.model
    selective = model.recompute_granularity == "selective"
    return selective and "mlp" in (model.recompute_modules or ()) and model.add_bias_linear


def _spelled(config: TransformerEngineConfig, name: str) -> str:
    dashed = name.replace("_", "-")
    return f"--disable-{dashed}" if getattr(config, name) is False else f"--{dashed}"


def read_overlap_settings(path: str | None) -> dict[str, Any]:
    """Read a file of ``--tp-comm-overlap-cfg``: what to do for each of `OVERLAPPED`.

    Raises:
        ConfigError: a file that cannot be read, or that names other products.
    """
    if path is None:
        return {}
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"`--tp-comm-overlap-cfg` ({path}) cannot be read: {error}.") from error
    if not isinstance(content, dict) or not all(isinstance(x, dict) for x in content.values()):
        raise ConfigError(
            f"`--tp-comm-overlap-cfg` ({path}) must hold settings by the names of products, such "
            "as `qkv_fprop: {method: ring_exchange}`."
        )
    unknown = [str(name) for name in content if name not in OVERLAPPED]
    if unknown:
        raise ConfigError(
            f"`--tp-comm-overlap-cfg` ({path}) names {', '.join(unknown)}, but products are called "
            f"{', '.join(OVERLAPPED)}."
        )
    return content


def _environment_errors(run: RunConfig) -> list[str]:
    """Refuse environment variables that contradict what megatron-core sets by the flags."""
    if run.model.blocks_dealt_by_cost:
        return []
    backend = run.model.attention_backend
    found = [
        f"`{name}` ({os.environ[name]}) in the environment contradicts `--attention-backend` "
        f"({backend}), which sets it to {value}; unset it."
        for name, value in zip(SWITCHES, BACKENDS[backend], strict=True)
        if os.environ.get(name, str(value)) != str(value)
    ]
    allowed = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    te = run.model.transformer_impl == TE_IMPL
    if te and run.training.deterministic_mode and allowed != "0":
        found.append(
            f"`NVTE_ALLOW_NONDETERMINISTIC_ALGO` ({allowed}) in the environment contradicts "
            "`--deterministic-mode`; unset it."
        )
    return found


def _layer_errors(run: RunConfig) -> list[str]:
    """Refuse options that our own layers have and Transformer Engine's lack."""
    rules = (
        (
            run.model.attention_backend == "local",
            "`--attention-backend` (local) leaves Transformer Engine's layers without any "
            "attention; use auto, or `--transformer-impl torch`.",
        ),
        (
            run.model.fp32_residual_connection,
            "`--fp32-residual-connection` needs our torch layers, since Transformer Engine's take "
            "a residual stream in the dtype of their weights only; use `--transformer-impl torch`.",
        ),
        (
            _recomputes_biases(run),
            "`--recompute-modules` (mlp) with Transformer Engine's layers needs an MLP without "
            "biases; give `--disable-bias-linear`, or `--transformer-impl torch`.",
        ),
    )
    return [sentence for broken, sentence in rules if broken]


def _attention_errors(run: RunConfig) -> list[str]:
    """Refuse attention over context-parallel ranks that Transformer Engine does not have."""
    parallel, model = run.parallel, run.model
    cp, tp = parallel.context_parallel_size, max(1, parallel.tensor_model_parallel_size)
    if cp <= 1:
        return []
    kinds, found = set(parallel.cp_comm_type), list[str]()
    rings = sorted(kinds & {"p2p", "a2a+p2p"})
    if model.window_size is not None and rings:
        found.append(
            f"`--window-size` over context-parallel ranks does not go with `--cp-comm-type` "
            f"({rings[0]}); use all_gather or a2a."
        )
    sizes = run.engine.hierarchical_context_parallel_sizes or [cp]
    groups = model.num_query_groups or model.num_attention_heads or 0
    for kind, share in (("a2a", cp), ("a2a+p2p", sizes[0])):
        if kind in kinds and (groups // tp) % max(1, share):
            found.append(
                f"`--cp-comm-type` ({kind}) needs the heads of keys on a tensor-parallel rank "
                f"({groups // tp}) to be divisible by the ranks that exchange them ({share}); use "
                "all_gather."
            )
    return found


MINIMUM = "2.4.0"
"""The first with all of: mxfp8 (2.0), tensorwise (2.2), blockwise with its parameters (2.4)."""

DISTRIBUTION = "transformer-engine"


@dataclass(frozen=True)
class Need:
    """One feature and the first version that has it.

    Attributes:
        spelled: the flag as the user writes it.
        minimum: the first version.
        used: whether a run asks for it.
    """

    spelled: str
    minimum: str
    used: Callable[[RunConfig], bool]


def _uses_layers(run: RunConfig) -> bool:
    return run.model.transformer_impl == "transformer_engine"


def _recomputes(*modules: str) -> Callable[[RunConfig], bool]:
    def used(run: RunConfig) -> bool:
        selective = run.model.recompute_granularity == "selective" and _uses_layers(run)
        chosen = set(run.model.recompute_modules or ())
        return selective and run.fp8.fp8_format is not None and bool(chosen & set(modules))

    return used


NEEDS: tuple[Need, ...] = (
    Need("--transformer-impl transformer_engine", MINIMUM, _uses_layers),
    Need("--cross-entropy-impl te", MINIMUM, lambda run: run.loss.cross_entropy_impl == "te"),
    Need("--recompute-modules layernorm` with `--fp8-format", "2.6.0", _recomputes("layernorm")),
    Need("--recompute-modules moe_act` with `--fp8-format", "2.6.0", _recomputes("moe_act")),
    Need(
        "--moe-router-fusion",
        "2.7.0",
        lambda run: (
            _uses_layers(run) and run.moe.num_experts is not None and run.moe.moe_router_fusion
        ),
    ),
    Need("--softmax-type", "2.8.0", lambda run: run.model.softmax_type != "vanilla"),
    Need(
        "--fp8-recipe custom",
        "2.9.0",
        lambda run: run.fp8.fp8_format is not None and run.fp8.fp8_recipe == "custom",
    ),
)


def found_version() -> str | None:
    """Return the installed version, without an import; None where there is none."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_errors(run: RunConfig, found: str) -> list[str]:
    """Return a sentence for each option that needs a newer Transformer Engine.

    Args:
        run: of any layers.
        found: its version, such as ``2.4.0+cu12``.
    """
    needed = [need for need in NEEDS if need.used(run)]
    lacking = [need for need in needed if not _reaches(found, need.minimum)]
    if not lacking:
        return []
    if not _reaches(found, MINIMUM):
        lacking = lacking[:1]  # too old for all: what else it lacks does not matter
    best = max((need.minimum for need in needed), key=Version)
    return [
        f"`{need.spelled}` needs Transformer Engine {need.minimum} or newer, but the installed one "
        f'is {found}; run `pip install -U --no-build-isolation "transformer-engine'
        f'[pytorch]>={best}"`.'
        for need in lacking
    ]


def _reaches(found: str, minimum: str) -> bool:
    try:
        return Version(found).release >= Version(minimum).release
    except InvalidVersion:
        return False
