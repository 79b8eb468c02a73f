"""Flags of tools/generate_text.py, with the names that transformers' `generate` has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.config.flags import COUNT, SIZE, Range, UsersOwn, changed_fields, derived, flag
from megatron_ext.errors import FlagError, exclusive
from megatron_ext.text.config.sft_rules import is_date

if TYPE_CHECKING:
    from megatron_ext.text.generation.sampling import Sampling

_DRAWN = ("temperature", "top_k", "top_p")
_PLAIN = "give `--prompt`, `--prompt-file` or `--interactive`"


@dataclass(frozen=True)
class GenerationConfig(UsersOwn):
    """The flags of prompts and how they are continued, for tools/generate_text.py alone."""

    prompt: list[str] | None = flag(None, "texts to continue", nargs="+")
    prompt_file: str | None = flag(
        None, "jsonl whose rows hold prompt, or messages with --chat; - is standard input"
    )
    interactive: bool = flag(
        False, "read prompts from the terminal, one a line, until its end; each one starts anew"
    )
    output_file: str | None = flag(
        None, "jsonl to write: each row of --prompt-file with completion and finish_reason added"
    )
    stream: bool = flag(True, "show a text while it is written, where one replica writes")
    chat: bool = flag(False, "put prompts into the tokenizer's chat template, as a user's messages")
    chat_template: str | None = flag(
        None, "a Jinja file for --chat; default: the chat template of the tokenizer"
    )
    chat_date: str | None = flag(
        None,
        "the date, as YYYY-MM-DD, that a template with strftime_now writes; default: that of the "
        "model's training, else today's",
    )
    max_new_tokens: int = flag(128, "longest text", COUNT, "tokens")
    do_sample: bool = flag(False, "draw tokens; without it the likeliest token is taken")
    temperature: float = flag(
        1.0,
        "divide logits by this before a token is drawn",
        Range(0, 1000, above=True),
        advice="for the likeliest token, leave out both it and `--do-sample`",
    )
    top_k: int | None = flag(None, "draw from so many of the likeliest tokens", COUNT)
    top_p: float | None = flag(
        None,
        "draw from the fewest likeliest tokens with this probability",
        Range(0, 1, above=True),
        advice="use 0.9, or leave it out for all tokens",
    )
    repetition_penalty: float = flag(
        1.0,
        "divide positive and multiply negative logits of tokens in the text by this; 1 is none",
        Range(0, 1000, above=True),
        advice="use 1.1, or leave it out for none",
    )
    stop_strings: list[str] | None = flag(
        None, "end a text at the first of these, which is left out", nargs="+"
    )
    generation_batch_size: int = flag(16, "texts that a replica writes at once", SIZE, "texts")

    trained_date: str | None = derived()
    """The date that the chat template wrote into the training data, YYYY-MM-DD; None if unknown."""

    def sampling(self, seed: int) -> Sampling:
        """Return the sampling options that the flags give; all requests share them."""
        # Its module imports torch, which the flags do not need.
        from megatron_ext.text.generation.sampling import Sampling

        return Sampling(
            max_new_tokens=self.max_new_tokens,
            do_sample=self.do_sample,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            repetition_penalty=self.repetition_penalty,
            stop_strings=tuple(self.stop_strings or ()),
            seed=seed,
        )

    def own_errors(self) -> list[str]:
        """Return a sentence for each flag that is missing, contradicts another or has no effect."""
        sources = {
            "--prompt": self.prompt,
            "--prompt-file": self.prompt_file,
            "--interactive": self.interactive,
        }
        given = [name for name, value in sources.items() if value]
        errors = []
        if not given:
            errors.append(f"There is nothing to continue; {_PLAIN}.")
        elif len(given) > 1:
            errors.append(exclusive(*given, remedy="give one source of prompts"))
        changed = changed_fields(self)
        errors += [
            FlagError(
                f"--{name.replace('_', '-')}",
                getattr(self, name),
                "has an effect only with `--do-sample`",
                "add it, or leave this out",
            )
            for name in _DRAWN
            if name in changed and not self.do_sample
        ]
        errors += [
            FlagError(
                f"--{name.replace('_', '-')}",
                getattr(self, name),
                "has an effect only with `--chat`",
                "add it, or leave this out",
            )
            for name in ("chat_template", "chat_date")
            if getattr(self, name) is not None and not self.chat
        ]
        if self.chat_date is not None and not is_date(self.chat_date):
            errors.append(
                FlagError(
                    "--chat-date", self.chat_date, "must be a day as YYYY-MM-DD", "use 2024-07-26"
                )
            )
        if self.interactive and self.output_file is not None:
            errors.append(
                FlagError(
                    "--output-file",
                    self.output_file,
                    "does not go with `--interactive`, which shows texts on the terminal",
                    "leave it out, or give `--prompt-file`",
                )
            )
        if "" in (self.stop_strings or ()):
            errors.append(
                FlagError(
                    "--stop-strings", None, "must hold no empty text, which would end every text"
                )
            )
        return errors
