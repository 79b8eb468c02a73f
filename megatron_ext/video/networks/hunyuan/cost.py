"""The cost formulas of HunyuanVideo, which adds a token refiner to double and single blocks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.optimizer import LoraConfig
from megatron_ext.planning.products import FORWARD_AND_BACKWARD, MULTIPLY_AND_ADD, Linear
from megatron_ext.planning.stages import FP32, LayerBytes, in_order, layer_norm
from megatron_ext.planning.weights import Weight, weights_of
from megatron_ext.video.config.sizes import TIMESTEP_WIDTH
from megatron_ext.video.cost import joint
from megatron_ext.video.networks.hunyuan.config import HunyuanSizes


def flops_of_clip(sizes: HunyuanSizes, num_text: int, num_image: int) -> float:
    """Return the floating-point operations of HunyuanVideo on one clip, forward and backward."""
    h = sizes.hidden_size
    vectors = (TIMESTEP_WIDTH + sizes.text_width + 2 * h) * h
    block = num_text * (4 * h + 2 * sizes.refiner_mlp_size + 2 * num_text) * h + 2 * h * h
    refiner = vectors + sizes.num_refiner_blocks * block
    blocks = joint.flops_of_clip(sizes, num_text, num_image)
    return blocks + float(FORWARD_AND_BACKWARD * MULTIPLY_AND_ADD * refiner)


@dataclass(frozen=True)
class HunyuanNetwork(joint.JointNetwork):
    """Formulas for the cost of HunyuanVideo on the clips of one bucket."""

    model: HunyuanSizes
    cond_bias = False

    def text_weights(self) -> list[Weight]:
        x = self.model
        h = x.hidden_size
        name = "embedding.txt_in"
        inner = x.refiner_mlp_size
        weights = self._plain(f"{name}.linear_in", x.text_width, h)
        for vector, width in (("time_in", TIMESTEP_WIDTH), ("mean_in", x.text_width)):
            weights += self._plain(f"{name}.{vector}.linear_in", width, h)
            weights += self._plain(f"{name}.{vector}.linear_out", h, h)
        for number in range(x.num_refiner_blocks):
            block = f"{name}.blocks.{number}"
            weights += self._norm(f"{block}.norm1")
            weights += self._plain(f"{block}.linear_qkv", h, 3 * h)
            weights += self._plain(f"{block}.linear_proj", h, h)
            weights += self._norm(f"{block}.norm2")
            weights += self._plain(f"{block}.linear_fc1", h, inner)
            weights += self._plain(f"{block}.linear_fc2", inner, h)
            weights += self._plain(f"{block}.modulation", h, 2 * h)
        return weights

    def _plain(self, name: str, inputs: int, outputs: int) -> list[Weight]:
        """Return the parameters of one of the refiner's linear layers, which get no adapters."""
        return weights_of(Linear(name, outputs, inputs), LoraConfig())

    def _norm(self, name: str) -> list[Weight]:
        return [Weight(f"{name}.{kind}", self.model.hidden_size) for kind in ("weight", "bias")]

    def text_memory(self) -> LayerBytes:
        """Return the memory of the refiner's activations; each rank has those of the whole text."""
        x = self.sizes
        h = self.model.hidden_size
        rows = x.b * self.clip.num_text
        stream = rows * h * x.width
        inner = rows * self.model.refiner_mlp_size * x.width
        scores = rows * self.model.num_heads * FP32
        # Inputs of norms and of linear layers, queries, keys and values, what goes through a gate,
        # and the MLP's inner features before and after SiLU.
        kept = 10 * stream + 2 * inner + 2 * layer_norm(rows) + scores
        weight = self.model.refiner_mlp_size * h * x.width
        block = LayerBytes(kept, inner + weight)
        return in_order(*[block] * self.model.num_refiner_blocks)

    def sample_flops(self) -> float:
        return flops_of_clip(self.model, self.clip.num_text, self.clip.num_image)
