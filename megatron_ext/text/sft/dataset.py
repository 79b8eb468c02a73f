"""The three splits of a fine-tuning run: rows of conversations, and which rows make a step.

A conversation of n tokens takes n - 1 positions of a row, since position t reads token t and
predicts token t + 1. ``--sft-max-length`` counts tokens; ``--seq-length`` counts positions. The
label of an input always belongs to the same conversation. Padding is recognized by its position,
never by its id, which may equal the id of the end token.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from megatron_ext.config.run import RunConfig
from megatron_ext.data.loader import StepDataset
from megatron_ext.data.samplers import Ints, shuffled
from megatron_ext.data.step_plan import Epochs, StepPlan
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.cost.products import score_channels, token_products
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.data.gpt import split_bounds
from megatron_ext.text.inputs import names_by_flag
from megatron_ext.text.sft.chat import Chat, build_chat
from megatron_ext.text.sft.intake import Intake
from megatron_ext.text.sft.packing import BudgetEpochs, CostModel, PackedEpochs, PaddedEpochs
from megatron_ext.text.sft.preprocess import chat_notes, open_stores, with_date_of_stores
from megatron_ext.text.sft.store import SftStore
from megatron_ext.text.tokenizers import TokenizerConfig
from megatron_ext.text.tokenizers.base import Tokenizer
from megatron_ext.train.task import Datasets

_SPLIT_SEED = 2
Truncation = Literal["error", "left", "right"]


def kept_tokens(max_length: int, truncation: Truncation) -> slice:
    """Return the slice of a conversation's tokens that truncation keeps.

    Truncation "left" keeps the last ``max_length`` tokens; any other keeps the first ones.
    """
    return slice(-max_length, None) if truncation == "left" else slice(max_length)


def lay_out(
    conversations: Mapping[int, tuple[ArrayLike, ArrayLike]], length: int, pad_id: int
) -> dict[str, NDArray[Any]]:
    """Put conversations one after another into a row; shift labels by one; pad the row.

    Position t reads ``ids[t]`` and predicts ``ids[t + 1]`` with the loss weight ``mask[t + 1]``.
    The first token is never a label.

    Args:
        conversations: maps the number of each conversation to its (ids, mask), which have at least
            2 tokens.
        length: the number of positions s of the row.
        pad_id: the token id for padding.

    Raises:
        DataError: the conversations need more than s positions.

    Returns:
        ``tokens``, ``labels``, ``position_ids`` (0 in padding) and ``sample_ids`` (numbers of
        conversations, -1 in padding), ``[s]`` int64; ``loss_mask``, ``[s]`` float32, 0 in padding.
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
        row["tokens"][here] = np.asarray(ids)[:-1]
        row["labels"][here] = np.asarray(ids)[1:]
        row["loss_mask"][here] = np.asarray(mask)[1:]
        row["position_ids"][here] = np.arange(here.stop - start)
        row["sample_ids"][here] = number
        start = here.stop
    return row


@dataclass(frozen=True)
class TruncationCounts:
    """Counts of the tokens and conversations that ``--sft-truncation`` removes from a split.

    Attributes:
        conversations: number of conversations before truncation.
        shortened: number of conversations that are cut.
        tokens: number of tokens that are cut off in all.
        dropped: number of conversations that are removed, because truncation leaves them no
            trained token.
    """

    conversations: int
    shortened: int
    tokens: int
    dropped: int
    max_length: int
    truncation: str

    def sentences(self, split: str) -> list[str]:
        """Return one sentence on the split ``split``, in a list.

        The list is empty if nothing was cut or removed.
        """
        if not self.shortened and not self.dropped:
            return []
        total = f"{self.conversations:,} conversations of the {split} split"
        parts = []
        if self.shortened:
            parts.append(
                f"`--sft-truncation {self.truncation}` cuts {self.shortened:,} of {total} to "
                f"`--sft-max-length` ({self.max_length}), and {self.tokens:,} tokens are lost"
            )
        if self.dropped:
            parts.append(f"{self.dropped:,} of {total} have no trained token, and are dropped")
        return ["; ".join(parts)]


class SftDataset(StepDataset):
    """The conversations of one split; ``dataset[3, 7]`` is a row that packs conversations 3 and 7.

    ``stores`` hold the conversations, numbered from the first store to the last; ``members`` are
    the numbers of those that belong to the split. The dataset keeps only the n conversations that
    still have a trained token after truncation, and numbers them anew from 0 to n - 1. If
    ``truncation`` is "error", raise a DataError if a conversation is longer than ``max_length``
    tokens.

    Attributes:
        lengths: number of positions that each conversation takes, ``[n]``.
        cut: counts of what truncation removes from the split.
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
        self._stores = list(stores)
        self._seq_length = seq_length
        self._begins = np.cumsum([0, *(len(store) for store in stores)])
        self._kept = kept_tokens(max_length, truncation)
        self._pad_id = pad_id
        self.plan: StepPlan | None = None
        tokens = np.concatenate([store.lengths for store in stores])[members]
        self._members = members
        long = np.flatnonzero(tokens > max_length)
        if truncation == "error":
            if long.size:
                first = int(long[np.argmin(members[long])])
                store, number = self.place_of(first)
                raise DataError(
                    f"{store.source_of(number)[0]}: {long.size} of {tokens.size} conversations are "
                    f"longer than `--sft-max-length` ({max_length}), such as number {number + 1} "
                    f"of its store with {tokens[first]} tokens; raise it and `--seq-length`, or "
                    "set `--sft-truncation` to left or right."
                )
        trains = self._trains(long)
        self.cut = TruncationCounts(
            conversations=tokens.size,
            shortened=long.size,
            tokens=int((tokens[long] - max_length).sum()),
            dropped=int((~trains).sum()),
            max_length=max_length,
            truncation=truncation,
        )
        if self.cut.dropped:
            self._members = members[trains]
            tokens = tokens[trains]
        self.lengths: Ints = np.minimum(tokens, max_length) - 1

    def _trains(self, long: Ints) -> NDArray[np.bool_]:
        """Return, for each conversation, whether a trained token is left after truncation, ``[n]``.

        ``long`` are the indices of the conversations that truncation cuts. Only these are read,
        since each conversation in a store has a trained token. But stores of earlier versions also
        hold conversations without one; if there is such a store, all conversations are read.
        """
        trains = np.ones(len(self._members), np.bool_)
        checked = {int(number) for number in long}
        if any(store.intake is None for store in self._stores):
            checked = set(range(len(self._members)))
        for number in checked:
            store, place = self.place_of(number)
            trains[number] = store.has_trained_token(place, self._kept)
        return trains

    def __len__(self) -> int:
        return len(self._members)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the plan, which a data loader's worker does not need."""
        return {**self.__dict__, "plan": None}

    def __getitem__(self, row: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the tensors of a row that packs the conversations with the indices ``row``.

        The row is padded to the sequence length; ``()`` gives a row of padding only. `lay_out`
        describes the tensors.
        """
        conversations = {}
        for sample in row:
            store, number = self.place_of(sample)
            ids, mask = store.conversation(number)
            conversations[sample] = ids[self._kept], mask[self._kept]
        laid = lay_out(conversations, self._seq_length, self._pad_id)
        return {name: torch.from_numpy(column) for name, column in laid.items()}

    def place_of(self, sample: int) -> tuple[SftStore, int]:
        """Return the store that holds a conversation, and the conversation's index in that store.

        ``sample`` is the index of the conversation in this dataset.
        """
        number = int(self._members[sample])
        store = int(np.searchsorted(self._begins, number, side="right")) - 1
        return self._stores[store], number - int(self._begins[store])


def cost_model(config: RunConfig) -> CostModel:
    """Return the cost of a forward pass as a function of a document's length L, up to a factor.

    Only ratios of costs matter, so the factor is arbitrary. A layer of width h with an MLP of width
    ``4 h`` costs ``12 h**2 L + h L**2``. Attention scores therefore cost as much as everything else
    at ``L = 12 h``. Narayanan et al. 2021 (arXiv:2104.04473) count full attention in their ``1 + s
    / (6 h) + ...``; the formula here counts the causal half of it.
    """
    model = config.model
    products = token_products(config, gated=model.swiglu)
    mlp = products["experts" if config.section(MoEConfig).num_experts else "dense"]
    layers = model.num_layers or 1
    linear = layers * (products["projections"] + mlp) + products["logits"]
    quadratic = layers * max(1, score_channels(config))
    common = gcd(linear, quadratic)  # keeps the sums of long rows far below 2**63
    return CostModel(linear // common, quadratic // common)


def _plan_steps(config: RunConfig, lengths: Ints, seed: int | None) -> StepPlan:
    """Return a plan of which conversations share a row, and which rows make a step.

    ``lengths`` holds the number of positions of each conversation. ``seed`` shuffles each epoch
    differently; without a seed all epochs are equal.
    """
    micro_batch_size, batch = config.training.batch_sizes
    replicas = config.parallel.data_parallel_size
    capacity = config.model.seq_length
    batching = config.section(SftConfig).sft_batching
    assert capacity is not None
    cost = cost_model(config)
    epochs: Epochs
    if batching == "padded":
        epochs = PaddedEpochs(lengths.size, batch, replicas, micro_batch_size, seed)
    elif batching == "packed":
        epochs = PackedEpochs(lengths, capacity, batch, replicas, cost, seed)
    else:
        # In megatron-core's interleaved schedule, the number of micro-batches must be a multiple of
        # the pipeline size.
        interleaved = config.parallel.virtual_pipeline_model_parallel_size is not None
        group = config.parallel.pipeline_model_parallel_size if interleaved else 1
        epochs = BudgetEpochs(lengths, capacity, batch, replicas, cost, seed, multiple=group)
    digest = hashlib.sha256(lengths.tobytes())
    digest.update(repr(((batching, capacity, batch), seed)).encode())
    identity = digest.hexdigest()[:16]
    return StepPlan(epochs, micro_batch_size, identity, packs_documents=batching != "padded")


@dataclass(frozen=True)
class Splits:
    """The conversations of a run, before rows and steps are planned.

    ``datasets`` holds train, valid and test in this order; a split without conversations is None.
    ``cuts`` holds what truncation removed from each split, by the name of the split.
    """

    chat: Chat
    stores: Sequence[SftStore]
    datasets: Sequence[SftDataset | None]
    cuts: Mapping[str, TruncationCounts]


_NAMES = ("train", "valid", "test")


def open_splits(config: RunConfig, tokenizer: Tokenizer) -> Splits:
    """Open the conversations of a run, and divide them into splits.

    Raise a ConfigError if there is no chat template or a flag cannot be used, and a DataError if
    the data cannot be used.
    """
    sft = config.section(SftConfig)
    data = config.section(DataConfig)
    chat = build_chat(tokenizer, config.section(TokenizerConfig), sft)
    assert config.model.seq_length is not None and sft.sft_max_length is not None
    by_flag = names_by_flag(data)
    names = [name for paths in by_flag.values() for name in paths or ()]
    chat = with_date_of_stores(chat, names, data.data_cache_path)
    opened = [
        open_stores(
            flag,
            paths or [],
            chat=chat,
            cache=data.data_cache_path,
            vocab_size=config.model.padded_vocab_size or chat.vocab_size,
        )
        for flag, paths in by_flag.items()
    ]
    stores = [store for group in opened for store in group]
    if data.data_path is not None:
        assert data.split is not None
        count = sum(map(len, stores))
        order = shuffled(count, config.training.seed, _SPLIT_SEED)
        parts = [np.sort(order[a:b]) for a, b in split_bounds(data.split, count)]
        groups = [(opened[0], part) for part in parts]
    else:
        groups = [(group, np.arange(sum(map(len, group)))) for group in opened]
    datasets: list[SftDataset | None] = []
    cuts = {}
    for name, (group, members) in zip(_NAMES, groups, strict=True):
        if not members.size:
            datasets.append(None)
            continue
        dataset = SftDataset(
            group,
            members,
            seq_length=config.model.seq_length,
            max_length=sft.sft_max_length,
            truncation=cast("Truncation", sft.sft_truncation),
            # Any id will do, also that of the end token: padding is recognized by its position.
            pad_id=chat.tokenizer.pad_token_id or 0,
        )
        cuts[name] = dataset.cut
        datasets.append(dataset if len(dataset) else None)
    return Splits(chat, stores, datasets, cuts)


def build_splits(config: RunConfig, tokenizer: Tokenizer, *_: Any) -> Datasets:
    """Build the splits, with a plan of their steps; every rank must call this.

    Ranks that read no data need the plans too. A split without conversations is None. ``_`` are the
    other arguments of `Task.datasets`, which are ignored here. Raise a ConfigError if no data or no
    chat template is given, and a DataError if the data cannot be used.
    """
    return planned(config, open_splits(config, tokenizer))


def planned(config: RunConfig, splits: Splits) -> Datasets:
    """Plan the steps of each dataset of ``splits``, and return the datasets.

    If the train split has no conversation, raise a ConfigError (no data was given for it) or a
    DataError, unless the run skips training.
    """
    seeds = (config.training.seed, None, None)
    for dataset, seed in zip(splits.datasets, seeds, strict=True):
        if dataset is not None:
            dataset.plan = _plan_steps(config, dataset.lengths, seed)
    if splits.datasets[0] is None and not config.training.skip_train:
        raise _without_training(config, splits)
    return Datasets(*splits.datasets)


def _without_training(config: RunConfig, splits: Splits) -> ConfigError | DataError:
    """Return the error that explains why the train split has no conversation."""
    data = config.section(DataConfig)
    if data.data_path is None and data.train_data_path is None:
        return ConfigError.about(
            "--sft",
            None,
            "needs conversations to train on",
            "name files with `--data-path`, or with `--train-data-path`",
        )
    if "train" in splits.cuts:
        cut = splits.cuts["train"]
        return DataError(
            f"None of the {cut.conversations} conversations of the train split has a trained token "
            f"within `--sft-max-length` ({cut.max_length}) under `--sft-truncation` "
            f"({cut.truncation}); raise it and `--seq-length`, keep the other end, or check the "
            "loss masks."
        )
    if not any(map(len, splits.stores)):
        counted = [store.intake for store in splits.stores if store.intake is not None]
        return DataError(
            f"No conversation has a trained token ({Intake.total(counted).summary()}); check the "
            "loss masks of the assistant's messages."
        )
    return DataError(
        f"The train split is empty under `--split` ({data.split}); give it a larger share, or "
        "more conversations."
    )


@dataclass(frozen=True)
class ConversationReport:
    """A report on the conversations that a run reads.

    Attributes:
        intake: the counts of all stores together; None if no store has any.
        notes: sentences on what was read and converted, and on the date that the template writes.
        warnings: sentences on values and conversations that are not used, and on truncation.
    """

    intake: Intake | None
    notes: Sequence[str]
    warnings: Sequence[str]


def report_conversations(config: RunConfig, tokenizer: Tokenizer) -> ConversationReport:
    """Return a report on the conversations that a run reads.

    Raise a ConfigError if there is no chat template or a flag cannot be used, and a DataError if
    the data cannot be used.
    """
    splits = open_splits(config, tokenizer)
    counted = [store.intake for store in splits.stores if store.intake is not None]
    intake = Intake.total(counted) if counted else None
    notes = [] if intake is None else [f"conversations: {intake.summary()}", *intake.notes()]
    notes += [*chat_notes(splits.chat), *_empty_splits(config, splits)]
    warnings = [] if intake is None else intake.warnings()
    warnings += [text for name, cut in splits.cuts.items() for text in cut.sentences(name)]
    warnings += _about_stores(splits)
    return ConversationReport(intake, notes, warnings)


def _empty_splits(config: RunConfig, splits: Splits) -> Iterator[str]:
    """Yield a sentence if the validation split is empty although the flags gave it data."""
    data = config.section(DataConfig)
    if splits.datasets[1] is not None or config.training.eval_iters == 0:
        return
    count = sum(map(len, splits.stores))
    if "valid" in splits.cuts:
        yield "the valid split has no conversation with a trained token, so nothing is validated"
    elif data.data_path is not None and data.split is not None:
        shares = split_bounds(data.split, 10**6)
        if shares[1][1] > shares[1][0]:
            yield (
                f"the valid split is empty, so nothing is validated: `--split` ({data.split}) "
                f"leaves it none of {count} conversations"
            )


def _about_stores(splits: Splits) -> Iterator[str]:
    for store in splits.stores:
        if store.intake is None:
            yield (
                f"{store.prefix} was made by an earlier version, which did not count what it left "
                "out; preprocess the data again to be sure of it"
            )
    dates = {store.about["date"] for store in splits.stores if store.about.get("date")}
    if len(dates) > 1:
        yield (
            f"the texts were made on several days ({', '.join(sorted(dates))}), which the chat "
            "template writes; preprocess them with one `--sft-date`"
        )
