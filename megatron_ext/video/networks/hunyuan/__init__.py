"""HunyuanVideo (arXiv:2412.03603), with all the code for it."""

from megatron_ext.train.task import later
from megatron_ext.video.config.joint import JointConfig
from megatron_ext.video.networks.hunyuan.config import HunyuanConfig
from megatron_ext.video.networks.network import WITHOUT_REFERENCES, VideoNetwork

_HERE = "megatron_ext.video.networks.hunyuan"

NETWORK = VideoNetwork(
    titles={"hunyuan-video": "a HunyuanVideo"},
    sections=(JointConfig, HunyuanConfig),
    flow=f"{_HERE}.flow:HunyuanFlow",
    resolve=later(f"{_HERE}.rules:resolve"),
    rules=later(f"{_HERE}.rules:rules"),
    stored_model=later(f"{_HERE}.rules:stored_model"),
    # Most published weights are of text to video.
    defaults=WITHOUT_REFERENCES,
    takes_pooled=True,
    takes_references=True,
    takes_adapters=True,
    conversion=f"{_HERE}.convert.conversion:CONVERSION",
)
