"""The table of the video networks: a line for each value of ``--video-model``, default first."""

NETWORKS = {
    "mmdit": "megatron_ext.video.networks.mmdit",
    "video-dit": "megatron_ext.video.networks.wan",
    "causal-video-dit": "megatron_ext.video.networks.wan",
    "hunyuan-video": "megatron_ext.video.networks.hunyuan",
}
"""The package of each network, by value of ``--video-model``; its ``NETWORK`` describes the
network."""
