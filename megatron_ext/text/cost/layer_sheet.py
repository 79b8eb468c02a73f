"""The table of a plan with the kinds of a model's layers, where these are not all of one kind."""

from __future__ import annotations

from collections import Counter
from typing import Any

from megatron_ext.config.layers import MIXERS, MLPS, mixer_of, mlp_of
from megatron_ext.planning.hardware import size
from megatron_ext.planning.sheet import Column, Sheet
from megatron_ext.text.cost.mixer import Run


def layer_sheet(run: Run) -> Sheet:
    """Return a table with a row for each kind of layer of a `GptNetwork`."""
    columns = [
        Column("layer", "kind"),
        Column("holds", "holds"),
        Column("layers", "layers"),
        Column("parameters of a rank", "parameters_of_a_rank", "{:,}".format),
        Column("a layer keeps", "bytes_kept_by_a_layer", size),
        Column("state of a sequence", "state_bytes", _bytes),
        Column("positions of a chunk", "chunk", _number),
        Column("context message", "context_message_bytes", _bytes),
    ]
    kinds = run.sizes.kinds
    stage = run.stages()[0].only
    rows: list[list[Any]] = []
    states: list[tuple[float | None, float | None]] = []
    for kind, count in Counter(kinds).items():
        number = kinds.index(kind)
        weights = sum(weight.numel for weight in run.weights(stage(number)))
        letter = mixer_of(kind)
        known = run.mixers[letter].described(run) if letter in run.mixers else {}
        kept = run.layer_bytes(number).kept
        state = known.get("state"), known.get("chunk")
        states.append(state)
        sent = run.mixer_context(kind)
        rows.append([kind, _parts(kind), count, weights, kept, *state, sent])
    caption = (
        "of a rank, and of one micro-batch; a context message is what a rank sends in a layer's "
        "forward pass for context parallelism: a state's does not grow with the sequence"
    )
    if any(known[1] is not None for known in states):
        caption += "; recurrences are priced as their torch form, which GPU kernels outrun"
    return Sheet("layers", "kinds of layers", columns, rows, caption)


def _parts(kind: str) -> str:
    names = [MIXERS.get(mixer_of(kind)), MLPS.get(mlp_of(kind))]
    return ", ".join(name.removeprefix("an ") for name in names if name)


def _bytes(value: float | None) -> str:
    return "" if not value else size(value)


def _number(value: float | None) -> str:
    return "" if value is None else str(value)
