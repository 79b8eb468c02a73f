"""Rules of Transformer Engine: what its layers do not support."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from math import prod
from typing import Any

from megatron_ext.config.flags import changed_fields
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.precision import TE_IMPL, TORCH_RECIPES, TransformerEngineConfig
from megatron_ext.config.rules.model import parts_of_torch_layers
from megatron_ext.config.run import RunConfig
from megatron_ext.config.training import TrainingConfig
from megatron_ext.disk.reading import UnreadableFile, read_yaml
from megatron_ext.errors import ConfigError, FlagError

OVERLAPPED = tuple(
    f"{layer}_{part}"
    for layer in ("qkv", "proj", "fc1", "fc2")
    for part in ("fprop", "dgrad", "wgrad")
)
"""Matrix products that a file of ``--tp-comm-overlap-cfg`` may configure."""
BACKENDS = {
    "auto": (1, 1, 1),
    "flash": (1, 0, 0),
    "fused": (0, 1, 0),
    "unfused": (0, 0, 1),
    "local": (0, 0, 0),
}
"""Value of ``--attention-backend`` -> values of the environment variables `SWITCHES`.

megatron-core sets these variables, and Transformer Engine reads them.
"""
SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def transformer_engine_errors(run: RunConfig, *, has_te: bool) -> Iterator[str]:
    """Yield an error for each fault in a run's use of Transformer Engine.

    With ``has_te`` Transformer Engine can be used, and if it is installed here, its version is
    checked too.
    """
    yield from _environment_errors(run.model, run.training)
    if run.device != "cpu":
        may_use_te = not needs_torch_layers(run)
        yield from _overlap_errors(run.engine, run.model, run.parallel, may_use_te)
    yield from _context_errors(run.parallel, run.engine, run.model)
    if run.model.transformer_impl == TE_IMPL:
        yield from _layer_errors(run)
        yield from _attention_errors(run.parallel, run.model, run.engine)
    if has_te:
        from megatron_ext.config.rules.te_version import found_version, version_errors

        installed = found_version()
        if installed is not None:
            yield from version_errors(run, installed)


def _overlap_errors(
    engine: TransformerEngineConfig, model: ModelConfig, parallel: ParallelConfig, may_use_te: bool
) -> Iterator[str]:
    if not engine.tp_comm_overlap:
        for name in changed_fields(engine):
            if name.startswith("tp_comm_"):
                off = "disable-" if getattr(engine, name) is False else ""
                flag = f"--{off}{name.replace('_', '-')}"
                yield FlagError(flag, None, "needs `--tp-comm-overlap`", "give it too")
        return
    if model.transformer_impl != TE_IMPL:
        use = "use `--transformer-impl transformer_engine`, or " if may_use_te else ""
        yield FlagError(
            "--tp-comm-overlap",
            None,
            "is done by Transformer Engine's layers",
            f"{use}leave it out",
        )
    if not parallel.sequence_parallel:
        yield FlagError(
            "--tp-comm-overlap",
            None,
            "needs `--sequence-parallel` and `--tensor-model-parallel-size` above 1, whose "
            "communication it hides",
            "give both",
        )
    try:
        read_overlap_settings(engine.tp_comm_overlap_cfg)
    except ConfigError as error:
        yield from error.messages


def _context_errors(
    parallel: ParallelConfig, engine: TransformerEngineConfig, model: ModelConfig
) -> Iterator[FlagError]:
    sizes = engine.hierarchical_context_parallel_sizes
    cp = parallel.context_parallel_size
    uses = "a2a+p2p" in parallel.cp_comm_type
    if sizes is None:
        if uses and cp > 1 and model.transformer_impl == TE_IMPL:
            yield FlagError(
                "--cp-comm-type",
                "a2a+p2p",
                "needs `--hierarchical-context-parallel-sizes`",
                f"give two sizes whose product is `--context-parallel-size` ({cp})",
            )
        return
    shown = " ".join(map(str, sizes))
    refused = partial(FlagError, "--hierarchical-context-parallel-sizes", shown)
    if not uses:
        yield refused(
            "has an effect with `--cp-comm-type a2a+p2p` only", "give that, or leave it out"
        )
    elif find_spec("einops") is None:
        yield refused(
            "needs the package einops, by which megatron-core makes the groups",
            "run `pip install einops`",
        )
    elif len(sizes) != 2 or min(sizes) < 1 or prod(sizes) != cp:
        yield refused(f"must be two sizes whose product is `--context-parallel-size` ({cp})")


def needs_torch_layers(run: RunConfig) -> bool:
    """Return whether a run's flags make ``--transformer-impl auto`` choose the torch layers."""
    return (
        run.model.blocks_dealt_by_cost
        or run.lora.lora_rank is not None
        or run.model.deterministic_dropout
        or run.model.fp32_residual_connection
        or _recomputes_biases(run.model)
        or bool(_torch_only(run))
        or run.model.attention_backend == "local"
        or run.model.document_masks
        or run.parallel.defers_weight_gradients
        or (run.fp8.fp8_format is not None and run.fp8.fp8_recipe in TORCH_RECIPES)
        or not run.fp8.fp8_wgrad
        or run.cuda_graphs.cuda_graph_impl == "local"
        or run.optimizer.use_precision_aware_optimizer
    )


def _recomputes_biases(model: ModelConfig) -> bool:
    """Return whether an MLP with biases is recomputed, which only this package's MLP can do.

    This package's MLP adds the bias inside the recomputed function. megatron-core's MLP returns the
    bias, a parameter, from that function, and the backward pass hangs.
    """
    selective = model.recompute_granularity == "selective"
    return selective and "mlp" in (model.recompute_modules or ()) and model.has_mlp_bias


def read_overlap_settings(path: str | None) -> dict[str, Any]:
    """Return the settings in the file of ``--tp-comm-overlap-cfg``; {} if ``path`` is None.

    They are mappings by matrix product, such as "qkv_fprop". A file that cannot be read, or names a
    product not in `OVERLAPPED`, raises a ConfigError.
    """
    if path is None:
        return {}
    refused = partial(FlagError, "--tp-comm-overlap-cfg", path)
    try:
        content = read_yaml(path)
    except UnreadableFile as error:
        raise ConfigError(refused(f"cannot be read: {error.reason}")) from error
    if not isinstance(content, dict) or not all(isinstance(x, dict) for x in content.values()):
        raise ConfigError(
            refused(
                "must hold settings by the names of products, such as "
                "`qkv_fprop: {method: ring_exchange}`"
            )
        )
    unknown = [str(product) for product in content if product not in OVERLAPPED]
    if unknown:
        called = f"but products are called {', '.join(OVERLAPPED)}"
        raise ConfigError(refused(f"names {', '.join(unknown)}, {called}"))
    return content


def _environment_errors(model: ModelConfig, training: TrainingConfig) -> Iterator[FlagError]:
    """Yield an error for each environment variable that contradicts a flag."""
    if model.blocks_dealt_by_cost:
        return
    backend = model.attention_backend
    for name, value in zip(SWITCHES, BACKENDS[backend], strict=True):
        if os.environ.get(name, str(value)) != str(value):
            yield FlagError(
                f"`{name}`",
                os.environ[name],
                f"in the environment contradicts `--attention-backend` ({backend}), which sets it "
                f"to {value}",
                "unset it",
            )
    allowed = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    if model.transformer_impl == TE_IMPL and training.deterministic_mode and allowed != "0":
        yield FlagError(
            "`NVTE_ALLOW_NONDETERMINISTIC_ALGO`",
            allowed,
            "in the environment contradicts `--deterministic-mode`",
            "unset it",
        )


def _torch_only(run: RunConfig) -> list[str]:
    """Return the flags that the run sets and that only the torch layers support."""
    of_task = (flag for section in run.layer_sections for flag in section.torch_only())
    return [*parts_of_torch_layers(run.model), *of_task]


def _layer_errors(run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each given option that Transformer Engine's layers lack."""
    model = run.model
    if model.attention_backend == "local":
        yield FlagError(
            "--attention-backend",
            "local",
            "leaves Transformer Engine's layers without any attention",
            "use auto, or `--transformer-impl torch`",
        )
    if model.fp32_residual_connection:
        yield FlagError(
            "--fp32-residual-connection",
            None,
            "needs our torch layers, since Transformer Engine's take a residual stream in the "
            "dtype of their weights only",
            "use `--transformer-impl torch`",
        )
    for flag in _torch_only(run):
        yield FlagError(
            flag,
            None,
            "needs our torch layers, since Transformer Engine's lack this part",
            "use `--transformer-impl torch`",
        )
    if _recomputes_biases(model):
        yield FlagError(
            "--recompute-modules",
            "mlp",
            "with Transformer Engine's layers needs an MLP without biases",
            "give `--disable-bias-linear`, or `--transformer-impl torch`",
        )


def _attention_errors(
    parallel: ParallelConfig, model: ModelConfig, engine: TransformerEngineConfig
) -> Iterator[FlagError]:
    """Yield an error for context-parallel attention that Transformer Engine cannot compute."""
    cp = parallel.context_parallel_size
    tp = max(1, parallel.tensor_model_parallel_size)
    if cp <= 1:
        return
    kinds = set(parallel.cp_comm_type)
    sizes = engine.hierarchical_context_parallel_sizes or [cp]
    groups = (model.num_query_groups or model.num_attention_heads or 0) // tp
    for kind, share in (("a2a", cp), ("a2a+p2p", sizes[0])):
        if kind in kinds and groups % max(1, share):
            yield FlagError(
                "--cp-comm-type",
                kind,
                f"needs the heads of keys on a tensor-parallel rank ({groups}) to be divisible by "
                f"the ranks that exchange them ({share})",
                "use all_gather",
            )
