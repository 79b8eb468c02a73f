"""Saving and loading."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.config.flags import COUNT, NATURAL, IfChanged, flag


@dataclass(frozen=True)
class CheckpointConfig:
    """Names and defaults are Megatron-LM's, but checkpoints reshard by default.

    Attributes:
        usual_save_interval: of a run that saves and does not say how often.
    """

    IF_CHANGED: ClassVar[IfChanged] = "allow"

    save: str | None = flag(None, "folder for checkpoints, metrics and the loss plot")
    save_interval: int | None = flag(
        None,
        "save after each multiple of this many steps; default: at the end only, or as the task "
        "says",
        unit="steps",
        names=("--persistent-save-interval",),
        bounds=COUNT,
    )
    save_retain_interval: int | None = flag(
        None,
        "keep only the older checkpoints whose step is a multiple of this",
        unit="steps",
        bounds=COUNT,
    )
    keep_last: int | None = flag(
        None, "keep only this many of the newest checkpoints", bounds=COUNT
    )
    keep_best: int | None = flag(
        None,
        "besides, save and keep so many checkpoints of the lowest validation loss seen",
        bounds=COUNT,
    )
    load: str | None = flag(None, "folder to continue from")
    resume_mode: str | None = flag(
        None,
        "where to go on: auto, from the newest checkpoint of --save, else as --load or "
        "--pretrained-checkpoint say; disable, nowhere; path, from --load, which must hold one; "
        "default: from --load, where it holds one",
        choices=("auto", "disable", "path"),
    )
    ckpt_step: int | None = flag(
        None, "iteration to load; default: the latest", unit="steps", bounds=NATURAL
    )
    finetune: bool = flag(False, "load the weights only, and start at iteration 0")
    pretrained_checkpoint: str | None = flag(None, "weights to start from, without --load")
    pretrained_average: bool = flag(
        False, "take the averaged weights of --pretrained-checkpoint, where it holds them"
    )
    no_save_optim: bool = flag(False, "leave the optimizer out of checkpoints")
    no_save_rng: bool = flag(False, "leave the random states out of checkpoints")
    no_load_optim: bool = flag(False, "do not load the optimizer")
    no_load_rng: bool = flag(False, "do not load the random states")
    exit_on_missing_checkpoint: bool = flag(False, "fail when --load holds no checkpoint")
    use_checkpoint_args: bool = flag(False, "take the shape of the model from the checkpoint")
    ckpt_format: str = flag("torch_dist", "format of checkpoints", choices=("torch_dist",))
    ckpt_fully_parallel_save: bool = flag(True, "share the writing over replicas")
    ckpt_fully_parallel_load: bool = flag(False, "share the reading over replicas")
    dist_ckpt_strictness: str = flag(
        "assume_ok_unexpected",
        "what to do about keys that do not match",
        choices=(
            "assume_ok_unexpected",
            "log_unexpected",
            "log_all",
            "raise_unexpected",
            "raise_all",
            "return_unexpected",
            "return_all",
            "ignore_all",
        ),
    )
    dist_ckpt_optim_fully_reshardable: bool = flag(
        True, "optimizer state that loads in any layout (the default here)"
    )

    usual_save_interval: int | None = None
    starts_others: bool = False
    """Networks besides the model of the run take weights of checkpoints."""

    def resolved(self) -> CheckpointConfig:
        """Return the section with the interval settled, where a folder is given."""
        if self.save is None or self.save_interval is not None:
            return self
        return dataclasses.replace(self, save_interval=self.usual_save_interval)

    def errors(self, *, evaluates: bool) -> list[str]:
        """Return a sentence for everything that cannot be run.

        Args:
            evaluates: the run has evaluations.
        """
        found = []
        for name in ("save_interval", "save_retain_interval", "keep_best"):
            if getattr(self, name) is not None and self.save is None:
                found.append(f"`--{name.replace('_', '-')}` needs `--save`; give a folder.")
        interval, retain = self.save_interval, self.save_retain_interval
        if interval and retain and retain % interval:
            found.append(
                f"`--save-retain-interval` ({retain}) must be divisible by `--save-interval` "
                f"({interval}); use {-(-retain // interval) * interval}."
            )
        if self.use_checkpoint_args and self.load is None and self.pretrained_checkpoint is None:
            found.append(
                "`--use-checkpoint-args` needs `--load` or `--pretrained-checkpoint`; give one."
            )
        if self.keep_best is not None and not evaluates:
            found.append(
                f"`--keep-best` ({self.keep_best}) needs evaluation, but `--eval-iters` is 0; give "
                "a number of batches, or `--full-validation`."
            )
        if self.pretrained_average and not (
            self.starts_others or self.finetune or self.pretrained_checkpoint
        ):
            found.append(
                "`--pretrained-average` needs a checkpoint that gives weights to start from; give "
                "`--pretrained-checkpoint`, or `--load` with `--finetune`."
            )
        return [*found, *self._resume_errors()]

    def _resume_errors(self) -> list[str]:
        """Return a sentence for each contradiction to ``--resume-mode``."""
        found = []
        if self.resume_mode == "disable" and self.load is not None:
            found.append(
                f"`--resume-mode disable` starts anew and contradicts `--load` ({self.load}); "
                "leave one out, or give the weights to start from as `--pretrained-checkpoint`."
            )
        if self.resume_mode == "path" and self.load is None:
            found.append("`--resume-mode path` needs `--load`; give the folder to go on from.")
        if self.resume_mode == "path" and self.pretrained_checkpoint is not None:
            found.append(
                "`--resume-mode path` goes on from `--load`, so `--pretrained-checkpoint` "
                f"({self.pretrained_checkpoint}) has no use; leave one out."
            )
        if self.resume_mode == "auto":
            found += self._auto_errors()
        return found

    def _auto_errors(self) -> list[str]:
        found = []
        if self.save is None:
            found.append("`--resume-mode auto` needs `--save`; give the folder to go on in.")
        if self.ckpt_step is not None:
            found.append(
                f"`--ckpt-step` ({self.ckpt_step}) contradicts `--resume-mode auto`, which takes "
                "the newest checkpoint; use `--resume-mode path` with `--load`."
            )
        if self.finetune and self.load is not None and self.load == self.save:
            found.append(
                f"With `--resume-mode auto` and `--finetune`, `--load` ({self.load}) must differ "
                "from `--save`, or the run could not tell its own checkpoints from those that it "
                "starts from; give another `--save`."
            )
        return found
