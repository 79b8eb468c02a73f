"""Lists the known defects of megatron-core that affect a run of Megatron-LM with given flags.

    python tools/audit.py [--core 0.16.1] [--json] -- <flags of a Megatron-LM script>
    python tools/audit.py model_config.yaml
    python tools/audit.py --list
    python tools/audit.py --reproduce D2

Launch scripts are not read. To audit one, replace its training program by this package's
pretrain_gpt.py, add --audit to the flags, and run it. Recipes of Megatron-LM's functional tests
(model_config.yaml) are read. The name of the training program may precede the flags; defect D7
depends on that name. docs/numerics.md describes every defect. Exit code 0: clean; 1: findings; 2:
errors.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.extras import run_tool


def main(argv: Sequence[str]) -> int:
    """Report the defects that affect the flags; return the exit code."""
    return run_tool("audit", "report", argv, description=str(__doc__))
