"""Public weights of Wan 2.1 text to video, to and from checkpoints of the video DiT, on the CPU.

They come in two namings: those of diffusers' ``WanTransformer3DModel``, and those of the original
repository, which Self-Forcing and LongLive keep in files of torch.save. names.py (whose rows are
whose) and config.py (config.json <-> sizes) are pure; read.py opens what holds the tensors;
importing.py and exporting.py put them together for tools/convert_checkpoint.py.
"""

from __future__ import annotations

from megatron_ext.checkpoint.wan.names import Naming, from_wan, to_wan, wan_names

__all__ = ["Naming", "from_wan", "to_wan", "wan_names"]
