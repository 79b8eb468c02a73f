"""Pretrain a video model by flow matching, or tune one on long videos (``--task streaming``).

Start it by torchrun, or directly: ``python pretrain_video.py --nproc-per-node 4 ...`` starts its
own ranks. ``python pretrain_video.py --help WORD`` finds flags.
"""

from __future__ import annotations

from functools import partial

from megatron_ext.errors import end_on_interrupt, run_program

if __name__ == "__main__":
    end_on_interrupt()

from megatron_ext.config.inapplicable import Inapplicable, of_program
from megatron_ext.train.main import main as train
from megatron_ext.video.task import VIDEO


def text_flags() -> list[Inapplicable]:
    """Return the flags of pretrain_gpt.py, to name that program if one of them is given here."""
    from megatron_ext.text.config.rules import SECTIONS

    return [of_program("pretrain_gpt.py", SECTIONS)]


main = partial(train, VIDEO, elsewhere=text_flags)

if __name__ == "__main__":
    run_program(main)
