"""Sizes of a run without gaps, and which layers each pipeline stage holds.

What a part of a model keeps for its backward pass, and how parts add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_ext.config.pipeline import mtp_stage, stages_of
from megatron_ext.errors import ConfigError
from megatron_ext.parallel.grid import Layout, Placement

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig


@dataclass(frozen=True)
class Ranks:
    """How a run is cut, whatever its model.

    Attributes:
        b: micro-batch size.
        tp, cp, pp, dp, ep, etp, expert_dp: ranks along each axis.
        sequence_parallel: norms and dropout are cut along the sequence too.
        width: bytes of a number in activations and in the parameters of the forward pass.
        gpu: fused kernels of a GPU.
    """

    b: int
    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    etp: int
    expert_dp: int
    sequence_parallel: bool
    width: int
    gpu: bool

    @property
    def half(self) -> bool:
        """Numbers have 16 bits."""
        return self.width == 2

    @property
    def sharing(self) -> int:
        """Tensor-parallel ranks that share out the sequence between the parallel layers."""
        return self.tp if self.sequence_parallel else 1


def ranks_of(config: RunConfig) -> dict[str, Any]:
    """The fields of `Ranks` of a resolved configuration, by name."""
    layout = Layout.from_config(config.parallel)
    sizes, experts = layout.sizes(), layout.expert_sizes()
    return {
        "b": config.training.micro_batch_size or 0,
        **{name: sizes[name] for name in ("tp", "cp", "pp", "dp")},
        "ep": experts["ep"],
        "etp": experts["tp"],
        "expert_dp": experts["dp"],
        "sequence_parallel": config.parallel.sequence_parallel,
        "width": 2 if config.precision.bf16 or config.precision.fp16 else 4,
        "gpu": config.device == "cuda",
    }


@dataclass(frozen=True)
class Sizes(Ranks):
    """Numbers of a resolved text run that formulas need.

    Attributes:
        s, h, f, n, g, d, v: sequence length (of the run, not of a rank), hidden size, width of the
            MLP, attention heads, query groups, head size, vocabulary.
        layers: transformer layers.
        depths: of multi-token prediction.
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
        """Of a micro-batch on a rank, ``s/c * b``."""
        return self.s // self.cp * self.b

    @property
    def residual_tokens(self) -> int:
        """Of them, those in norms, dropout and the residual stream of a rank."""
        return self.tokens // self.sharing

    @classmethod
    def of(cls, config: RunConfig) -> Sizes:
        """The sizes of a resolved text run without errors.

        Raises:
            ConfigError: no vocabulary.
        """
        model = config.model
        if not model.padded_vocab_size:
            raise ConfigError("`--padded-vocab-size` is missing; give it, or a tokenizer.")
        h, n = model.hidden_size or 0, model.num_attention_heads or 0
        return cls(
            **ranks_of(config),
            s=model.seq_length or 0,
            h=h,
            f=model.ffn_hidden_size or 0,
            n=n,
            g=model.num_query_groups or n,
            d=model.kv_channels or h // max(1, n),
            v=model.padded_vocab_size,
            layers=model.num_layers or 0,
            depths=model.mtp_num_layers or 0,
            experts=tuple(expert_layers(config)),
        )


def expert_layers(config: RunConfig) -> list[bool]:
    """For each layer of the decoder, whether it holds experts."""
    layers = config.model.num_layers or 0
    if config.moe.num_experts is None:
        return [False] * layers
    frequency = config.moe.layer_pattern()
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(layers)]
    return [bool(flag) for flag in frequency]


@dataclass(frozen=True)
class Stage:
    """What one stage of the model holds.

    Attributes:
        index: counted along the model.
        rank: the pipeline rank that holds it.
        chunk: its index among the chunks of that rank.
        layers: numbers of its decoder layers, from 0.
        depths: of multi-token prediction.
        embedding: it holds the embedding of the model's first stage.
        final_norm: it holds the decoder's last norm.
        head: it holds the output layer and the loss.
    """

    index: int
    rank: int
    chunk: int
    layers: tuple[int, ...]
    depths: int
    embedding: bool
    final_norm: bool
    head: bool


def stages(config: RunConfig) -> list[Stage]:
    """All stages, along the model."""
    placement = Layout.from_config(config.parallel).placement
    last, total = placement.num_stages - 1, config.model.num_layers or 0
    depths = config.model.mtp_num_layers or 0
    with_depths = mtp_stage(config.parallel) if depths else None
    found, first = [], 0
    for index in range(placement.num_stages):
        count = _layers_of(config, placement, index)
        layers = tuple(range(first, first + count))
        ends = total - 1 in layers
        found.append(
            Stage(
                index=index,
                rank=placement.rank_of(index),
                chunk=placement.chunk_of(index),
                layers=layers,
                depths=depths if index == with_depths else 0,
                embedding=index == 0,
                final_norm=ends if depths else index == last,
                head=index == last,
            )
        )
        first += count
    return found


def _layers_of(config: RunConfig, placement: Placement, index: int) -> int:
    """Decoder layers of a stage, as megatron-core deals them."""
    parallel, layers = config.parallel, config.model.num_layers or 0
    if parallel.pipeline_model_parallel_layout is not None:
        return stages_of(parallel.pipeline_model_parallel_layout)[index].count("t")
    rank, size = placement.rank_of(index), placement.pipeline_size
    first = parallel.decoder_first_pipeline_num_layers
    last = parallel.decoder_last_pipeline_num_layers
    if rank == 0 and first is not None:
        of_rank = first
    elif rank == size - 1 and last is not None:
        of_rank = last
    else:
        between = size - (first is not None) - (last is not None)
        extra = parallel.account_for_embedding_in_pipeline_split
        extra_last = parallel.account_for_loss_in_pipeline_split
        of_rank = (layers + extra + extra_last - (first or 0) - (last or 0)) // max(1, between)
    count = of_rank // placement.num_chunks
    count -= parallel.account_for_embedding_in_pipeline_split and index == 0
    count -= parallel.account_for_loss_in_pipeline_split and index == placement.num_stages - 1
    return count


FP32 = 4
INT64 = 8


@dataclass(frozen=True)
class LayerBytes:
    """What one layer keeps, and what its backward pass needs besides for a moment.

    Attributes:
        kept: from the forward to the backward pass.
        transient: the most beyond ``kept`` while its gradients are computed.
    """

    kept: int
    transient: int


def in_order(*parts: LayerBytes) -> LayerBytes:
    """Parts that run one after the other; backward, the last one has gone before the others."""
    transient = released = 0
    for part in reversed(parts):
        transient = max(transient, part.transient - released)
        released += part.kept
    return LayerBytes(released, transient)


def recomputed(
    layers: Sequence[LayerBytes], entering: int, *, size: int, limit: int
) -> list[LayerBytes]:
    """Layers of which some keep only their input, and are run again one unit after the other.

    Args:
        layers: without recomputation.
        entering: bytes of the input of a layer.
        size: layers of a unit.
        limit: layers that are run again, the first ones.
    """
    limit = min(limit, len(layers))
    found = []
    for first in range(0, limit, size):
        again = in_order(*layers[first : min(first + size, limit)])
        found.append(LayerBytes(entering, again.kept + again.transient))
    return found + list(layers[limit:])


def rms_norm(ranks: Ranks, rows: int, size: int, *, frozen: bool = False) -> int:
    """What torch's RMSNorm of ``[rows, size]`` keeps besides its input.

    Args:
        ranks: of the run.
        rows, size: of the input.
        frozen: its weight is not trained.
    """
    statistics = rows * FP32
    if ranks.gpu:
        return statistics
    # On a CPU the normed input is kept for the weight, and of 16 bits the input in fp32 instead.
    normed = 0 if frozen else rows * size * FP32
    return statistics + normed + (rows * size * (FP32 - ranks.width) if ranks.half else 0)


def layer_norm(rows: int) -> int:
    """The mean and the reciprocal deviation of each row that torch's LayerNorm keeps."""
    return 2 * rows * FP32
