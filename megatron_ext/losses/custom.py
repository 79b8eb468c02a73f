"""A user's own loss on the hidden states of a language model.

``--loss my_module:MyLossConfig`` names a frozen dataclass of the user. Its fields are the options
(``--loss-args gamma=2.0``), and its ``loss_class`` is the class that computes the losses of tokens;
see ``examples/custom_loss/focal.py``. The framework cuts tokens into blocks and handles tensor and
sequence parallelism. It sums the losses, normalizes them over the global batch and logs them.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from megatron_ext.config.user_code import load_object, split_options
from megatron_ext.data.batch import Batch
from megatron_ext.disk.reading import UnreadableFile, parse_yaml
from megatron_ext.errors import ConfigError
from megatron_ext.losses.vocabulary import VocabularyHead
from megatron_ext.parallel.context import ParallelContext

_TAKEN = (
    "kind iteration consumed_samples learning_rate grad_norm loss_scale global_batch_size split "
    "seconds_per_iteration tokens_per_second skipped_iterations nan_iterations final epoch "
    "total_skipped_iterations num_zeros params_norm max_attention_logit"
).split()


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a loss for one micro-batch on one rank, which holds s tokens of each sequence.

    Attributes:
        weights: ``[b, s]``, 0 for tokens without a target. The loss of a step is the weighted mean
            over all micro-batches and all data- and context-parallel ranks.
        tensors: scalars, or tensors ``[b, s, ...]``, by name. `TokenLoss.token_losses` gets the
            scalars unchanged, and the tensors in blocks of tokens.
    """

    weights: Tensor
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class TokenLossConfig:
    """Base class of a loss's options; a subclass is a frozen dataclass that sets ``loss_class``."""

    loss_class: ClassVar[type["TokenLoss[Any]"]]


Config = TypeVar("Config", bound=TokenLossConfig)


class TokenLoss(Generic[Config]):
    """Base class of per-token losses; a subclass implements `token_losses`.

    Attributes:
        name: name of the loss in the log.
        extra_names: names of the extra values that `token_losses` returns. The log reports the
            mean of each over the tokens, with the same weights as the loss.
    """

    name: ClassVar[str] = "loss"
    extra_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Config) -> None:
        self.config = config

    def build(self, batches: Sequence[Batch], context: ParallelContext) -> list[LossInputs]:
        """Return the inputs of each micro-batch of a step.

        It is called before the step's first forward pass. Override it to pass more tensors or to
        change the weights. To divide the weights by a sum over the whole step, sum over ``batches``
        and over the ranks of ``context.pgs.dp_cp``. All ranks of the last pipeline stage call it
        together, in evaluation as well.
        """
        return [LossInputs(batch.loss_weights, {"labels": batch.labels}) for batch in batches]

    def token_losses(
        self, hidden: Tensor, head: VocabularyHead, inputs: Mapping[str, Tensor]
    ) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """Return the losses ``[C]`` of a block of C tokens, whose hidden states are ``[C, h]``.

        If the class has `extra_names`, return the losses and a mapping from each of these names to
        values ``[C]``. The head's methods hide how the vocabulary is split over the ranks. The
        inputs are this block's part of the tensors that `build` returned.
        """
        raise NotImplementedError


@functools.lru_cache(maxsize=8)
def load_loss(spec: str, arguments: tuple[str, ...] = ()) -> TokenLoss[Any]:
    """Return the loss that ``--loss`` and ``--loss-args`` name, the same object for the whole run.

    Args:
        spec: the class of the loss's options, ``module:Class`` or ``path/to/file.py:Class``.
        arguments: options, each ``field=value`` with the value in YAML.

    Raises:
        ConfigError: the class is missing or unfit, or an argument does not fit its field.
    """
    kind = _config_class(spec)
    names = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for argument, name, text in split_options("--loss-args", spec, arguments, names):
        values[name] = _value(kind, name, argument, text)
    reported = [kind.loss_class.name, *kind.loss_class.extra_names]
    for name in reported:
        if name in _TAKEN or reported.count(name) > 1:
            raise ConfigError.about(
                "--loss",
                spec,
                f"reports `{name}`, a name that is taken",
                "rename it in `name` or `extra_names` of its class",
            )
    try:
        return kind.loss_class(kind(**values))
    except (TypeError, ValueError) as error:
        raise ConfigError.about(
            "--loss", spec, f"cannot be built from {values}: {error}", "correct `--loss-args`"
        ) from error


def _value(kind: type[TokenLossConfig], name: str, argument: str, text: str) -> Any:
    """Parse the value of an option; raise a ConfigError if it does not fit its field's type."""
    hint = typing.get_type_hints(kind)[name]
    members = typing.get_args(hint) or (hint,)
    try:
        value = parse_yaml(text, "--loss-args")
        if float in members and value is not None:
            value = float(value)
    except (ValueError, TypeError, OverflowError, UnreadableFile):
        value = text
    plain = all(member in (bool, int, float, str, type(None)) for member in members)
    fits = type(value) in members and not (isinstance(value, float) and not math.isfinite(value))
    if plain and not fits:
        names = " or ".join(member.__name__ for member in members if member is not type(None))
        raise ConfigError.about(
            "--loss-args",
            argument,
            f"must give `{name}` as {names}, and numbers must be finite",
            "correct the value",
        )
    return value


def _config_class(spec: str) -> type[TokenLossConfig]:
    kind = load_object("--loss", spec, "the class of its options")
    is_config = isinstance(kind, type) and issubclass(kind, TokenLossConfig)
    if not is_config or not issubclass(getattr(kind, "loss_class", object), TokenLoss):
        raise ConfigError.about(
            "--loss",
            spec,
            "must name a subclass of megatron_ext.losses.custom.TokenLossConfig with a "
            "`loss_class`",
        )
    return kind  # type: ignore[no-any-return]
