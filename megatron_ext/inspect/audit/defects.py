"""Lists all known defects of megatron-core."""

from __future__ import annotations

from megatron_ext.inspect.audit.defect import Defect
from megatron_ext.inspect.audit.defects_model import MODEL
from megatron_ext.inspect.audit.defects_rest import REST
from megatron_ext.inspect.audit.defects_step import STEP

DEFECTS: tuple[Defect, ...] = (*MODEL, *STEP, *REST)
"""All defects in the order of their numbers."""
BY_NUMBER = {defect.number: defect for defect in DEFECTS}
