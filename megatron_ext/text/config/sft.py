"""Flags of fine-tuning on conversations."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.flags import Range, derived, flag
from megatron_ext.disk.reading import parse_json

ROW_FORMATS = ("messages", "prompt-response", "prompt-completion", "sharegpt", "alpaca")
_PROMPT_COLUMNS = {"prompt-completion": ("prompt", "completion")}
"""Default (prompt, answer) columns by row format; other formats have (question, answer)."""
BATCHING = ("packed", "padded", "token-budget")
_ARGUMENT_FORMS = ("auto", "object", "string")


@dataclass(frozen=True)
class SftConfig:
    """The flags of supervised fine-tuning on conversations.

    A conversation of n tokens takes n - 1 positions of a batch row, since its labels are the same
    tokens shifted by one. ``sft_max_length`` counts tokens; ``--seq-length`` counts positions.
    """

    sft: bool = flag(False, "fine-tune on conversations: jsonl, parquet or preprocessed")
    sft_row_format: str = flag(
        "messages", "columns that hold a row's conversation", choices=ROW_FORMATS
    )
    sft_messages_key: str = flag("messages", "column of messages, each with role and content")
    sft_prompt_key: str | None = flag(
        None,
        "column of the prompt; default: question (prompt-response), prompt (prompt-completion)",
    )
    sft_response_key: str | None = flag(
        None,
        "column of the response; default: answer (prompt-response), completion (prompt-completion)",
    )
    sft_conversations_key: str = flag("conversations", "column of from/value pairs (sharegpt)")
    sft_instruction_key: str = flag("instruction", "column of the instruction (alpaca)")
    sft_input_key: str = flag("input", "optional column of the instruction's input (alpaca)")
    sft_output_key: str = flag("output", "column of the answer (alpaca)")
    sft_history_key: str = flag(
        "history", "optional column of earlier turns, pairs of instruction and answer (alpaca)"
    )
    sft_system_key: str = flag("system", "optional column of the system text")
    sft_tools_key: str = flag("tools", "optional column of tool schemas")
    sft_enable_thinking_key: str = flag("enable_thinking", "optional column of booleans")
    sft_chat_template: str | None = flag(
        None, "a Jinja file; default: the chat template of the tokenizer", from_checkpoint=False
    )
    sft_template_kwargs: str | None = flag(
        None, 'JSON object for the template, such as {"enable_thinking": false}'
    )
    sft_date: str | None = flag(
        None,
        "the date, as YYYY-MM-DD, that a template with strftime_now writes; default: the day on "
        "which the conversations are tokenized",
    )
    sft_tool_arguments: str = flag(
        "auto",
        "the form in which the template gets the arguments of tool calls: as an object, as JSON "
        "text (string), or as it needs them, found by a trial (auto)",
        choices=_ARGUMENT_FORMS,
    )
    sft_on_unrendered: str = flag(
        "refuse",
        "a message, tool, tool call or reasoning that the template leaves out of the text is "
        "refused, or counted in the report (note)",
        choices=("refuse", "note"),
    )
    sft_split_turns: bool = flag(
        False,
        "make one sample of each trained assistant turn, which ends with it, so that a template "
        "that shortens earlier turns writes each as it is generated",
    )
    sft_on_mismatch: str = flag(
        "error",
        "a turn that the template writes otherwise once messages follow is refused (error) or "
        "looked for (realign)",
        choices=("error", "realign"),
    )
    sft_max_length: int | None = flag(
        None, "longest conversation; default: --seq-length", unit="tokens", bounds=Range(2)
    )
    sft_truncation: str = flag(
        "error",
        "conversations longer than --sft-max-length are refused, or keep their last (left) or "
        "first tokens (right)",
        choices=("error", "left", "right"),
    )
    sft_batching: str = flag(
        "packed",
        "rows of several conversations, one conversation in each row, or as many micro-batches of "
        "--seq-length tokens as the conversations of a step need",
        choices=BATCHING,
    )

    def resolved(self, seq_length: int | None) -> SftConfig:
        """Return these flags with defaults filled in.

        Under ``--sft``, ``seq_length`` is the default of ``sft_max_length``.
        """
        if self.sft_max_length is not None or not self.sft:
            return self
        return dataclasses.replace(self, sft_max_length=seq_length)

    @property
    def prompt_column(self) -> str:
        return self.sft_prompt_key or _PROMPT_COLUMNS.get(self.sft_row_format, ("question",))[0]

    @property
    def response_column(self) -> str:
        return self.sft_response_key or _PROMPT_COLUMNS.get(self.sft_row_format, ("answer",))[-1]

    written_date: str | None = derived()
    """The date that the chat template writes into the conversations; None if it writes none."""

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return dict(parse_json(self.sft_template_kwargs or "{}", "--sft-template-kwargs"))
