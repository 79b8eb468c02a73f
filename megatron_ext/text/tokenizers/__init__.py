"""Flags of tokenizers, and `build_tokenizer`, which builds them for tools and for training.

Importing this package loads no tokenizer library. Building a tokenizer loads only its own library,
and torch only for Hugging Face classes that transformers must load.
"""

from dataclasses import dataclass

from megatron_ext.config.flags import COUNT, NATURAL, flag
from megatron_ext.disk.reading import UnreadableFile, read_json_object
from megatron_ext.errors import ConfigError, DataError, MegatronExtError, did_you_mean
from megatron_ext.text.tokenizers.base import (
    ByteLevelTokenizer,
    NullTokenizer,
    Tokenizer,
    require_file,
)


@dataclass(frozen=True)
class TokenizerConfig:
    """The flags of tokenizers; names and defaults are Megatron-LM's."""

    tokenizer_type: str | None = flag(
        "GPT2BPETokenizer",
        "kind of tokenizer, such as HuggingFaceTokenizer",
        renamed={"PretrainedFromHF": "HuggingFaceTokenizer"},
    )
    tokenizer_model: str | None = flag(None, "file or folder of the tokenizer")
    tokenizer_metadata: str | None = flag(
        None, "a JSON file that names the tokenizer's library", if_changed="allow"
    )
    tokenizer_special_tokens: list[str] | None = flag(None, "further special tokens", nargs="+")
    vocab_file: str | None = flag(None, "vocabulary of GPT2BPETokenizer")
    merge_file: str | None = flag(None, "merges of GPT2BPETokenizer")
    vocab_size: int | None = flag(None, "entries of NullTokenizer or TikTokenizer", bounds=COUNT)
    vocab_extra_ids: int = flag(0, "further special tokens", bounds=NATURAL)
    tiktoken_pattern: str | None = flag(None, "pattern by which TikTokenizer cuts words")
    tiktoken_num_special_tokens: int = flag(
        1000, "number of special tokens of TikTokenizer", bounds=NATURAL
    )
    tiktoken_special_tokens: list[str] | None = flag(
        None, "names of the first special tokens of TikTokenizer", nargs="+"
    )
    tokenizer_sentencepiece_legacy: bool = flag(False, "SentencePiece with its legacy wrapper")
    tokenizer_hf_use_fast: bool = flag(
        False, "the fast tokenizer of transformers", if_changed="allow"
    )
    tokenizer_hf_include_special_tokens: bool = flag(False, "let transformers add special tokens")
    trust_remote_code: bool = flag(
        False,
        "let transformers run code of the tokenizer's folder",
        if_changed="allow",
        from_checkpoint=False,
    )

    def errors(self, config: object) -> list[str]:
        """Return the error about a type of tokenizer that there is not; [] if there is none."""
        try:
            _known_type(self)
        except ConfigError as error:
            return list(error.messages)
        return []


_LIBRARY_OF_TYPE = {
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "HuggingFaceTokenizer": "huggingface",
    "TikTokenizer": "tiktoken",
    "GPT2BPETokenizer": "megatron",
    "ByteLevelTokenizer": "byte-level",
    "NullTokenizer": "null",
}
TOKENIZER_TYPES = tuple(_LIBRARY_OF_TYPE)
_NOT_HERE = {
    "BertWordPieceLowerCase": "train with HuggingFaceTokenizer on a BERT folder",
    "BertWordPieceCase": "train with HuggingFaceTokenizer on a BERT folder",
    "MultimodalTokenizer": "use HuggingFaceTokenizer for the text",
    "NullMultimodalTokenizer": "use NullTokenizer",
    "SFTTokenizer": "use HuggingFaceTokenizer",
}


_FILES_OF_TYPE = {
    "TikTokenizer": {"--tokenizer-model": "a tiktoken vocabulary"},
    "GPT2BPETokenizer": {
        "--vocab-file": "GPT-2's vocab.json",
        "--merge-file": "GPT-2's merges.txt",
    },
} | {
    kind: {"--tokenizer-model": "a SentencePiece .model file"}
    for kind, library in _LIBRARY_OF_TYPE.items()
    if library == "sentencepiece"
}
"""The flags that name the files of each type of tokenizer, and words for each file in errors."""


def check_files(settings: TokenizerConfig) -> None:
    """Raise one error that names each file of the tokenizer that is missing or not given.

    A name that may be a model on the Hugging Face hub is accepted without asking the hub.
    """
    kind = _known_type(settings)
    if _LIBRARY_OF_TYPE[kind] == "huggingface" and settings.tokenizer_model:
        from megatron_ext.text.tokenizers.huggingface import local_folder

        local_folder(settings.tokenizer_model)
    _files_of(settings, kind)
    _check_metadata(settings.tokenizer_metadata, kind)


def _files_of(settings: TokenizerConfig, kind: str) -> list[str]:
    """Return the paths of the files of a tokenizer of type ``kind``.

    Raise one error that names all missing files.
    """
    paths = list[str]()
    errors = list[MegatronExtError]()
    for name, what in _FILES_OF_TYPE.get(kind, {}).items():
        given = getattr(settings, name.removeprefix("--").replace("-", "_"))
        try:
            paths.append(require_file(name, given, what, kind))
        except MegatronExtError as error:
            errors.append(error)
    if len(errors) > 1:
        raise DataError([sentence for error in errors for sentence in error.messages])
    if errors:
        raise errors[0]
    return paths


def build_tokenizer(settings: TokenizerConfig) -> Tokenizer:
    """Build the tokenizer that `--tokenizer-type` and the other tokenizer flags describe.

    Raise a ConfigError if a flag is missing or does not suit the type, a DataError if a file is
    missing or damaged.
    """
    kind = _known_type(settings)
    _check_metadata(settings.tokenizer_metadata, kind)
    special = tuple(settings.tokenizer_special_tokens or ())
    if kind == "NullTokenizer":
        return NullTokenizer(_vocab_size(settings.vocab_size, kind))
    if kind == "ByteLevelTokenizer":
        return ByteLevelTokenizer(_vocab_size(settings.vocab_size or 512, kind), special)
    if kind == "TikTokenizer":
        from megatron_ext.text.tokenizers import models

        (path,) = _files_of(settings, kind)
        return models.TikTokenizer(
            path,
            pattern=settings.tiktoken_pattern or "v2",
            vocab_size=settings.vocab_size or models.DEFAULT_VOCAB_SIZE,
            num_special=settings.tiktoken_num_special_tokens,
            special=special or tuple(settings.tiktoken_special_tokens or models.SPECIAL_TOKENS),
        )
    if _LIBRARY_OF_TYPE[kind] == "sentencepiece":
        from megatron_ext.text.tokenizers.models import SentencePieceTokenizer

        (path,) = _files_of(settings, kind)
        if special and not settings.tokenizer_sentencepiece_legacy:
            raise ConfigError.about(
                "--tokenizer-special-tokens",
                None,
                "with a SentencePiece model needs `--tokenizer-sentencepiece-legacy`",
                "add it, or put the tokens into the model",
            )
        return SentencePieceTokenizer(kind, path, special)
    from megatron_ext.text.tokenizers import huggingface

    if kind == "GPT2BPETokenizer":
        vocab, merges = _files_of(settings, kind)
        return huggingface.build_gpt2(kind, vocab, merges, special)
    return huggingface.build(
        kind,
        settings.tokenizer_model,
        special,
        include_special_tokens=settings.tokenizer_hf_include_special_tokens,
        trust_remote_code=settings.trust_remote_code,
    )


def _known_type(settings: TokenizerConfig) -> str:
    kind = settings.tokenizer_type
    names = ", ".join(TOKENIZER_TYPES)
    if not kind:
        raise ConfigError.about("--tokenizer-type", None, "is missing", f"give one of {names}")
    if kind in _NOT_HERE:
        raise ConfigError.about(
            f"--tokenizer-type {kind}", None, "is not supported here", _NOT_HERE[kind]
        )
    if kind not in TOKENIZER_TYPES:
        hint = did_you_mean(kind, TOKENIZER_TYPES) or f"give one of {names}"
        raise ConfigError.about("--tokenizer-type", kind, "is unknown", hint)
    if settings.vocab_extra_ids:
        raise ConfigError.about(
            "--vocab-extra-ids",
            settings.vocab_extra_ids,
            "is for T5's legacy tokenizer and has no effect on the ids here",
            "leave it out, and name further tokens with `--tokenizer-special-tokens`",
        )
    return kind


def _vocab_size(size: int | None, kind: str) -> int:
    if size is None:
        raise ConfigError.about(
            f"--tokenizer-type {kind}", None, "needs `--vocab-size`, the number of ids"
        )
    if kind == "ByteLevelTokenizer" and size < 256:
        raise ConfigError.about(
            "--vocab-size", size, "must be at least 256 for ByteLevelTokenizer", "use 512"
        )
    if size < 1:
        raise ConfigError.about("--vocab-size", size, "must be positive")
    return size


def _check_metadata(path: str | None, kind: str) -> None:
    """Raise a ConfigError if a tokenizer metadata file names a library that ``kind`` does not use.

    ``path`` is the file, or None; ``kind`` is the type of the tokenizer.
    """
    if path is None:
        return
    require_file("--tokenizer-metadata", path, "a JSON file", kind)
    try:
        library = read_json_object(path).get("library")
    except UnreadableFile as error:
        raise DataError.about(
            "--tokenizer-metadata", path, f"is not a JSON object ({error.reason})", "fix it"
        ) from None
    if library != _LIBRARY_OF_TYPE[kind]:
        raise ConfigError.about(
            "--tokenizer-metadata",
            path,
            f"names the library {library}, but `--tokenizer-type {kind}` uses "
            f"{_LIBRARY_OF_TYPE[kind]}",
            "make them agree or leave the metadata out",
        )
