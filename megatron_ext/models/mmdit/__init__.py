"""The multi-modal diffusion transformer (MMDiT) that learns a velocity field over video latents.

Text and image tokens have weights of their own in the double-stream blocks and share them in the
single-stream blocks; attention is joint and bidirectional (Stable Diffusion 3, arXiv:2403.03206;
FLUX; Open-Sora 2.0, arXiv:2503.09642).
"""

from megatron_ext.config.mmdit_sizes import SIZES, MMDiTSizes
from megatron_ext.models.mmdit.model import MMDiT, build_mmdit_chunk
from megatron_ext.models.mmdit.options import MMDiTOptions
from megatron_ext.models.mmdit.sequence import TokenRange

__all__ = ["SIZES", "MMDiT", "MMDiTOptions", "MMDiTSizes", "TokenRange", "build_mmdit_chunk"]
