#!/usr/bin/env python3
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

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.errors import end_on_interrupt, run_program

if __name__ == "__main__":
    end_on_interrupt()

from megatron_ext.extras import run_tool

main = partial(run_tool, "ledger", "tool", description=str(__doc__))

if __name__ == "__main__":
    run_program(main)
