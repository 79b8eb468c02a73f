"""Rows of jsonl or parquet to token ids and masks, block by block in a worker process.

Parquet comes as lines of JSON too, see `preprocess.parquet`; a row's number is its line's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from megatron_ext.data.preprocess.encode import Encoded
from megatron_ext.data.preprocess.records import BadLine
from megatron_ext.data.preprocess.texts import Refuse, Write
from megatron_ext.data.sft.chat import Chat
from megatron_ext.data.sft.conversation import Place, read_conversation
from megatron_ext.data.sft.masks import TokenizedConversation, tokenize_conversation
from megatron_ext.errors import DataError

KEYS = ("document", "mask")
"""What a store holds of each conversation: its token ids, and 1 for each trained one."""


def row_of(line: bytes) -> dict[str, Any]:
    """The object of one line.

    Raises:
        BadLine: blank, no JSON, or no object.
    """
    if not line.strip():
        raise BadLine("is blank")
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        row = _leniently(line, str(error))
    if not isinstance(row, dict):
        raise BadLine("is not a JSON object")
    return row


def _leniently(line: bytes, complaint: str) -> Any:
    """Python's parser takes NaN, and half surrogate pairs, which the tokenizer will refuse."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLine(f"is not UTF-8 (byte {error.start + 1} of the line)") from None
    except (ValueError, RecursionError):
        raise BadLine(f"is not valid JSON ({complaint})") from None


@dataclass(frozen=True)
class ConversationEncoder:
    """A `BlockEncoder` of conversations: one document for each, under both `KEYS`."""

    chat: Chat

    def encode(self, lines: Sequence[bytes], first: int, refuse: Refuse, write: Write) -> int:
        """See `BlockEncoder.encode`."""
        kept: list[TokenizedConversation] = []
        for number, line in enumerate(lines, first):
            try:
                kept.append(self.tokenize(line, number))
            except BadLine as bad:
                refuse(number, str(bad))
        ones = np.ones(len(kept), np.int32)
        lengths = np.array([len(conversation.ids) for conversation in kept], np.int32)
        for key in range(len(KEYS)):
            values = [np.asarray(conversation[key], np.int64) for conversation in kept]
            tokens = np.concatenate(values) if values else np.zeros(0, np.int64)
            write(key, 0, Encoded(tokens, lengths, ones))
        return len(kept)

    def tokenize(self, line: bytes, number: int) -> TokenizedConversation:
        """Ids and mask of the conversation of one line.

        Raises:
            BadLine: it holds none that can be trained.
        """
        place = Place("", number)
        try:
            conversation = read_conversation(row_of(line), place, self.chat.row_format)
            tokenized = tokenize_conversation(self.chat.tokenizer, conversation, self.chat.options)
        except DataError as error:
            text = str(error).removeprefix(f"{place}: ").removesuffix(".")
            raise BadLine(f"is refused: {text}") from None
        if len(tokenized.ids) < 2:
            raise BadLine(f"gives {len(tokenized.ids)} tokens, but at least 2 are needed")
        return tokenized
