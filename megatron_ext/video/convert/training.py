"""Starts a run from published weights (``--load-weights``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron_ext.checkpoint.adapters import FrozenBase
from megatron_ext.checkpoint.conversion import weight_shards
from megatron_ext.checkpoint.files import digest_of_weights
from megatron_ext.config.flags import flags_of, spelling_of
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError, ConfigError, FlagError
from megatron_ext.parallel.collectives import on_every_rank
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.config.weights import PublishedConfig
from megatron_ext.video.convert.find import sizes_of, stamps_of
from megatron_ext.video.convert.reading import Description, fill, open_published
from megatron_ext.video.networks.lookup import named_by
from megatron_ext.video.networks.network import STREAMING

_ENTRY = "--load-weights-entry"


@dataclass(frozen=True)
class _Described:
    """The published weights that a run starts from.

    Attributes:
        kinds: the kinds of run that can train them, of the run's task alone.
    """

    model: Description
    kinds: Sequence[str]

    @property
    def sizes(self) -> Any:
        return self.model.sizes


def described(config: RunConfig) -> _Described:
    """Return the weights of ``--load-weights``, which must be given.

    Raises:
        CheckpointError: they cannot be read, or no run of this task can train them.
    """
    given = config.section(PublishedConfig)
    assert given.load_weights is not None
    source = Path(given.load_weights)
    model = _opened(source, given.load_weights_entry, stamps_of(source))
    streams = config.section(VideoConfig).streams
    own = model.conversion.kinds(model.sizes)
    kinds = [kind for kind in own if (kind == STREAMING) == streams]
    if not kinds:
        task = "flow" if streams else "streaming"
        raise CheckpointError.about(
            "--load-weights",
            given.load_weights,
            f"holds {model.conversion.title} of a kind that only `--task {task}` can train",
            "give it, or other weights",
        )
    return _Described(model, kinds)


@lru_cache(maxsize=1)
def _opened(source: Path, entry: str | None, _stamps: Any) -> Description:
    """Check published weights and keep what describes them, since flags are resolved often."""
    with open_published(source, entry, _ENTRY) as model:
        model.check()
        return model.description


def model_of_weights(config: RunConfig) -> Mapping[str, Mapping[str, Any]]:
    """Return the values of flags, by section and field, that ``--load-weights`` determines."""
    weights = described(config)
    name = config.section(VideoConfig).video_model
    kind = name if name in weights.kinds else weights.kinds[0]
    sections: dict[str, Mapping[str, Any]] = dict(
        weights.model.conversion.sections(weights.sizes, kind)
    )
    if kind != STREAMING:
        sections["video"] = {"video_model": kind}
    return sections


def resolve_weights(config: RunConfig) -> RunConfig:
    """Return the configuration with what follows from ``--load-weights``, which must be given."""
    given = config.section(PublishedConfig)
    assert given.load_weights is not None
    model = described(config).model
    source = str(model.source.resolve())
    entry = given.load_weights_entry
    digest = _identity(model.source, entry)
    origin = {"path": source, "entry": entry, "form": model.form.name, "digest": digest}
    checkpoint = dataclasses.replace(
        config.checkpoint,
        starts_elsewhere=True,
        published=(source, digest, "--load-weights"),
    )
    return dataclasses.replace(config, checkpoint=checkpoint).with_section(
        dataclasses.replace(given, weights_origin=origin)
    )


def weights_errors(given: RunConfig, run: RunConfig) -> list[FlagError]:
    """Return a sentence on each error in ``--load-weights`` and the flags beside it.

    ``given`` has the flags as given, ``run`` also values derived from them.
    """
    own = run.section(PublishedConfig)
    path = own.load_weights
    if path is None:
        return [
            FlagError("--load-weights-entry", own.load_weights_entry, "needs `--load-weights`",
                      "give both")
        ]  # fmt: skip
    errors = []
    pretrained = run.checkpoint.pretrained_checkpoint
    if pretrained is not None:
        errors.append(
            FlagError(
                "--load-weights",
                path,
                f"and `--pretrained-checkpoint` ({pretrained}) both give initial weights",
                "leave one out",
            )
        )
    if run.checkpoint.use_checkpoint_args:
        errors.append(
            FlagError(
                "--load-weights",
                path,
                "and `--use-checkpoint-args` both give the shape of the model",
                "leave one out",
            )
        )
    weights = described(run)
    name = run.section(VideoConfig).video_model
    if STREAMING not in weights.kinds and name not in weights.kinds:
        title = weights.model.conversion.title
        errors.append(
            FlagError(
                "--video-model",
                name,
                f"cannot start from `--load-weights` ({path}), which holds {title}",
                f"leave it out, or give {named_by(weights.kinds)}",
            )
        )
        return errors
    kind = STREAMING if STREAMING in weights.kinds else name
    contradictions = [*_contradictions(given, weights.model, kind)]
    return errors + (contradictions or _size_errors(run, weights.model))


def _contradictions(given: RunConfig, model: Description, kind: str) -> Iterator[FlagError]:
    """Yield an error for each flag whose value is not that of the model."""
    sections = given.by_name()
    for name, values in model.conversion.sections(model.sizes, kind).items():
        kind_of_section: Any = type(sections[name])
        for flag in flags_of(name, kind_of_section):
            value = getattr(sections[name], flag.field)
            theirs = values.get(flag.field, value)
            if value != theirs and not _adds(model, flag.field, theirs, value):
                yield FlagError(
                    spelling_of(sections[name], flag.field),
                    value,
                    f"contradicts `--load-weights` ({model.source}), whose model has {theirs}",
                    "leave it out",
                )


def _adds(model: Description, field: str, theirs: Any, ours: Any) -> bool:
    """Return whether a size differs by a branch that the run may add to the model."""
    return field in model.conversion.adds and not theirs and bool(ours)


def _size_errors(run: RunConfig, model: Description) -> list[FlagError]:
    """Return an error if the weights are not all that the run's network needs.

    It may have other sizes, or a branch that the weights lack and that nothing would train.
    """
    sizes = sizes_of(run)
    words = _differences(sizes, model)
    if words:
        usual = "leave out the flags of its size, or give data that is encoded for it"
        differing = [name for name, *_ in _differing(sizes, model)]
        remedies = model.conversion.remedies
        return [
            FlagError(
                "--load-weights",
                model.source,
                f"holds a model with {words} as this run by its flags and its data",
                next((remedies[name] for name in differing if name in remedies), usual),
            )
        ]
    new = _lacks(sizes, model)
    if not new or run.lora.lora_rank is None:
        return []
    return [
        FlagError(
            "--load-weights",
            model.source,
            f"holds no `{min(new)}`, and a run with `--lora-rank` trains adapters alone, so that "
            "it would stay as it starts",
            "give weights that have it, train all weights, or leave out what needs it, such as "
            "condition modes other than t2v",
        )
    ]


def _lacks(sizes: Any, model: Description) -> set[str]:
    """Return the names of the parameters of a network of these sizes that the weights lack."""
    parameters = model.conversion.parameters
    return parameters(sizes).keys() - parameters(model.sizes).keys()


def _differences(ours: Any, model: Description) -> str:
    """Return text on the sizes of a model that are not ``ours``; "" if it has all of them."""
    if type(ours) is not type(model.sizes):
        return f"the blocks of {model.conversion.title}"
    differing = _differing(ours, model)
    return " and ".join(f"{name} {theirs}, not {value}" for name, theirs, value in differing)


def _differing(ours: Any, model: Description) -> list[tuple[str, Any, Any]]:
    """Return name, the model's value and ours of each size that differs; [] for another network."""
    if type(ours) is not type(model.sizes):
        return []
    found = [
        (f.name, getattr(model.sizes, f.name), getattr(ours, f.name))
        for f in dataclasses.fields(ours)
        if getattr(model.sizes, f.name) != getattr(ours, f.name)
    ]
    return [x for x in found if not _adds(model, *x)]


def check_network(flag: str, path: str, sizes: Any) -> None:
    """Raise an error unless the published weights that ``flag`` gives have these sizes.

    They are those of a second network, such as a critic, whose size other flags give.
    """
    with open_published(Path(path)) as model:
        words = _differences(sizes, model)
        if words:
            raise ConfigError.about(
                flag,
                path,
                f"holds a model with {words} as this run by its flags",
                f"give `{flag.replace('checkpoint', 'size')}` for it, or other weights",
            )


def check_sizes(config: RunConfig) -> None:
    """Raise ConfigError if the ``--load-weights`` do not give the network that the run builds.

    It is checked again when the data has been opened, which decides some of the sizes.
    """
    if config.section(PublishedConfig).load_weights is not None:
        errors = _size_errors(config, described(config).model)
        if errors:
            raise ConfigError(errors)


@dataclass
class Loaded:
    """The result of loading published weights on one rank.

    Attributes:
        bytes_read: number of bytes of tensors that this rank has read.
        notes: sentences on what was loaded, and on what the weights lack.
    """

    bytes_read: int = 0
    notes: list[str] = field(default_factory=list)


def load_initial_weights(config: RunConfig, chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Load the weights of ``--load-weights`` into the model chunks of this rank; return notes."""
    given = config.section(PublishedConfig)
    assert given.load_weights is not None
    source = Path(given.load_weights)
    return load_weights(config, chunks, source, given.load_weights_entry, sizes_of(config)).notes


def load_weights(
    config: RunConfig,
    chunks: Sequence[torch.nn.Module],
    source: Path,
    entry: str | None,
    sizes: Any,
) -> Loaded:
    """Fill this rank's chunks of a network of these sizes from published weights.

    All ranks call this together. Adapters keep their values, and so do branches that the weights
    lack. An optimizer that was built before must copy the model's new weights afterwards.

    Raises:
        CheckpointError: on every rank, if the weights are not those of such a network.
    """

    def load() -> Loaded:
        with open_published(source, entry) as model:
            model.check()
            new = _lacks(sizes, model)
            shards = [
                shard for chunk in unwrap_model(list(chunks)) for shard in weight_shards(chunk)
            ]
            fill([shard for shard in shards if shard.name not in new], model)
            notes = [f"loaded {source} ({model.conversion.title}, {model.form.name})"]
            notes += [f"{source} holds no `{name}`, so it starts anew." for name in sorted(new)]
            return Loaded(model.tensors.bytes_read, notes)

    held: Any = nullcontext()
    if config.optimizer.shards_weights:
        from megatron_ext.layers.weight_shards import whole_weights

        held = whole_weights(chunks, writes=True)
    with held:
        return on_every_rank(load, f"{source} cannot be read")


def fill_network(
    config: RunConfig, chunks: Sequence[torch.nn.Module], path: str, _context: ParallelContext
) -> FrozenBase:
    """Fill the chunks of a network with the published weights under its adapters.

    Return the identity of these weights.
    """
    sizes: Any = unwrap_model(list(chunks))[0].sizes
    origin = config.section(PublishedConfig).weights_origin or {}
    entry = origin.get("entry")
    load_weights(config, chunks, Path(path), entry, sizes)
    return base_of(path, "--load-weights", entry)


def base_of(path: str, flag: str, entry: str | None = None) -> FrozenBase:
    """Return the identity of the published weights that ``flag`` gives, for adapters on them.

    ``entry`` is the entry of a file of torch.save.
    """
    source = Path(path).resolve()
    return FrozenBase(str(source), _identity(source, entry), flag)


def _identity(source: Path, entry: str | None) -> str:
    return digest_of_weights(source) + (f" {entry}" if entry else "")
