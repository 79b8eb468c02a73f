"""Checking a run, and pricing it, without starting it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.flags import flag
from megatron_ext.config.ranges import SIZE

GPU_NAMES = ("A100-40GB", "A100", "L40S", "H100", "H200", "B200")
"""GPUs whose rates are known; see `planning.hardware`."""


@dataclass(frozen=True)
class PlanningConfig:
    """``--dry-run``: all checks, and what each rank would hold, send and take."""

    dry_run: bool = flag(
        False, "check everything, print what memory and time a step would take, start nothing"
    )
    dry_run_nodes: int | None = flag(
        None,
        "machines of the planned run, each with --nproc-per-node ranks",
        unit="machines",
        bounds=SIZE,
    )
    dry_run_gpu: str | None = flag(
        None,
        f"estimate time for this GPU, and check what holds on GPUs: {', '.join(GPU_NAMES)}, or a "
        "file .json that tools/doctor.py --json wrote",
    )

    def errors(self) -> list[str]:
        """What cannot be planned, one sentence each."""
        found = [
            f"`--{name.replace('_', '-')}` ({getattr(self, name)}) needs `--dry-run`; give both."
            for name in ("dry_run_nodes", "dry_run_gpu")
            if getattr(self, name) is not None and not self.dry_run
        ]
        if self.dry_run_gpu is not None and not is_gpu(self.dry_run_gpu):
            found.append(
                f"`--dry-run-gpu` ({self.dry_run_gpu}) must be one of {', '.join(GPU_NAMES)}, or a "
                "file .json that `tools/doctor.py --json` wrote."
            )
        return found


def is_gpu(name: str) -> bool:
    """Whether this is one of the GPUs, in any case, or a file that may describe some."""
    return name.endswith(".json") or name.lower() in {known.lower() for known in GPU_NAMES}
