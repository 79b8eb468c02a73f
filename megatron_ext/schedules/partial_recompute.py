"""Full recomputation of some micro-batches, and of fewer layers of the others.

With ``--num-microbatches-with-partial-activation-checkpoints`` n, the first n of each window of
micro-batches recompute the layers of ``--recompute-num-layers``, and the others all layers
(arXiv:2205.05198, appendix C). A window is as long as the most micro-batches that a rank has in
flight, so at most n of those in flight keep their activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.utils import get_attr_wrapped_model


@contextmanager
def recomputing_all(chunk: torch.nn.Module) -> Iterator[None]:
    """Inside the block, let forward passes of a chunk recompute all of its decoder's layers."""
    decoder = get_attr_wrapped_model(chunk, "decoder")
    config = decoder.config
    given = config.recompute_num_layers
    config.recompute_num_layers = max(given, len(decoder.layers))
    try:
        yield
    finally:
        config.recompute_num_layers = given
