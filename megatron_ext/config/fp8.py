"""Matrix products in 8-bit floating point (arXiv:2209.05433)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.config.flags import flag

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig

OF_TRANSFORMER_ENGINE = ("blockwise", "mxfp8", "custom")
OF_DELAYED = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
OF_BF16_LAYERS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
UNIT = 16
"""What the sides of a weight on one rank must divide by, for the GPU's 8-bit products."""


@dataclass(frozen=True)
class Fp8Config:
    """bf16 unless ``--fp8-format``; names, meanings and defaults are Megatron-LM's."""

    fp8_format: str | None = flag(
        None,
        "products of the layers in 8 bits: e4m3 throughout, or hybrid with e5m2 for gradients",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str = flag(
        "delayed",
        "where scales come from: the steps before, or the tensor or each of its rows itself",
        choices=("delayed", "tensorwise", "rowwise", *OF_TRANSFORMER_ENGINE),
    )
    fp8_margin: int = flag(0, "headroom: a scale of the delayed recipe is divided by 2^margin")
    fp8_amax_history_len: int = flag(
        1, "steps whose largest magnitudes the delayed recipe remembers", unit="steps"
    )
    fp8_amax_compute_algo: str = flag(
        "most_recent",
        "which of the remembered magnitudes decides",
        choices=("most_recent", "max"),
    )
    fp8_wgrad: bool = flag(True, "weight gradients in 8 bits as well")
    first_last_layers_bf16: bool = flag(False, "keep the first and the last layers in bf16")
    num_layers_at_start_in_bf16: int = flag(
        1, "first layers to keep with --first-last-layers-bf16", unit="layers"
    )
    num_layers_at_end_in_bf16: int = flag(
        1, "last layers to keep with --first-last-layers-bf16", unit="layers"
    )

    def keeps_bf16(self, layer_number: int, num_layers: int) -> bool:
        """Whether a layer is computed in bf16.

        Args:
            layer_number: from 1, along the whole model.
            num_layers: of the whole model.
        """
        if not self.first_last_layers_bf16:
            return False
        after = num_layers - self.num_layers_at_end_in_bf16
        return not self.num_layers_at_start_in_bf16 < layer_number <= after

    def errors(self, run: RunConfig) -> list[str]:
        """What cannot be run, one sentence each."""
        if self.fp8_format is None:
            return [
                f"`{self._spelled(name)}` needs `--fp8-format`; give e4m3 or hybrid."
                for name in self._changed()
            ]
        found = [*self._recipe_errors(), *self._layer_errors(run.model.num_layers or 0)]
        return [*found, *self._run_errors(run), *self._width_errors(run)]

    def _changed(self) -> list[str]:
        default = Fp8Config()
        names = [field.name for field in dataclasses.fields(self)]
        return [name for name in names if getattr(self, name) != getattr(default, name)]

    def _spelled(self, name: str) -> str:
        dashed = name.replace("_", "-")
        return f"--no-{dashed}" if getattr(self, name) is False else f"--{dashed}"

    def _recipe_errors(self) -> list[str]:
        found = []
        if self.fp8_recipe in OF_TRANSFORMER_ENGINE:
            found.append(
                f"`--fp8-recipe` ({self.fp8_recipe}) is a recipe of Transformer Engine's layers; "
                "use delayed, tensorwise or rowwise."
            )
        if self.fp8_recipe != "delayed":
            found += [
                f"`{self._spelled(name)}` belongs to `--fp8-recipe delayed`, but the recipe is "
                f"{self.fp8_recipe}; leave it out."
                for name in self._changed()
                if name in OF_DELAYED
            ]
        if self.fp8_amax_history_len < 1:
            found.append(
                f"`--fp8-amax-history-len` ({self.fp8_amax_history_len}) must be at least 1."
            )
        if self.fp8_margin < 0:
            found.append(
                f"`--fp8-margin` ({self.fp8_margin}) must be at least 0: below it values would "
                "be cut off."
            )
        return found

    def _layer_errors(self, num_layers: int) -> list[str]:
        if not self.first_last_layers_bf16:
            return [
                f"`{self._spelled(name)}` needs `--first-last-layers-bf16`; give it too."
                for name in self._changed()
                if name in OF_BF16_LAYERS
            ]
        found = [
            f"`{self._spelled(name)}` ({getattr(self, name)}) must be at least 0."
            for name in OF_BF16_LAYERS
            if getattr(self, name) < 0
        ]
        if self.fp8_recipe == "delayed":
            found.append(
                "`--first-last-layers-bf16` does not go with `--fp8-recipe delayed`, whose state "
                "in a checkpoint is that of all layers alike; use tensorwise."
            )
        kept = self.num_layers_at_start_in_bf16 + self.num_layers_at_end_in_bf16
        if not found and kept >= num_layers > 0:
            found.append(
                f"`--first-last-layers-bf16` keeps {kept} of the {num_layers} layers in bf16, so "
                "that none is left for `--fp8-format`; leave that out."
            )
        return found

    def _run_errors(self, run: RunConfig) -> list[str]:
        rules = (
            (not run.precision.bf16, "needs `--bf16` for all but its products; give it too"),
            (
                run.model.transformer_impl == "transformer_engine",
                "is not supported with Transformer Engine's layers yet; use "
                "`--transformer-impl torch`",
            ),
            (
                run.video.video and self.first_last_layers_bf16,
                "of a video model does not go with `--first-last-layers-bf16`, whose layers are "
                "those of a language model; leave that out",
            ),
        )
        return [f"`--fp8-format` {reason}." for broken, reason in rules if broken]

    def _width_errors(self, run: RunConfig) -> list[str]:
        """Sides of the weights on one rank that 8-bit products cannot have."""
        model, tp = run.model, run.parallel.tensor_model_parallel_size
        experts_tp = run.parallel.expert_tensor_parallel_size or tp
        heads = model.num_attention_heads or 0
        channels = model.kv_channels or 0
        queries, groups = heads * channels, (model.num_query_groups or heads) * channels
        sides = (
            ("--hidden-size", model.hidden_size or 0, 1),
            ("--num-attention-heads times --kv-channels", queries, tp),
            ("the width of queries, keys and values", queries + 2 * groups, tp),
            ("--ffn-hidden-size", model.ffn_hidden_size or 0, tp),
            ("--moe-ffn-hidden-size", run.moe.moe_ffn_hidden_size or 0, experts_tp),
            (
                "--moe-shared-expert-intermediate-size",
                run.moe.moe_shared_expert_intermediate_size or 0,
                tp,
            ),
        )
        return [
            f"`--fp8-format` needs layers whose sides divide by {UNIT} on every rank, but {name} "
            f"({width}) over {parts} rank(s) does not; use a multiple of {UNIT * parts}."
            for name, width, parts in sides
            if width % (UNIT * parts)
        ]
