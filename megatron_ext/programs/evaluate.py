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

from collections.abc import Sequence

from megatron_ext.config.sections import help_question
from megatron_ext.text.evaluation.tool import evaluate


def main(argv: Sequence[str]) -> int:
    """Score the model that the flags name; return the exit code."""
    if help_question(argv) in ("", "all"):
        print(__doc__)
    return evaluate(argv)
