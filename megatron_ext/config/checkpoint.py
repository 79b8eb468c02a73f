"""Saving and loading."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.flags import flag


@dataclass(frozen=True)
class CheckpointConfig:
    """Names and defaults are Megatron-LM's, but checkpoints reshard by default."""

    save: str | None = flag(None, "folder for checkpoints, metrics and the loss plot")
    save_interval: int | None = flag(
        None,
        "save after each multiple of this",
        unit="steps",
        names=("--persistent-save-interval",),
    )
    save_retain_interval: int | None = flag(
        None, "of older checkpoints keep each multiple of this", unit="steps"
    )
    keep_last: int | None = flag(None, "of the checkpoints keep only the newest of this number")
    load: str | None = flag(None, "folder to continue from")
    ckpt_step: int | None = flag(None, "iteration to load; default: the latest", unit="steps")
    finetune: bool = flag(False, "load the weights only, and start at iteration 0")
    pretrained_checkpoint: str | None = flag(None, "weights to start from, without --load")
    no_save_optim: bool = flag(False, "leave the optimizer out of checkpoints")
    no_save_rng: bool = flag(False, "leave the random states out of checkpoints")
    no_load_optim: bool = flag(False, "do not load the optimizer")
    no_load_rng: bool = flag(False, "do not load the random states")
    exit_on_missing_checkpoint: bool = flag(False, "fail when --load holds no checkpoint")
    use_checkpoint_args: bool = flag(False, "take the shape of the model from the checkpoint")
    ckpt_format: str = flag("torch_dist", "format", choices=("torch_dist",))
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

    def errors(self) -> list[str]:
        """What cannot be run, one sentence each."""
        found = [
            f"`--{name.replace('_', '-')}` ({value}) must be at least 1."
            for name in ("save_interval", "save_retain_interval", "keep_last")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        for name in ("save_interval", "save_retain_interval"):
            if getattr(self, name) is not None and self.save is None:
                found.append(f"`--{name.replace('_', '-')}` needs `--save`; give a folder.")
        interval, retain = self.save_interval, self.save_retain_interval
        if interval and retain and interval > 0 and retain % interval:
            found.append(
                f"`--save-retain-interval` ({retain}) must be divisible by `--save-interval` "
                f"({interval}); use {-(-retain // interval) * interval}."
            )
        if self.use_checkpoint_args and self.load is None:
            found.append("`--use-checkpoint-args` needs `--load`; give a folder.")
        return found
