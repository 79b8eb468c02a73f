"""Looks at a machine before a run: what is there, what is not what it seems, and what that costs.

Nothing is imported here that could end this process: torch, megatron-core and the extensions are
asked in processes of their own.
"""

from megatron_ext.doctor.examine import examine
from megatron_ext.doctor.findings import Examination, Finding, Gpu, Rates
from megatron_ext.doctor.main import main
from megatron_ext.doctor.report import report
from megatron_ext.doctor.surroundings import Outcome, Surroundings, ThisMachine

__all__ = [
    "Examination",
    "Finding",
    "Gpu",
    "Outcome",
    "Rates",
    "Surroundings",
    "ThisMachine",
    "examine",
    "main",
    "report",
]
