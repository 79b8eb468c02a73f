"""Which pipeline rank holds which stage of the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank holds which stage.

    Stages run through the ranks again and again (0 1 2 0 1 2, the virtual chunks of interleaving),
    or there and back (0 1 2 2 1 0).

    Attributes:
        pipeline_size: ranks.
        num_chunks: stages on each rank.
        v_shape: there and back, with two chunks.
    """

    pipeline_size: int
    num_chunks: int = 1
    v_shape: bool = False

    @property
    def num_stages(self) -> int:
        return self.pipeline_size * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        turn, position = divmod(stage, self.pipeline_size)
        return self.pipeline_size - 1 - position if self.v_shape and turn == 1 else position

    def chunk_of(self, stage: int) -> int:
        """Index of a stage among the chunks of its rank."""
        return stage // self.pipeline_size

    def stage_of(self, rank: int, chunk: int) -> int:
        """The stage that is a rank's chunk."""
        position = self.pipeline_size - 1 - rank if self.v_shape and chunk == 1 else rank
        return chunk * self.pipeline_size + position
