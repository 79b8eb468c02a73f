"""A Megatron-style 3D-parallel training framework on top of the PyPI package megatron-core.

raw jsonl / video -> .bin/.idx -> samples -> batch -> model chunks -> schedule -> loss
    -> gradients -> distributed optimizer (+EMA) -> checkpoint

Imports point one way; CONTRIBUTING.md has the order of the packages.
"""

import warnings

# megatron-core says this at import, once for each of five files; the run's notes say it once.
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
warnings.filterwarnings("ignore", message="Apex is not installed")
