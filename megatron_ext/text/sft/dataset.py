"""The three splits of a fine-tuning run: rows of conversations as tensors, and their steps.

A conversation of n tokens takes n - 1 positions of a row, since position t reads token t and
predicts token t + 1. ``--sft-max-length`` counts tokens; ``--seq-length`` counts positions. No
label belongs to another conversation than its input. Padding is recognized by its position, never
by its id, which may be that of the end token.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import Dataset

from megatron_ext.config.model import ModelConfig
from megatron_ext.config.moe import MoEConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.data.samplers import Epochs, Ints, StepPlan, shuffled
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.config import SftConfig, TokenizerConfig
from megatron_ext.text.cost.flops import score_channels, token_products
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.data.gpt import split_bounds
from megatron_ext.text.sft.chat import build_chat
from megatron_ext.text.sft.packing import BudgetEpochs, CostModel, PackedEpochs, PaddedEpochs
from megatron_ext.text.sft.preprocess import open_stores
from megatron_ext.text.sft.store import SftStore
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.task import Datasets

_SPLIT_SEED = 2
Truncation = Literal["error", "left", "right"]


def kept_tokens(max_length: int, truncation: Truncation) -> slice:
    """Return the slice of tokens to keep: the last ``max_length`` for "left", else the first."""
    return slice(-max_length, None) if truncation == "left" else slice(max_length)


def lay_out(
    conversations: Mapping[int, tuple[ArrayLike, ArrayLike]], length: int, pad_id: int
) -> dict[str, NDArray[Any]]:
    """Lay conversations side by side, each shifted by one, and pad the row.

    Position t reads ``ids[t]`` and predicts ``ids[t + 1]`` with the loss weight ``mask[t + 1]``.
    The first token is never a label.

    Args:
        conversations: ids and mask of each conversation (at least 2 tokens), by its number.
        length: positions s of the row; raise a DataError if the conversations need more.

    Returns:
        ``tokens``, ``labels``, ``position_ids`` (0 in padding) and ``sample_ids`` (-1 in padding),
        ``[s]`` int64; ``loss_mask``, ``[s]`` float32, 0 in padding.
    """
    total = sum(np.size(ids) - 1 for ids, _ in conversations.values())
    if total > length:
        raise DataError(
            f"{len(conversations)} conversations of {total} positions together must fit a row of "
            f"{length}; truncate them first, or lay out fewer."
        )
    row: dict[str, NDArray[Any]] = {
        "tokens": np.full(length, pad_id),
        "labels": np.full(length, pad_id),
        "loss_mask": np.zeros(length, np.float32),
        "position_ids": np.zeros(length, np.int64),
        "sample_ids": np.full(length, -1),
    }
    start = 0
    for number, (ids, mask) in conversations.items():
        here = slice(start, start + np.size(ids) - 1)
        row["tokens"][here], row["labels"][here] = np.asarray(ids)[:-1], np.asarray(ids)[1:]
        row["loss_mask"][here] = np.asarray(mask)[1:]
        row["position_ids"][here] = np.arange(here.stop - start)
        row["sample_ids"][here] = number
        start = here.stop
    return row


class SftDataset(Dataset[dict[str, Tensor]]):
    """The conversations of one split; an item is a row, indexed by the tuple of its conversations.

    ``members [n]`` are the indices of the split's conversations in all stores together. With the
    truncation "error", raise a DataError if one is longer than ``max_length`` tokens.

    Attributes:
        lengths: positions that each conversation takes, ``[n]``.
        plan: the rows of each step of a run; None until `build_splits` sets it.
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
        self._stores, self._members, self._seq_length = list(stores), members, seq_length
        self._begins = np.cumsum([0, *(len(store) for store in stores)])
        self._kept, self._pad_id = kept_tokens(max_length, truncation), pad_id
        self.plan: StepPlan | None = None
        tokens = np.concatenate([store.lengths for store in stores])[members]
        if truncation == "error":
            long = np.flatnonzero(tokens > max_length)
            if long.size:
                first = int(long[np.argmin(members[long])])
                store, number = self.place_of(first)
                raise DataError(
                    f"{store.source_of(number)[0]}: {long.size} of {tokens.size} conversations are "
                    f"longer than `--sft-max-length` ({max_length}), such as number {number + 1} "
                    f"of its store with {tokens[first]} tokens; raise it and `--seq-length`, or "
                    "set `--sft-truncation` to left or right."
                )
        self.lengths: Ints = np.minimum(tokens, max_length) - 1

    def __len__(self) -> int:
        return len(self._members)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the plan, which a data loader's worker does not need."""
        return {**self.__dict__, "plan": None}

    def __getitem__(self, row: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the row of these conversations (`lay_out`); ``()`` gives a row of padding."""
        conversations = {}
        for sample in row:
            store, number = self.place_of(sample)
            ids, mask = store.conversation(number)
            conversations[sample] = ids[self._kept], mask[self._kept]
        laid = lay_out(conversations, self._seq_length, self._pad_id)
        return {name: torch.from_numpy(column) for name, column in laid.items()}

    def place_of(self, sample: int) -> tuple[SftStore, int]:
        """Return the store that holds conversation ``sample`` of the split, and its index there."""
        number = int(self._members[sample])
        store = int(np.searchsorted(self._begins, number, side="right")) - 1
        return self._stores[store], number - int(self._begins[store])


def cost_model(model: ModelConfig, moe: MoEConfig) -> CostModel:
    """Return the compute of a forward pass as a function of document lengths L, up to a factor.

    A layer of width h takes ``12 h**2 L + h L**2`` where the MLP is ``4 h`` wide, so that attention
    costs as much as all else at ``L = 12 h``. The formula ``1 + s / (6 h) + ...`` of
    Narayanan et al. 2021 (arXiv:2104.04473) counts full attention; here the causal half counts.
    """
    products = token_products(model, moe, gated=model.swiglu)
    mlp, layers = products["experts" if moe.num_experts else "dense"], model.num_layers or 1
    linear = layers * (products["projections"] + mlp) + products["logits"]
    quadratic = layers * max(1, score_channels(model))
    common = gcd(linear, quadratic)  # keeps the sums of long rows far below 2**63
    return CostModel(linear // common, quadratic // common)


def _plan_steps(config: RunConfig, lengths: Ints, seed: int | None) -> StepPlan:
    """Return the plan that says which conversations share a row, and which rows make up a step.

    ``lengths`` are the positions that each conversation takes. ``seed`` shuffles each epoch anew;
    without a seed all epochs are equal.
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
    digest = hashlib.sha256(lengths.tobytes())
    digest.update(repr(((batching, capacity, batch), seed)).encode())
    identity = digest.hexdigest()[:16]
    return StepPlan(epochs, micro_batch_size, identity, packs_documents=batching != "padded")


def build_splits(config: RunConfig, tokenizer: Tokenizer, *_: Any) -> Datasets:
    """Build the splits, each with the plan of its steps, on every rank; see `Task.datasets`.

    A split without conversations is None. Ranks that read no data need the plans too. Raise a
    ConfigError if data or chat template are not given, a DataError for unusable data.
    """
    sft = config.section(SftConfig)
    chat = build_chat(tokenizer, config.section(TokenizerConfig), sft)
    assert config.model.seq_length is not None and sft.sft_max_length is not None
    sizes: dict[str, Any] = {
        "seq_length": config.model.seq_length,
        "max_length": sft.sft_max_length,
        "truncation": cast("Truncation", sft.sft_truncation),
        "pad_id": chat.tokenizer.pad_token_id or 0,  # it may be the end token's
    }

    def split(stores: Sequence[SftStore], members: Ints, seed: int | None) -> SftDataset | None:
        if not members.size:
            return None
        dataset = SftDataset(stores, members, **sizes)
        dataset.plan = _plan_steps(config, dataset.lengths, seed)
        return dataset

    seeds, data = (config.training.seed, None, None), config.section(DataConfig)
    opened = functools.partial(
        open_stores,
        chat=chat,
        cache=data.data_cache_path,
        vocab_size=config.model.padded_vocab_size or chat.vocab_size,
    )
    if data.data_path is not None:
        stores = opened("--data-path", data.data_path)
        assert data.split is not None
        count = sum(map(len, stores))
        order = shuffled(count, config.training.seed, _SPLIT_SEED)
        parts = [np.sort(order[a:b]) for a, b in split_bounds(data.split, count)]
        found = [split(stores, part, seed) for part, seed in zip(parts, seeds, strict=True)]
    else:
        found = []
        for name, seed in zip(("train", "valid", "test"), seeds, strict=True):
            stores = opened(f"--{name}-data-path", getattr(data, f"{name}_data_path") or [])
            found.append(split(stores, np.arange(sum(map(len, stores))), seed))
    if found[0] is None and not config.training.skip_train:
        if data.data_path is None and data.train_data_path is None:
            raise ConfigError(
                "`--sft` needs conversations to train on; name files with `--data-path`, or with "
                "`--train-data-path`."
            )
        raise DataError(
            f"The train split is empty under `--split` ({data.split}); give it a larger share, or "
            "more conversations."
        )
    return Datasets(*found)
