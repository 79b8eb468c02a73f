"""From a run's configuration to megatron-core's TransformerConfig.

Which layers a chunk holds when the stages run through the ranks there and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend, LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_ext.config.transformer_engine import TE_IMPL
from megatron_ext.layers.auxiliary_loss import AuxiliaryScale
from megatron_ext.layers.pointwise import ACTIVATIONS, Fusions
from megatron_ext.layers.weight_gradients import DeferredWeightGradients

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig


class VShapedLayerLayout(PipelineParallelLayerLayout):  # type: ignore[misc]
    """megatron-core's table of layers for two chunks on each rank, there and back.

    Rank r holds stages r and ``2 * pipeline_size - 1 - r``; all stages hold equally many layers,
    the first one also the embedding, the last one the output layer.

    Args:
        num_layers: of the model, a multiple of twice the pipeline size.
        pipeline_size: ranks.
    """

    def __init__(self, num_layers: int, pipeline_size: int) -> None:
        self.per_stage = num_layers // (2 * pipeline_size)
        layers = [LayerType.decoder] * self.per_stage
        there = [list(layers) for _ in range(pipeline_size)]
        back = [list(layers) for _ in range(pipeline_size)]
        there[0].insert(0, LayerType.embedding)
        back[0].append(LayerType.loss)
        super().__init__([*there, *back], pipeline_size)

    def validate_layer_layout(self, num_layers: int, mtp_num_layers: int | None) -> bool:
        """The construction is right; no stage holds multi-token prediction alone."""
        return False

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Layers before a chunk, along the model; the rank is this one unless it is given."""
        there = int(super().get_layer_offset(layer_type, vp_stage=0, pp_rank=pp_rank))
        last = (2 * self.pipeline_model_parallel_size - 1) * self.per_stage
        return last - there if vp_stage else there


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

ZERO_BUBBLE = ("zb-h1", "zb-v")


@dataclass
class StepTransformerConfig(TransformerConfig):  # type: ignore[misc]
    """TransformerConfig that also carries what a step hands to its layers.

    Attributes:
        auxiliary_scale: what a micro-batch's auxiliary loss counts in the step.
        weight_gradients: where zero-bubble schedules put them off; None with the others.
        deterministic_dropout: see `layers.dropout`.
        adds_in_place: weight gradients are added to the data-parallel gradient buffer by the
            product that makes them; see `layers.autograd`.
        te_gradient_accumulation_fusion: Transformer Engine's layers sum weight gradients in the
            main buffer, also where megatron-core's cannot.
        fusions: what of a layer compiles.
    """

    auxiliary_scale: AuxiliaryScale | None = None
    weight_gradients: DeferredWeightGradients | None = None
    deterministic_dropout: bool = False
    adds_in_place: bool = False
    te_gradient_accumulation_fusion: bool = False
    fusions: Fusions = Fusions()


def adds_in_place(config: RunConfig) -> bool:
    """``--gradient-accumulation-fusion`` in our own layers, which need no kernel of apex."""
    ours = config.model.transformer_impl != TE_IMPL
    return ours and config.device == "cuda" and config.model.gradient_accumulation_fusion


def params_dtype(config: RunConfig) -> torch.dtype:
    """The dtype of the parameters that the forward pass uses."""
    if config.precision.bf16:
        return torch.bfloat16
    return torch.float16 if config.precision.fp16 else torch.float32


def xavier_uniform(tensor: torch.Tensor) -> torch.Tensor:
    """Draw a matrix as Glorot and Bengio do (2010); a bias, which has no fans, is zero."""
    if tensor.dim() < 2:
        return torch.nn.init.zeros_(tensor)
    return torch.nn.init.xavier_uniform_(tensor)


def _fusions(config: RunConfig) -> Fusions:
    model = config.model
    return Fusions(
        norm=model.persist_layer_norm,
        activation=model.bias_swiglu_fusion if model.swiglu else model.bias_gelu_fusion,
        rotary=model.apply_rope_fusion,
        bias_dropout=model.bias_dropout_fusion,
    )


def build_transformer_config(config: RunConfig) -> TransformerConfig:
    """Translate a run's configuration for megatron-core.

    With megatron-core's interleaved schedule, messages follow two rules that keep it exact:
    virtual chunks never use batched messages (with two stages both neighbours are the same peer,
    and batched messages swap), and overlapped messages never go with the deallocation of stage
    outputs (a buffer would be freed while it is being sent). Our own runtime has neither fault.
    """
    fields: dict[str, Any] = dict(config.transformer_fields())
    dtype = params_dtype(config)
    fields["params_dtype"] = dtype
    in_fp32 = config.model.fp32_residual_connection
    fields["pipeline_dtype"] = torch.float32 if in_fp32 else dtype
    fields["activation_func"] = ACTIVATIONS[str(fields.get("activation_func", "gelu"))]
    fields["attention_backend"] = AttnBackend[str(fields["attention_backend"])]
    schedule = config.parallel.pipeline_schedule
    core_interleaved = schedule == "core-interleaved"
    fields["overlap_p2p_comm"] = core_interleaved
    fields["batch_p2p_comm"] = not core_interleaved
    fields["deallocate_pipeline_outputs"] = not core_interleaved
    fields["deterministic_dropout"] = config.model.deterministic_dropout
    fields["adds_in_place"] = adds_in_place(config)
    fields["te_gradient_accumulation_fusion"] = (
        config.model.transformer_impl == TE_IMPL and config.model.gradient_accumulation_fusion
    )
    fields["fusions"] = _fusions(config)
    fields["weight_gradients"] = DeferredWeightGradients() if schedule in ZERO_BUBBLE else None
    fields["pipeline_model_parallel_layout"] = config.parallel.pipeline_model_parallel_layout
    if schedule == "zb-v":
        fields["pipeline_model_parallel_layout"] = VShapedLayerLayout(
            config.model.num_layers or 0, config.parallel.pipeline_model_parallel_size
        )
    if config.model.init_method_xavier_uniform:
        fields["init_method"] = xavier_uniform
        fields["output_layer_init_method"] = xavier_uniform
    fields["auxiliary_scale"] = AuxiliaryScale()
    core = StepTransformerConfig(**fields)
    if isinstance(core.cp_comm_type, list):
        # megatron-core looks a layer up by its number, which starts from 1.
        core.cp_comm_type = [core.cp_comm_type[0], *core.cp_comm_type]
    return core
