"""The network of Wan (arXiv:2503.20314), causal or bidirectional, with all the code for it."""

from megatron_ext.train.task import later
from megatron_ext.video.config.window import WINDOW
from megatron_ext.video.networks.network import VideoNetwork
from megatron_ext.video.networks.wan.config import BIDIRECTIONAL, CAUSAL, SIZES, VideoDiTConfig

_HERE = "megatron_ext.video.networks.wan"
_SHARED = frozenset({"zero_head", "recompute_blocks"})

_SAMPLING = {"sample_text_scale": 5.0, "sample_image_scale": 1.0, "sample_oscillation": False}
"""Defaults of the flags of sampling that are those of Wan's own program."""

NETWORK = VideoNetwork(
    titles={BIDIRECTIONAL: "a video DiT", CAUSAL: "a causal video DiT"},
    sections=(VideoDiTConfig,),
    flow=f"{_HERE}.flow:WanFlow",
    resolve=later(f"{_HERE}.rules:resolve"),
    rules=later(f"{_HERE}.rules:rules"),
    stored_model=later(f"{_HERE}.rules:stored_model"),
    restated=later(f"{_HERE}.rules:restated"),
    # The only condition is the text; a tenth of the clips get none.
    defaults={"text_dropout": 0.1, **_SAMPLING},
    streaming_flags={BIDIRECTIONAL: _SHARED, CAUSAL: _SHARED.union(WINDOW)},
    takes_references=True,
    conditions=later(f"{_HERE}.rules:conditions"),
    conditions_flag="--dit-condition",
    takes_adapters=True,
    even_times=False,
    streamed=f"{_HERE}.streaming:STREAMED",
    streamed_sizes=SIZES,
    conversion=f"{_HERE}.convert.conversion:CONVERSION",
)
