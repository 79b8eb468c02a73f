"""Builds a pipeline chunk of a GPT from megatron-core's GPTModel."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.core.models.gpt import GPTModel as CoreGPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlock as CoreTransformerBlock
from torch import Tensor

from megatron_ext import core
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.layers.specs import layer_spec, layers_of_chunk, mtp_block_spec
from megatron_ext.layers.subclass import specialize
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.text.config.positions import PositionConfig
from megatron_ext.text.model.language import TextModel

if TYPE_CHECKING:
    from megatron_ext.layers.changed_specs import ChangeLayers


class TransformerBlock(CoreTransformerBlock):  # type: ignore[misc]
    """megatron-core's TransformerBlock, whose last group of recomputed layers may be shorter.

    With releases of megatron-core for which `core.TAKES_SHORT_GROUPS` is False, the base class
    fails unless ``--recompute-num-layers`` divides the number of layers in the chunk.
    """

    def _get_layer(self, layer_number: int) -> Any:
        """Return this chunk's layer with the index ``layer_number``, counted from 0.

        An index past the last layer gives a layer that returns its input.
        """
        return self.layers[layer_number] if layer_number < len(self.layers) else _Nothing(self)


class _Nothing:
    def __init__(self, block: TransformerBlock) -> None:
        self.layer_number = block.layers[-1].layer_number

    def __call__(
        self, *, hidden_states: Tensor, context: Tensor | None, **_kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        return hidden_states, context


class GPTModel(TextModel, CoreGPTModel):  # type: ignore[misc]
    """A GPTModel of megatron-core with the forward pass and MTP losses of `TextModel`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not core.TAKES_SHORT_GROUPS:
            specialize(self.decoder, TransformerBlock)


def build_gpt_chunk(
    config: RunConfig,
    transformer_config: TransformerConfig,
    context: ParallelContext,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    model_class: Callable[..., TextModel] = GPTModel,
    change_layers: "ChangeLayers | None" = None,
) -> TextModel:
    """Build one model chunk of this pipeline rank.

    Args:
        pre_process: whether the chunk holds the embedding.
        post_process: whether the chunk holds the output layer.
        vp_stage: index of the chunk on this rank, with virtual pipelining.
        model_class: `GPTModel`, a subclass of it, or a function that returns an instance.
        change_layers: gets the specs of all layers of the decoder and of the final norm, and
            returns those to build. Layers of multi-token prediction are built like the last layer.

    Raise a ConfigError if the vocabulary size is not set.
    """
    model = config.model
    positions = config.section(PositionConfig)
    if not model.padded_vocab_size:
        raise ConfigError(
            "`--vocab-size` is not known: give a tokenizer or `--vocab-size` with NullTokenizer."
        )
    impl = model.transformer_impl
    last = mtp_spec = None
    if change_layers is None:
        block = layer_spec(transformer_config, impl=impl, vp_stage=vp_stage)
    else:
        from megatron_ext.layers.changed_specs import changed_specs

        block = changed_specs(transformer_config, change_layers, impl=impl, vp_stage=vp_stage)
        last = block.layer_specs[-1]
        block.layer_specs = block.layer_specs[layers_of_chunk(transformer_config, vp_stage)]
    if model.mtp_num_layers and core.mtp_on_this_chunk(transformer_config, vp_stage):
        mtp_spec = mtp_block_spec(transformer_config, impl=impl, vp_stage=vp_stage, layer=last)
    chunk = model_class(
        config=transformer_config,
        transformer_layer_spec=block,
        vocab_size=model.padded_vocab_size,
        max_sequence_length=positions.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=positions.position_embedding_type,
        rotary_percent=positions.rotary_percent,
        rotary_base=positions.rotary_base,
        rope_scaling=positions.use_rope_scaling,
        rope_scaling_factor=positions.rope_scaling_factor,
        seq_len_interpolation_factor=positions.rotary_seq_len_interpolation_factor,
        mtp_block_spec=mtp_spec,
        vp_stage=vp_stage,
        pg_collection=context.pgs,
    )
    chunk.has_changed_layers = change_layers is not None
    rotary = positions.own_rotary()
    if rotary is not None:
        from megatron_ext.layers.rotary import RotaryEmbedding

        chunk.rotary_pos_emb = RotaryEmbedding(rotary, transformer_config, context.pgs.cp)
    return chunk
