"""Flags of what lies in host memory instead of a GPU's: optimizer state and activations."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.flags import NATURAL, SHARE, Changeable, flag


@dataclass(frozen=True)
class OffloadConfig(Changeable):
    """Flags of state and activations on the host; names are Megatron-LM's."""

    optimizer_cpu_offload: bool = flag(
        False,
        "keep optimizer state in host memory, and let the host update the weights that it belongs "
        "to",
    )
    optimizer_offload_fraction: float = flag(
        1.0, "share of the optimizer state that --optimizer-cpu-offload moves to the host", SHARE
    )
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        False, "copy the gradients and weights of neighbours while the host updates a weight"
    )
    use_torch_optimizer_for_cpu_offload: bool = flag(
        False, "let torch's Adam update the weights whose state stays on the GPU, too"
    )
    pin_cpu_grads: bool = flag(
        True, "copy gradients to pinned host memory, which is faster but cannot be swapped out"
    )
    pin_cpu_params: bool = flag(True, "pin the weights that the host updates, for the same reason")
    cpu_offloading_num_layers: int = flag(
        0,
        "first layers of each pipeline stage, or of each of its chunks, whose activations wait in "
        "host memory for the backward pass",
        NATURAL,
        "layers",
    )
    fine_grained_activation_offloading: bool = flag(
        False, "let the activations of --offload-modules wait in host memory, in all layers"
    )
    offload_modules: list[str] = flag(
        [],
        "parts of a layer for --fine-grained-activation-offloading",
        choices="attn_norm qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act",
        nargs="+",
    )
    min_offloaded_tensor_size: int = flag(
        1024 * 1024, "elements below which an activation stays on the GPU", NATURAL, "elements"
    )

    @property
    def moves_activations(self) -> bool:
        """Return whether activations wait in host memory."""
        return self.cpu_offloading_num_layers > 0 or self.fine_grained_activation_offloading
