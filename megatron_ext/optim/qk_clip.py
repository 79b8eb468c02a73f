"""QK-clip of MuonClip (Kimi K2, arXiv:2507.20534, section 2.1), and the largest attention logits.

After an update, the weights of the queries and keys of a head whose largest logit S in the step was
above a threshold t are multiplied such that the same inputs give logits of at most t. With
``g = min(1, t / S)``, queries are multiplied by ``g^alpha`` and keys by ``g^(1 - alpha)``. In
multi-latent attention, all heads share the rotated part of their keys, which stays as it is; the
rotated part of a head's queries is multiplied by g. In a group of heads that share their keys, S is
the largest logit of all its heads. A bias of queries and keys is multiplied like their weights.

The optimizer's own float32 weights are multiplied between its update and the moment at which they
are rounded and gathered to the model's weights, so both stay equal in every layout. A step that is
skipped changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import Attention
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ext.errors import ConfigError
from megatron_ext.layers.attention import DotProductAttention
from megatron_ext.layers.attention_logits import LogitMaxima
from megatron_ext.layers.latent_attention import LatentAttention
from megatron_ext.optim.fused_adam import model_weights
from megatron_ext.optim.shards import Shard, shards_of
from megatron_ext.optim.update import parts_of


@dataclass(frozen=True, eq=False)
class Projection:
    """A parameter that makes queries or keys, perhaps beside others, and how a clip changes it.

    Attributes:
        units: for each row on this rank, the index of its group of heads among this rank's.
        powers: for each row, the power of the group's factor g by which it is multiplied.
    """

    parameter: Parameter
    units: Tensor
    powers: Tensor

    def factors(self, of_units: Tensor) -> Tensor:
        """Return the factor of each row, float32; ``of_units`` has g of each group of heads."""
        return of_units[self.units] ** self.powers


@dataclass(frozen=True, eq=False)
class Followed:
    """An attention whose logits are followed.

    Attributes:
        layer: number of its layer, from 1; depths of multi-token prediction follow the decoder.
        units: number of groups of heads that share keys, on this tensor-parallel rank.
    """

    layer: int
    maxima: LogitMaxima
    units: int
    projections: Sequence[Projection]


def followed_in(chunk: Module, *, scales: bool) -> Iterator[Followed]:
    """Follow the logits of each attention in a model chunk, and yield what follows them.

    With ``scales``, the results have the parameters that make queries and keys.

    Raises:
        ConfigError: an attention computes its logits in a way that cannot be followed.
    """
    for name, module in chunk.named_modules():
        if not isinstance(module, Attention):
            continue
        if not isinstance(module.core_attention, DotProductAttention):
            raise ConfigError(
                f"`--log-max-attention-logit` and `--qk-clip` need attention of the torch layers, "
                f"but `{name}` is {type(module).__name__}; leave them out."
            )
        heads = module.num_attention_heads_per_partition
        latent = isinstance(module, LatentAttention)
        units = heads if latent else module.num_query_groups_per_partition
        maxima = LogitMaxima(module.core_attention, heads, module.linear_proj.weight.device)
        projections = list(_projections(module)) if scales else []
        yield Followed(module.layer_number, maxima, units, projections)


def _projections(module: Any) -> Iterator[Projection]:
    """Yield the parameters that make the queries and keys of an attention."""
    config = module.config
    alpha = config.qk_clip_alpha
    if isinstance(module, LatentAttention):
        channels = config.qk_head_dim
        direct = config.q_lora_rank is None
        of_query = module.linear_q_proj if direct else module.linear_q_up_proj
        yield from _rows(of_query, [(channels, alpha), (config.qk_pos_emb_head_dim, 1.0)])
        yield from _rows(
            module.linear_kv_up_proj, [(channels, 1 - alpha), (config.v_head_dim, 0.0)]
        )
        return
    head = module.hidden_size_per_attention_head
    queries = config.num_attention_heads // config.num_query_groups * head
    gate = [(queries, 0.0)] if config.attention_output_gate else []
    yield from _rows(module.linear_qkv, [(queries, alpha), *gate, (head, 1 - alpha), (head, 0.0)])


def _rows(linear: Any, powers: Sequence[tuple[int, float]]) -> Iterator[Projection]:
    """Yield the weight of a column-parallel layer, and its bias if it has one.

    ``powers`` are the numbers of rows that follow one another in each group of heads, each with the
    power of the group's factor.
    """
    of_unit = torch.cat([torch.full((rows,), power) for rows, power in powers])
    for parameter in (linear.weight, linear.bias):
        if parameter is not None:
            row = torch.arange(len(parameter))
            units = (row // len(of_unit)).to(parameter.device)
            yield Projection(parameter, units, of_unit[row % len(of_unit)].to(parameter.device))


class AttentionLogits:
    """The largest attention logits of each step, by which weights of queries and keys are clipped.

    All ranks make it, and call `before_update` and `by_layer`, together.

    Args:
        chunks: this rank's chunks of the model.
        optimizer: the optimizer of these chunks, whose weights are clipped if ``qk_clip`` of the
            config is set.

    Raises:
        ConfigError: an attention cannot be followed, or the model has none.
    """

    def __init__(
        self,
        chunks: Sequence[Module],
        optimizer: Any,
        transformer_config: TransformerConfig,
        groups: ProcessGroupCollection,
    ) -> None:
        self._config = transformer_config
        self._groups = groups
        self._scales: bool = transformer_config.qk_clip
        self._device = next(weight for chunk in chunks for weight in chunk.parameters()).device
        self._followed = [
            each for chunk in chunks for each in followed_in(chunk, scales=self._scales)
        ]
        number = torch.tensor(len(self._followed), device=self._device)
        torch.distributed.all_reduce(number)
        if not number:
            raise ConfigError(
                "`--log-max-attention-logit` and `--qk-clip` need a model with attention of the "
                "torch layers, but this one has none; leave them out."
            )
        self._latest: list[Tensor] = [each.maxima.values.clone() for each in self._followed]
        self._factors: dict[Parameter, Tensor] = {}
        if self._scales:
            for part in parts_of(optimizer):
                self._follow_updates(part)

    def before_update(self, *_unused: Any) -> Tensor:
        """Keep the largest logits of a step's passes, and choose the factors of its weights.

        Return True, bool ``[]``: any update may be applied (see `StepRunner.approvals`).
        """
        self._latest = [each.maxima.values.clone() for each in self._followed]
        for each in self._followed:
            each.maxima.restart()
        if self._scales and self._followed:
            self._choose_factors()
        return torch.ones((), dtype=torch.bool, device=self._device)

    def _choose_factors(self) -> None:
        """Set the factor of each row of each projection, from the logits of all replicas."""
        logits = torch.stack(self._latest)
        torch.distributed.all_reduce(
            logits, op=torch.distributed.ReduceOp.MAX, group=self._groups.dp_cp
        )
        threshold = self._config.qk_clip_threshold
        for each, own in zip(self._followed, logits, strict=True):
            largest = own.view(each.units, -1).amax(dim=1)
            exceeds = torch.isfinite(largest) & (largest > threshold)
            of_units = torch.where(exceeds, threshold / largest, 1.0)
            for projection in each.projections:
                self._factors[projection.parameter] = projection.factors(of_units)

    def _follow_updates(self, part: Any) -> None:
        """Let an optimizer multiply its weights by the factors at the end of each update."""
        mine = {x.parameter for each in self._followed for x in each.projections}
        shards = [x for x in shards_of(part) if x.parameter in mine and x.main.numel()]
        if shards:
            inner = part.optimizer
            copies = model_weights(part)
            inner.step = partial(self._step, inner, inner.step, shards, copies)

    @torch.no_grad()
    def _step(
        self,
        inner: torch.optim.Optimizer,
        update: Any,
        shards: Sequence[Shard],
        copies: Mapping[Tensor, Tensor],
        closure: Any = None,
    ) -> None:
        """Update by ``update``, an optimizer's own step; then multiply its weights by the factors.

        ``copies`` maps a float32 weight to the model's 16-bit one, which is rounded from it.
        """
        update(closure)
        skipped = getattr(inner, "found_inf", None)
        for shard in shards:
            factors = self._factors[shard.parameter]
            if skipped is not None:
                factors = torch.where(skipped > 0, 1.0, factors)
            multiply_rows(shard, factors.to(shard.main.device))
            if shard.main in copies:
                copies[shard.main].copy_(shard.main)

    def by_layer(self) -> dict[str, float]:
        """Return the largest logit of the last step in each layer with attention, by its name.

        The names are such as "layer 1", and "mtp layer 1" for multi-token prediction.
        """
        config = self._config
        depths = config.mtp_num_layers or 0
        logits = torch.full((config.num_layers + depths,), -math.inf, device=self._device)
        for each, own in zip(self._followed, self._latest, strict=True):
            logits[each.layer - 1] = own.amax()
        torch.distributed.all_reduce(logits, op=torch.distributed.ReduceOp.MAX)
        names = [f"layer {number}" for number in range(1, config.num_layers + 1)]
        names += [f"mtp layer {number}" for number in range(1, depths + 1)]
        found = dict(zip(names, logits.tolist(), strict=True))
        return {name: logit for name, logit in found.items() if logit != -math.inf}


def multiply_rows(shard: Shard, factors: Tensor) -> None:
    """Multiply the rows of a parameter, or those elements of them that are in a shard of it.

    ``factors`` has one number for each row of the parameter.
    """
    columns = shard.parameter.numel() // len(factors)
    numel = shard.main.numel()
    first = shard.start // columns
    last = -(-(shard.start + numel) // columns)
    each = factors[first:last].repeat_interleave(columns)
    own = each[shard.start - first * columns :][:numel]
    shard.main.mul_(own.view(shard.main.shape))
