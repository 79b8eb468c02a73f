"""The signal at which a run saves and exits, and the message of a run that exits without saving."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from megatron_ext.config.run import RunConfig
from megatron_ext.config.training import TrainingConfig
from megatron_ext.errors import (
    EXIT_CODE_NOT_SAVED,
    STOP_SIGNALS,
    ignore_stop_signals,
    pass_over,
)
from megatron_ext.train.exit_codes import EXIT_CODE_SIGNAL, code_of


class ExitSignal:
    """The signal of ``--exit-signal-handler``, and whether this process has received it.

    A process that is forked later starts with the same state.

    Attributes:
        number: the signal; None if the flag is not given.
        came: whether the signal has arrived.
    """

    def __init__(self, number: signal.Signals | None) -> None:
        self.number = number
        self.came = False

    @classmethod
    def of_run(cls, training: TrainingConfig) -> ExitSignal:
        """Return the signal that the flags choose; from now on this process watches for it."""
        if not training.exit_signal_handler:
            return cls(None)
        exit_signal = cls(signal.Signals[training.exit_signal])
        # From here on, each kind of process decides for itself what SIGTERM does.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        exit_signal.watch()
        return exit_signal

    def watch(self) -> None:
        """Install a handler for the signal, which sets `came` instead of ending the process.

        Once the signal has arrived, SIGTERM is ignored until the run has saved: schedulers send
        SIGTERM soon after the first signal, and so does torchrun when it receives a second signal.
        """
        if self.number is not None:
            signal.signal(self.number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, pass_over)
        self.came = True

    def end_by_sigterm(self, tell: Callable[[int], None]) -> None:
        """Make SIGTERM end this process with exit code `EXIT_CODE_NOT_SAVED`.

        The handler first calls ``tell`` with that code. Do nothing if there is no exit signal, or
        if it is SIGTERM. Without this handler, SIGTERM would give exit code 143, which in runs with
        ``--exit-signal-handler`` means that a checkpoint has been saved.
        """

        def end(_number: int, _frame: FrameType | None) -> None:
            tell(EXIT_CODE_NOT_SAVED)
            os._exit(EXIT_CODE_NOT_SAVED)

        if self.number not in (None, signal.SIGTERM):
            signal.signal(signal.SIGTERM, end)

    def obey(self) -> None:
        """Ignore signals from now on, since the run is saving and exiting.

        A scheduler sends more signals soon after the first, and torchrun sends some when the first
        rank has ended.
        """
        ignore_stop_signals()


def loss_at_end(code: int, config: RunConfig) -> str | None:
    """Return a sentence on the work that a run has lost because a signal ended it.

    ``code`` is the run's exit code. Return None if no signal ended the run, or if the run has saved
    before it ended.
    """
    training = config.training
    save = config.checkpoint.save
    number = next((number for number in STOP_SIGNALS if code == code_of(-number)), None)
    if code == EXIT_CODE_NOT_SAVED:
        number = signal.Signals[training.exit_signal] if save is None else signal.SIGTERM
    elif number is None or (code == EXIT_CODE_SIGNAL and training.exit_signal_handler):
        return None
    ending = f"ended by {number.name}"
    sender = number.name
    if number == signal.SIGINT:
        ending = "interrupted"
        sender = "Ctrl-C"
    flags = "`--exit-signal-handler"
    flags += "`" if number == signal.SIGTERM else f" --exit-signal {number.name}`"
    if save is None:
        return (
            f"{ending}: nothing has been saved, as `--save` is not given; give it and {flags}, and "
            f"{sender} saves a checkpoint before the run ends."
        )

    from megatron_ext.checkpoint.files import read_tracker

    iteration = read_tracker(Path(save))
    lost = f"nothing has been saved in `--save` ({save})"
    if iteration is not None:
        lost = f"the newest checkpoint in `--save` ({save}) is of iteration {iteration}, and later "
        lost += "steps are lost"
    return f"{ending}: {lost}; give {flags}, and {sender} saves a checkpoint before the run ends."
