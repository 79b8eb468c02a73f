#!/usr/bin/env python3
r"""Score a checkpoint or a Hugging Face model on tasks of lm-eval, in any layout.

    python tools/evaluate.py --load RUN --eval-tasks hellaswag arc_easy --results-file scores.json
    python tools/evaluate.py --load RUN --nproc-per-node 4 --tensor-model-parallel-size 2 \
        --pipeline-model-parallel-size 2 --eval-tasks-path my_tasks --eval-tasks my_task

With ``--load``, model, tokenizer and precision are those of the checkpoint; ``--load-hf`` names a
folder of a Hugging Face model. All other flags are those of pretrain_gpt.py;
``--help results`` lists those of this tool alone.
It needs the package lm_eval (the extra ``eval``). Your own tasks in YAML files need no network.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.errors import end_on_interrupt, run_program

if __name__ == "__main__":
    end_on_interrupt()


from collections.abc import Sequence

from megatron_ext.config.sections import help_question
from megatron_ext.text.evaluation.tool import evaluate


def main(argv: Sequence[str]) -> int:
    """Score the model that the flags name; return the exit code."""
    if help_question(argv) in ("", "all"):
        print(__doc__)
    return evaluate(argv)


if __name__ == "__main__":
    run_program(main)
