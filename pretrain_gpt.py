"""Pretrain a GPT model, or fine-tune it on conversations (``--sft``).

Start it by torchrun, or directly: ``python pretrain_gpt.py --nproc-per-node 4 ...`` starts its own
ranks. ``python pretrain_gpt.py --help WORD`` finds flags, which are those of Megatron-LM. With
``--audit`` it does not train: it names the defects of megatron-core that affect Megatron-LM with
the other flags.
"""

from __future__ import annotations

import os

from megatron_ext.errors import end_on_interrupt, run_program

if __name__ == "__main__":
    end_on_interrupt()

from megatron_ext.config.inapplicable import Inapplicable, of_program
from megatron_ext.config.sections import help_question
from megatron_ext.extras import run_tool
from megatron_ext.text.task import TEXT
from megatron_ext.train.main import main as train

AUDIT = "--audit"
"""The flag with which the other flags are audited instead of used."""


def video_flags() -> list[Inapplicable]:
    """Return the flags of pretrain_video.py, to name that program if one of them is given here."""
    from megatron_ext.video.config.rules import SECTIONS

    return [of_program("pretrain_video.py", SECTIONS)]


def main(argv: list[str]) -> int:
    """Train, or audit the flags if `AUDIT` is among the arguments; return the exit code."""
    question = help_question(argv)
    if question in ("", "all"):
        print(__doc__)
    elif question is None and AUDIT in argv:
        return audit([word for word in argv if word != AUDIT])
    return train(TEXT, argv, elsewhere=video_flags)


def audit(flags: list[str]) -> int:
    """Audit flags on rank 0 and return the exit code; on other ranks do nothing and return 0."""
    rank = os.environ.get("RANK", "")
    if rank.isdecimal() and int(rank) > 0:
        return 0
    print(
        "> These flags are audited as those of Megatron-LM; what this program does instead is in "
        "docs/numerics.md.",
        flush=True,
    )
    words = ["--", "pretrain_gpt.py", *flags]
    return run_tool("audit", "report", words, description=str(__doc__))


if __name__ == "__main__":
    run_program(main)
