"""Saving and loading.

What ``--use-checkpoint-args`` takes of a stored configuration: what makes the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_ext.config.flags import COUNT, NATURAL, IfChanged, flag
from megatron_ext.errors import ConfigError
from megatron_ext.video.config.wan import CAUSAL, WINDOW, stored_dit
from megatron_ext.video.streaming.config import stored_streaming


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
        "save after each multiple of this; default: at the end only, in pretrain_video.py 1000",
        unit="steps",
        names=("--persistent-save-interval",),
        bounds=COUNT,
    )
    save_retain_interval: int | None = flag(
        None, "of older checkpoints keep each multiple of this", unit="steps", bounds=COUNT
    )
    keep_last: int | None = flag(
        None, "of the checkpoints keep only the newest of this number", bounds=COUNT
    )
    keep_best: int | None = flag(
        None, "besides, save and keep so many of the lowest validation loss seen", bounds=COUNT
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
        False, "of checkpoints that only give weights take the averaged ones, where they are kept"
    )
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

    usual_save_interval: int | None = None

    def resolved(self) -> CheckpointConfig:
        """With the interval settled, where a folder is given."""
        if self.save is None or self.save_interval is not None:
            return self
        return dataclasses.replace(self, save_interval=self.usual_save_interval)

    def errors(self, *, evaluates: bool, starts_others: bool = False) -> list[str]:
        """What cannot be run, one sentence each.

        Args:
            evaluates: the run has evaluations.
            starts_others: networks besides the model of the run take weights of checkpoints.
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
            starts_others or self.finetune or self.pretrained_checkpoint
        ):
            found.append(
                "`--pretrained-average` needs a checkpoint that gives weights to start from; give "
                "`--pretrained-checkpoint`, or `--load` with `--finetune`."
            )
        return [*found, *self._resume_errors()]

    def _resume_errors(self) -> list[str]:
        """What contradicts ``--resume-mode``."""
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


Sections = dict[str, dict[str, Any]]

_STREAMING, _MMDIT, _TEXT = "streaming", "mmdit", "text"
_NAMES = {
    _TEXT: "a text model",
    _MMDIT: "an MMDiT",
    "video-dit": "a video DiT",
    CAUSAL: "a causal video DiT",
    _STREAMING: "the networks of `--task streaming`",
}


def model_of(stored: Mapping[str, Any], asked: Mapping[str, Any]) -> Sections:
    """The sections of a stored configuration that describe the weights, as a run takes them.

    Args:
        stored: the configuration in the checkpoint.
        asked: the section ``video`` of the run.

    Raises:
        ConfigError: the run builds another kind of model.
    """
    held, wanted = _kind(stored.get("video", {})), _kind(asked)
    if held == wanted:
        return _same(stored)
    if {held, wanted} & {_TEXT, _MMDIT}:
        raise ConfigError(
            f"The checkpoint is of {_NAMES[held]}, but this run builds {_NAMES[wanted]}; give "
            "another checkpoint, or leave out `--use-checkpoint-args`."
        )
    if stored.get("lora", {}).get("lora_rank"):
        raise ConfigError(
            "`--use-checkpoint-args` finds a checkpoint of adapters, which flow matching does not "
            "train; make whole networks of them with `tools/lora.py merge`."
        )
    return _between_dits(held, wanted, stored)


def _kind(video: Mapping[str, Any]) -> str:
    """What a run builds, by its section ``video``."""
    if not video.get("video"):
        return _TEXT
    if video.get("task") == "streaming":
        return _STREAMING
    return str(video.get("video_model", _MMDIT))


def _same(stored: Mapping[str, Any]) -> Sections:
    """Of a checkpoint of the same kind of model."""
    of_dits = stored_streaming(stored) or stored_dit(stored)
    if of_dits is not None:
        return of_dits
    if stored.get("video", {}).get("video"):
        # What else its model's section holds follows from these.
        names = ("hidden_size", "num_attention_heads")
        model = {name: stored["model"][name] for name in names}
        return {"model": model, "mmdit": dict(stored["mmdit"])}
    return {"model": _shape(stored), "moe": stored["moe"], "lora": stored.get("lora", {})}


def _between_dits(held: str, wanted: str, stored: Mapping[str, Any]) -> Sections:
    """Size, channels and window of one video DiT as another run names them."""
    streaming, dit = stored["streaming"], stored["video_dit"]
    size, channels = dit["video_dit_size"], dit.get("dit_channels")
    if held == _STREAMING:
        size, channels = streaming["generator_size"], streaming["latent_channels"]
    causal = {_STREAMING, CAUSAL}
    window = {x: streaming[x] for x in WINDOW} if held in causal and wanted in causal else {}
    if wanted == _STREAMING:
        return {"streaming": {"generator_size": size, "latent_channels": channels, **window}}
    return {"video_dit": {"video_dit_size": size}, "streaming": window}


def _shape(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What of a stored model section describes the weights rather than how they are computed."""
    keep = (
        "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups "
        "group_query_attention max_position_embeddings position_embedding_type rotary_base "
        "rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling "
        "rope_scaling_factor normalization "
        "norm_epsilon apply_layernorm_1p swiglu squared_relu quick_geglu add_bias_linear "
        "add_qkv_bias qk_layernorm untie_embeddings_and_output_weights padded_vocab_size "
        "mtp_num_layers seq_length"
    ).split()
    return {name: value for name, value in stored["model"].items() if name in keep}
