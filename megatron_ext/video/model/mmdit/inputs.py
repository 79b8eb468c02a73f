"""What a forward pass takes, checked: nothing is swallowed, nothing is guessed.

How an MMDiT of given sizes is initialized, recomputed and cut.

Blocks of both kinds, dealt to pipeline stages by cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.layers.attention import GATHER
from megatron_ext.video.config.mmdit import MMDiTSizes

SWITCHES = {"guidance": "guidance_embed", "cond": "cond_embed"}
"""Inputs that a model takes only if it was built for them."""


def check_inputs(
    sizes: MMDiTSizes, given: Mapping[str, Tensor | None], *, is_first_stage: bool
) -> None:
    """Compare inputs with the sizes and with each other.

    Args:
        sizes: of the model.
        given: all inputs of `MMDiT.forward` by name.
        is_first_stage: all but the ids may be None on the stages after it.

    Raises:
        ConfigError: an optional input that the model does not take, or one that is missing.
        DataError: a missing input, or one whose shape or dtype does not fit.
    """
    for name, switch in SWITCHES.items():
        _check_optional(name, given[name], switch, getattr(sizes, switch), is_first_stage)
    _check_present(given, is_first_stage)
    image, text = given["img_ids"], given["txt_ids"]
    assert image is not None and text is not None
    batch, num_image, num_text = image.size(0), image.size(1), text.size(1)
    shapes = {
        "img": (batch, num_image, sizes.token_width),
        "img_ids": (batch, num_image, 3),
        "txt": (batch, num_text, sizes.text_width),
        "txt_ids": (batch, num_text, 3),
        "timesteps": (batch,),
        "y_vec": (batch, sizes.pooled_width),
        "guidance": (batch,),
        "cond": (batch, num_image, sizes.cond_width),
    }
    for name, shape in shapes.items():
        tensor = given[name]
        if tensor is not None and tensor.shape != shape:
            raise DataError(
                f"`{name}` has the shape {list(tensor.shape)}, but the model takes {list(shape)}; "
                "see the widths in its sizes."
            )
    _check_precision(given)


def _check_optional(
    name: str, tensor: Tensor | None, switch: str, taken: bool, is_first_stage: bool
) -> None:
    if taken and tensor is None and is_first_stage:
        raise ConfigError(f"`{name}` is missing, but the model was built with `{switch}`; give it.")
    if not taken and tensor is not None:
        raise ConfigError(
            f"`{name}` was given, but the model was built without `{switch}` and would ignore it; "
            f"leave it out or set `{switch}`."
        )


def _check_present(given: Mapping[str, Tensor | None], is_first_stage: bool) -> None:
    for name, tensor in given.items():
        is_ids = name.endswith("_ids")
        if tensor is None and (is_ids or is_first_stage) and name not in SWITCHES:
            raise DataError(
                f"`{name}` is None, but every stage needs the ids, and the first all inputs; "
                "give it."
            )
        if is_ids and tensor is not None and tensor.dim() != 3:
            raise DataError(
                f"`{name}` has the shape {list(tensor.shape)}, but must be [batch, tokens, 3]."
            )


def _check_precision(given: Mapping[str, Tensor | None]) -> None:
    for name in ("timesteps", "guidance"):
        tensor = given[name]
        if tensor is not None and tensor.dtype not in (torch.float32, torch.float64):
            raise DataError(
                f"`{name}` has the type {tensor.dtype}, but must be float32: in 16 bits 1000 t "
                "has steps of up to 4."
            )


@dataclass(frozen=True)
class MMDiTOptions:
    """What changes no shape of a parameter.

    Attributes:
        adaln_zero: modulations and the last layer start at zero (DiT, arXiv:2212.09748), so that
            every block begins as the identity and the model predicts zero. For training from
            scratch; Open-Sora starts from the weights of FLUX instead.
        recompute_double_blocks: the first so many double blocks of the model keep only their
            inputs, and are run again in the backward pass; more than there are means all.
        recompute_single_blocks: the same of single blocks.
        cp_comm_type: how context-parallel ranks attend to the whole sequence: ``all_gather`` (or
            ``p2p``) collects keys and values, ``a2a`` trades heads for sequence.
        double_block_cost: time of a double block over that of a single one, by which blocks are
            dealt to pipeline stages. Both multiply every token by 12 h^2 weights (mlp_ratio 4) and
            attend alike, so it is 1; measure it, or take 2.4, the ratio of their parameters, to
            balance memory.

    Raises:
        ConfigError: a value out of its range.
    """

    adaln_zero: bool = False
    recompute_double_blocks: int = 0
    recompute_single_blocks: int = 0
    cp_comm_type: str = "all_gather"
    double_block_cost: float = 1.0

    def __post_init__(self) -> None:
        for name in ("recompute_double_blocks", "recompute_single_blocks"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"`{name}` ({getattr(self, name)}) must be 0 or more; 0 recomputes nothing."
                )
        if self.cp_comm_type not in (*GATHER, "a2a"):
            raise ConfigError(
                f"`cp_comm_type` ({self.cp_comm_type}) must be p2p, all_gather or a2a."
            )
        if not 0 < self.double_block_cost < float("inf"):
            raise ConfigError(
                f"`double_block_cost` ({self.double_block_cost}) must be a positive number; 1 if "
                "it was not measured."
            )


def stage_blocks(sizes: MMDiTSizes, num_stages: int, double_block_cost: float) -> list[range]:
    """The blocks of each stage.

    Args:
        sizes: of the model.
        num_stages: pipeline stages, virtual ones included.
        double_block_cost: time of a double block over that of a single one.

    Returns:
        For each stage a range over all blocks, double blocks first.

    Raises:
        ConfigError: fewer blocks than stages.
    """
    if num_stages > sizes.num_blocks:
        raise ConfigError(
            f"the pipeline has {num_stages} stages, but the model only {sizes.num_blocks} blocks "
            f"({sizes.num_double_blocks} double, {sizes.num_single_blocks} single); use a smaller "
            "`--pipeline-model-parallel-size`."
        )
    costs = [double_block_cost] * sizes.num_double_blocks + [1.0] * sizes.num_single_blocks
    return list(_deal(tuple(costs), num_stages))


@lru_cache(maxsize=16)
def _deal(costs: tuple[float, ...], num_stages: int) -> tuple[range, ...]:
    """Contiguous parts, none empty, whose largest cost is smallest, and as even as can be then.

    Dynamic programming over the number of blocks dealt: ``best[i]`` is the (largest cost, sum of
    squares) of the best way to deal the first i blocks, with its ends of stages.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(1, num_stages + 1):
        last_end = len(costs) - (num_stages - stage)
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(stage, last_end + 1):
            longer[end] = min(
                (max(largest, cost), squares + cost**2, (*ends, end))
                for start, (largest, squares, ends) in best.items()
                if start < end
                for cost in (sums[end] - sums[start],)
            )
        best = longer
    ends = best[len(costs)][2]
    return tuple(range(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True))
