"""The configuration of a run: frozen dataclasses, one for each concern, and their flags."""

from __future__ import annotations

from megatron_ext.config.cli import ParsedArgs, parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.config.tokenizer import TokenizerConfig

__all__ = ["ParsedArgs", "RunConfig", "TokenizerConfig", "parse_args"]
