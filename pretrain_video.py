"""Pretrain a video model by flow matching, or tune one on long videos (``--task streaming``).

Started by torchrun, or plainly: ``python pretrain_video.py --nproc-per-node 4 ...`` makes its own
ranks. ``python pretrain_video.py --help`` lists the flags.
"""

from __future__ import annotations

from functools import partial

from megatron_ext.errors import end_on_interrupt, run_program

if __name__ == "__main__":
    end_on_interrupt()

from megatron_ext.text.config import SECTIONS as TEXT_SECTIONS
from megatron_ext.train.main import main
from megatron_ext.video.task import VIDEO

if __name__ == "__main__":
    run_program(partial(main, VIDEO, elsewhere={"pretrain_gpt.py": TEXT_SECTIONS}))
