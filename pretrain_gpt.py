"""Pretrain a GPT model, or fine-tune it on conversations (``--sft``).

Started by torchrun, or plainly: ``python pretrain_gpt.py --nproc-per-node 4 ...`` makes its own
ranks. ``python pretrain_gpt.py --help`` lists the flags; they are Megatron-LM's.
"""

from __future__ import annotations

from functools import partial

from megatron_ext.errors import end_on_interrupt, run_program

if __name__ == "__main__":
    end_on_interrupt()

from megatron_ext.text.task import TEXT
from megatron_ext.train.main import main


def video_sections() -> dict[str, tuple[type, ...]]:
    """Return the flags of pretrain_video.py, which nothing but a flag of them needs here."""
    from megatron_ext.video.config.rules import SECTIONS

    return {"pretrain_video.py": SECTIONS}


if __name__ == "__main__":
    run_program(partial(main, TEXT, elsewhere=video_sections))
