"""Changes to megatron-core's mixture of experts (MoE), for CPUs and per-token normalization.

- Without Transformer Engine, megatron-core's `gating` calls a name that does not exist.
- With ``--calculate-per-token-loss``, megatron-core multiplies auxiliary losses by the number of
  local tokens. Here their coefficient always refers to the mean over all micro-batches.
- In 16-bit models, megatron-core rounds the token counts that determine the experts' bias.
- megatron-core's all-to-all dispatcher supports split sizes only in GPU tensors. Between the
  tensor-parallel parts of an expert it gathers unequal numbers of tokens, which Gloo cannot do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe.moe_utils import z_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext import core
from megatron_ext.layers.auxiliary_loss import attach_microbatch_loss
from megatron_ext.layers.dropout import HiddenDropout

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class ExpertChoice:
    """Chooses each token's experts in ways that megatron-core's own choice does not offer.

    A router takes this object as its ``router_replay``: the interface of megatron-core for
    replaying recorded choices, which overrides the router's own choice.

    Attributes:
        count: how many of a group's best scores are summed to rank the group; None means
            ``topk // group_topk``, megatron-core's number.
        normalizes: whether each token's weights are divided by their sum.
        biased: the router whose ``expert_bias`` is added to the scores for the choice alone; None
            adds nothing. megatron-core adds the bias itself to sigmoid scores.
    """

    layer_number: int | None = None

    def __init__(
        self, count: int | None = None, normalizes: bool = False, biased: Router | None = None
    ) -> None:
        self.count = count
        self.normalizes = normalizes
        self.biased = biased

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        *_default: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the weights and indices of each token's experts, both ``[tokens, topk]``.

        ``scores`` are the scores of all e experts, ``[tokens, e]``. If they form ``num_groups``
        groups, a token's experts are chosen from its ``group_topk`` best groups (DeepSeek-V2,
        arXiv:2405.04434, section 2.2.2).
        """
        ranked = scores
        if self.biased is not None:
            ranked = scores + self.biased.expert_bias
        if num_groups and group_topk:
            count = self.count or topk // group_topk
            grouped = ranked.view(len(scores), num_groups, -1)
            ranks = grouped.topk(count, dim=-1).values.sum(-1)
            chosen = ranks.topk(group_topk, dim=-1).indices
            hidden = torch.ones_like(ranks, dtype=torch.bool).scatter(1, chosen, False)
            ranked = grouped.masked_fill(hidden.unsqueeze(-1), float("-inf")).flatten(1)
        indices = ranked.topk(topk, dim=-1).indices
        weights = scores.gather(1, indices)
        if self.normalizes:
            # The same small number as in megatron-core's sum of sigmoid scores.
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights, indices


class Router(TopKRouter):  # type: ignore[misc]
    """Top-k router that runs without Transformer Engine.

    Auxiliary losses have the same scale in all parallel layouts.
    """

    def __init__(self, *args: Any, pg_collection: ProcessGroupCollection, **kwargs: Any) -> None:
        super().__init__(*args, pg_collection=pg_collection, **kwargs)
        self._groups = pg_collection
        count = getattr(self.config, "moe_router_group_scores", None)
        normalizes = getattr(self.config, "moe_router_norm_topk_prob", False)
        biased = self.enable_expert_bias and self.score_function == "softmax"
        if count is not None or normalizes or biased:
            self.router_replay = ExpertChoice(count, normalizes, self if biased else None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Move the router; keep its token counts and the experts' bias in float32 when it is cast.

        In 16 bits, counts are rounded from 257 (bf16) or 2,049 (fp16) on, so a bias could move in
        the wrong direction. megatron-core restores only the bias, after it has been rounded.
        """
        before = {name: x for name, x in self._buffers.items() if x is not None}
        super()._apply(fn, recurse)
        for name, value in before.items():
            cast = self._buffers[name]
            assert cast is not None
            if cast.element_size() < value.element_size():
                self._buffers[name] = value.to(cast.device)
        return self

    def apply_input_jitter(self, input: Tensor) -> Tensor:
        """In training, multiply the input ``[s, b, h]`` by noise (arXiv:2101.03961), if enabled.

        Under ``--deterministic-dropout`` the noise does not depend on the layout.
        """
        eps = self.config.moe_input_jitter_eps
        if eps is None or not getattr(self.config, "deterministic_dropout", False):
            return super().apply_input_jitter(input)  # type: ignore[no-any-return]
        if not self.training:
            return input
        site = f"router {self.layer_number}"
        noise = HiddenDropout(0.0, site, self._groups, self.config.sequence_parallel).drawn(input)
        factor: Tensor = 1 + eps * (2 * noise - 1)
        return input * factor.to(input.dtype)

    def gating(self, input: Tensor) -> Tensor:
        """Return e experts' logits ``[s, b, e]`` in ``--moe-router-dtype`` or the input's dtype."""
        dtype = ROUTER_DTYPES.get(self.config.moe_router_dtype, input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return torch.nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias)

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        aux_loss_name: str,
        *_groups: ProcessGroup,
        **_counts: Any,
    ) -> Tensor:
        """Log the load-balancing loss, and return ``activation`` with the loss attached.

        ``aux_loss`` includes the factor ``aux_loss_coeff``; the logged value does not.
        """
        core.log_auxiliary_loss(self, aux_loss_name, aux_loss / aux_loss_coeff)
        return attach_microbatch_loss(activation, aux_loss, self.config)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the logits with the router z-loss attached (ST-MoE, arXiv:2202.08906, eq. 5).

        The logits are ``[tokens, e]`` for e experts. ``padding_mask`` ``[tokens]`` is True at
        padding; None means no padding. Without a coefficient or without gradients nothing is
        attached.
        """
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not (self.training and torch.is_grad_enabled()):
            return logits
        coefficient /= self.tp_cp_group.size()
        z_loss = z_loss_func(logits, coefficient, padding_mask=padding_mask)
        core.log_auxiliary_loss(self, "z_loss", z_loss / coefficient)
        return attach_microbatch_loss(logits, z_loss, self.config)


class AlltoAllDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Dispatcher that sends each token to the ranks of its experts by one all-to-all."""

    tp_size: int
    ep_size: int
    num_local_experts: int

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> Any:
        """Gather the tokens of all ranks that share this rank's experts; sort them by expert.

        Return the tokens ``[tokens, h]``, the number of tokens by expert, and the probabilities.
        """
        sizes = self._unequal_parts()
        if sizes is None:
            with self._sorted_already():
                return super().dispatch_postprocess(global_input_tokens, global_probs)
        own = [len(global_input_tokens)] * len(sizes)
        copies = (torch.cat([x] * len(sizes)) for x in (global_input_tokens, global_probs))
        tokens, probs = (all_to_all(self.tp_group, x, sizes, own) for x in copies)
        with self._gathered_already():
            return super().dispatch_postprocess(tokens, probs)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Sum each token's outputs over the tensor-parallel ranks that share its expert.

        Return the sums for the tokens that this rank got from the all-to-all.
        """
        sizes = self._unequal_parts()
        if sizes is None:
            with self._sorted_already():
                return super().combine_preprocess(hidden_states)  # type: ignore[no-any-return]
        with self._gathered_already():
            unsorted = super().combine_preprocess(hidden_states)
        own = [sizes[self.tp_rank]] * len(sizes)
        parts = all_to_all(self.tp_group, unsorted.to(self.probs.dtype), own, sizes)
        return parts.unflatten(0, (len(sizes), -1)).sum(0).to(unsorted.dtype)  # type: ignore[no-any-return]

    def _unequal_parts(self) -> list[int] | None:
        """Return the number of tokens of each expert-tensor-parallel rank.

        Return None if megatron-core can gather the tokens itself: there is only one rank, the
        numbers are equal, or the backend is not Gloo.
        """
        if self.tp_size == 1 or self.output_splits_tp is None:
            return None
        sizes = [int(size) for size in self.output_splits_tp]
        on_gloo = torch.distributed.get_backend(self.tp_group) == "gloo"
        return sizes if len(set(sizes)) > 1 and on_gloo else None

    @contextmanager
    def _gathered_already(self) -> Iterator[None]:
        """Inside the block, let megatron-core communicate as if no ranks shared an expert.

        The caller sends the tokens between these ranks itself.
        """
        size, self.tp_size = self.tp_size, 1
        try:
            yield
        finally:
            self.tp_size = size

    @contextmanager
    def _sorted_already(self) -> Iterator[None]:
        """Inside the block, keep megatron-core from sorting tokens that arrive sorted by expert.

        It would only copy them in the same order.
        """
        count = self.num_local_experts
        if self._arrive_sorted():
            self.num_local_experts = 1
        try:
            yield
        finally:
            self.num_local_experts = count

    def _arrive_sorted(self) -> bool:
        """Return whether tokens arrive sorted by expert, as they do if one rank has all experts."""
        return bool(self.tp_size * self.ep_size == 1 and not self.drop_and_pad)

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Tensor | None:
        """Call megatron-core's method; convert split sizes to numpy arrays on CPUs, too."""
        tokens_per_expert = super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits = getattr(self, name)
                if torch.is_tensor(splits):
                    setattr(self, name, splits.numpy())
        return tokens_per_expert
