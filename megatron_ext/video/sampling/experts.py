"""Puts the weights of a second network into a run's model, as Wan 2.2 A14B samples with two.

Two networks of one size, the experts, share the steps from noise to data: one takes those at high
noise, the other those below ``--sample-boundary``. The second one's weights replace the first one's
when all clips have come to the boundary, so that the memory of one network is enough.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_ext.checkpoint.files import TRACKER
from megatron_ext.checkpoint.manager import CheckpointManager
from megatron_ext.checkpoint.stored import read_run_config
from megatron_ext.config.output import CheckpointConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.train.run import Run
from megatron_ext.video.config.run import SampleConfig
from megatron_ext.video.convert.reading import open_published
from megatron_ext.video.convert.training import load_weights
from megatron_ext.video.networks.lookup import network_of


def load_low_noise_expert(run: Run) -> str:
    """Load the weights of ``--sample-low-noise-expert``, and return a sentence on them for the log.

    All ranks call this together.

    Raises:
        CheckpointError: there are no weights, or they do not fit the model.
    """
    sample = run.config.section(SampleConfig)
    assert sample.sample_low_noise_expert is not None
    place = Path(sample.sample_low_noise_expert)
    if not _is_run(place):
        sizes = network_of(run.config).sizes
        loaded = load_weights(run.config, run.chunks, place, None, sizes)
        return f"the low-noise expert: {loaded.notes[0]}"
    config = dataclasses.replace(
        CheckpointConfig(),
        pretrained_checkpoint=str(place),
        pretrained_average=sample.sample_ema,
    )
    checkpoint = CheckpointManager(config, run.context).load(model=run.chunks)
    assert checkpoint is not None
    kind = "averaged weights" if sample.sample_ema and not checkpoint.notes else "weights"
    return f"the low-noise expert: loaded the {kind} of {checkpoint.path}"


def check_low_noise_expert(config: RunConfig) -> None:
    """Check ``--sample-low-noise-expert``, if it is given, before a run starts.

    Raises:
        ConfigError, CheckpointError: there are no weights, or they are of another network than the
            run's.
    """
    given = config.section(SampleConfig).sample_low_noise_expert
    if given is None:
        return
    place = Path(given)
    if _is_run(place):
        if not (read_run_config(place, None).get("video") or {}).get("video"):
            raise ConfigError.about(
                "--sample-low-noise-expert",
                given,
                "must be a checkpoint of pretrain_video.py, but holds another kind of model",
                "give another",
            )
        return
    with open_published(place) as model:
        model.check()
        theirs = model.sizes
    ours = network_of(config).sizes
    differing = [
        f"{name} {getattr(theirs, name, None)}, not {value}"
        for name, value in dataclasses.asdict(ours).items()
        if getattr(theirs, name, None) != value
    ]
    if differing:
        raise ConfigError.about(
            "--sample-low-noise-expert",
            given,
            f"holds a network with {' and '.join(differing)} as that for high noise",
            "give the two networks of one pipeline",
        )


def _is_run(place: Path) -> bool:
    """Return whether a folder holds checkpoints of a run."""
    return (place / TRACKER).is_file()
