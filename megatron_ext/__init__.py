"""A Megatron-style 3D-parallel training framework on top of the PyPI package megatron-core.

The way from raw data to a checkpoint:
raw jsonl / video -> .bin/.idx -> samples -> batch -> model chunks -> schedule -> loss
    -> gradients -> distributed optimizer (+EMA) -> checkpoint

Packages import each other in one direction only; CONTRIBUTING.md has their order.
"""

import warnings

# megatron-core says this at import, once for each of five files; the run's notes say it once.
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
warnings.filterwarnings("ignore", message="Apex is not installed")
