"""Lists the documents on which a run was trained, with when and how often, from its save folder.

    python tools/ledger.py out/run                              # tokens and epochs by source
    python tools/ledger.py out/run --document data/web 1234     # where a document was read
    python tools/ledger.py out/run --step 500 --text            # what a step has read
    python tools/ledger.py out/run --spike --text               # and each step with a spike
    python tools/ledger.py out/run --compare out/continued      # samples read again, or missed
    python tools/ledger.py out/run --export read.parquet        # all of it

The tool reads `data_ledger.jsonl`, the record that runs with --data-order direct keep. Exit code 0:
answered; 2: bad flags, or a question that the record cannot answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.extras import run_tool


def main(argv: Sequence[str]) -> int:
    """Answer a question about the record; return the exit code."""
    return run_tool("ledger", "tool", argv, description=str(__doc__))
