"""Joint bidirectional attention of [text; image], under tensor and context parallelism.

Context-parallel ranks hold equal contiguous slices of the sequence, in the order of the ranks: no
query is masked, so slices cost the same without the zig-zag that causal attention needs.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.errors import ConfigError
from megatron_ext.layers import sdpa
from megatron_ext.layers.pointwise import NormSpec as Norm
from megatron_ext.layers.pointwise import RMSNorm, spec_of, weights_of
from megatron_ext.video.config.mmdit import EPSILON

QKV = tuple[Tensor, Tensor, Tensor]


class QKNorm(MegatronModule):  # type: ignore[misc]
    """RMSNorm of the queries and keys of each head, with scales that the heads share.

    The names of the parameters tell megatron-core's ``finalize_model_grads`` to sum their gradients
    over the tensor-parallel ranks, with and without sequence parallelism (for ``qk_layernorm``):
    each rank sees all tokens of its slice, but only its own heads.
    """

    def __init__(self, config: TransformerConfig, tp_group: ProcessGroup) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        self.q_layernorm = RMSNorm(config.kv_channels, EPSILON, zero_centered=False)
        self.k_layernorm = RMSNorm(config.kv_channels, EPSILON, zero_centered=False)

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """Return the scales of queries and keys, ``[d]`` each, for `pointwise.heads`."""
        return weights_of(self.q_layernorm)[0], weights_of(self.k_layernorm)[0]

    @property
    def spec(self) -> Norm:
        """Return what kind of norms they are."""
        return spec_of(self.q_layernorm)


class JointAttention:
    """Attention from this rank's slice and heads to the whole sequence.

    Args:
        tp_group: ranks among which the heads are dealt.
        cp_group: ranks among which the sequence is cut.
        cp_comm_type: see `MMDiTOptions`.

    Raises:
        ConfigError: the heads cannot be dealt out as asked.
    """

    def __init__(
        self,
        config: TransformerConfig,
        tp_group: ProcessGroup,
        cp_group: ProcessGroup,
        cp_comm_type: str,
    ) -> None:
        self.cp_group = cp_group
        self.trades_heads = cp_comm_type == "a2a" and cp_group.size() > 1
        heads, tp = config.num_attention_heads, tp_group.size()
        if heads % tp:
            raise ConfigError(
                f"the attention heads ({heads}) must be divisible by "
                f"`--tensor-model-parallel-size` ({tp})."
            )
        if self.trades_heads and heads // tp % cp_group.size():
            raise ConfigError(
                f"`cp_comm_type` a2a needs the attention heads of a tensor-parallel rank "
                f"({heads // tp}) to be divisible by `--context-parallel-size` "
                f"({cp_group.size()}); use all_gather."
            )

    def __call__(self, qkv: QKV) -> Tensor:
        """Return the output of the attention, ``[s/c, b, n * d]``.

        Args:
            qkv: queries and keys, rotated, and values of this rank's slice, each ``[s/c, b, n,
                d]``.
        """
        query, key, value = qkv
        if self.trades_heads:
            stacked = torch.stack((query, key, value), dim=3)
            query, key, value = heads_to_sequence(stacked, self.cp_group).unbind(3)
            return sequence_to_heads(_attend(query, key, value), self.cp_group).flatten(2)
        if self.cp_group.size() > 1:
            key, value = gather_from_sequence_parallel_region(
                torch.stack((key, value), dim=1),
                tensor_parallel_output_grad=True,
                group=self.cp_group,
            ).unbind(1)
        return _attend(query, key, value).flatten(2)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return ``softmax(q k / sqrt(d)) v`` of ``[s, b, n, d]`` queries and all keys and values."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    return sdpa.attend(q, k, v).permute(2, 0, 1, 3)


def heads_to_sequence(x: Tensor, group: ProcessGroup) -> Tensor:
    """Trade heads for sequence (Ulysses, arXiv:2309.14509), the slices in the order of the ranks.

    Args:
        x: ``[s/c, b, n, ...]``, n divisible by the number of ranks c.

    Returns:
        ``[s, b, n/c, ...]``.
    """
    parts = torch.cat(x.chunk(group.size(), dim=2))
    traded: Tensor = all_to_all(group, parts)
    return traded


def sequence_to_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    """Invert `heads_to_sequence`: ``[s, b, n/c, ...]`` to ``[s/c, b, n, ...]``."""
    return torch.cat(all_to_all(group, x.contiguous()).chunk(group.size()), dim=2)
