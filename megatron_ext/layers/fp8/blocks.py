"""The formats of rows that `layers.fp8.rows` encodes; rules and plans read them without torch."""

BLOCKS = {"fp8": 128, "mxfp8": 32}
"""For each ``--moe-dispatch-fwd-dtype`` in 8 bits, the consecutive values that share a scale."""
