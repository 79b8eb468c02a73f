"""tools/sample_video.py --streaming: long videos from a checkpoint, block by block."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_ext.checkpoint.adapters import FrozenBase
from megatron_ext.errors import CheckpointError, ConfigError, MegatronExtError
from megatron_ext.parallel.collectives import on_first_of_replica, share
from megatron_ext.train.launch import refuse
from megatron_ext.train.main import main
from megatron_ext.video.config.rules import STREAMING_DEFAULTS
from megatron_ext.video.data.codecs import build_codec
from megatron_ext.video.data.text_encoders import build_text_encoder
from megatron_ext.video.sampling.tool import averaged, stored_of
from megatron_ext.video.streaming.configuration import (
    film_requests,
    network_options,
    noise_of,
    sized,
    window_of,
)
from megatron_ext.video.streaming.films import FilmMaker, Pace
from megatron_ext.video.streaming.task import STREAMING

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.text.tokenizers.base import Tokenizer
    from megatron_ext.train.run import Run

_STORED = ("streaming", "lora", "codec", "text_encoder")
"""Sections of the checkpoint's configuration that decide what the model is and how it samples."""

EVERY = 5.0
"""Seconds between two lines about the progress, at least."""


def defaults_of(argv: Sequence[str]) -> dict[str, Any]:
    """Values of flags as the checkpoint has them; the command line wins over them.

    Raises:
        ConfigError: see `stored_of`; or the checkpoint is of another task.
        CheckpointError: see `read_run_config` and `_base_of`.
    """
    stored, asked = stored_of(argv)
    if stored["video"].get("task") != "streaming":
        raise ConfigError(
            f"`--load` ({asked['checkpoint']['load']}) must be a checkpoint of `--task streaming`, "
            "but is of a flow-matching run; leave out `--streaming`."
        )
    return {
        **STREAMING_DEFAULTS,
        **{name: value for section in _STORED for name, value in stored[section].items()},
        **_base_of(stored, asked["checkpoint"]),
        "task": "streaming",
        "bf16": stored["precision"]["bf16"],
        "only_samples": True,
        "skip_train": True,
        "micro_batch_size": 1,
        "ema_decay": None,
        "for_sampling": averaged(stored, asked.get("sample", {})),
    }


def _base_of(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Where the weights under adapters lie, as the checkpoint of these says, or how to draw them.

    Raises:
        CheckpointError: they are gone, or given where there are no adapters.
    """
    load, elsewhere = given["load"], given.get("pretrained_checkpoint")
    base = FrozenBase.under(Path(load), given.get("ckpt_step"))
    if base is None:
        if elsewhere is not None:
            raise CheckpointError(
                f"`--pretrained-checkpoint` ({elsewhere}) has no effect: `--load` ({load}) holds "
                "all weights itself; leave it out."
            )
        return {}
    if elsewhere is None and base.path is not None and not Path(base.path).is_dir():
        raise CheckpointError(
            f"`--load` ({load}) holds adapters of the weights in {base.path}, which are not there; "
            "give `--pretrained-checkpoint` with where they are now."
        )
    return {
        "pretrained_checkpoint": base.path,
        "pretrained_average": base.path is not None and stored["checkpoint"]["pretrained_average"],
        "seed": stored["training"]["seed"],
    }


def prepare_sampling(config: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """Check what is asked for before any process group exists; see `Task.preflight`."""
    noise_of(config.streaming)
    network_options(config, window_of(config.streaming))
    film_requests(config)
    return sized(config)


def sample_at_once(run: Run) -> None:
    """Make the videos, say how it goes, and at the end how fast it went."""
    config = run.config
    assert config.sample.sample_dir is not None
    maker = FilmMaker(run, partial(_encode, run), lambda: build_codec(config.codec, run.device))
    pace = maker(Path(config.sample.sample_dir), _Teller(maker.num_blocks))
    run.reporters.say(summary(pace, config.streaming.frame_block))


def _encode(run: Run, captions: Sequence[str]) -> Tensor:
    """On one rank of each replica, for the memory of large encoders, which go again."""
    config = run.config

    def encoded() -> Tensor:
        encoder = build_text_encoder(config.text_encoder, run.device)
        return torch.cat([encoder.encode([caption])[0] for caption in captions])

    known = on_first_of_replica(encoded, "Encoding the prompts", run.context)
    assert config.streaming.text_features is not None
    shape = len(captions), config.text_encoder.text_length, config.streaming.text_features
    return share(known, shape, run.context, run.device)


class _Teller:
    """Says how far the first replica is, at the first block and then now and then."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._said: float | None = None

    def __call__(self, pace: Pace) -> None:
        now = time.perf_counter()
        if self._said is None or now - self._said >= EVERY:
            self._said = now
            print(
                f"> frame block {pace.blocks} of {self._num_blocks} after {pace.seconds:.1f} s, "
                f"{pace.blocks / pace.seconds:.2f} blocks/s",
                flush=True,
            )


def summary(pace: Pace, block: int) -> str:
    """How fast videos came about, whose frame blocks have so many latent frames."""
    rate = pace.blocks / pace.seconds
    return (
        f"made {pace.videos} videos of {pace.blocks} frame blocks ({pace.blocks * block} latent "
        f"frames, {pace.frames} frames) in {pace.seconds:.1f} s: {rate:.2f} blocks/s, "
        f"{rate * block:.2f} latent frames/s, {pace.frames / pace.seconds:.2f} frames/s; first "
        f"block after {pace.first_block:.2f} s"
    )


def sample_streaming(argv: Sequence[str]) -> int:
    """The program.

    Args:
        argv: the words after the program's name, without ``--streaming``.

    Returns:
        Its exit code.
    """
    try:
        defaults: Mapping[str, Any] = {} if {"-h", "--help"} & {*argv} else defaults_of(argv)
    except MegatronExtError as error:
        return refuse(error)
    sampling = dataclasses.replace(
        STREAMING, preflight=prepare_sampling, callbacks=(), step_runner=None
    )
    return main(sampling, argv, defaults=defaults, work=sample_at_once)
