"""Optimizer state of layers of which not all are trained.

The layers of a decoder are stored stacked: a weight of all layers is one tensor, in which each
layer has its place. Where ``--freeze`` freezes some of the layers, their optimizer state would
leave gaps in such a tensor, which no checkpoint may have. So a run that freezes anything stores the
state of each layer as a tensor of its own.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

_STACKED = re.compile(r"(?<=\blayers)\.(?!\d)")
"""Matches, in the name of a stacked tensor, the place of the layer's number."""


def by_layer(state: dict[Any, Any]) -> None:
    """Store the state of each layer as a tensor of its own; ``state`` is changed in place."""
    dict_list_map_inplace(_of_one_layer, state)


def _of_one_layer(entry: Any) -> Any:
    if isinstance(entry, ShardedTensorFactory):
        build = entry.build_fn

        def built(*arguments: Any) -> Any:
            parts = build(*arguments)
            if isinstance(parts, ShardedTensor):
                return _of_one_layer(parts)
            dict_list_map_inplace(_of_one_layer, parts)
            return parts

        return dataclasses.replace(entry, build_fn=built)
    if not isinstance(entry, ShardedTensor) or not _STACKED.search(entry.key):
        return entry
    ahead = entry.prepend_axis_num
    changes: dict[str, Any] = {
        "key": _STACKED.sub(f".{entry.global_offset[0]}.", entry.key, count=1),
        "global_shape": entry.global_shape[1:],
        "global_offset": entry.global_offset[1:],
        "prepend_axis_num": max(0, ahead - 1),
    }
    if entry.axis_fragmentations is not None:
        changes["axis_fragmentations"] = entry.axis_fragmentations[1:]
    if not ahead:  # one layer's place is an axis of the values, too
        changes["local_shape"] = entry.local_shape[1:]
        changes["data"] = None if entry.data is None else entry.data.squeeze(0)
    return dataclasses.replace(entry, **changes)
