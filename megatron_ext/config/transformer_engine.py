"""What only Transformer Engine's layers have: overlapped tensor-parallel communication, and rules.

Names, meanings and defaults are Megatron-LM's; a flag that the torch layers would ignore is
refused with them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from megatron_ext.config.flags import SIZE, IfChanged, changed_fields, flag
from megatron_ext.config.rules.fp8 import TORCH_RECIPES
from megatron_ext.config.te_versions import version_errors
from megatron_ext.errors import ConfigError

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig

TE_IMPL = "transformer_engine"
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


@dataclass(frozen=True)
class TransformerEngineConfig:
    """Overlap of matrix products with the communication of tensor parallelism."""

    IF_CHANGED: ClassVar[IfChanged] = "allow"

    tp_comm_overlap: bool = flag(
        False, "overlap products with tensor-parallel communication, in Transformer Engine's layers"
    )
    tp_comm_overlap_cfg: str | None = flag(
        None, "YAML file that says how each product of --tp-comm-overlap overlaps"
    )
    tp_comm_overlap_ag: bool = flag(
        True,
        "overlap of the all-gather before a product",
        negative=("--disable-tp-comm-overlap-ag",),
    )
    tp_comm_overlap_rs: bool = flag(
        True,
        "overlap of the reduce-scatter after a product",
        negative=("--disable-tp-comm-overlap-rs",),
    )
    tp_comm_overlap_rs_dgrad: bool = flag(
        False, "overlap of the reduce-scatter with the gradient of the input"
    )
    tp_comm_bulk_dgrad: bool = flag(
        True,
        "overlap of the all-gather with the gradient of the input, not cut",
        negative=("--disable-tp-comm-bulk-dgrad",),
    )
    tp_comm_bulk_wgrad: bool = flag(
        True,
        "overlap of the reduce-scatter with the gradient of the weight, not cut",
        negative=("--disable-tp-comm-bulk-wgrad",),
    )
    tp_comm_overlap_disable_qkv: bool = flag(False, "no overlap in the QKV projection")
    tp_comm_overlap_disable_fc1: bool = flag(False, "no overlap in the first layer of the MLP")
    tp_comm_bootstrap_backend: str = flag(
        "nccl", "what the overlap's buffers are set up over", choices=("nccl", "mpi", "gloo")
    )
    hierarchical_context_parallel_sizes: list[int] | None = flag(
        None,
        "--context-parallel-size as a product, for --cp-comm-type a2a+p2p: ranks that exchange "
        "heads, and groups of them that pass keys and values on",
        nargs="+",
        bounds=SIZE,
    )

    def errors(self, run: RunConfig, *, found_version: str | None) -> list[str]:
        """What cannot be run, one sentence each.

        Args:
            run: all of it.
            found_version: of Transformer Engine; None where it is unknown or absent.
        """
        found = [*_environment_errors(run), *self._overlap_errors(run), *self._context_errors(run)]
        if run.model.transformer_impl == TE_IMPL:
            found += [*_layer_errors(run), *_attention_errors(run)]
        return found if found_version is None else [*found, *version_errors(run, found_version)]

    def _overlap_errors(self, run: RunConfig) -> list[str]:
        changed = [
            name
            for name in changed_fields(self)
            if name.startswith("tp_comm_") and name != "tp_comm_overlap"
        ]
        if not self.tp_comm_overlap:
            return [
                f"`{_spelled(self, name)}` needs `--tp-comm-overlap`; give it too."
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
            read_overlap_settings(self.tp_comm_overlap_cfg)
        except ConfigError as error:
            found += error.messages
        return found

    def _context_errors(self, run: RunConfig) -> list[str]:
        sizes, cp = self.hierarchical_context_parallel_sizes, run.parallel.context_parallel_size
        kinds = run.parallel.cp_comm_type
        if run.video.video and len(kinds) > 1:
            return [
                f"`--cp-comm-type` has {len(kinds)} values, but a video model has one for all its "
                "blocks; give one."
            ]
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
    """Whether ``--transformer-impl auto`` takes the torch layers also beside Transformer Engine.

    These are the runs that its layers would refuse.
    """
    return (
        run.video.video
        or run.lora.lora_rank is not None
        or run.model.deterministic_dropout
        or run.model.fp32_residual_connection
        or _recomputes_biases(run)
        or run.model.attention_backend == "local"
        or run.data.reset_attention_mask
        or (run.sft.sft and run.sft.sft_batching != "padded")
        or (run.parallel.pipeline_schedule or "").startswith("zb-")
        or (run.fp8.fp8_format is not None and run.fp8.fp8_recipe in TORCH_RECIPES)
        or not run.fp8.fp8_wgrad
        or run.cuda_graphs.cuda_graph_impl == "local"
    )


def _recomputes_biases(run: RunConfig) -> bool:
    """Whether an MLP with biases is recomputed, which megatron-core's would do for ever.

    Core returns the bias, a parameter, from what is recomputed; our MLP adds it within.
    """
    model = run.model
    selective = model.recompute_granularity == "selective"
    return selective and "mlp" in (model.recompute_modules or ()) and model.add_bias_linear


def _spelled(config: TransformerEngineConfig, name: str) -> str:
    dashed = name.replace("_", "-")
    return f"--disable-{dashed}" if getattr(config, name) is False else f"--{dashed}"


def read_overlap_settings(path: str | None) -> dict[str, Any]:
    """A file of ``--tp-comm-overlap-cfg``: what to do for each of `OVERLAPPED`.

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
    """Variables of the environment that contradict what megatron-core sets by the flags."""
    if run.video.video:
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
    """What our own layers have and Transformer Engine's do not."""
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
        (
            run.data.reset_attention_mask,
            "`--reset-attention-mask` needs masks that Transformer Engine's causal attention "
            "ignores; use `--transformer-impl torch`.",
        ),
        (
            run.sft.sft and run.sft.sft_batching != "padded",
            f"`--sft-batching` ({run.sft.sft_batching}) needs masks that Transformer Engine's "
            "causal attention ignores; use padded, or `--transformer-impl torch`.",
        ),
    )
    return [sentence for broken, sentence in rules if broken]


def _attention_errors(run: RunConfig) -> list[str]:
    """What Transformer Engine's attention cannot do over context-parallel ranks."""
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
