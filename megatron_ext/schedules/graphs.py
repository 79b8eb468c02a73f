"""CUDA graphs in a step: when the chunks of a rank record them, and when they replay them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.utils import unwrap_model

from megatron_ext.config.acceleration import CudaGraphConfig
from megatron_ext.errors import ConfigError
from megatron_ext.layers.graphs import ChunkGraphs
from megatron_ext.layers.transformer_layer import TransformerLayer
from megatron_ext.parallel.grid import Placement
from megatron_ext.schedules.plan import Action, Kind


def records_graphs(flags: CudaGraphConfig, device: str) -> bool:
    """Return whether the layers of a run are recorded."""
    return flags.cuda_graph_impl == "local" and device == "cuda"


def most_in_flight(actions: Sequence[Action], placement: Placement) -> list[int]:
    """Return how many micro-batches each chunk of a rank holds at most between the two passes."""
    now, most = [0] * placement.num_chunks, [0] * placement.num_chunks
    for action in actions:
        chunk = placement.chunk_of(action.stage)
        if action.kind is Kind.FORWARD:
            now[chunk] += 1
            most[chunk] = max(most[chunk], now[chunk])
        elif action.kind is Kind.BACKWARD:
            now[chunk] -= 1
    return most


def graphable_layers(chunk: torch.nn.Module) -> list[TransformerLayer]:
    """Return the layers of a model chunk that graphs are made of.

    Raises:
        ConfigError: the model has none, since its layers are its own.
    """
    layers = getattr(getattr(unwrap_model(chunk), "decoder", None), "layers", None)
    if layers is None or not all(isinstance(layer, TransformerLayer) for layer in layers):
        raise ConfigError(
            "`--cuda-graph-impl` (local) records the TransformerLayers of a model's `decoder`, "
            "which this model does not have; leave it out."
        )
    return list(layers)


class StepGraphs:
    """The graphs of a rank's chunks.

    The first step runs without and shows what the layers are called with; before the second the
    graphs are recorded, while all gradients are zero. A step with more micro-batches in flight than
    any before adds to them.

    Args:
        chunks: chunks of this rank, in the order of their stages.

    Raises:
        ConfigError: see `graphable_layers`.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], warmup_steps: int) -> None:
        self.chunks = [ChunkGraphs(graphable_layers(chunk), warmup_steps) for chunk in chunks]

    def before_step(self, actions: Sequence[Action], placement: Placement) -> None:
        """Record what a training step lacks, and let the chunks replay that have enough.

        The ranks of a stage call this together, with the gradients zeroed.
        """
        for chunk, wanted in zip(self.chunks, most_in_flight(actions, placement), strict=True):
            if chunk.num_slots < wanted:
                chunk.capture(wanted)
            chunk.switch(chunk.num_slots >= wanted)


def step_graphs(
    flags: CudaGraphConfig, device: str, chunks: Sequence[torch.nn.Module]
) -> StepGraphs | None:
    """Return the graphs of a rank's chunks; None if the run records none."""
    if not records_graphs(flags, device):
        return None
    return StepGraphs(chunks, flags.cuda_graph_warmup_steps)
