"""The table of the video networks: one line for each value of ``--video-model``, default first."""

NETWORKS = {
    "mmdit": "megatron_ext.video.networks.mmdit",
    "video-dit": "megatron_ext.video.networks.wan",
    "causal-video-dit": "megatron_ext.video.networks.wan",
}
"""The folder of each network; its ``NETWORK``, a `network.VideoNetwork`, says what it has."""
