"""Flags of a GPT's positions, learned or rotary, and their rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_ext.config.flags import (
    COUNT,
    FACTOR,
    SIZE,
    Range,
    changed_fields,
    default_of,
    fixed_flag,
    flag,
    resumed_flag,
)
from megatron_ext.config.layers import layers_without_rope, pattern_errors
from megatron_ext.config.rules.model import REQUIRED
from megatron_ext.config.run import LayerSection, RunConfig
from megatron_ext.errors import FlagError, exclusive

if TYPE_CHECKING:
    from megatron_ext.layers.rope_scaling import RopeScaling, RotarySettings


@dataclass(frozen=True)
class PositionConfig(LayerSection):
    """The flags of the positions of a GPT's tokens; names and defaults are Megatron-LM's."""

    SECTION: ClassVar[str] = "positions"

    max_position_embeddings: int | None = flag(
        None, "longest position that the model may see", COUNT, "tokens"
    )
    position_embedding_type: str = fixed_flag(
        "learned_absolute",
        "kind of position embedding; yarn is rope scaled by the --yarn flags",
        choices="learned_absolute rope yarn none",
        advice="use rope",
    )
    rotary_base: float = resumed_flag(10000.0, "base of the rotary frequencies", Range(1, 10**12))
    rope_local_base_freq: float | None = resumed_flag(
        None,
        "base of the rotary frequencies in layers with a window, which are then not scaled, as in "
        "Gemma 3; default: --rotary-base, scaled as in other layers",
        Range(1, 10**12),
    )
    no_rope_freq: str | None = resumed_flag(
        None, "no rotary positions in every n-th layer, or where a list such as [0,0,1] has a 1"
    )
    rotary_percent: float = fixed_flag(1.0, "share of each head to rotate", Range(0, 1, above=True))
    rotary_interleaved: bool = fixed_flag(False, "rotate neighbouring channels instead of halves")
    rotary_seq_len_interpolation_factor: int | None = resumed_flag(
        None, "divide rotary positions by this factor", SIZE
    )
    use_rope_scaling: bool = resumed_flag(False, "scale rotary frequencies as Llama 3.1 does")
    rope_scaling_factor: float = resumed_flag(8.0, "factor of --use-rope-scaling", FACTOR)
    rope_scaling: str | None = resumed_flag(
        None,
        "scaling of the rotary frequencies as a JSON object, like rope_parameters of transformers: "
        "rope_type linear, llama3, yarn, longrope or proportional, with its entries",
    )
    yarn_rotary_scaling_factor: float | None = resumed_flag(
        None, "new context length over the original one, for --position-embedding-type yarn", FACTOR
    )
    yarn_original_max_position_embeddings: int | None = resumed_flag(
        None, "context length before YaRN lengthened it", COUNT, "tokens"
    )
    yarn_beta_fast: float = resumed_flag(
        32.0, "rotations in the original context above which YaRN keeps a frequency", FACTOR
    )
    yarn_beta_slow: float = resumed_flag(
        1.0, "rotations in the original context below which YaRN divides a frequency", FACTOR
    )
    yarn_mscale: float | None = resumed_flag(
        None, "numerator's weight in YaRN's factor of cosines and sines", Range(0, 1e6)
    )
    yarn_mscale_all_dim: float | None = resumed_flag(
        None, "denominator's weight in YaRN's factor of cosines and sines", Range(0, 1e6)
    )
    yarn_correction_range_round_to_int: bool = resumed_flag(
        True, "round the bounds of YaRN's ramp to whole channels"
    )

    llama_4_scaling_beta: float | None = resumed_flag(
        None,
        "growth b of the queries at the position p, which are multiplied by 1 + b ln(1 + "
        "floor(p / n)); n is original_max_position_embeddings of --rope-scaling (Ministral 3)",
        FACTOR,
    )

    def resolved(self) -> PositionConfig:
        """Return a copy in which the YaRN flags are replaced by an equivalent ``--rope-scaling``.

        Return the section unchanged without ``--position-embedding-type yarn``, and if the YaRN
        flags are incomplete or contradict ``--rope-scaling``, which `errors` refuses.
        """
        factor = self.yarn_rotary_scaling_factor
        original = self.yarn_original_max_position_embeddings
        if self.position_embedding_type != "yarn" or self.rope_scaling is not None:
            return self
        if factor is None or original is None:
            return self
        from megatron_ext.layers.rope_scaling import written, yarn_scaling

        scaling = yarn_scaling(
            factor,
            original,
            mscale=self.yarn_mscale,
            mscale_all_dim=self.yarn_mscale_all_dim,
            beta_fast=self.yarn_beta_fast,
            beta_slow=self.yarn_beta_slow,
            truncate=self.yarn_correction_range_round_to_int,
        )
        usual: dict[str, Any] = {
            name: default_of(self, name) for name in vars(self) if name.startswith("yarn_")
        }
        return dataclasses.replace(
            self, **usual, position_embedding_type="rope", rope_scaling=written(scaling)
        )

    def scaling(self) -> RopeScaling | None:
        """Return the scaling that ``--rope-scaling`` gives; None without the flag.

        Raise a ValueError with the rule that the flag breaks.
        """
        if self.rope_scaling is None:
            return None
        from megatron_ext.layers.rope_scaling import read_scaling

        return read_scaling(self.rope_scaling, self.max_position_embeddings or 0)

    def own_rotary(self) -> RotarySettings | None:
        """Return the settings of our own rotary embedding, if the model needs it.

        Return None if there are no rotary positions, or if megatron-core's embedding gives the same
        angles.
        """
        if self.position_embedding_type != "rope":
            return None
        scaling = self.scaling()
        if self.rope_local_base_freq is None and scaling is None:
            return None
        from megatron_ext.layers.rope_scaling import RotarySettings

        return RotarySettings(
            percent=self.rotary_percent,
            base=self.rotary_base,
            local_base=self.rope_local_base_freq,
            interpolation_factor=self.rotary_seq_len_interpolation_factor,
            llama_factor=self.rope_scaling_factor if self.use_rope_scaling else None,
            scaling=scaling,
            query_growth=self.llama_4_scaling_beta,
        )

    def transformer_fields(self, config: RunConfig) -> Mapping[str, object]:
        """Return the fields of `StepTransformerConfig` for rotary positions, with their values."""
        scaling = self.scaling()
        lacking = None
        if self.no_rope_freq is not None:
            layers = layers_without_rope(self.no_rope_freq, config.model.num_layers or 0)
            lacking = [int(lacks) for lacks in layers]
        return {
            "rotary_interleaved": self.rotary_interleaved,
            "no_rope_freq": lacking,
            "rotary_magnitude": scaling.magnitude if scaling is not None else 1.0,
            "has_local_rotary": self.rope_local_base_freq is not None,
            "llama_4_scaling_beta": self.llama_4_scaling_beta,
        }

    def torch_only(self) -> list[str]:
        """Return the names of the given flags that Transformer Engine's layers do not support."""
        magnitude = 1.0
        try:
            scaling = self.resolved().scaling()
            magnitude = 1.0 if scaling is None else scaling.magnitude
        except ValueError:
            pass  # said by `position_rules.rotary_errors`
        given = {
            "--rope-local-base-freq": self.rope_local_base_freq is not None,
            "--rope-scaling": magnitude != 1,
            "--llama-4-scaling-beta": self.llama_4_scaling_beta is not None,
        }
        return [name for name, has in given.items() if has]

    def unused_fields(self) -> frozenset[str]:
        """Return the ``rotary_*`` fields if they have no effect, since no positions are rotary."""
        names = frozenset(f.name for f in dataclasses.fields(self) if f.name.startswith("rotary"))
        return names if self.position_embedding_type != "rope" else frozenset()

    def errors(self, config: RunConfig) -> Iterator[FlagError]:
        """Yield an error for each fault in the flags of positions."""
        model = config.model
        longest = self.max_position_embeddings
        if longest is None:
            yield FlagError(
                "--max-position-embeddings", None, "is missing", "give the size of the model"
            )
        if longest is None or any(getattr(model, name) is None for name in REQUIRED):
            return
        length = model.seq_length or 0
        if longest < length:
            yield FlagError(
                "--max-position-embeddings",
                longest,
                f"must be at least `--seq-length` ({length})",
                f"use {length}",
            )
        yield from _yarn_errors(self)
        yield from pattern_errors("--no-rope-freq", self.no_rope_freq, model.num_layers or 0)
        stages = config.parallel.pipeline_model_parallel_size
        learned = self.position_embedding_type == "learned_absolute"
        if model.mtp_num_layers and stages > 1 and learned:
            yield FlagError(
                "--mtp-num-layers",
                None,
                "with more than one pipeline stage does not go with `--position-embedding-type "
                "learned_absolute`, whose table would differ between the stages",
                "use rope",
            )


def _yarn_errors(positions: PositionConfig) -> Iterator[FlagError]:
    """Yield an error for flags of YaRN that are incomplete or contradict ``--rope-scaling``."""
    given = [name for name in changed_fields(positions) if name.startswith("yarn_")]
    if positions.position_embedding_type != "yarn":
        if given:
            yield FlagError(
                f"--{given[0].replace('_', '-')}",
                None,
                "needs `--position-embedding-type yarn`",
                "give both",
            )
    elif positions.rope_scaling is not None:
        yield exclusive("--position-embedding-type yarn", "--rope-scaling")
    else:
        for name in ("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings"):
            if getattr(positions, name) is None:
                flag = f"--{name.replace('_', '-')}"
                yield FlagError(
                    "--position-embedding-type yarn", None, f"needs `{flag}`", "give it"
                )
