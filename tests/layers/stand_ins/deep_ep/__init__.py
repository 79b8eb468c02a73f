"""Stands in for DeepEP: the interface that megatron-core calls, computed by torch's collectives.

Like the library it takes tokens in bf16 only, and notes each call in `CALLS`. A handle holds the
numbers of rows that go to, and come from, each rank, and which rows these are.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deep_ep.utils import EventOverlap

CALLS: list[str] = []


def exchange(group: ProcessGroup, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    torch.distributed.all_to_all_single(
        arrived,
        rows.contiguous(),
        output_split_sizes=received,
        input_split_sizes=sent,
        group=group,
    )
    return arrived


def counts_received(group: ProcessGroup, sent: list[int]) -> list[int]:
    ones = [1] * group.size()
    return exchange(group, torch.tensor(sent), ones, ones).tolist()  # type: ignore[no-any-return]


def check_rows(x: Tensor) -> None:
    assert x.dtype is torch.bfloat16
    assert x.is_contiguous()
    assert x.size(1) * x.element_size() % 16 == 0


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes if num_ranks > 8 else 0


class Buffer:
    num_sms = 20

    def __init__(
        self,
        group: ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
    ) -> None:
        self.group = group
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        CALLS.append("layout")
        assert topk_idx.dtype is torch.int64
        size = self.group.size()
        rows, places = (topk_idx >= 0).nonzero(as_tuple=True)
        chosen = torch.zeros(len(topk_idx), num_experts, dtype=torch.bool)
        chosen[rows, topk_idx[rows, places]] = True
        in_rank = chosen.unflatten(1, (size, -1)).any(-1)
        return in_rank.sum(0), None, chosen.sum(0), in_rank, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        check_rows(x)
        group = self.group
        if handle is not None:
            CALLS.append("dispatch again")
            assert topk_idx is None
            row, sent, received, _ = handle
            return exchange(group, x[row], received, sent), None, None, None, None, EventOverlap()
        CALLS.append("dispatch")
        assert is_token_in_rank is not None and num_tokens_per_rank is not None
        assert topk_idx is not None and topk_weights is not None
        assert topk_weights.dtype is torch.float32
        sent = num_tokens_per_rank.tolist()
        received = counts_received(group, sent)
        receiver, row = is_token_in_rank.T.nonzero(as_tuple=True)
        rows = exchange(group, x[row], received, sent)
        local = len(num_tokens_per_expert) // group.size()  # type: ignore[arg-type]
        own = topk_idx[row] // local == receiver.unsqueeze(1)
        own &= topk_idx[row] >= 0
        indices = torch.where(own, topk_idx[row] - receiver.unsqueeze(1) * local, -1)
        weights = torch.where(own, topk_weights[row], 0.0)
        indices, weights = (exchange(group, t, received, sent) for t in (indices, weights))
        counts = [int((indices == expert).sum()) for expert in range(local)]
        handle = row, sent, received, len(x)
        return rows, indices, weights, counts, handle, EventOverlap()

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        CALLS.append("combine" if topk_weights is None else "combine with weights")
        check_rows(x)
        row, sent, received, num_rows = handle
        sums = []
        for tensor in (x, topk_weights):
            if tensor is None:
                sums.append(None)
                continue
            copies = exchange(self.group, tensor, sent, received).float()
            total = torch.zeros(num_rows, tensor.size(1)).index_add(0, row, copies)
            sums.append(total.to(tensor.dtype))
        return sums[0], sums[1], EventOverlap()  # type: ignore[return-value]


class HybridEPBuffer:
    def __init__(
        self,
        group: ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
    ) -> None:
        assert not use_fp8
        self.group = group

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        pad_multiple: int | None = None,
        num_permuted_tokens: Any = None,
        non_blocking: bool = False,
        handle: Any = None,
    ) -> tuple[Any, ...]:
        """Return a copy of each token for each of its experts, sorted by expert, then by sender."""
        check_rows(hidden)
        group = self.group
        if handle is None:
            CALLS.append("dispatch")
            assert routing_map is not None and routing_map.dtype is torch.bool
            assert probs is not None and probs.dtype is torch.float32
            expert, row = routing_map.T.nonzero(as_tuple=True)
            local = routing_map.size(1) // group.size()
            sent = routing_map.unflatten(1, (group.size(), local)).sum((0, 2)).tolist()
            received = counts_received(group, sent)
            order = exchange(group, expert % local, received, sent).argsort(stable=True)
            experts = exchange(group, expert % local, received, sent)
            counts = experts.bincount(minlength=local)
            handle = row, expert, sent, received, order, counts, tuple(routing_map.shape)
        else:
            CALLS.append("dispatch again")
        row, expert, sent, received, order, counts, _ = handle
        rows = exchange(group, hidden[row], received, sent)[order]
        weights = None
        if probs is not None:
            weights = exchange(group, probs[row, expert], received, sent)[order]
        return rows, weights, None, counts, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: Any = None,
        pad_multiple: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        CALLS.append("combine" if probs is None else "combine with weights")
        check_rows(hidden)
        row, expert, sent, received, order, _, (num_rows, num_experts) = handle
        back = order.argsort()
        copies = exchange(self.group, hidden[back], sent, received).float()
        total = torch.zeros(num_rows, hidden.size(1)).index_add(0, row, copies).to(hidden.dtype)
        if probs is None:
            return total, None
        weights = torch.zeros(num_rows, num_experts)
        weights[row, expert] = exchange(self.group, probs[back], sent, received)
        return total, weights
