"""Makes pairs of answers to a toy task without downloads, from what examples/sft/make_toy.py made.

The chosen answer is the conversation's own. The rejected one is the answer to the other task: the
digits reversed in place of one added to each, or the other way round.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.sft.make_toy import TASKS, answer


def pair_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the pair of a conversation, whose last answer is the one to choose."""
    *prompt, chosen = row["messages"]
    task, digits = prompt[-1]["content"].rsplit(" ", 1)
    other = TASKS[1 - TASKS.index(task)]
    rejected = {"role": "assistant", "content": answer(other, digits)}
    return {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True, type=Path, help="conversations, as JSON lines")
    parser.add_argument("--output", required=True, type=Path, help="file for the pairs")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.input.read_text().splitlines()]
    args.output.write_text("".join(json.dumps(pair_of(row)) + "\n" for row in rows))


if __name__ == "__main__":
    main()
