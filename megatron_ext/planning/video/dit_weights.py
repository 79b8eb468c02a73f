"""Every parameter of a stage of the video DiT (`models.causal_video`) on one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.config.mmdit_sizes import TIMESTEP_WIDTH
from megatron_ext.config.video_dit_sizes import VideoDiTSizes
from megatron_ext.planning.contents import Stage
from megatron_ext.planning.parameters import Linear, Weight, with_frozen

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig


def dit_weights(config: RunConfig, sizes: VideoDiTSizes, tp: int, stage: Stage) -> list[Weight]:
    """Parameters in the order of the module.

    Args:
        config: of the run, whose adapters count.
        sizes: of the network.
        tp: ranks that share its matrices.
        stage: of it.
    """
    h, width, found = sizes.hidden_size, sizes.token_width, list[Weight]()
    if stage.embedding:
        for name, inputs, outputs in (
            ("patch_in", width, h),
            ("text_in", sizes.text_width, h),
            ("text_out", h, h),
            ("time_in.linear_in", TIMESTEP_WIDTH, h),
            ("time_in.linear_out", h, h),
            ("time_projection", h, 6 * h),
        ):
            found += Linear(f"embedder.{name}", outputs, inputs).weights(config)
    for number in stage.layers:
        found += _block(config, sizes, tp, f"blocks.{number}")
    if stage.head:
        found.append(Weight("head.modulation.weight", 2 * h))
        found += Linear("head.linear", width, h).weights(config)
    return with_frozen(config, found)


def _block(config: RunConfig, sizes: VideoDiTSizes, tp: int, name: str) -> list[Weight]:
    h, f = sizes.hidden_size, sizes.ffn_size

    def layer(own: str, outputs: int, inputs: int, *, row: bool = False) -> list[Weight]:
        rows, columns = (1, tp) if row else (tp, 1)
        linear = Linear(f"{name}.{own}", outputs, inputs, rows=rows, columns=columns)
        return linear.weights(config)

    def norms(of: str) -> list[Weight]:
        return [Weight(f"{name}.{of}.{x}_norm.weight", h // tp, parts=tp) for x in "qk"]

    return [
        Weight(f"{name}.modulation.weight", 6 * h),
        *layer("self_attention.linear_qkv", 3 * h, h),
        *norms("self_attention"),
        *layer("self_attention.linear_proj", h, h, row=True),
        Weight(f"{name}.cross_norm.weight", h),
        Weight(f"{name}.cross_norm.bias", h),
        *layer("cross_attention.linear_q", h, h),
        *layer("cross_attention.linear_kv", 2 * h, h),
        *norms("cross_attention"),
        *layer("cross_attention.linear_proj", h, h, row=True),
        *layer("linear_fc1", f, h),
        *layer("linear_fc2", h, f, row=True),
    ]
