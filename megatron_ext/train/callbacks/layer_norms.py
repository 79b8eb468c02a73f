"""Reports the norm of each layer, for runs with ``--log-layer-norms-interval``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ext.train.callbacks.callback import Callback, due
from megatron_ext.train.reporting.records import EvaluationRecord
from megatron_ext.train.run import Run, sum_of_squares, summed


class LayerNorms(Callback):
    """Reports the L2 norm of each decoder layer's parameters, and of all others together."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._interval = run.config.logging.log_layer_norms_interval
        self._count = run.config.model.num_layers or 0
        self._layers = layers_of(run.chunks, self._count)

    def after_step(self) -> None:
        run = self.run
        if not due(run.progress.iteration, self._interval):
            return
        with run.parameter_gather.paused(), torch.no_grad():
            others, *layers = summed(self._squares, run.chunks, run.context).sqrt().tolist()
        norms = {f"norm of layer {number}": norm for number, norm in enumerate(layers, start=1)}
        run.reporters.on_evaluation(
            EvaluationRecord(
                split="layers",
                iteration=run.progress.iteration,
                losses={**norms, "norm of all other parameters": others},
                consumed_samples=run.progress.consumed_train_samples,
                perplexity=False,
                title="parameter norms",
            )
        )

    def _squares(self, parameter: torch.nn.Parameter) -> Tensor:
        """Return the sum of a parameter's squares at the place of its layer; 0 elsewhere."""
        squares = torch.zeros(1 + self._count, dtype=torch.float64, device=parameter.device)
        squares[self._layers.get(id(parameter), 0)] = sum_of_squares(parameter)
        return squares


def layers_of(chunks: Sequence[torch.nn.Module], count: int) -> dict[int, int]:
    """Return the number of the decoder layer, from 1 to ``count``, of each parameter by its id.

    Parameters outside of the decoder's layers, such as those of multi-token prediction, are left
    out.
    """
    layers: dict[int, int] = {}
    for chunk in chunks:
        for name, module in chunk.named_modules():
            number = getattr(module, "layer_number", None)
            if "mtp." in name or not isinstance(number, int) or not 1 <= number <= count:
                continue
            for parameter in module.parameters():
                layers.setdefault(id(parameter), number)
    return layers
