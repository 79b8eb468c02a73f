"""Files of conversations tokenized when a run starts: once, by one process, into a cache."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from megatron_ext.data.preprocess.inputs import identities
from megatron_ext.data.preprocess.run import Say, say_to_stderr
from megatron_ext.data.sft.chat import Chat, key_of
from megatron_ext.data.sft.preprocess import SftPreprocessOptions, write_store
from megatron_ext.data.sft.store import SftStore, about_path, prefix_of
from megatron_ext.errors import ConfigError, DataError, MegatronExtError

if TYPE_CHECKING:
    from megatron_ext.config import RunConfig

_MOST_WORKERS = 16
_SECONDS_TO_NOTE = 10.0


def open_stores(
    flag: str, names: Sequence[str], config: RunConfig, chat: Chat, say: Say = say_to_stderr
) -> list[SftStore]:
    """The stores of files of conversations, or of prefixes that were preprocessed.

    Args:
        flag: that names them, for errors.
        names: files or prefixes, in order.

    Raises:
        ConfigError: a weight, or a cache that cannot be written.
        DataError: a file is missing or holds a bad row, or a store does not fit the run.
    """
    stores = []
    for name in names:
        _refuse_weight(flag, name)
        prefix = prefix_of(name)
        if not about_path(prefix).exists():
            if not Path(name).is_file():
                raise DataError(
                    f"`{flag}` ({name}) is neither a file of conversations nor the prefix of a "
                    "store made by tools/preprocess_data.py --sft; check the path."
                )
            prefix = _tokenized(name, config, chat, say)
        store = SftStore(prefix)
        store.check(chat.identity, config.model.padded_vocab_size or chat.vocab_size)
        stores.append(store)
    return stores


def _refuse_weight(flag: str, name: str) -> None:
    try:
        float(name)
    except ValueError:
        return
    if not os.path.exists(name):
        raise ConfigError(
            f"`{flag}` ({name}) is a weight, but `--sft` uses every conversation of its files "
            "once in an epoch; leave weights out."
        )


def _tokenized(name: str, config: RunConfig, chat: Chat, say: Say) -> str:
    """Prefix of the store of one file, made now if the cache lacks it."""
    folder = Path(config.data.data_cache_path or Path(name).parent / "cache")
    prefix = folder / f"{Path(name).name}.{key_of(identities([name]), chat.identity)}"
    if about_path(prefix).exists():
        return str(prefix)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(prefix, name, say):
            if not about_path(prefix).exists():
                say(f"> tokenizing {name} into {folder}")
                _tokenize(name, prefix, config, chat, say)
    except OSError as error:
        raise ConfigError(
            f"The cache of tokenized conversations ({folder}) cannot be written "
            f"({error.strerror or error}); give a folder that can with `--data-cache-path`."
        ) from None
    return str(prefix)


@contextmanager
def _lock(prefix: Path, name: str, say: Say) -> Iterator[None]:
    """Holds the right to write a store; it is freed when its process ends, however it ends."""
    lock = FileLock(f"{prefix}.lock")
    try:
        lock.acquire(timeout=_SECONDS_TO_NOTE)
    except Timeout:
        say(f"> waiting for another process, which tokenizes {name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _tokenize(name: str, prefix: Path, config: RunConfig, chat: Chat, say: Say) -> None:
    options = SftPreprocessOptions(
        inputs=[name],
        output_prefix=str(prefix),
        tokenizer=config.tokenizer,
        workers=min(len(os.sched_getaffinity(0)), _MOST_WORKERS),
        sft=config.sft,
    )
    # Every worker is a process of its own; threads inside the library would only compete.
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        write_store(options, chat, say)
    except MegatronExtError as error:
        if os.environ.get("RANK", "0") != "0":  # the first rank alone shows errors, but waits
            for sentence in error.messages:
                say(f"error: {sentence}")
        raise
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before
