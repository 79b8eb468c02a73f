"""The three splits of a fine-tuning run: rows of conversations as tensors, and their steps.

One rule for lengths: a conversation of n tokens takes n - 1 positions of a row, since position t
reads token t and predicts token t + 1. ``--sft-max-length`` counts tokens, ``--seq-length``
positions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_ext.data.samplers import Epochs, Ints, StepPlan, shuffled
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.config import DataConfig, SftConfig, TokenizerConfig
from megatron_ext.text.data.gpt import split_bounds
from megatron_ext.text.sft.chat import build_chat
from megatron_ext.text.sft.epochs import BudgetEpochs, PackedEpochs, PaddedEpochs
from megatron_ext.text.sft.packing import CostModel
from megatron_ext.text.sft.preprocess import open_stores
from megatron_ext.text.sft.rows import Truncation, kept_tokens, lay_out, pad_id_of, shift
from megatron_ext.text.sft.store import SftStore
from megatron_ext.train.task import Datasets

if TYPE_CHECKING:
    from megatron_ext.config.model import ModelConfig
    from megatron_ext.config.moe import MoEConfig
    from megatron_ext.config.run import RunConfig
    from megatron_ext.text.tokenizers.base import Tokenizer

_SPLIT_SEED = 2


class SftDataset(Dataset[dict[str, Tensor]]):
    """The conversations of one split; an index is a row, a tuple of their numbers.

    Args:
        members: numbers of the split's conversations among those of all stores, ``[n]``.
        seq_length: s, positions of a row.
        max_length: tokens of a conversation, at most.
        truncation: the tokens that a longer conversation keeps.

    Attributes:
        lengths: positions that each conversation takes, ``[n]``.
        plan: rows of each step of a run; None until the split is given one.

    Raises:
        DataError: a longer conversation under the truncation "error".
    """

    def __init__(
        self,
        stores: Sequence[SftStore],
        members: Ints,
        *,
        seq_length: int,
        max_length: int,
        truncation: Truncation,
        pad_id: int,
    ) -> None:
        self._stores = list(stores)
        self._begins = np.cumsum([0, *(len(store) for store in stores)])
        self._members = members
        self._seq_length, self._max_length = seq_length, max_length
        self._truncation, self._pad_id = truncation, pad_id
        self.plan: StepPlan | None = None
        tokens = np.concatenate([store.lengths for store in stores])[members]
        if truncation == "error":
            self._refuse_long(tokens)
        self.lengths: Ints = np.minimum(tokens, max_length) - 1

    def _refuse_long(self, tokens: Ints) -> None:
        long = np.flatnonzero(tokens > self._max_length)
        if not long.size:
            return
        first = int(long[np.argmin(self._members[long])])
        store, number = self.place_of(first)
        raise DataError(
            f"{store.source_of(number)}: {long.size} of {tokens.size} conversations are longer "
            f"than `--sft-max-length` ({self._max_length}), such as number {number + 1} of its "
            f"store with {tokens[first]} tokens; raise it and `--seq-length`, or set "
            "`--sft-truncation` to left or right."
        )

    def __len__(self) -> int:
        """Return the number of conversations."""
        return len(self._members)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the plan, which a loader's process does not need."""
        return {**self.__dict__, "plan": None}

    def __getitem__(self, row: tuple[int, ...]) -> dict[str, Tensor]:
        """Return one row: its conversations side by side, then padding.

        Args:
            row: numbers of conversations; ``()`` is a row of padding.

        Returns:
            ``tokens``, ``labels``, ``position_ids`` (0 in padding) and ``sample_ids`` (-1 in
            padding), ``[s]`` int64; ``loss_mask``, ``[s]`` float32, 0 in padding.
        """
        kept = kept_tokens(self._max_length, self._truncation)
        sequences = []
        for sample in row:
            store, number = self.place_of(sample)
            ids, mask = store.conversation(number)
            sequences.append(shift(ids[kept], mask[kept]))
        laid = lay_out(sequences, self._seq_length, self._pad_id)
        sample_ids = np.full(self._seq_length, -1, dtype=np.int64)
        sample_ids[: laid.cu_seqlens[-1]] = np.repeat(
            np.array(row, dtype=np.int64), np.diff(laid.cu_seqlens)
        )
        return {
            "tokens": torch.from_numpy(laid.inputs),
            "labels": torch.from_numpy(laid.labels),
            "loss_mask": torch.from_numpy(laid.weights),
            "position_ids": torch.from_numpy(laid.position_ids),
            "sample_ids": torch.from_numpy(sample_ids),
        }

    def place_of(self, sample: int) -> tuple[SftStore, int]:
        """Return the store of a conversation, and its number there."""
        number = int(self._members[sample])
        store = int(np.searchsorted(self._begins, number, side="right")) - 1
        return self._stores[store], number - int(self._begins[store])

    def source_of(self, sample: int) -> str:
        """Return the input file that a conversation came from."""
        store, number = self.place_of(sample)
        return store.source_of(number)


def cost_model(model: ModelConfig, moe: MoEConfig) -> CostModel:
    """Return the cost of the documents of a row, by the sizes of the model."""
    width = model.ffn_hidden_size or 0
    if moe.num_experts:
        expert_width = moe.moe_ffn_hidden_size or width
        width = expert_width * moe.moe_router_topk + (moe.moe_shared_expert_intermediate_size or 0)
    return CostModel.of_sizes(
        model.hidden_size or 1,
        width,
        model.num_attention_heads or 1,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        gated=model.swiglu,
        num_layers=model.num_layers or 1,
        vocab_size=model.padded_vocab_size or 0,
    )


def plan_steps(config: RunConfig, lengths: Ints, *, seed: int | None) -> StepPlan:
    """Return the rows of each step.

    Args:
        lengths: positions of each conversation of the split, ``[n]``.
        seed: decides the order, anew in each epoch; None makes every epoch the same (evaluation).
    """
    micro_batch_size, batch = config.training.batch_sizes
    replicas, capacity = config.parallel.data_parallel_size, config.model.seq_length
    batching = config.section(SftConfig).sft_batching
    assert capacity is not None
    cost = cost_model(config.model, config.moe)
    epochs: Epochs
    if batching == "padded":
        epochs = PaddedEpochs(lengths.size, batch, replicas, micro_batch_size, seed)
    elif batching == "packed":
        epochs = PackedEpochs(lengths, capacity, batch, replicas, cost, seed)
    else:
        # megatron-core's interleaved schedule takes whole groups of micro-batches only.
        interleaved = config.parallel.virtual_pipeline_model_parallel_size is not None
        group = config.parallel.pipeline_model_parallel_size if interleaved else 1
        epochs = BudgetEpochs(lengths, capacity, batch, replicas, cost, seed, multiple=group)
    return StepPlan(
        epochs,
        micro_batch_size,
        _identity(config, lengths, seed),
        packs_documents=batching != "padded",
    )


def _identity(config: RunConfig, lengths: Ints, seed: int | None) -> str:
    decides = (
        config.section(SftConfig).sft_batching,
        config.model.seq_length,
        config.training.batch_sizes[1],
    )
    digest = hashlib.sha256(lengths.tobytes())
    digest.update(repr((decides, seed)).encode())
    return digest.hexdigest()[:16]


def build_splits(config: RunConfig, tokenizer: Tokenizer) -> Datasets:
    """Build the splits with their plans; a split without conversations is None.

    Raises:
        ConfigError: no data, or a tokenizer without a chat template.
        DataError: a file or a conversation that cannot be used, or nothing to train on.
    """
    sft = config.section(SftConfig)
    chat = build_chat(tokenizer, config.section(TokenizerConfig), sft)
    assert config.model.seq_length is not None and sft.sft_max_length is not None
    sizes: dict[str, Any] = {
        "seq_length": config.model.seq_length,
        "max_length": sft.sft_max_length,
        "truncation": cast("Truncation", sft.sft_truncation),
        "pad_id": pad_id_of(chat.tokenizer),
    }

    def split(stores: Sequence[SftStore], members: Ints, seed: int | None) -> SftDataset | None:
        if not members.size:
            return None
        dataset = SftDataset(stores, members, **sizes)
        dataset.plan = plan_steps(config, dataset.lengths, seed=seed)
        return dataset

    seeds = (config.training.seed, None, None)
    data = config.section(DataConfig)
    if data.data_path is not None:
        stores = open_stores("--data-path", data.data_path, config, chat)
        assert data.split is not None
        members = _shares(data.split, config.training.seed, sum(map(len, stores)))
        found = [split(stores, part, seed) for part, seed in zip(members, seeds, strict=True)]
    else:
        found = []
        for name, seed in zip(("train", "valid", "test"), seeds, strict=True):
            paths = getattr(data, f"{name}_data_path") or []
            stores = open_stores(f"--{name}-data-path", paths, config, chat)
            found.append(split(stores, np.arange(sum(map(len, stores))), seed))
    if found[0] is None and not config.training.skip_train:
        raise _no_train(data)
    return Datasets(*found)


def _shares(split: str, seed: int, count: int) -> list[Ints]:
    """Return the conversations of each split, out of all of them shuffled by the seed."""
    order = shuffled(count, seed, _SPLIT_SEED)
    return [np.sort(order[a:b]) for a, b in split_bounds(split, count)]


def _no_train(data: DataConfig) -> Exception:
    if data.data_path is None and data.train_data_path is None:
        return ConfigError(
            "`--sft` needs conversations to train on; name files with `--data-path`, or with "
            "`--train-data-path`."
        )
    return DataError(
        f"The train split is empty under `--split` ({data.split}); give it a larger share, or "
        "more conversations."
    )


def build_sft_datasets(
    config: RunConfig,
    tokenizer: Tokenizer,
    sizes: Sequence[int | None],
    is_built_on_rank: Callable[[], bool],
) -> Datasets:
    """Build the splits on every rank: ranks that read no data need the plan of the steps.

    Raises:
        ConfigError, DataError: see `build_splits`.
    """
    return build_splits(config, tokenizer)
