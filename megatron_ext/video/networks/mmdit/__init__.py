"""The MMDiT, the network of Open-Sora 2.0 (arXiv:2503.09642); this package is all its code."""

from functools import partial

from megatron_ext.video.config.joint import (
    JointConfig,
    guidance_errors,
    resolve_joint,
    stored_joint,
)
from megatron_ext.video.networks.mmdit.config import MMDiTConfig, sizes_of
from megatron_ext.video.networks.network import VideoNetwork

_HERE = "megatron_ext.video.networks.mmdit"

NETWORK = VideoNetwork(
    titles={"mmdit": "an MMDiT"},
    sections=(JointConfig, MMDiTConfig),
    flow=f"{_HERE}.flow:MMDiTFlow",
    resolve=partial(resolve_joint, sizes_of=sizes_of),
    rules=guidance_errors,
    stored_model=partial(stored_joint, section="mmdit"),
    takes_pooled=True,
    takes_references=True,
    takes_adapters=True,
    conversion=f"{_HERE}.convert.conversion:CONVERSION",
)
