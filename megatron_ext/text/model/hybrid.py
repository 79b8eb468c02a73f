"""GPT as megatron-core's HybridModel, whose layers hold either attention or an MLP, not both.

Layer ``i`` of a GPT becomes two layers of the stack: ``2i`` with its attention and ``2i + 1`` with
its MLP. In `sharded_state_dict` both use the GPT's parameter names; initialization, saving and
loading go by these names. Both keep the GPT's layer number, which seeds the dropout masks. Hence a
GPT and its HybridModel train alike from one seed, and each loads the checkpoints of the other.
Import this module only if `megatron_ext.text.hybrid.HAS_HYBRID_MODEL`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.hybrid.hybrid_block import HybridStack as CoreHybridStack
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel as CoreHybridModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor

from megatron_ext.layers.norms import Norm
from megatron_ext.layers.specs import expert_pattern, torch_layer_spec
from megatron_ext.layers.transformer_layer import TransformerLayer
from megatron_ext.text.model.language import TextModel


class HalfLayer(TransformerLayer):
    """Half of a GPT's transformer layer: only its attention, or only its MLP.

    Both halves have the layer number of the GPT's layer.
    """

    def __init__(
        self, config: TransformerConfig, *args: Any, layer_number: int, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, layer_number=(layer_number + 1) // 2, **kwargs)
        # What this layer lacks has no output to drop out of and to add.
        if isinstance(self.mlp, IdentityOp):
            self.mlp_bda: Any = _pass_on
            self.recompute_mlp = False
        else:
            self.self_attn_bda: Any = _pass_on

    def _fuses(self, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Return False: the fused forward pass needs attention and MLP in one module."""
        return False


def _pass_on(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Replace megatron-core's `get_bias_dropout_add` for the MLP or attention of the other half.

    Ignore both arguments. Return a function that returns its first argument, the hidden states
    ``[s, b, h]``, unchanged.
    """
    return lambda output, residual, probability: output


def attention_half(layer: ModuleSpec) -> ModuleSpec:
    """Return the spec of a transformer layer without its MLP."""
    rest = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp}
    return ModuleSpec(module=HalfLayer, submodules=dataclasses.replace(layer.submodules, **rest))


def mlp_half(layer: ModuleSpec) -> ModuleSpec:
    """Return the spec of a transformer layer without its attention."""
    rest = {"input_layernorm": IdentityOp, "self_attention": IdentityOp}
    return ModuleSpec(module=HalfLayer, submodules=dataclasses.replace(layer.submodules, **rest))


class HybridStack(CoreHybridStack):  # type: ignore[misc]
    """megatron-core's HybridStack, but with this package's `Norm` as the final norm.

    In `sharded_state_dict` the parameters have the names that a GPT's decoder gives them.

    Attributes:
        first_layer: number of GPT layers in the chunks before this one.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        *,
        first_layer: int,
        pp_layer_offset: int,
        post_process: bool,
        **kwargs: Any,
    ) -> None:
        # megatron-core's norm is Transformer Engine's, and its offset is wrong for V-shaped stages.
        super().__init__(
            config, submodules, pp_layer_offset=2 * first_layer, post_layer_norm=False,
            post_process=post_process, **kwargs,
        )  # fmt: skip
        ends = bool(self.layers) and self.layers[-1].layer_number == config.num_layers
        # Multi-token prediction, on this stage or a later one, reads normalized states.
        self.final_layernorm = None
        if ends if config.mtp_num_layers else post_process:
            size = config.hidden_size
            epsilon = config.layernorm_epsilon
            self.final_layernorm = Norm(config=config, hidden_size=size, eps=epsilon)
        if config.recompute_num_layers is not None:
            self.config = copy.copy(config)
            self.config.recompute_num_layers = 2 * config.recompute_num_layers

    def forward(
        self,
        hidden_states: Tensor | None,
        attention_mask: Tensor | None,
        rotary_pos_emb: Tensor | None = None,
        padding_mask: Tensor | None = None,
        **_unused: Any,
    ) -> Tensor:
        """Return the hidden states ``[s, b, h]`` after this chunk's layers.

        Args:
            hidden_states: the embedded tokens ``[s, b, h]`` on the first pipeline stage. None on
                later stages, where `set_input_tensor` has set the output of the stage before.
            attention_mask: the document index of each position ``[b, s]``, or a dense mask
                ``[b, 1, s, s]`` that is True where attention is forbidden; None means causal.
        """
        hidden: Tensor = super().forward(
            hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, padding_mask=padding_mask
        )
        if self.final_layernorm is not None:
            return self.final_layernorm(hidden)  # type: ignore[no-any-return]
        # A stage must not return its input itself, whose gradient the schedule reads.
        return hidden if self.layers or self.pre_process else hidden.clone()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sharded state, with the names that a GPT's TransformerBlock uses."""
        metadata = metadata or {}
        by_number = metadata.get("non_homogeneous_layers") or metadata.get("singleton_local_shards")
        by_number = by_number or self.config.moe_layer_freq not in (0, 1)
        state: dict[str, Any] = {}
        for index, layer in enumerate(self.layers):
            own = f"{prefix}layers.{index}."
            number = layer.layer_number - 1
            offsets = [] if by_number else [(0, number, self.config.num_layers)]
            part = layer.sharded_state_dict(own, offsets, metadata)
            named = f"{prefix}layers.{number}." if by_number else f"{prefix}layers."
            replace_prefix_for_sharding(part, own, named)
            state |= part
        if self.final_layernorm is not None:
            state |= sharded_state_dict_default(
                self.final_layernorm, f"{prefix}final_layernorm.", sharded_offsets or (), metadata,
                tp_group=self.tp_group,
            )  # fmt: skip
        return state


class Depth(MultiTokenPredictionLayer):  # type: ignore[misc]
    """A depth of multi-token prediction with one whole transformer layer, not two half layers."""

    def __init__(
        self,
        *args: Any,
        mtp_layer_pattern: str | None = None,
        hybrid_submodules: HybridStackSubmodules | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)


def stack_spec(
    transformer_config: TransformerConfig,
    depths: MultiTokenPredictionBlockSubmodules | None,
    vp_stage: int | None,
) -> ModuleSpec:
    """Return the spec of the `HybridStack` of one chunk.

    ``depths`` is the spec of the MTP block that a GPT would have; None without MTP.
    """
    dense = torch_layer_spec(transformer_config, moe=False)
    experts = transformer_config.num_moe_experts is not None
    for depth in depths.layer_specs if depths is not None else ():
        depth.module = Depth
    submodules = HybridStackSubmodules(
        attention_layer=attention_half(dense),
        mlp_layer=mlp_half(dense),
        moe_layer=mlp_half(torch_layer_spec(transformer_config, moe=True)) if experts else None,
        mtp_block_spec=depths,
    )
    first = get_transformer_layer_offset(transformer_config, vp_stage=vp_stage)
    params = {"first_layer": first}
    return ModuleSpec(module=HybridStack, submodules=submodules, params=params)


def stages_pattern(transformer_config: TransformerConfig) -> str:
    """Return megatron-core's layer pattern of the whole model, such as ``*-*-|*-*E``.

    Each layer of the GPT gives two letters: ``*`` for attention, then ``-`` for a dense MLP or
    ``E`` for experts. ``|`` separates the pipeline chunks, in the order that megatron-core's
    HybridModel expects: the first virtual chunk of every pipeline rank, then the second of every
    rank, and so on. Each MTP depth adds ``/`` and a pair of letters at the end.
    """
    pairs = ["*E" if experts else "*-" for experts in expert_pattern(transformer_config)]
    chunks = transformer_config.virtual_pipeline_model_parallel_size
    stages = []
    for chunk in range(chunks or 1):
        for rank in range(transformer_config.pipeline_model_parallel_size):
            where: dict[str, Any] = {"vp_stage": chunk if chunks else None, "pp_rank": rank}
            first = get_transformer_layer_offset(transformer_config, **where)
            count = get_num_layers_to_build(transformer_config, **where)
            stages.append("".join(pairs[first : first + count]))
    depths = f"/{pairs[-1]}" * (transformer_config.mtp_num_layers or 0)
    return "|".join(stages) + depths


class HybridModel(TextModel, CoreHybridModel):  # type: ignore[misc]
    """A HybridModel of megatron-core based on `TextModel`, with the arguments of a GPTModel."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        transformer_layer_spec: TransformerBlockSubmodules,
        mtp_block_spec: MultiTokenPredictionBlockSubmodules | None,
        rope_scaling: bool,
        rope_scaling_factor: float,
        vp_stage: int | None = None,
        **given: Any,
    ) -> None:
        super().__init__(
            config,
            hybrid_stack_spec=stack_spec(config, mtp_block_spec, vp_stage),
            hybrid_layer_pattern=stages_pattern(config),
            vp_stage=vp_stage,
            **given,
        )
        if self.position_embedding_type == "rope":
            # megatron-core's HybridModel leaves out some options of the embedding.
            self.rotary_pos_emb = RotaryEmbedding(
                kv_channels=config.kv_channels,
                rotary_percent=given["rotary_percent"],
                rotary_interleaved=config.rotary_interleaved,
                seq_len_interpolation_factor=given["seq_len_interpolation_factor"],
                rotary_base=given["rotary_base"],
                rope_scaling=rope_scaling,
                rope_scaling_factor=rope_scaling_factor,
                use_cpu_initialization=config.use_cpu_initialization,
                cp_group=self.pg_collection.cp,
            )

    def _preprocess(
        self, *, input_ids: Tensor, position_ids: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        """Return the embedded tokens ``[s, b, h]`` and the rotary angles, followed by four Nones.

        The Nones stand for the other values that a GPTModel's `_preprocess` returns. The embedded
        tokens are None on later pipeline stages; the angles are None without rotary positions.
        """
        embedded = self.embedding(input_ids, position_ids) if self.pre_process else None
        rotary = None
        if self.position_embedding_type == "rope":
            length = self.rotary_pos_emb.get_rotary_seq_len(
                None, self.decoder, embedded, self.config, None
            )
            rotary = self.rotary_pos_emb(length)
        return embedded, rotary, None, None, None, None

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the sharded state with the keys that a GPT has.

        It leaves out the output layer's extra state, which is empty.
        """
        state: dict[str, Any] = super().sharded_state_dict(*args, **kwargs)
        return {key: x for key, x in state.items() if not key.endswith("output_layer._extra_state")}
