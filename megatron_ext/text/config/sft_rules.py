"""Rules of fine-tuning on conversations; a run without ``--sft`` does not import this file."""

from __future__ import annotations

import datetime

from megatron_ext.config.run import RunConfig
from megatron_ext.disk.reading import UnreadableFile, parse_json
from megatron_ext.errors import FlagError
from megatron_ext.text.config.sft import BATCHING, ROW_FORMATS, SftConfig


def sft_errors(sft: SftConfig, run: RunConfig) -> list[FlagError]:
    """Return an error for each value of a flag that a run with ``--sft`` cannot have."""
    training = run.training
    seq_length = run.model.seq_length
    errors = row_errors(sft)
    longest = sft.sft_max_length
    batching = sft.sft_batching
    if seq_length is not None and longest is not None and not 2 <= longest <= seq_length + 1:
        errors.append(
            FlagError(
                "--sft-max-length",
                longest,
                f"must be from 2 to `--seq-length` + 1 ({seq_length + 1}), since n tokens take n "
                "- 1 positions",
                "change either",
            )
        )
    if batching not in BATCHING:
        return [
            *errors,
            FlagError("--sft-batching", batching, f"must be one of {', '.join(BATCHING)}"),
        ]
    if run.model.deterministic_dropout and batching != "padded":
        errors.append(
            FlagError(
                "--deterministic-dropout",
                None,
                f"numbers the samples of a step by their place, which `--sft-batching {batching}` "
                "changes with the layout",
                "use padded",
            )
        )
    if batching == "token-budget" and training.micro_batch_size not in (None, 1):
        errors.append(
            FlagError(
                "--micro-batch-size",
                training.micro_batch_size,
                "must be 1 with `--sft-batching token-budget`, whose micro-batches are rows of "
                "--seq-length tokens",
                "give `--micro-batch-size 1`",
            )
        )
    return errors


def row_errors(sft: SftConfig) -> list[FlagError]:
    """Return an error for each bad value of a flag about rows of data or the chat template."""
    errors = []
    if sft.sft_row_format not in ROW_FORMATS:
        errors.append(
            FlagError(
                "--sft-row-format",
                sft.sft_row_format,
                f"must be one of {', '.join(ROW_FORMATS)}",
            )
        )
    if sft.sft_date is not None and not is_date(sft.sft_date):
        errors.append(
            FlagError("--sft-date", sft.sft_date, "must be a day as YYYY-MM-DD", "use 2024-07-26")
        )
    try:
        kwargs = parse_json(sft.sft_template_kwargs or "{}", "--sft-template-kwargs")
    except UnreadableFile:
        kwargs = None
    if not isinstance(kwargs, dict):
        errors.append(
            FlagError(
                "--sft-template-kwargs",
                sft.sft_template_kwargs,
                "must be a JSON object",
                "use '{\"enable_thinking\": false}'",
            )
        )
    return errors


def is_date(text: str) -> bool:
    """Tell whether a text is a valid date in the form YYYY-MM-DD."""
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
