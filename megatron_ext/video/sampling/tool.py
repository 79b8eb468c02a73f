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
from megatron_ext.video.sampling.pipeline import Pipeline
from megatron_ext.video.task import VIDEO

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig
    from megatron_ext.train.run import Run

# Imported when they are called, so that the flags are read without torch.
ClipSampler = later("megatron_ext.video.sampling.samples:ClipSampler")
check_sampling = later("megatron_ext.video.sampling.check:check_sampling")
check_low_noise_expert = later("megatron_ext.video.sampling.experts:check_low_noise_expert")
encode_prompts = later("megatron_ext.video.sampling.prompts:encode_prompts")
build_chunk = later("megatron_ext.video.flow:build_chunk")
open_published = later("megatron_ext.video.convert.reading:open_published")

DefaultsOf = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
"""A function of (configuration stored in a checkpoint, the command line's flags of checkpoints).

It returns the defaults, by field name, that the checkpoint sets for the flags of sampling; flags
on the command line override them. It may raise MegatronExtError."""

DefaultsOfWeights = Callable[[str, "str | None"], "tuple[Mapping[str, Any], str]"]
"""A function of the values of ``--load-weights`` and ``--load-weights-entry``.

It returns the defaults, by field name, that the weights set for the flags of sampling, and the
folder or file of the network itself. It may raise MegatronExtError."""

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
    published = given.get("load_weights")
    base = FrozenBase.under(Path(load), given.get("ckpt_step"))
    if base is None:
        if elsewhere is not None:
            raise CheckpointError(
                f"`--pretrained-checkpoint` ({elsewhere}) has no effect: `--load` ({load}) holds "
                "all weights itself; leave it out."
            )
        return {}
    moved = elsewhere if base.flag is None else published
    if moved is None and base.path is not None and not Path(base.path).exists():
        raise CheckpointError(
            f"`--load` ({load}) holds adapters of the weights in {base.path}, which are not there; "
            f"give `{base.flag or '--pretrained-checkpoint'}` with where they are now."
        )
    if base.flag is not None:
        entry = (stored["weights"]["weights_origin"] or {}).get("entry")
        return {"load_weights": base.path, "load_weights_entry": entry}
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
    source = check_sampling(config)
    config = with_widths(config, source.manifest)
    check_low_noise_expert(config)
    return config, None


class Sampling:
    """Samples the clips of a run at once.

    With ``--sample-offload`` the prompts are encoded before the model is built, so that text
    encoder and network are never in memory together.
    """

    def __init__(self) -> None:
        self._prompts: Any = None

    def model_chunk(
        self, config: RunConfig, transformer_config: Any, context: Any, **stage: Any
    ) -> Any:
        """Build a pipeline chunk of the model on this rank, after the prompts are encoded."""
        if config.section(SampleConfig).sample_offload and self._prompts is None:
            self._prompts = encode_prompts(config, context)
        return build_chunk(config, transformer_config, context, **stage)

    def __call__(self, run: Run) -> None:
        """Sample the clips and write them into ``--sample-dir``."""
        sample = run.config.section(SampleConfig)
        assert sample.sample_dir is not None
        sampler = ClipSampler(run, self._prompts, frees_model=sample.sample_offload)
        sampler(Path(sample.sample_dir))


def sample_video(program: TaskChoice, argv: Sequence[str]) -> int:
    """Run tools/sample_video.py for a model of ``--task flow``, and return its exit code.

    ``program`` holds the tasks of pretrain_video.py, among which ``--task`` chooses; it builds the
    model. ``argv`` are the arguments after the program's name.
    """
    sampling = Sampling()
    task = program.replace(
        preflight=prepare_sampling, datasets=no_datasets, callbacks=(),
        model_chunk=sampling.model_chunk,
    )  # fmt: skip
    return run_sampling(task, argv, defaults_of, sampling, of_weights=defaults_of_weights)


def defaults_of_weights(path: str, entry: str | None) -> tuple[dict[str, Any], str]:
    """Return the flags of sampling, by field, that published weights give, and the network's place.

    Args:
        path: value of ``--load-weights``: a folder of a pipeline or network, or a file.
        entry: value of ``--load-weights-entry``.

    Raises:
        ConfigError, CheckpointError: the folder or file cannot be read.
    """
    pipeline = Pipeline.at(Path(path))
    network = Path(path) if pipeline is None else pipeline.network
    with open_published(network, entry) as model:
        index = {} if pipeline is None else pipeline.index
        values = dict(model.conversion.sampling(model.sizes, index))
    if pipeline is not None:
        values |= pipeline.defaults()
    return {**values, "eval_iters": 0}, str(network)


def run_sampling(
    program: Task | TaskChoice,
    argv: Sequence[str],
    defaults_of: DefaultsOf,
    sample: Callable[[Run], None],
    of_weights: DefaultsOfWeights | None = None,
) -> int:
    """Start the ranks of a sampling program, and return its exit code.

    Args:
        program: the task that builds the model, or tasks among which ``--task`` chooses.
        argv: command-line arguments after the program's name, which override all defaults.
        defaults_of: returns the defaults that the checkpoint in ``--load`` sets; see `DefaultsOf`.
        sample: called with the `Run` on all ranks, instead of training.
        of_weights: returns what published weights set, see `defaults_of_weights`; None if the
            program samples from checkpoints only.
    """
    words = list(argv)
    try:
        defaults: dict[str, Any] = {}
        if help_question(argv) is None:
            defaults, places = _defaults(argv, defaults_of, of_weights)
            if places is not None:
                words = _replaced(argv, *places)
    except MegatronExtError as error:
        return refuse(error)
    return main(program, words, defaults=defaults, work=sample)


def _replaced(argv: Sequence[str], given: str, place: str) -> list[str]:
    """Return the arguments with ``place`` as ``--load-weights``, where ``given`` stands there."""
    if given == place:
        return list(argv)
    new = {given: place, f"--load-weights={given}": f"--load-weights={place}"}
    words = [new.get(word, word) for word in argv]
    # A file of flags (``--config``) may give it; the last value of a flag counts.
    return words if words != [*argv] else [*words, "--load-weights", place]


def _is_on_published(load: str, step: int | None) -> bool:
    """Return whether a folder of checkpoints holds adapters of published weights."""
    from megatron_ext.checkpoint.adapters import FrozenBase
    from megatron_ext.checkpoint.files import TRACKER

    if not (Path(load) / TRACKER).is_file():
        return False
    base = FrozenBase.under(Path(load), step)
    return base is not None and base.flag is not None


def _defaults(
    argv: Sequence[str], defaults_of: DefaultsOf, of_weights: DefaultsOfWeights | None = None
) -> tuple[dict[str, Any], tuple[str, str] | None]:
    """Return the defaults of flags, by field name, that the model sets; and where its weights are.

    The latter is None for the checkpoint in ``--load``. For published weights it is the value of
    ``--load-weights`` and the place of the network in it.

    Raises:
        ConfigError: the model, captions or ``--sample-dir`` are missing, or the checkpoint is not
            of a video model.
        CheckpointError: the checkpoint or its configuration is missing.
    """
    flags = read_words(argv, VIDEO).values
    published = flags.get("weights", {})
    given = {**flags.get("checkpoint", {}), **published}
    sample = flags.get("sample", {})
    load = given.get("load")
    weights = published.get("load_weights") if of_weights is not None else None
    if load and weights and _is_on_published(load, given.get("ckpt_step")):
        # The flag says where the weights under the checkpoint's adapters are now.
        weights = None
    missing = []
    if load and weights:
        missing.append(
            f"`--load` ({load}) and `--load-weights` ({weights}) both give a model; leave one out."
        )
    if not load and not weights:
        folder = "" if of_weights is None else ", or published weights as `--load-weights`"
        missing.append(
            f"`--load` is missing; give the --save folder of a run of pretrain_video.py{folder}."
        )
    if not sample.get("sample_prompts") and not sample.get("sample_texts"):
        missing.append("Captions are missing; give `--sample-prompts` or `--sample-texts`.")
    if not sample.get("sample_dir"):
        missing.append("`--sample-dir` is missing; give the folder for the clips.")
    if missing:
        raise ConfigError(missing)
    samples_only = {"skip_train": True, "micro_batch_size": 1, "ema_decay": None}
    if weights:
        assert of_weights is not None
        values, place = of_weights(weights, published.get("load_weights_entry"))
        return {**values, **samples_only}, (weights, place)
    stored = read_run_config(Path(given["load"]), given.get("ckpt_step"))
    stored = described(stored, VIDEO.sections)
    if not stored.get("video", {}).get("video"):
        raise ConfigError(
            f"`--load` ({given['load']}) must be a checkpoint of pretrain_video.py, but holds "
            "another kind of model; give another."
        )
    values = {**defaults_of(stored, given), **samples_only}
    averaged = bool(stored["ema"]["ema_decay"]) and sample.get("sample_ema", True)
    return {**values, "for_sampling": averaged}, None
