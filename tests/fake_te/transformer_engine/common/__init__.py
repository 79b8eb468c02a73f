"""Parts that all frameworks share."""

from __future__ import annotations

from transformer_engine.common import recipe

__all__ = ["recipe"]
