"""Flags of the texts that a model writes while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ext.config.flags import COUNT, UsersOwn, flag
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import FlagError, exclusive


@dataclass(frozen=True)
class TextSampleConfig(UsersOwn):
    """The flags of the texts that a model writes while it trains."""

    sample_interval: int | None = flag(
        None, "continue prompts after each multiple of this many steps", COUNT, "steps"
    )
    sample_prompts: str | None = flag(
        None, "jsonl file with the prompts of --sample-interval, each the `prompt` of an object"
    )
    sample_texts: list[str] | None = flag(
        None, "prompts of --sample-interval, in the place of --sample-prompts", nargs="+"
    )
    sample_new_tokens: int = flag(64, "longest text of --sample-interval", COUNT, "tokens")

    def errors(self, config: RunConfig) -> Iterator[FlagError]:
        """Yield an error for each flag that lacks another or contradicts it."""
        prompts = {"--sample-prompts": self.sample_prompts, "--sample-texts": self.sample_texts}
        given = [name for name, value in prompts.items() if value]
        if self.sample_interval is None:
            for name in given:
                yield FlagError(
                    name, None, "needs `--sample-interval`, the steps between two texts", "give it"
                )
            return
        interval = self.sample_interval
        if not given:
            yield FlagError(
                "--sample-interval",
                interval,
                "needs prompts",
                "give `--sample-prompts` with a file of them, or `--sample-texts`",
            )
        elif len(given) > 1:
            yield exclusive(*given, remedy="give a file or texts")
        if config.checkpoint.save is None:
            yield FlagError(
                "--sample-interval",
                interval,
                "needs `--save`, whose folder `samples` gets the texts",
                "give it",
            )
