"""HunyuanVideo (arXiv:2412.03603), with all the code for it."""

from functools import partial

from megatron_ext.video.config.joint import (
    JointConfig,
    guidance_errors,
    resolve_joint,
    stored_joint,
)
from megatron_ext.video.networks.hunyuan.config import HunyuanConfig, sizes_of
from megatron_ext.video.networks.network import WITHOUT_REFERENCES, VideoNetwork

_HERE = "megatron_ext.video.networks.hunyuan"

NETWORK = VideoNetwork(
    titles={"hunyuan-video": "a HunyuanVideo"},
    sections=(JointConfig, HunyuanConfig),
    flow=f"{_HERE}.flow:HunyuanFlow",
    resolve=partial(resolve_joint, sizes_of=sizes_of),
    rules=guidance_errors,
    stored_model=partial(stored_joint, section="hunyuan"),
    # Most published weights are of text to video.
    defaults=WITHOUT_REFERENCES,
    takes_pooled=True,
    takes_references=True,
    takes_adapters=True,
    conversion=f"{_HERE}.convert.conversion:CONVERSION",
)
