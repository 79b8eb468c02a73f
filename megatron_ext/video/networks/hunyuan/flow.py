"""Flow matching with HunyuanVideo, whose captions are masked behind their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from megatron_ext.video.cost.clip import Clip
from megatron_ext.video.data.conditions import text_mask
from megatron_ext.video.data.dataset import VideoBatch
from megatron_ext.video.data.randomness import Randomness
from megatron_ext.video.data.sampler import Geometry
from megatron_ext.video.networks.hunyuan.config import HunyuanSizes, sizes_of
from megatron_ext.video.networks.hunyuan.cost import HunyuanNetwork, flops_of_clip
from megatron_ext.video.networks.hunyuan.model import HunyuanVideo
from megatron_ext.video.networks.joint import JointBatchBuilder, JointFlow, JointVelocity


class HunyuanBatchBuilder(JointBatchBuilder):
    """Builds micro-batches of packed tokens, and the mask of the text, which every stage needs."""

    def _inputs(
        self, batch: VideoBatch, randomness: Randomness, x_t: Tensor, times: Tensor, masks: Tensor
    ) -> dict[str, Tensor | None]:
        inputs = super()._inputs(batch, randomness, x_t, times, masks)
        text = inputs.get("txt")
        if text is None:
            text = self.text_of(batch, randomness).sequence
        return {**inputs, "txt_mask": text_mask(text)}


class HunyuanVelocity(JointVelocity):
    """Predicts velocities with a `HunyuanVideo`."""

    masks_text = True

    def _run(self, inputs: Mapping[str, Tensor], shape: Sequence[int]) -> Sequence[Tensor]:
        return super()._run({**inputs, "txt_mask": text_mask(inputs["txt"])}, shape)


class HunyuanFlow(JointFlow):
    """The `FlowNetwork` of a run that trains or samples HunyuanVideo."""

    builder = HunyuanBatchBuilder
    chunk = HunyuanVideo
    velocity_class = HunyuanVelocity
    masks_text = True

    @property
    def sizes(self) -> HunyuanSizes:
        return sizes_of(self.config)

    def flops(self, sequence: Geometry) -> float:
        return flops_of_clip(self.sizes, sequence.num_text, sequence.num_image)

    def planned(self, clip: Clip) -> HunyuanNetwork:
        return HunyuanNetwork.of(self.config, self.sizes, clip)
