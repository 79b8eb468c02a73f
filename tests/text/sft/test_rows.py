"""Cuts, the shift and padding; cases worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_ext.errors import DataError
from megatron_ext.text.sft.conversation import Place, read_conversation
from megatron_ext.text.sft.masks import TokenizedConversation, tokenize_conversation
from megatron_ext.text.sft.rows import SftRow, Truncation, kept_tokens, lay_out, pad_id_of, shift
from tests.text.sft import tiny

PLACE = Place("chats.parquet", 3)
EOS = 9
TOKENS = TokenizedConversation([10, 11, 12, 20, EOS], [0, 0, 0, 1, 1])  # p0 p1 p2 r0 r1


def test_the_response_is_trained_and_the_prompt_is_not() -> None:
    inputs, labels, weights = shift(*TOKENS)
    assert inputs.tolist() == [10, 11, 12, 20]
    assert labels.tolist() == [11, 12, 20, EOS]
    assert labels[weights > 0].tolist() == [20, EOS]
    assert weights.dtype == np.float32


def test_the_same_case_from_a_row() -> None:
    tokenizer = tiny.tokenizer("chatml", template="{% for m in messages %}{{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}")  # fmt: skip
    row = {"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "d"}]}
    _, labels, weights = shift(*tokenize_conversation(tokenizer, read_conversation(row, PLACE)))
    assert tokenizer.decode(labels[weights > 0]) == "d<|im_end|>"
    assert weights.tolist() == [0, 0, 1, 1]


def test_shift_needs_two_tokens_and_a_mask_of_the_same_length() -> None:
    with pytest.raises(DataError, match=r"ids \(shape \(1,\)\) and mask \(shape \(1,\)\) must be"):
        shift([1], [1])
    with pytest.raises(DataError, match=r"mask \(shape \(2,\)\) must be of one length"):
        shift([1, 2, 3], [0, 1])


@pytest.mark.parametrize(("truncation", "kept"), [("left", [12, 20, EOS]), ("right", [10, 11, 12])])
def test_truncation_keeps_the_last_or_the_first_tokens(
    truncation: Truncation, kept: list[int]
) -> None:
    assert TOKENS.ids[kept_tokens(3, truncation)] == kept
    assert TOKENS.ids[kept_tokens(5, truncation)] == TOKENS.ids


def test_padding_with_the_end_token_trains_the_end_token_once() -> None:
    row = lay_out([shift(*TOKENS)], 7, pad_id=EOS)
    assert row.inputs.tolist() == [10, 11, 12, 20, EOS, EOS, EOS]
    assert row.labels.tolist() == [11, 12, 20, EOS, EOS, EOS, EOS]
    assert row.weights.tolist() == [0, 0, 1, 1, 0, 0, 0]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 0, 0, 0]
    assert row.cu_seqlens.tolist() == [0, 4]


def test_packed_conversations_share_no_label() -> None:
    # A second conversation cut from the left begins with a trained token, which is never a label.
    second = TokenizedConversation([21, 22, EOS], [1, 1, 1])
    row = lay_out([shift(*TOKENS), shift(*second)], 7, pad_id=0)
    assert row.inputs.tolist() == [10, 11, 12, 20, 21, 22, 0]
    assert row.labels.tolist() == [11, 12, 20, EOS, 22, EOS, 0]
    assert row.weights.tolist() == [0, 0, 1, 1, 1, 1, 0]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 0]
    assert row.cu_seqlens.tolist() == [0, 4, 6]


def test_padded_and_packed_rows_give_the_same_summed_loss() -> None:
    generator = np.random.default_rng(0)
    samples = []
    for length in (5, 9, 2):
        ids = generator.integers(0, 16, length)
        samples.append(shift(ids, generator.integers(0, 2, length)))
    table = torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def summed(rows: list[SftRow]) -> float:
        total = 0.0
        for row in rows:
            logits = table[torch.from_numpy(row.inputs)]
            labels = torch.from_numpy(row.labels)
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
            total += float((losses * torch.from_numpy(row.weights)).sum())
        return total

    padded = summed([lay_out([sample], 8, 0) for sample in samples])
    packed = summed([lay_out(samples, 16, 0)])
    assert packed == pytest.approx(padded, rel=1e-12)
    assert packed > 0


def test_rows_that_do_not_fit_are_refused() -> None:
    sample = shift(*TOKENS)
    with pytest.raises(DataError, match="2 conversations of 8 positions together must fit a row o"):
        lay_out([sample, sample], 7, 0)


def test_pad_id() -> None:
    tokenizer = tiny.tokenizer("chatml")
    assert pad_id_of(tokenizer) == tokenizer.eos_token_id != 0
    tokenizer.pad_token = None
    assert pad_id_of(tokenizer) == 0
