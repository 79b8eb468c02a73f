"""The table of the video networks: one line for each value of ``--video-model``."""

NETWORKS = {
    "mmdit": "megatron_ext.video.networks.mmdit.flow:MMDiTFlow",
    "video-dit": "megatron_ext.video.networks.wan.flow:WanFlow",
    "causal-video-dit": "megatron_ext.video.networks.wan.flow:WanFlow",
}
"""The module and name of each network's `FlowNetwork`; the one that a run names is imported."""
