"""Flow matching with an MMDiT."""

from __future__ import annotations

from megatron_ext.video.config.joint import JointSizes
from megatron_ext.video.networks.joint import JointFlow
from megatron_ext.video.networks.mmdit.config import sizes_of
from megatron_ext.video.networks.mmdit.model import MMDiT


class MMDiTFlow(JointFlow):
    """The `FlowNetwork` of a run that trains or samples an MMDiT."""

    chunk = MMDiT

    @property
    def sizes(self) -> JointSizes:
        return sizes_of(self.config)
