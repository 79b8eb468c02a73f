"""Rules of optimizer state and activations in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import FlagError, exclusive


def offload_errors(run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in the flags of what lies in host memory."""
    if run.offload.optimizer_cpu_offload:
        yield from _state_errors(run)
    yield from _module_errors(run)
    if run.offload.moves_activations:
        yield from _activation_errors(run)


def _state_errors(run: RunConfig) -> Iterator[FlagError]:
    refused = partial(FlagError, "--optimizer-cpu-offload", None)
    rule = run.optimizer.optimizer
    if rule == "muon":
        yield refused(
            "does not go with `--optimizer muon`, whose products of matrices are a GPU's work",
            "use adam, or leave it out",
        )
    elif rule == "custom":
        yield refused(
            "does not go with `--optimizer-class`: it updates one weight at a time, which an "
            "optimizer of your own may count as a step each",
            "use adam or sgd, or leave it out",
        )
    if run.fp8.fp8_param_gather:
        yield refused(
            "does not go with `--fp8-param-gather`, whose weights only a GPU rounds to 8 bits",
            "leave one out",
        )


RECOMPUTED_PARTS = {
    "core_attn": ("core_attn",),
    "layernorm": ("attn_norm", "mlp_norm"),
    "moe": ("expert_fc1", "moe_act"),
    "moe_act": ("moe_act",),
    "mla_up_proj": ("qkv_linear",),
}
"""For each of ``--recompute-modules``, the ``--offload-modules`` that then keep nothing."""


def _module_errors(run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in the flags of fine-grained offload."""
    flags = run.offload
    modules = flags.offload_modules
    if not flags.fine_grained_activation_offloading:
        if modules:
            yield FlagError(
                "--offload-modules",
                " ".join(modules),
                "needs `--fine-grained-activation-offloading`",
                "give both",
            )
        return
    refused = partial(FlagError, "--fine-grained-activation-offloading", None)
    if not modules:
        yield refused("needs `--offload-modules`", "name the parts, such as core_attn")
    if flags.cpu_offloading_num_layers:
        yield exclusive(
            ("--cpu-offloading-num-layers", flags.cpu_offloading_num_layers),
            "--fine-grained-activation-offloading",
        )
    if run.model.recompute_granularity == "full":
        yield refused(
            "does not go with `--recompute-granularity full`, which keeps nothing of a layer's "
            "parts",
            "use `--cpu-offloading-num-layers`, which moves the inputs of recomputed layers",
        )
    selective = run.model.recompute_granularity == "selective"
    recomputed = (run.model.recompute_modules or ["core_attn"]) if selective else []
    again = [part for name in recomputed for part in RECOMPUTED_PARTS.get(name, ())]
    for name in modules:
        if name in again:
            yield FlagError(
                "--offload-modules",
                name,
                "is recomputed, so that it keeps nothing for the backward pass",
                "leave it out here or in `--recompute-modules`",
            )


def _activation_errors(run: RunConfig) -> Iterator[FlagError]:
    """Yield an error for each reason why activations cannot wait on the host."""
    count = run.offload.cpu_offloading_num_layers
    name = "--cpu-offloading-num-layers" if count else "--fine-grained-activation-offloading"
    refused = partial(FlagError, name, count or None)
    if count > (run.model.num_layers or count):
        yield refused(
            f"must be at most `--num-layers` ({run.model.num_layers})",
            f"use {run.model.num_layers}",
        )
    if run.cuda_graphs.cuda_graph_impl != "none":
        yield refused("does not go with `--cuda-graph-impl`, whose memory stays", "leave one out")
    if run.fp8.fp8_format is not None:
        yield refused(
            "does not go with `--fp8-format`, whose 8-bit copies of weights would be moved with "
            "every micro-batch",
            "leave one out",
        )
