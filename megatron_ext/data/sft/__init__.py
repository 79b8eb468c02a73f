"""Supervised fine-tuning data: a row to a conversation to tokens, trained tokens and model rows.

Everywhere in this package a mask marks the *tokens* that are trained, 1 at a token whose
probability the loss raises; `lengths.shift` turns it into weights of labels, once.
"""

from megatron_ext.data.sft.conversation import (
    Conversation,
    Place,
    RowFormat,
    read_conversation,
)
from megatron_ext.data.sft.lengths import (
    Labeled,
    SftRow,
    Truncation,
    lay_out,
    pad_id_of,
    shift,
    truncate,
)
from megatron_ext.data.sft.masks import TokenizedConversation, tokenize_conversation
from megatron_ext.data.sft.template import ChatTokenizer, OnMismatch, TemplateOptions

__all__ = [
    "ChatTokenizer",
    "Conversation",
    "Labeled",
    "OnMismatch",
    "Place",
    "RowFormat",
    "SftRow",
    "TemplateOptions",
    "TokenizedConversation",
    "Truncation",
    "lay_out",
    "pad_id_of",
    "read_conversation",
    "shift",
    "tokenize_conversation",
    "truncate",
]
