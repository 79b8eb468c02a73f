"""Numbers of bytes as people read them."""

from __future__ import annotations

from megatron_ext.planning.hardware import GB


def size(count: float) -> str:
    """Bytes in GB, small ones in MB (powers of ten), a dash for none."""
    if not count:
        return "–"
    return f"{count / GB:,.2f} GB" if count >= GB / 10 else f"{count / 1e6:,.2f} MB"
