"""What looks wrong in the batches, in plain words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_ext.inspect.preview.collect import Row, Step
from megatron_ext.inspect.preview.documents import Document, documents_of, target_exists
from megatron_ext.inspect.preview.text import Pieces

NEAR = 3
"""Tokens from the end of what is trained in which a turn is taken to end."""


def name_of(document: Document) -> str:
    """Where a document can be found."""
    origin = document.origin
    if origin is None:
        return f"document {document.number} of its row"
    place = f"{origin.source}, sample {origin.sample}"
    return place if origin.number is None else f"{place}, conversation {origin.number}"


def warnings_of(steps: Sequence[Step], pieces: Pieces, eod: int) -> list[str]:
    """One sentence for each suspicion, with how often and a first example.

    Args:
        steps: as `collect` gives them.
        pieces: of the tokenizer.
        eod: id that ends a document in a stream.
    """
    rows = [(step, row, documents_of(row, eod)) for step in steps for row in step.rows]
    conversations = [
        document for _, row, found in rows if row.samples is not None for document in found
    ]
    masked = [
        f"step {step.iteration}, rank {row.dp_rank}, micro-batch {row.microbatch + 1}, "
        f"row {row.number + 1}"
        for step, row, found in rows
        if found and not row.weights.any()
    ]
    found = [
        *_some(masked, "rows train no token at all", "they cost compute and teach nothing"),
        *_of_conversations(conversations),
        *_turn_ends(conversations, pieces),
    ]
    crossing = [_place(step, row) for step, row, _ in rows if _crosses(row)]
    found += _some(
        crossing,
        "rows have attention or a multi-token target that crosses into another document",
        "this is a fault of the data loader",
    )
    return found


def _place(step: Step, row: Row) -> str:
    return f"step {step.iteration}, rank {row.dp_rank}, micro-batch {row.microbatch + 1}"


def _some(examples: Sequence[str], what: str, advice: str) -> Iterator[str]:
    if examples:
        yield f"{len(examples)} {what} (the first: {examples[0]}); {advice}."


def _of_conversations(documents: Sequence[Document]) -> Iterator[str]:
    idle = [name_of(document) for document in documents if not document.trained]
    yield from _some(
        idle,
        "conversations have no trained token",
        "check the roles of their messages and their `loss_mask`, or whether truncation took all "
        "of the answer",
    )
    full = [name_of(d) for d in documents if d.trained == len(d.targets) and len(d.targets)]
    if full and len(full) == len(documents):
        yield (
            f"every token of all {len(full)} conversations is trained, prompts included; the mask "
            "of the data is all ones, so check how it was made."
        )
    else:
        yield from _some(
            full,
            "conversations are trained from end to end, prompts included",
            "check the roles of their messages",
        )
    cut = [d for d in documents if d.origin is not None and d.origin.cut]
    taken = sum(d.origin.cut for d in cut if d.origin is not None)
    yield from _some(
        [name_of(document) for document in cut],
        f"conversations are cut to `--sft-max-length`, {taken} tokens in all are lost",
        "raise it and `--seq-length` to keep them whole",
    )


def _turn_ends(documents: Sequence[Document], pieces: Pieces) -> Iterator[str]:
    """Special tokens that end what is trained, but are never trained themselves."""
    ends: dict[int, str] = {}
    trained: set[int] = set()
    for document in documents:
        weighs = document.targets > 0
        ids = document.ids[-len(weighs) :]
        trained |= set(np.unique(ids[weighs]).tolist())
        for after in (np.flatnonzero(weighs[:-1] & ~weighs[1:]) + 1).tolist():
            # A template may train a newline or two after the end of a turn.
            last = range(max(0, after - NEAR), after)
            if not any(weighs[i] and pieces.is_special(int(ids[i])) for i in last):
                ends.setdefault(int(ids[after]), name_of(document))
    for token, example in ends.items():
        if token not in trained and pieces.is_special(token):
            yield (
                f"{pieces.text_of(token)} ({token}) follows what is trained, but is never trained "
                f"itself (the first: {example}), so the model does not learn to end its turn; "
                "check the chat template and the mask."
            )


def _crosses(row: Row) -> bool:
    """Whether attention goes from one sample into the next, or a target lies beyond its document.

    Rows of one sample each have no attention mask; then only their padding follows them.
    """
    if row.samples is not None:
        both = (row.samples[1:] >= 0) & (row.samples[:-1] >= 0)
        if (both & (row.samples[1:] != row.samples[:-1]) & row.reaches[1:]).any():
            return True
    for depth, (labels, weights) in enumerate(
        zip(row.mtp_labels, row.mtp_weights, strict=True), start=1
    ):
        learns = weights > 0
        if (learns & ~target_exists(row, depth)).any():
            return True
        if (labels[:-depth] != row.labels[depth:])[learns[:-depth]].any():
            return True
    return False
