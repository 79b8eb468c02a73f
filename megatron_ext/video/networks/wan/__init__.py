"""The network of Wan (arXiv:2503.20314), causal or bidirectional, with all the code for it."""

from megatron_ext.train.task import later
from megatron_ext.video.config.window import WINDOW
from megatron_ext.video.networks.network import VideoNetwork
from megatron_ext.video.networks.wan.config import BIDIRECTIONAL, CAUSAL, SIZES, VideoDiTConfig

_HERE = "megatron_ext.video.networks.wan"
_SHARED = frozenset({"zero_head", "recompute_blocks"})

NETWORK = VideoNetwork(
    titles={BIDIRECTIONAL: "a video DiT", CAUSAL: "a causal video DiT"},
    sections=(VideoDiTConfig,),
    flow=f"{_HERE}.flow:WanFlow",
    resolve=later(f"{_HERE}.rules:resolve"),
    rules=later(f"{_HERE}.rules:rules"),
    stored_model=later(f"{_HERE}.rules:stored_model"),
    restated=later(f"{_HERE}.rules:restated"),
    # The only condition is the text; a tenth of the clips get none.
    defaults={"text_dropout": 0.1},
    streaming_flags={BIDIRECTIONAL: _SHARED, CAUSAL: _SHARED.union(WINDOW)},
    takes_references=True,
    conditions=later(f"{_HERE}.rules:conditions"),
    takes_adapters=True,
    even_times=False,
    streamed=f"{_HERE}.streaming:STREAMED",
    streamed_sizes=SIZES,
    conversion=f"{_HERE}.convert.conversion:CONVERSION",
)
