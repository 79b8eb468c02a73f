"""Loads Hugging Face tokenizers, and GPT-2's BPE from its two files.

If tokenizer_config.json names no class, or a general one such as PreTrainedTokenizerFast, the
`tokenizers` library loads tokenizer.json. This takes milliseconds and does not import torch. Any
other class may change the tokenizer in Python, so transformers loads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.disk.reading import UnreadableFile, read_json_object
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.text.tokenizers.base import NO_TOKEN, FastKind, Tokenizer, require_package
from megatron_ext.text.tokenizers.entries import (
    LISTED,
    NAMED,
    check_entries,
    flags_differ,
    part_at_fault,
    special_entries,
    text_of,
    unused_entries,
)

if TYPE_CHECKING:
    from megatron_ext.text.tokenizers.base import Ids
    from megatron_ext.text.tokenizers.boundaries import Boundary

_GENERAL_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend", None)
_FILES = tuple("*.json *.jinja *.txt *.py *.model *.tiktoken *.bpe *.spm vocab* tokenizer*".split())
"""Patterns of the files that are downloaded for a tokenizer from the hub, so without the weights.

`*.jinja` are chat templates, also in folders such as `additional_chat_templates/`."""


@contextmanager
def refused_panic(tokenizer: str) -> Iterator[None]:
    """Turn a Rust panic of the `tokenizers` library within a ``with`` block into a DataError.

    The library panics after ten million attempts to match a regular expression at one position, and
    if the tokenizer's file is damaged. A panic does not derive from Exception. ``tokenizer`` names
    the file or the folder of the tokenizer, for the error.
    """
    what = f"`--tokenizer-model` ({tokenizer}) has a pattern or content"
    with _panic_as_data_error(what, "give a tokenizer from a source that you trust"):
        yield


@contextmanager
def _panic_as_data_error(what: str, advice: str) -> Iterator[None]:
    """Turn a Rust panic of the `tokenizers` library within a ``with`` block into a DataError.

    The error's message begins with ``what``, which names the cause, and ends with ``advice``.
    """
    try:
        yield
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise DataError(
            f"{what} that the library of tokenizers gives up on ({_reason(error)}); {advice}."
        ) from None


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]


def _check_post_processor(path: Path, backend: Any) -> None:
    """Raise a DataError if the `tokenizers` library panics in a tokenizer's post-processor.

    ``path`` is the tokenizer.json, ``backend`` the `tokenizers.Tokenizer` loaded from it.
    """
    with _panic_as_data_error(f"{path} has a `post_processor`", "copy it again"):
        backend.encode("a", "a")
        backend.encode("a")


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer that wraps ``backend``, a `tokenizers.Tokenizer`.

    Args:
        named: the texts of special tokens, by names such as `eos_token`.
        special_tokens: further special tokens; those not in the vocabulary get the next ids.
        include_special_tokens: whether to add the tokens, such as bos, that the tokenizer itself
            puts around a text.
        unused: returns the sentences of `notes`, on ignored entries of the tokenizer's files; None
            if there are none.
    """

    def __init__(
        self,
        kind: str,
        path: str,
        backend: Any,
        named: Mapping[str, str],
        special_tokens: Sequence[str] = (),
        *,
        include_special_tokens: bool = False,
        unused: Callable[[], list[str]] | None = None,
    ) -> None:
        options = {
            "special_tokens": list(special_tokens) or None,
            "include_special_tokens": include_special_tokens or None,
        }
        super().__init__(path, options)
        self.kind = kind
        self._backend = backend
        self._include_special = include_special_tokens
        self._unused = unused
        backend.no_truncation()
        backend.no_padding()
        if special_tokens:
            backend.add_special_tokens(list(special_tokens))
        self.vocab_size = int(backend.get_vocab_size(with_added_tokens=True))
        ids = {name: backend.token_to_id(text) for name, text in _complete(named).items()}
        self.eos, self.bos, self.pad, self.unk = (
            NO_TOKEN if ids.get(f"{name}_token") is None else int(ids[f"{name}_token"])
            for name in ("eos", "bos", "pad", "unk")
        )

    def tokenize(self, text: str) -> list[int]:
        with refused_panic(str(self.path)):
            return list(self._backend.encode(text, add_special_tokens=self._include_special).ids)

    def token_id(self, text: str) -> int:
        number = self._backend.token_to_id(text)
        return NO_TOKEN if number is None else int(number)

    def notes(self) -> list[str]:
        return [] if self._unused is None else self._unused()

    def start_ids(self) -> tuple[int, ...]:
        if self._include_special:
            return ()
        alone, whole = (self._backend.encode("a", add_special_tokens=x).ids for x in (False, True))
        offsets = range(len(whole) - len(alone) + 1)
        start = next((i for i in offsets if whole[i : i + len(alone)] == alone), 0)
        return tuple(whole[:start])

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Ids]:
        with refused_panic(str(self.path)):
            encodings = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=self._include_special
            )
        return [encoding.ids for encoding in encodings]

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    @cached_property
    def boundary(self) -> Boundary | None:
        from megatron_ext.text.tokenizers.boundaries import boundary_of_backend

        if self._include_special:
            return None
        return boundary_of_backend(json.loads(self._backend.to_str()), self.control_texts())

    def fast_source(self) -> tuple[FastKind, str] | None:
        return None if self._include_special else ("json", self._backend.to_str())

    def control_texts(self) -> tuple[str, ...]:
        added = self._backend.get_added_tokens_decoder().values()
        return tuple(sorted(token.content for token in added if token.content))


def _complete(named: Mapping[str, str]) -> dict[str, str]:
    """Return special tokens by name, with missing ones of eos, sep, bos and cls filled in.

    If only one of eos and sep is given, the other gets the same text; likewise for bos and cls.
    """
    out = dict(named)
    for one, other in (("eos_token", "sep_token"), ("bos_token", "cls_token")):
        if one not in out and other in out:
            out[one] = out[other]
        elif other not in out and one in out:
            out[other] = out[one]
    return out


def build(
    kind: str,
    name: str | None,
    special_tokens: Sequence[str],
    *,
    include_special_tokens: bool,
    trust_remote_code: bool,
) -> Tokenizer:
    """Load a Hugging Face tokenizer.

    ``name`` is a folder or the name of a model on the hub; ``kind`` is the tokenizer's type.
    ``special_tokens`` are added to it; `HuggingFaceTokenizer` describes ``include_special_tokens``.
    With ``trust_remote_code`` transformers loads it, and may run Python code from the folder. Raise
    a ConfigError if no name is given, and a DataError if the tokenizer cannot be loaded.
    """
    if not name:
        raise ConfigError.about(
            f"--tokenizer-type {kind}",
            None,
            "needs `--tokenizer-model` with a folder or a hub name",
        )
    folder = tokenizer_folder(name)
    files = {file: _read_json(folder / file) for file in _WITH_ENTRIES}
    for file, entries in files.items():
        check_entries(folder / file, entries)
    config = files["tokenizer_config.json"]
    direct = (folder / "tokenizer.json").is_file() and not trust_remote_code
    if include_special_tokens and ("add_bos_token" in config or "add_eos_token" in config):
        direct = False  # transformers changes the post-processor by these entries.
    backend_and_names = _load_direct(folder, files) if direct else None
    loaded = None
    if backend_and_names is None:
        loaded = load_pretrained(folder, trust_remote_code=trust_remote_code)
        named = {key: str(getattr(loaded, key)) for key in NAMED if getattr(loaded, key, None)}
        backend_and_names = loaded.backend_tokenizer, named
    backend, named = backend_and_names
    return HuggingFaceTokenizer(
        kind,
        name,
        backend,
        named,
        special_tokens,
        include_special_tokens=include_special_tokens,
        unused=partial(unused_entries, folder, files, backend, loaded),
    )


_WITH_ENTRIES = ("tokenizer_config.json", "special_tokens_map.json")


def local_folder(name: str) -> Path | None:
    """Return the folder of a tokenizer, given the folder or a file in it; None for a hub name.

    Raise a DataError for a path that does not exist.
    """
    if Path(name).is_dir():
        return Path(name)
    if Path(name).is_file():
        return Path(name).parent
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError.about(
            "--tokenizer-model",
            name,
            "does not exist",
            "give a folder with tokenizer.json here, or, if it has moved, where it is now",
        )
    return None


def tokenizer_folder(name: str) -> Path:
    """Return the folder of a tokenizer, given the folder, a file in it or a name on the hub.

    Raise a DataError if the folder does not exist and cannot be downloaded from the hub.
    """
    folder = local_folder(name)
    if folder is not None:
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:  # The hub's client and its HTTP library raise many classes.
        reason = _reason(error)
        raise DataError.about(
            "--tokenizer-model",
            name,
            "is neither a folder here nor a Hugging Face name that could be fetched "
            f"({type(error).__name__}: {reason})",
            "check the name and the network",
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a tokenizer; {} if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        return read_json_object(path, not_finite=True)
    except UnreadableFile as error:
        raise DataError(
            f"{path} is not valid JSON ({error.reason}); copy the tokenizer again."
        ) from None


def _load_direct(
    folder: Path, files: Mapping[str, dict[str, Any]]
) -> tuple[Any, dict[str, str]] | None:
    """Load tokenizer.json without transformers.

    ``files`` has the contents of the folder's JSON files, by file name. Return the
    `tokenizers.Tokenizer` and the texts of its special tokens by name; None if transformers might
    load another tokenizer from the folder.
    """
    config = files["tokenizer_config.json"]
    if config.get("tokenizer_class") not in _GENERAL_CLASSES or "auto_map" in config:
        return None
    tokenizers = require_package("tokenizers", "HuggingFaceTokenizer")
    path = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:  # The library raises plain Exception, or panics.
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        reason = _reason(error)
        part = part_at_fault(_read_json(path), tokenizers.Tokenizer)
        where = "" if part is None else f", at fault is `{part}`"
        raise DataError(f"{path} is not a tokenizer ({reason}){where}; copy it again.") from None
    _check_post_processor(path, backend)
    merged = special_entries(config, files["special_tokens_map.json"])
    named = {key: text_of(merged[key]) for key in NAMED if merged.get(key) is not None}
    listed: list[Any] = []
    for key in LISTED:
        tokens = merged.get(key) or ()
        listed += tokens.values() if isinstance(tokens, dict) else tokens
    others = [x for key, x in merged.items() if key.endswith("_token") and isinstance(x, str)]
    # transformers would add special tokens that are missing, and change flags that differ.
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    if any(text_of(token) not in added for token in [*named.values(), *listed, *others]):
        return None
    decoder = (config.get("added_tokens_decoder") or {}).values()
    if any(flags_differ(token, added[text_of(token)]) for token in decoder):
        return None
    if merged.get("add_prefix_space") or merged.get("split_special_tokens"):
        return None
    return backend, named


def load_pretrained(folder: Path, *, trust_remote_code: bool) -> Any:
    """Return the fast tokenizer that transformers loads, with its chat template if it has one.

    Raise a ConfigError if transformers is not installed, a DataError if it cannot load the folder.
    """
    transformers = require_package("transformers", "HuggingFaceTokenizer")
    try:
        with refused_panic(str(folder)):
            loaded = transformers.AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=trust_remote_code
            )
            loaded.backend_tokenizer  # noqa: B018 - raises for a slow tokenizer, which has none
    except DataError:
        raise
    except Exception as error:  # Libraries and remote code may raise anything here.
        if "trust_remote_code" in str(error):
            raise DataError.about(
                "--tokenizer-model",
                folder,
                "is a tokenizer with code of its own, which is not run",
                "give `--trust-remote-code` if you trust its source",
            ) from None
        reason = _reason(error)
        raise DataError.about(
            "--tokenizer-model",
            folder,
            f"could not be loaded by transformers ({type(error).__name__}: {reason})",
            "give a folder with tokenizer.json",
        ) from None
    return loaded


def build_gpt2(
    kind: str, vocab_file: str, merge_file: str, special_tokens: Sequence[str]
) -> Tokenizer:
    """Build GPT-2's byte-level BPE from `vocab.json` and `merges.txt`; eod is `<|endoftext|>`.

    ``special_tokens`` are added to the vocabulary; ``kind`` is the tokenizer's type, for errors.
    Raise a DataError if a file cannot be read, or the vocabulary has no `<|endoftext|>`.
    """
    tokenizers = require_package("tokenizers", kind)
    vocabulary = _read_json(Path(vocab_file))
    if "<|endoftext|>" not in vocabulary:
        raise DataError.about(
            "--vocab-file",
            vocab_file,
            "has no `<|endoftext|>`, which GPT2BPETokenizer needs as its end of document",
            "give GPT-2's vocab.json",
        )
    try:
        model = tokenizers.models.BPE.from_file(vocab_file, merge_file)
    except Exception as error:  # The library raises plain Exception.
        reason = _reason(error)
        raise DataError.about(
            "--merge-file",
            merge_file,
            f"does not fit `--vocab-file` ({vocab_file}): {reason}",
            "give the two files of one tokenizer",
        ) from None
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    named = dict.fromkeys(("eos_token", "bos_token", "unk_token"), "<|endoftext|>")
    return HuggingFaceTokenizer(kind, vocab_file, backend, named, special_tokens)
