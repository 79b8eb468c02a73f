"""Checkpoints of Hugging Face's transformers, to and from ours, on one rank and on the CPU.

names.py (whose rows are whose) and config.py (config.json <-> flags) are pure; read.py and write.py
hold the files; importing.py and exporting.py put them together for tools/convert_checkpoint.py.
"""

from __future__ import annotations

from megatron_ext.checkpoint.huggingface.names import RowShape, join_rows, split_rows

__all__ = ["RowShape", "join_rows", "split_rows"]
