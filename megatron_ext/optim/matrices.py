"""The weights that Muon updates, the matrices inside them, and how ranks share them.

As in Megatron-LM, Muon updates every two-dimensional weight except embeddings and output layers:
the projections of attention, recurrent mixers, indexers, MLPs and experts, and routers. AdamW
updates norms, biases, embeddings, output layers, and the convolutions, decays and offsets of
recurrent mixers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import VocabParallelEmbedding
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from megatron_ext.layers.expert_parameters import expert_parameters
from megatron_ext.layers.fused_rows import fused_rows
from megatron_ext.layers.linear import OutputLayer

NOT_MATRICES = (torch.nn.Embedding, VocabParallelEmbedding, OutputLayer)
"""Modules whose weights are tables of vectors, one for each entry of a vocabulary."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight ``[out, in]`` that Muon updates, as this rank holds it.

    A weight may fuse several matrices, whose rows alternate: for example some rows of queries, keys
    and values for the first group of heads, then for the second.

    Attributes:
        rows: for each fused matrix, how many of its rows follow each other before those of the next
            matrix: for example the rows of (queries, keys, values) of one group of heads. A weight
            that is a single matrix has one entry, its number of rows.
        group: tensor-parallel ranks that hold the other rows or columns; None if this rank has all.
        dim: the dimension that is divided among ``group``: 0 for rows, 1 for columns.
    """

    parameter: Parameter
    rows: tuple[int, ...]
    group: ProcessGroup | None
    dim: int

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Split ``whole`` into the matrices that the weight fuses.

        Each result has the shape ``[rows of the matrix, in]``. ``whole`` has one value for each
        element of the weight, for example its momentum.
        """
        columns = self.parameter.size(1)
        turns = whole.view(-1, sum(self.rows), columns)
        return [part.reshape(-1, columns) for part in torch.split(turns, list(self.rows), dim=1)]

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Join matrices as the weight fuses them, and return them as a flat tensor.

        This is the inverse of `parts`.
        """
        columns = self.parameter.size(1)
        turns = [part.reshape(-1, n, columns) for part, n in zip(parts, self.rows, strict=True)]
        return torch.cat(turns, dim=1).flatten()

    @property
    def operations(self) -> int:
        """Return the relative cost of orthogonalizing the fused matrices as wholes.

        Rows or columns that other tensor-parallel ranks hold are included.
        """
        ranks = 1 if self.group is None else self.group.size()
        total = 0
        for number in self.rows:
            rows = self.parameter.size(0) * number // sum(self.rows)
            sizes = [rows, self.parameter.size(1)]
            sizes[self.dim] *= ranks
            total += min(sizes) ** 2 * max(sizes)
        return total


def matrices_of(
    chunk: Module, groups: ProcessGroupCollection, *, split_qkv: bool
) -> dict[Parameter, Matrix]:
    """Return the trained weights of a model chunk that Muon updates, each with its `Matrix`.

    These are all two-dimensional weights except tables of vectors: embeddings, output layers, and
    parameters with a true attribute ``is_table``, such as the filters ``[c, w]`` of a convolution
    of each channel by itself.

    Args:
        split_qkv: whether fused queries, keys and values count as three matrices or as one.
    """
    experts = set(expert_parameters(chunk))
    tables = {p for m in chunk.modules() if isinstance(m, NOT_MATRICES) for p in m.parameters()}
    fused = dict(fused_rows(chunk, split_qkv=split_qkv))
    matrices = {}
    for parameter in chunk.parameters():
        marks = "is_embedding_or_output_parameter", "is_table"
        is_table = parameter in tables or any(getattr(parameter, mark, False) for mark in marks)
        if parameter.requires_grad and parameter.dim() == 2 and not is_table:
            group = groups.expt_tp if parameter in experts else groups.tp
            dim = 0
            if getattr(parameter, "tensor_model_parallel", False) and group.size() > 1:
                dim = parameter.partition_dim  # type: ignore[attr-defined]
            else:
                group = None
            rows = fused.get(parameter, (parameter.size(0),))
            matrices[parameter] = Matrix(parameter, rows, group, dim)
    return matrices
