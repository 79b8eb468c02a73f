"""Which layers a chunk holds when the stages run through the ranks there and back."""

from __future__ import annotations

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout


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
