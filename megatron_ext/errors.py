"""The four kinds of error that a user can meet.

Each message is one sentence: the name, the value, the rule, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class MegatronExtError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        messages: one sentence, or several that belong together (all the errors of a
            configuration are reported at once).
    """

    def __init__(self, messages: str | Sequence[str]) -> None:
        self.messages: tuple[str, ...] = (
            (messages,) if isinstance(messages, str) else tuple(messages)
        )
        super().__init__("\n".join(self.messages))


class ConfigError(MegatronExtError):
    """A flag, or a combination of flags, that cannot be run."""


class DataError(MegatronExtError):
    """Input data, an indexed dataset or a tokenizer that cannot be used."""


class CheckpointError(MegatronExtError):
    """A checkpoint that is partial, damaged, or does not fit the run."""


class DeviceNotSupported(MegatronExtError):
    """Something that only a GPU can answer, asked on a machine without one."""
