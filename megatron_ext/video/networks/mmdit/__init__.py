"""The MMDiT, the network of Open-Sora 2.0 (arXiv:2503.09642); this package is all its code."""

from megatron_ext.train.task import later
from megatron_ext.video.config.joint import JointConfig
from megatron_ext.video.networks.mmdit.config import MMDiTConfig
from megatron_ext.video.networks.network import VideoNetwork

_HERE = "megatron_ext.video.networks.mmdit"

NETWORK = VideoNetwork(
    titles={"mmdit": "an MMDiT"},
    sections=(JointConfig, MMDiTConfig),
    flow=f"{_HERE}.flow:MMDiTFlow",
    resolve=later(f"{_HERE}.rules:resolve"),
    rules=later(f"{_HERE}.rules:rules"),
    stored_model=later(f"{_HERE}.rules:stored_model"),
    takes_pooled=True,
    takes_references=True,
    takes_adapters=True,
    conversion=f"{_HERE}.convert.conversion:CONVERSION",
)
