"""A Megatron-style 3D-parallel training framework on top of the PyPI package megatron-core.

The path from raw data to a checkpoint:
raw jsonl / video -> .bin/.idx -> samples -> batch -> model chunks -> schedule -> loss
    -> gradients -> distributed optimizer (+EMA) -> checkpoint

Packages import each other in one direction only; CONTRIBUTING.md has their order.
"""

import warnings

# megatron-core prints this warning at import, in each of five files; the notes of a run have it
# once.
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
warnings.filterwarnings("ignore", message="Apex is not installed")
