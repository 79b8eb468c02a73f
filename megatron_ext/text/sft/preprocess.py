"""Tokenizes conversations into a store: one dataset of token ids, and one of loss masks.

tools/preprocess_data.py writes a store on demand. A run writes one for each of its files of
conversations, into a cache that later runs reuse; other processes wait for it.
"""

import dataclasses
import glob
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from filelock import FileLock, Timeout

from megatron_ext import limits
from megatron_ext.data.indexed import optimal_dtype
from megatron_ext.disk.reading import MAX_DEPTH, is_too_deep
from megatron_ext.disk.writing import lock_path
from megatron_ext.errors import ConfigError, DataError, MegatronExtError, say_to_stderr
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.config.sft_rules import row_errors
from megatron_ext.text.data.config import is_number
from megatron_ext.text.preprocess.encode import (
    BadLine,
    Encoded,
    Refuse,
    Tally,
    Write,
    read_exactly,
    read_object,
)
from megatron_ext.text.preprocess.inputs import Part, identity_of
from megatron_ext.text.preprocess.jobs import Say
from megatron_ext.text.preprocess.options import PreprocessOptions
from megatron_ext.text.preprocess.parts import PartMarker
from megatron_ext.text.preprocess.run import Report, encoded, publish_job
from megatron_ext.text.sft.chat import Chat, build_chat, dated, key_of
from megatron_ext.text.sft.conversation import Place, read_conversation
from megatron_ext.text.sft.intake import Intake
from megatron_ext.text.sft.masks import TokenizedConversation, tokenize_samples
from megatron_ext.text.sft.store import (
    SftStore,
    about_path,
    has_intake,
    prefix_of,
    read_about,
    write_about,
)
from megatron_ext.text.tokenizers import build_tokenizer

_WITHOUT_MEANING = {
    "append_eod": "the chat template ends conversations",
    "eod_token": "the chat template ends conversations",
    "split_sentences": "a conversation is one sequence",
    "keep_newlines": "the chat template writes the text",
    "partitions": "all conversations go into one store",
    "keep_sequential_samples": "all conversations go into one store",
    "shard_tokens": "all conversations go into one store",
    "engine": "the chat template and its special tokens need transformers",
}


KEYS = ("document", "mask")
"""The two datasets of a store: token ids, and masks with 1 for each trained token."""


@dataclass(frozen=True)
class ConversationEncoder:
    """Encodes lines, each a conversation, as token ids and loss mask of each training sample."""

    chat: Chat

    def encode_long(self, *_: object) -> bool:
        """Return False: `encode` encodes conversations of any length."""
        return False

    def encode(
        self, lines: Sequence[bytes], first: int, refuse: Refuse, write: Write, tally: Tally
    ) -> int:
        kept: list[TokenizedConversation] = []
        intake = Intake()
        for number, line in enumerate(lines, first):
            try:
                samples, read = self.tokenize(line, number)
            except BadLine as bad:
                refuse(number, str(bad))
                continue
            # The first token is never a label, so its mask does not count.
            trained = [sample for sample in samples if any(sample.mask[1:])]
            if len(trained) < len(samples):
                read.dropped[WITHOUT_TRAINED_TOKEN] += len(samples) - len(trained)
            read.counts.update(
                {
                    "conversations": len(trained),
                    "tokens": sum(len(sample.ids) for sample in trained),
                    "trained tokens": sum(sum(sample.mask[1:]) for sample in trained),
                }
            )
            intake.add(read)
            kept += trained
        tally(intake.as_dict())
        ones = np.ones(len(kept), np.int32)
        lengths = np.array([len(conversation.ids) for conversation in kept], np.int32)
        for key in range(len(KEYS)):
            values = [np.asarray(conversation[key], np.int64) for conversation in kept]
            tokens = np.concatenate(values) if values else np.zeros(0, np.int64)
            write(key, 0, Encoded(tokens, lengths, ones))
        return len(kept)

    def tokenize(self, line: bytes, number: int) -> tuple[list[TokenizedConversation], Intake]:
        """Return ids and masks of the samples of a conversation, and counts of what was read.

        ``line`` is the conversation's row as JSON; ``number`` is the row's number, for errors.
        Raise a BadLine if the line is not usable.
        """
        place = Place("", number)
        try:
            if is_too_deep(read_object(line)):
                raise BadLine(f"is nested more than {MAX_DEPTH} deep")
            row, repeated = read_exactly(line)
            if repeated is not None:
                raise BadLine(f"has the key {repeated!r} twice in one object")
            conversation = read_conversation(row, place, self.chat.sft)
            samples = tokenize_samples(self.chat.tokenizer, conversation, self.chat.sft)
        except DataError as error:
            text = str(error).removeprefix(f"{place}: ").removesuffix(".")
            raise BadLine(f"is refused: {text}") from None
        shortest = min(len(sample.ids) for sample in samples)
        if shortest < 2:
            raise BadLine(f"gives {shortest} tokens, but at least 2 are needed")
        return samples, conversation.intake


@dataclass(frozen=True)
class SftPreprocessOptions(PreprocessOptions):
    """The options of preprocessing conversations into a store of token ids and masks."""

    smallest_part: ClassVar[int] = 250_000  # templates take longer than bytes alone
    json_keys: Sequence[str] = KEYS
    sft: SftConfig = field(default_factory=SftConfig)

    def _wrong_names(self) -> list[str]:
        wrong = super()._wrong_names()
        if tuple(self.json_keys) != KEYS:
            wrong.append(
                "`--json-keys` does not go with `--sft`, whose columns have flags of their own, "
                "such as `--sft-messages-key`; leave it out."
            )
        for name, reason in _WITHOUT_MEANING.items():
            if getattr(self, name) != getattr(PreprocessOptions, name):
                flag = "--" + name.replace("_", "-")
                wrong.append(f"`{flag}` does not go with `--sft`: {reason}; leave it out.")
        return [*wrong, *row_errors(self.sft)]

    @property
    def columns(self) -> None:
        """Return None: all columns of a table are read, since rows may have different ones."""
        return None

    def dataset_prefix(self, key: str, piece: str | None = None) -> str:
        """Return the prefix of one of the store's two datasets.

        ``key`` is "document" for the token ids, or "mask". ``piece`` is ignored, since a store is
        not divided into shards or partitions.
        """
        return f"{self.output_prefix}_sft_{key}"


class ConversationEncoding:
    """The `Encoding` of conversations: for each training sample, token ids and a loss mask."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.identity: dict[str, Any] = {"sft": chat.identity}
        self.dtypes = (optimal_dtype(chat.vocab_size), np.dtype(np.uint8))

    def choose_engine(self, parts: Sequence[Part], say: Say) -> bool:
        """Return False: gigatoken is never used, since chat templates need transformers."""
        return False

    def encoder(self, *, fast: bool) -> ConversationEncoder:
        return ConversationEncoder(self._chat)


def conversation_encoding(options: PreprocessOptions) -> ConversationEncoding:
    """Return the `ConversationEncoding` for the tokenizer and the chat template in ``options``."""
    assert isinstance(options, SftPreprocessOptions)
    return ConversationEncoding(chat_of(options))


def preprocess_sft(options: SftPreprocessOptions, say: Say = say_to_stderr) -> Report:
    """Tokenize the conversations of the input files into a store; return a report.

    Call ``say`` with sentences on what was read.
    """
    tokenizer = build_tokenizer(options.tokenizer)
    for sentence in tokenizer.notes():
        say(sentence)
    chat = build_chat(tokenizer, options.tokenizer, options.sft)
    report, intake = write_store(options, chat, say)
    for line in report_lines([intake], chat, "the input"):
        say(line)
    return report


def chat_of(options: SftPreprocessOptions) -> Chat:
    """Return the `Chat` (tokenizer, chat template and their options) that ``options`` describe."""
    return build_chat(build_tokenizer(options.tokenizer), options.tokenizer, options.sft)


def with_fixed_date(options: SftPreprocessOptions) -> SftPreprocessOptions:
    """Return the options with the date that the template will write: the user's, or else today's.

    Workers on all machines, and on later days, then write the same date. If the template writes no
    date, the options stay as they are.
    """
    return dataclasses.replace(options, sft=chat_of(options).sft)


def write_store(
    options: SftPreprocessOptions, chat: Chat, say: Say, *, may_be_empty: bool = False
) -> tuple[Report, Intake]:
    """Tokenize conversations into a store; return a report and the counts of what was read.

    Raise a DataError if there is no conversation, or if no conversation has a trained token.
    ``may_be_empty`` allows the second case, for a run that reads other stores too.
    """
    start = time.monotonic()
    options = dataclasses.replace(options, sft=chat.sft)
    with encoded(options, conversation_encoding, say, ConversationEncoding(chat)) as work:
        job, done, resumed = work
        intake = Intake.total(Intake.from_dict(marker.tally) for marker in done.values())
        names = " ".join(options.inputs)
        if not any(marker.documents for marker in done.values()):
            if not intake.dropped:
                raise DataError(f"{names} holds no conversation; give files that do.")
            if not may_be_empty:
                raise DataError(
                    f"{names} holds no conversation with a trained token ({intake.summary()}); "
                    "check the loss masks of the assistant's messages."
                )
        about_path(options.output_prefix).unlink(missing_ok=True)
        report = publish_job(job, done, resumed, start, may_be_empty=may_be_empty)
        identity = job.encoding.identity["sft"]
        files = _conversations_of(job.parts, done)
        write_about(options.output_prefix, identity, files, intake)
    return dataclasses.replace(report, tokens=report.tokens // len(KEYS)), intake


WITHOUT_TRAINED_TOKEN = "conversations without a trained token, by their loss masks"


def report_lines(intakes: Sequence[Intake], chat: Chat, what: str) -> list[str]:
    """Return lines for the user on what was read from conversations, converted and not used.

    ``intakes`` holds the counts of each store; ``what`` names the input in the first line.
    """
    intake = Intake.total(intakes)
    return [
        *([f"{what}: {intake.summary()}"] if intake.counts else []),
        *chat_notes(chat),
        *intake.notes(),
        *intake.warnings(),
    ]


def chat_notes(chat: Chat) -> list[str]:
    """Return sentences on the date that the template writes and the keywords that it ignores."""
    notes = []
    if chat.date is not None:
        notes.append(f"the chat template writes the date {chat.date}; `--sft-date` sets it")
    elif chat.date_is_given:
        notes.append(f"`--sft-date` ({chat.sft.sft_date}): the chat template writes no date")
    if chat.unread:
        notes.append(
            f"`--sft-template-kwargs` ({', '.join(chat.unread)}): the chat template reads no such "
            "name"
        )
    return notes


def _conversations_of(
    parts: Sequence[Part], done: Mapping[int, PartMarker]
) -> list[tuple[str, int]]:
    """Return (absolute path, number of training samples) of each input file, in input order.

    ``parts`` are the pieces into which the files were cut; ``done`` maps the index of each part to
    the marker that counts the samples written for it.
    """
    counts: list[tuple[str, int]] = []
    for i, part in enumerate(parts):
        before = counts.pop()[1] if counts and part.start > 0 else 0
        counts.append((os.path.abspath(part.source), before + done[i].documents))
    return counts


_MOST_WORKERS = 16
_SECONDS_TO_NOTE = 10.0


def open_stores(
    flag: str,
    names: Sequence[str],
    *,
    chat: Chat,
    cache: str | None,
    vocab_size: int,
    say: Say = say_to_stderr,
) -> list[SftStore]:
    """Return a store for each name; a file of conversations is tokenized first.

    Args:
        flag: the flag that gives the names, for errors.
        names: files or datasets of conversations, or prefixes of stores.
        chat: the tokenizer and template with which files are tokenized, and with which stores must
            agree.
        cache: folder to which tokenized files are written; None means a folder named "cache" beside
            each file.
        vocab_size: number above all token ids that a store may hold.

    Raises:
        ConfigError: a name is a number (weights of a blend are not supported here), or the cache
            cannot be written.
        DataError: a file is missing or holds a bad row, or a store does not fit the run.
    """
    stores = []
    for name in names:
        check_name(flag, name)
        prefix = prefix_of(name)
        if not about_path(prefix).exists():
            prefix = _tokenized(name, cache_of(name, cache), chat, say)
        store = SftStore(prefix)
        store.check(chat.identity, vocab_size, date_is_given=chat.date_is_given)
        stores.append(store)
    return stores


def check_name(flag: str, name: str) -> None:
    """Check that ``name`` is a file, a saved dataset or a store of conversations.

    ``flag`` is the flag that gave the name, for errors. Raise a ConfigError for a number, which
    would be the weight of a dataset in a blend, and a DataError if nothing has this name.
    """
    if is_number(name) and not os.path.exists(name):
        raise ConfigError(
            f"`{flag}` ({name}) is a weight, but `--sft` uses every conversation of its files "
            "once in an epoch; leave weights out."
        )
    if not about_path(prefix_of(name)).exists() and not Path(name).exists():
        raise DataError(
            f"`{flag}` ({name}) is neither a file of conversations, a dataset saved to disk, nor "
            "the prefix of a store made by tools/preprocess_data.py --sft; check the path."
        )


def cache_of(name: str, cache: str | None) -> Path:
    """Return the folder for the tokenized copy of a file: ``cache``, or "cache" beside the file."""
    return Path(cache or Path(name).parent / "cache")


def cached_prefix(name: str, folder: Path, identity: Mapping[str, Any]) -> Path:
    """Return the prefix in the cache ``folder`` for the store of the file ``name``.

    The prefix contains a digest of values that change with the file's content (`identity_of`), and
    of ``identity``, which holds everything else that determines the tokens.
    """
    return folder / f"{Path(name).name}.{key_of([identity_of(name)], identity)}"


def with_date_of_stores(chat: Chat, names: Sequence[str], cache: str | None) -> Chat:
    """Return ``chat`` with the date that the existing stores of ``names`` were tokenized with.

    ``names`` are stores, or files whose stores are in the cache. A run with the date of these
    stores can reuse them on later days. If they have different dates, the latest is taken. ``chat``
    is unchanged if there is no such store, if the user gave a date, or if the template writes none.
    """
    if chat.date is None or chat.date_is_given:
        return chat
    dates: set[str] = set()
    for name in names:
        if about_path(prefix_of(name)).exists():
            stored = read_about(prefix_of(name)).get("date")
            dates |= {stored} if stored is not None else set()
        elif Path(name).exists():
            folder = cache_of(name, cache)
            for path in folder.glob(f"{glob.escape(Path(name).name)}.*_sft.json"):
                date = read_about(str(path).removesuffix("_sft.json")).get("date")
                same = cached_prefix(name, folder, {**chat.identity, "date": date})
                if date is not None and about_path(same) == path:
                    dates.add(date)
    return dated(chat, max(dates)) if dates else chat


def _tokenized(name: str, folder: Path, chat: Chat, say: Say) -> str:
    """Return the prefix of the store of one file; write the store if the cache lacks it.

    ``folder`` is the cache.
    """
    prefix = cached_prefix(name, folder, chat.identity)
    if has_intake(prefix):
        return str(prefix)
    lock = FileLock(f"{prefix}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_path(lock.lock_file)
        try:
            guard = lock.acquire(timeout=_SECONDS_TO_NOTE)
        except Timeout:
            say(f"> waiting for another process, which tokenizes {name}")
            guard = lock.acquire()
        with guard:  # The system frees this lock even if the process is killed.
            if not has_intake(prefix):
                say(f"> tokenizing {name} into {folder}")
                _tokenize(name, prefix, chat, say)
    except OSError as error:
        raise ConfigError(
            f"The cache of tokenized conversations ({folder}) cannot be written "
            f"({limits.cause(error, folder)}); give a folder that can with `--data-cache-path`."
        ) from None
    return str(prefix)


def _tokenize(name: str, prefix: Path, chat: Chat, say: Say) -> None:
    options = SftPreprocessOptions(
        inputs=[name],
        output_prefix=str(prefix),
        tokenizer=chat.settings,
        workers=min(len(os.sched_getaffinity(0)), _MOST_WORKERS),
        sft=chat.sft,
    )
    try:
        write_store(options, chat, say, may_be_empty=True)
    except MegatronExtError as error:
        # Only the first rank shows errors, and here it is still waiting for this process.
        if os.environ.get("RANK", "0") != "0":
            for sentence in error.messages:
                say(f"error: {sentence}")
        raise
