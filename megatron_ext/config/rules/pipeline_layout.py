"""Reads ``--pipeline-model-parallel-layout``, which says what each stage holds, and its rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

from megatron_ext.config.model import ModelConfig
from megatron_ext.config.parallel import STAGES, ParallelConfig
from megatron_ext.errors import FlagError

MOST_REPETITIONS = 10_000
"""The largest n in a repetition ``t*n`` of a pipeline layout.

megatron-core expands repetitions before it checks anything, so a huge n would fill the memory.
"""
CUTS = (
    "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
    "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split"
)
"""Fields that split layers into stages; none may be set beside a pipeline layout."""


def stages_of(layout: str) -> list[str]:
    """Return the stages of ``--pipeline-model-parallel-layout``, each as letters such as "Ett".

    E is the embedding, t a layer, m multi-token prediction, L the loss. Another letter, or a
    repetition such as ``*99`` with a number above `MOST_REPETITIONS`, raises a ValueError.
    """
    return list(_expanded(layout))


@lru_cache(maxsize=1 << 10)
def _expanded(layout: str) -> tuple[str, ...]:
    """Return the `stages_of` a layout.

    megatron-core reads the same language, but importing it takes seconds, and plans do not need it.
    """
    if any(int(times) > MOST_REPETITIONS for times in re.findall(r"\*(\d+)", layout)):
        raise ValueError(f"no part can be repeated more than {MOST_REPETITIONS} times")
    text = layout.replace(",", "")
    # First groups in parentheses, such as (t|)*3, then single letters, such as t*3.
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    if unknown := sorted({*text} - {*"EtmL|"}):
        raise ValueError(f"only E, t, m and L stand for parts, but it has {' '.join(unknown)}")
    return tuple(text.split("|"))


def layout_errors(parallel: ParallelConfig, model: ModelConfig, layout: str) -> Iterator[FlagError]:
    """Yield an error for each fault in a pipeline layout, and each flag that contradicts it."""
    size = parallel.pipeline_model_parallel_size
    refused = partial(FlagError, "--pipeline-model-parallel-layout", layout)
    try:
        stages = stages_of(layout)
    except ValueError:
        yield refused("may hold only E, t, m, L, |, *, brackets and numbers", "write Et*2|t*2L")
        return
    if size < 2:
        yield refused(f"needs `{STAGES}` ({size}) of at least 2", "use 2")
        return
    yield from _content_errors(refused, stages, size, model)
    for field in (field for field in CUTS.split() if getattr(parallel, field)):
        other = f"`--{field.replace('_', '-')}`"
        yield refused(
            f"says which layers each stage holds, and so does {other}", "give one of them"
        )


def _content_errors(
    refused: Callable[[str, str], FlagError], stages: list[str], size: int, model: ModelConfig
) -> Iterator[FlagError]:
    """Yield an error for each fault in the layers that a pipeline layout gives to its stages.

    Args:
        refused: returns the error about the layout, given the texts of broken rule and remedy.
        stages: the layers of each stage as letters (see `stages_of`).
        size: number of pipeline ranks.
    """
    if len(stages) % size:
        yield refused(
            f"has {len(stages)} stages, which must be a multiple of `{STAGES}` ({size})",
            f"write {-(-len(stages) // size) * size}",
        )
    layers = model.num_layers or 0
    depths = model.mtp_num_layers or 0
    expected = "E" + "t" * layers + "m" * depths + "L"
    if "".join(stages) != expected or "E" not in stages[0] or "L" not in stages[-1]:
        yield refused(
            f"must hold E in its first stage, then t {layers} times (`--num-layers`), then m "
            f"{depths} times (`--mtp-num-layers`), then L in its last stage",
            "move, add or remove layers",
        )
    bare = [rank for rank in range(size) if not any(stages[rank::size])]
    if bare:
        yield refused(
            f"leaves pipeline rank {bare[0]} without any layer", "give it one, or use fewer ranks"
        )
    holding = [index for index, stage in enumerate(stages) if "m" in stage]
    if len(holding) > 1 or (holding and holding[0] < len(stages) - size):
        yield refused(f"must hold every m in one of its last {size} stages", "move them")
    if holding and holding[0] % size == 0:
        yield refused("must not hold m on the first pipeline rank", "move it to a later one")
