"""The time of a pair: two passes that run in turns, as `parallel.turns` runs them."""

from __future__ import annotations

from collections.abc import Sequence

Piece = tuple[float, float]
"""The times of some computing, and of the exchange that it starts; 0 for no exchange."""


def pair_time(backward: Sequence[Piece], forward: Sequence[Piece]) -> float:
    """Return the time of two passes that run in turns; the backward pass begins.

    A pass computes its next piece as soon as it has its turn and its last exchange has arrived. It
    gives way when it has started the next one. Exchanges follow one another on the network.
    """
    passes = [iter(backward), iter(forward)]
    arrives = [0.0, 0.0]
    running = [True, True]
    now = network = 0.0
    turn = 0
    while any(running):
        if running[turn]:
            now = max(now, arrives[turn])
            computing, exchange = next(passes[turn], (0.0, -1.0))
            now += computing
            if exchange > 0:
                network = arrives[turn] = max(network, now) + exchange
            running[turn] = exchange >= 0
        turn = 1 - turn
    return now


def hidden_time(
    forward: float,
    backward: float,
    exchange: float,
    layers: int,
    inside: float,
    again: int = 0,
    *,
    early: bool = False,
) -> float:
    """Return by how much a pair of passes takes less time than the two one after the other.

    Args:
        forward, backward: times of the passes' computing, in all layers.
        exchange: time of all exchanges of experts' tokens in both passes.
        layers: the number of layers whose experts exchange tokens.
        inside: the share of the computing that is done between a layer's two exchanges.
        again: how many of the layers, the first ones, the backward pass recomputes with their
            exchanges.
        early: whether the backward pass does not give way between a layer's experts and attention.
    """
    if not layers:
        return 0.0
    one = exchange / (4 * layers + 2 * again)
    outer = (1 - inside) * forward / layers
    inner = inside * forward / layers
    ahead = [(outer, one), (inner, one)] * layers
    # What the backward pass computes beyond the recomputation.
    gradients = backward - again / layers * forward
    # The first exchange of a layer's backward pass brings the gradients of its outputs.
    back: list[Piece] = []
    rest = 0.0
    for recomputes in [False] * (layers - again) + [True] * again:
        if recomputes:
            back += [(rest + outer, one), (inner, one)]
            rest = 0.0
        back.append((rest, one))
        experts = inside * gradients / layers
        rest = (1 - inside) * gradients / layers
        if early:
            back.append((experts + one + rest, 0.0))
            rest = 0.0
        else:
            back.append((experts, one))
    back.append((rest, 0.0))
    return forward + backward + exchange - pair_time(back, ahead)
