"""The program tools/sample_video.py: samples clips from a training checkpoint, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.checkpoint.stored import read_run_config
from megatron_ext.config.parser import read_words
from megatron_ext.config.sections import described, help_question
from megatron_ext.errors import CheckpointError, ConfigError, MegatronExtError
from megatron_ext.train.launch import refuse
from megatron_ext.train.main import main
from megatron_ext.train.task import Task, TaskChoice, later, no_datasets
from megatron_ext.video.config.rules import ENCODING
from megatron_ext.video.config.run import SampleConfig
from megatron_ext.video.config.stored import stored_network
from megatron_ext.video.networks.lookup import with_widths
from megatron_ext.video.task import VIDEO

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.train.run import Run

# Imported when they are called, so that the flags are read without torch.
ClipSampler = later("megatron_ext.video.sampling.samples:ClipSampler")
check_sampling = later("megatron_ext.video.sampling.generate:check_sampling")
manifest_of = later("megatron_ext.video.data.setup:manifest_of")

DefaultsOf = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
"""A function of (configuration stored in a checkpoint, the command line's flags of checkpoints).

It returns the defaults, by field name, that the checkpoint sets for the flags of sampling; flags
on the command line override them. It may raise MegatronExtError."""

_STORED = ("flow", "conditions", *ENCODING)
"""Sections of a checkpoint's configuration whose flags become the defaults of sampling."""
_DATA = ("video_model", "video_data_path", "video_buckets", "online_encoding")


def defaults_of(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of a flow-matching checkpoint that become defaults of sampling, by name.

    They are the flags of its model, flow, data, encoders and precision. ``stored`` is the
    configuration in the checkpoint; ``given`` has the command line's checkpoint flags.

    Raises:
        ConfigError: the checkpoint is of ``--task streaming``.
        CheckpointError: the weights under its adapters cannot be found.
    """
    if stored["video"].get("task") == "streaming":
        raise ConfigError(
            f"`--load` ({given['load']}) is a checkpoint of `--task streaming`, whose videos are "
            "made block by block; give `--streaming`."
        )
    sections = [stored.get(name, {}) for name in _STORED] + [*stored_network(stored).values()]
    return {
        **{name: value for section in sections for name, value in section.items()},
        **{name: stored["precision"][name] for name in ("bf16", "fp16")},
        **{name: stored["video"][name] for name in _DATA},
        **(base_of(stored, given) if stored["lora"]["lora_rank"] is not None else {}),
        "eval_iters": 0,
    }


def base_of(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags by which a run gets the frozen weights under a checkpoint's adapters.

    The flags name the checkpoint that holds the frozen weights, or the seed from which they were
    drawn. A checkpoint without adapters needs none of these flags, and the result is {}.

    Raises:
        CheckpointError: the checkpoint with the frozen weights is gone, or
            ``--pretrained-checkpoint`` is given for a checkpoint without adapters.
    """
    # Its module imports torch, which the flags do not need.
    from megatron_ext.checkpoint.adapters import FrozenBase

    load = given["load"]
    elsewhere = given.get("pretrained_checkpoint")
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


def prepare_sampling(config: RunConfig) -> tuple[RunConfig, None]:
    """Check prompts and clip size before a run; return (configuration, None).

    The configuration now has the dataset's latent channels and text widths. None takes the place
    of the assets that `Task.preflight` returns, since sampling needs none.
    """
    manifest = manifest_of(config)
    check_sampling(config, manifest)
    return with_widths(config, manifest), None


def sample_at_once(run: Run) -> None:
    """Sample the clips and write them into ``--sample-dir``."""
    folder = run.config.section(SampleConfig).sample_dir
    assert folder is not None
    ClipSampler(run)(Path(folder))


def sample_video(program: TaskChoice, argv: Sequence[str]) -> int:
    """Run tools/sample_video.py for a model of ``--task flow``, and return its exit code.

    ``program`` holds the tasks of pretrain_video.py, among which ``--task`` chooses; it builds the
    model. ``argv`` are the arguments after the program's name.
    """
    sampling = program.replace(preflight=prepare_sampling, datasets=no_datasets, callbacks=())
    return run_sampling(sampling, argv, defaults_of, sample_at_once)


def run_sampling(
    program: Task | TaskChoice,
    argv: Sequence[str],
    defaults_of: DefaultsOf,
    sample: Callable[[Run], None],
) -> int:
    """Start the ranks of a sampling program, and return its exit code.

    Args:
        program: the task that builds the model, or tasks among which ``--task`` chooses.
        argv: command-line arguments after the program's name, which override all defaults.
        defaults_of: returns the defaults that the checkpoint in ``--load`` sets; see `DefaultsOf`.
        sample: called with the `Run` on all ranks, instead of training.
    """
    try:
        defaults = {} if help_question(argv) is not None else _defaults(argv, defaults_of)
    except MegatronExtError as error:
        return refuse(error)
    return main(program, argv, defaults=defaults, work=sample)


def _defaults(argv: Sequence[str], defaults_of: DefaultsOf) -> dict[str, Any]:
    """Return the defaults of flags, by field name, that the checkpoint in ``--load`` sets.

    Raises:
        ConfigError: ``--load``, captions or ``--sample-dir`` are missing, or the checkpoint is not
            of a video model.
        CheckpointError: the checkpoint or its configuration is missing.
    """
    flags = read_words(argv, VIDEO).values
    given = flags.get("checkpoint", {})
    sample = flags.get("sample", {})
    missing = []
    if not given.get("load"):
        missing.append("`--load` is missing; give the --save folder of a run of pretrain_video.py.")
    if not sample.get("sample_prompts") and not sample.get("sample_texts"):
        missing.append("Captions are missing; give `--sample-prompts` or `--sample-texts`.")
    if not sample.get("sample_dir"):
        missing.append("`--sample-dir` is missing; give the folder for the clips.")
    if missing:
        raise ConfigError(missing)
    stored = read_run_config(Path(given["load"]), given.get("ckpt_step"))
    stored = described(stored, VIDEO.sections)
    if not stored.get("video", {}).get("video"):
        raise ConfigError(
            f"`--load` ({given['load']}) must be a checkpoint of pretrain_video.py, but holds "
            "another kind of model; give another."
        )
    return {
        **defaults_of(stored, given),
        "skip_train": True,
        "micro_batch_size": 1,
        "ema_decay": None,
        "for_sampling": bool(stored["ema"]["ema_decay"]) and sample.get("sample_ema", True),
    }
