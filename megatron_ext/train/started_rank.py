"""Runs the rank that torchrun or a similar launcher has started as this process."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from megatron_ext.disk.host_folder import (
    is_under_torchrun,
    leave_exit_code,
    leave_host_folder,
    restarts_by_torchrun,
)
from megatron_ext.errors import EXIT_CODE_NOT_SAVED, end_with_parent, parent_at_start
from megatron_ext.train.exit_codes import EXIT_CODE_RESIZED, EXIT_CODE_SIGNAL
from megatron_ext.train.exit_signal import ExitSignal
from megatron_ext.train.rank import Main, Tell, leave, run_rank, tell_nothing
from megatron_ext.train.supervision import Supervision


def run_started_rank(
    main: Main, exit_signal: ExitSignal, tell: Tell, supervision: Supervision
) -> int:
    """Run the rank that torchrun or a similar launcher has started as this process.

    The process exits here unless the exit code is 0.
    """
    agent = parent_at_start()
    if is_under_torchrun():
        # A signal that the agent does not pass on may end the agent.
        end_with_parent(agent, exit_signal.number or signal.SIGKILL)
        supervision.follow_earlier_process()
        if exit_signal.number is not None:
            # Its agent waits only for a limited time until it has saved.
            leave_exit_code(EXIT_CODE_NOT_SAVED)
    if os.environ["RANK"] != "0":
        tell = tell_nothing
    exit_signal.end_by_sigterm(tell)
    code = run_rank(main)
    if is_under_torchrun():
        leave_exit_code(code)
    if code:
        tell(code)
        if code != EXIT_CODE_RESIZED:
            leave_host_folder()
        if code == EXIT_CODE_SIGNAL and restarts_by_torchrun() and not supervision.is_elastic:
            # torchrun restarts ranks whatever their exit code, unless torchrun itself is asked to
            # end. An elastic run gets the same signal whenever its number of nodes changes, so it
            # must not do that.
            with suppress(ProcessLookupError):
                os.kill(agent, signal.SIGTERM)
        leave(code)
    return code
