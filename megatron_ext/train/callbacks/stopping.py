"""Regular checkpoints, and the ends of a run that the flags or the user ask for."""

from __future__ import annotations

from megatron_ext.train.callbacks.callback import Callback, Decision, due
from megatron_ext.train.stop_requests import EXIT_CODE_SIGNAL

EXIT_INTERVAL = "exit interval"
"""The reason of a run that ends by ``--exit-interval``; any other reason is told instead of it."""


class StopConditions(Callback):
    """Saves every ``--save-interval`` steps, and ends a run by signal, time or interval."""

    def decide(self, decision: Decision) -> None:
        """Look at the interval flags, the exit signal and the clock."""
        run, config = self.run, self.run.config
        iteration = run.progress.iteration
        request = run.stop_requests.check(run.device)
        if request is not None:
            decision.stop = request
            decision.exit_code = EXIT_CODE_SIGNAL if request == "signal" else 0
        elif due(iteration, config.training.exit_interval):
            decision.stop = decision.stop or EXIT_INTERVAL
        decision.save |= due(iteration, config.checkpoint.save_interval)
