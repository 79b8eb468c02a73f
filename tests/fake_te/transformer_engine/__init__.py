"""A stand-in for Transformer Engine 2.9 that computes with torch on a CPU and records its calls.

It has what megatron-core and this project import and call, under the names and keywords of
the real sources (``signatures.json`` beside it, which `tests/layers/test_transformer_engine.py`
compares with it and with the sources, where they are).
It quantizes nothing: contexts, recipes and arguments are only recorded, products are exact. It is
put on the path of a process of its own, never on that of other tests.
"""

from transformer_engine import common, pytorch

__version__ = "2.9.0"
__all__ = ["common", "pytorch"]
