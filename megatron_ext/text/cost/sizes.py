"""The numbers of a GPT run that the formulas of its cost read, and the layers of each stage."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.moe import MoEConfig
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.rules.pipeline import mtp_stage, stages_of
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.parallel.grid import Layout, Placement
from megatron_ext.planning.stages import Ranks, Stage


@dataclass(frozen=True)
class Sizes(Ranks):
    """The numbers of a resolved run that formulas need.

    Attributes:
        s, h, f, n, g, d, v: sequence length (of the run, not of a rank), hidden size, width of the
            MLP, attention heads, query groups, head size, vocabulary.
        layers: transformer layers.
        depths: depths of multi-token prediction.
        experts: for each layer, whether it holds experts.
    """

    s: int
    h: int
    f: int
    n: int
    g: int
    d: int
    v: int
    layers: int
    depths: int
    experts: tuple[bool, ...]

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro-batch on a rank, ``s/c * b``."""
        return self.s // self.cp * self.b

    @property
    def residual_tokens(self) -> int:
        """Return the tokens in norms, dropout and the residual stream of a rank."""
        return self.tokens // self.sequence_size

    @classmethod
    def of(cls, config: RunConfig) -> Sizes:
        """Return the sizes of a resolved run without errors.

        Raises:
            ConfigError: no vocabulary.
        """
        model = config.model
        if not model.padded_vocab_size:
            raise ConfigError("`--padded-vocab-size` is missing; give it, or a tokenizer.")
        h, n = model.hidden_size or 0, model.num_attention_heads or 0
        return cls(
            **vars(Ranks.of(config)),
            s=model.seq_length or 0,
            h=h,
            f=model.ffn_hidden_size or 0,
            n=n,
            g=model.num_query_groups or n,
            d=model.kv_channels or h // max(1, n),
            v=model.padded_vocab_size,
            layers=model.num_layers or 0,
            depths=model.mtp_num_layers or 0,
            experts=tuple(expert_layers(config.moe, model.num_layers or 0)),
        )


def expert_layers(moe: MoEConfig, num_layers: int) -> list[bool]:
    """Return for each layer of the decoder whether it holds experts."""
    if moe.num_experts is None:
        return [False] * num_layers
    frequency = moe.layer_pattern()
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(num_layers)]
    return [bool(flag) for flag in frequency]


def stages(config: RunConfig) -> list[Stage]:
    """Return all stages, along the model."""
    placement = Layout.from_config(config.parallel).placement
    last, total = placement.num_stages - 1, config.model.num_layers or 0
    depths = config.model.mtp_num_layers or 0
    with_depths = mtp_stage(config.parallel) if depths else None
    found, first = [], 0
    for index in range(placement.num_stages):
        count = _num_layers(config.parallel, total, placement, index)
        layers = tuple(range(first, first + count))
        found.append(
            Stage(
                index=index,
                rank=placement.rank_of(index),
                chunk=placement.chunk_of(index),
                layers=layers,
                depths=depths if index == with_depths else 0,
                embedding=index == 0,
                final_norm=total - 1 in layers if depths else index == last,
                head=index == last,
            )
        )
        first += count
    return found


def _num_layers(parallel: ParallelConfig, total: int, placement: Placement, index: int) -> int:
    """Return the decoder layers of a stage, as megatron-core deals them.

    Args:
        total: layers of the decoder.
        index: position of the stage along the model.
    """
    if parallel.pipeline_model_parallel_layout is not None:
        return stages_of(parallel.pipeline_model_parallel_layout)[index].count("t")
    rank, size = placement.rank_of(index), placement.pipeline_size
    first = parallel.decoder_first_pipeline_num_layers
    last = parallel.decoder_last_pipeline_num_layers
    with_embedding = parallel.account_for_embedding_in_pipeline_split
    with_loss = parallel.account_for_loss_in_pipeline_split
    if rank == 0 and first is not None:
        of_rank = first
    elif rank == size - 1 and last is not None:
        of_rank = last
    else:
        between = size - (first is not None) - (last is not None)
        dealt = total + with_embedding + with_loss - (first or 0) - (last or 0)
        of_rank = dealt // max(1, between)
    count = of_rank // placement.num_chunks
    return (
        count - (with_embedding and index == 0) - (with_loss and index == placement.num_stages - 1)
    )
