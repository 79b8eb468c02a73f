"""An optimizer of the user's own: ``--optimizer-class`` names a subclass of torch's Optimizer.

megatron-core's optimizers, which clip, keep float32 weights and save, need to know three things of
it that a class need not say: which tensors it keeps for a weight, how many updates it has made, and
whether it updates each element of a weight on its own, so that a weight can be sharded. A trial on
small weights tells.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.nn import Parameter

from megatron_ext.config.optimizer import OptimizerConfig
from megatron_ext.config.run import RunConfig
from megatron_ext.config.user_code import load_object, split_options
from megatron_ext.disk.reading import UnreadableFile, parse_yaml
from megatron_ext.errors import ConfigError
from megatron_ext.optim.adam import Custom
from megatron_ext.optim.update import parts_of

FLAG = "--optimizer-class"
GIVEN = {"lr": "--lr", "weight_decay": "--weight-decay"}
"""Arguments of a class that have flags of their own."""
TRIAL_SHAPE = (6, 10)
TRIAL_CUT = 17
"""Where a trial cuts a flattened weight in two: in the middle of a row."""
TRIAL_SCALES = (1.0, 100.0, 0.01, 1.0)
"""Factors of the gradients in the updates of a trial."""


Build = Callable[[list[Parameter]], "Managed"]


class Managed(Custom):
    """The base class that an optimizer of the user's own is given, beside its own class.

    Between updates, the state of each parameter has its step count under "step", as a tensor. The
    user's own `step` finds there what it has put there itself: a tensor, a number, or nothing.

    Attributes:
        build: makes another optimizer of the same class and options, of some parameters.
        count_type: type of the step count that the user's class keeps for a parameter; None if it
            keeps none.
        counts_in_group: whether the user's class keeps a step count in its parameter groups.
    """

    build: Build
    count_type: type[Any] | None = None
    counts_in_group: bool = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        assert closure is None, "the gradients are computed before"
        self.start_state()
        counts = {p: state["step"] for p, state in self.state.items()}
        for state in self.state.values():
            self._give_own_count(state)
        super().step()
        for parameter, state in self.state.items():
            if self.count_type is None:
                updated = parameter.grad is not None
                state["step"] = counts[parameter] + 1 if updated else counts[parameter]
            elif not isinstance(state["step"], Tensor):
                state["step"] = torch.tensor(float(state["step"]))

    def _give_own_count(self, state: dict[str, Any]) -> None:
        """Replace the step count in a parameter's state by what the user's class keeps there."""
        if self.count_type is None:
            del state["step"]
        elif not issubclass(self.count_type, Tensor):
            state["step"] = self.count_type(state["step"].item())

    @torch.no_grad()
    def start_state(self) -> None:
        """Create the state of each parameter that has none, as before its first update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self.state:
                    self.state[parameter] = self._state_of(parameter, group)

    def _state_of(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that the user's class makes of a copy whose gradient is zero."""
        copy = Parameter(parameter.detach().clone())
        copy.grad = torch.zeros_like(copy)
        other = self.build([copy])
        (alone,) = other.param_groups
        alone.update({name: x for name, x in group.items() if name != "params"})
        with torch.random.fork_rng(devices=[]):
            super(Managed, other).step()
        state = dict(other.state.get(copy, {}))
        self.count_type = type(state["step"]) if "step" in state else None
        self.counts_in_group = "step" in alone
        count = state.get("step")
        zero = torch.zeros_like(count) if isinstance(count, Tensor) else torch.zeros(())
        return {**state, "step": zero}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; each tensor keeps the dtype that the user's class has given it."""
        dtypes = {
            parameter: {name: x.dtype for name, x in state.items() if isinstance(x, Tensor)}
            for parameter, state in self.state.items()
        }
        counts = [group.get("step") for group in state_dict["param_groups"]]
        super().load_state_dict(state_dict)
        for parameter, names in dtypes.items():
            state = self.state[parameter]
            state.update({k: x.to(names[k]) for k, x in state.items() if k in names})
        for group, count in zip(self.param_groups, counts, strict=True):
            if self.counts_in_group and count is not None:
                group["step"] = int(count)


@dataclass(frozen=True)
class Findings:
    """The properties of an optimizer that a trial finds.

    Attributes:
        is_elementwise: whether it updates each element by its own gradients alone.
        width: bytes of its state for each element of a weight.
        odd: a state that does not have one value for each element of the weight, as "`name` of
            shape (6,)"; None if there is none.
    """

    is_elementwise: bool
    width: int
    odd: str | None


def load_optimizer(flags: OptimizerConfig) -> Managed:
    """Build the optimizer that ``flags`` name, without parameters.

    Raises:
        ConfigError: the class is missing or unfit, or an option does not fit it.
    """
    spec = flags.optimizer_class
    assert spec is not None
    kind = _class(spec)
    options = _options(spec, kind, tuple(flags.optimizer_args))
    arguments = dict(inspect.signature(kind).parameters)
    if "lr" in arguments:
        options["lr"] = flags.lr or 0.0
    if "weight_decay" in arguments:
        options["weight_decay"] = flags.weight_decay
    elif flags.weight_decay:
        raise ConfigError.about(
            "--weight-decay", flags.weight_decay, f"is no option of {spec}", "use 0"
        )
    constructor: Any = kind  # Its signature is the user's.
    build: Build = functools.partial(constructor, **options)
    try:
        # torch refuses views as parameters, which shards are. So parameters are put in afterwards,
        # as megatron-core does.
        own = build([Parameter(torch.empty(0))])
    except (TypeError, ValueError) as error:
        raise ConfigError.about(
            FLAG, spec, f"cannot be built with {options}: {error}", "correct `--optimizer-args`"
        ) from error
    own.param_groups = []
    own.state.clear()
    own.build = build
    return own


@functools.lru_cache(maxsize=8)
def _class(spec: str) -> type[Managed]:
    """Return the class ``spec`` with the base class `Managed`, always the same one."""
    kind = load_object(FLAG, spec, "a class of optimizers")
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError.about(
            FLAG, spec, "must name a subclass of torch.optim.Optimizer", "derive it from that"
        )
    return type(kind.__name__, (Managed, kind), {"__module__": kind.__module__})


def _options(spec: str, kind: type[Managed], arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values of ``--optimizer-args``; raise a ConfigError if one does not fit."""
    flag = "--optimizer-args"
    names = [name for name in list(inspect.signature(kind).parameters)[1:] if name not in GIVEN]
    values: dict[str, Any] = {}
    for argument, name, text in split_options(flag, spec, arguments, names):
        try:
            values[name] = parse_yaml(text, flag)
        except UnreadableFile as error:
            raise ConfigError.about(flag, argument, "must have a value in YAML") from error
    return values


def take_parameters(own: Managed, inner: torch.optim.Optimizer) -> None:
    """Give ``own`` the parameter groups of ``inner``, the Adam that megatron-core has built.

    The groups keep their learning rates and weight decays, but not Adam's settings.
    """
    of_adam = inner.defaults.keys() - GIVEN.keys()
    own.param_groups = [
        {**own.defaults, **{name: x for name, x in group.items() if name not in of_adam}}
        for group in inner.param_groups
    ]


@functools.lru_cache(maxsize=8)
def _try(spec: str, arguments: tuple[str, ...]) -> Findings:
    flags = OptimizerConfig(
        optimizer_class=spec, optimizer_args=list(arguments), lr=0.01, weight_decay=0.0
    )
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(TRIAL_SHAPE, generator=random)
    gradients = [scale * torch.randn(TRIAL_SHAPE, generator=random) for scale in TRIAL_SCALES]
    whole, state = _moved(load_optimizer(flags), [weight], [[x] for x in gradients])
    cut = [[x.flatten()[:TRIAL_CUT], x.flatten()[TRIAL_CUT:]] for x in (weight, *gradients)]
    pieces, _ = _moved(load_optimizer(flags), cut[0], cut[1:])
    kept = {name: x for name, x in state.items() if name != "step"}
    shapes = {name: tuple(getattr(x, "shape", ())) for name, x in kept.items()}
    odd = next((name for name, shape in shapes.items() if shape != TRIAL_SHAPE), None)
    return Findings(
        is_elementwise=torch.allclose(whole, pieces, rtol=1e-4, atol=1e-6, equal_nan=True),
        width=sum(x.nbytes for x in kept.values() if isinstance(x, Tensor)) // weight.numel(),
        odd=None if odd is None else f"`{odd}` of shape {shapes[odd]}",
    )


def _moved(
    optimizer: Managed, weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> tuple[Tensor, dict[str, Any]]:
    """Return the flattened weights after some updates, and the state of the first weight."""
    own = [weight.clone() for weight in weights]
    optimizer.param_groups = [{**optimizer.defaults, "params": own}]
    with torch.random.fork_rng(devices=[]):
        for each in gradients:
            for weight, gradient in zip(own, each, strict=True):
                weight.grad = gradient.clone()
            optimizer.step()
    return torch.cat([weight.flatten() for weight in own]), optimizer.state[own[0]]


def findings(flags: OptimizerConfig) -> Findings:
    """Try the optimizer that ``flags`` name on small weights.

    Raises:
        ConfigError: the class is missing or unfit, or its update fails.
    """
    load_optimizer(flags)
    assert flags.optimizer_class is not None
    try:
        return _try(flags.optimizer_class, tuple(flags.optimizer_args))
    except Exception as error:  # It is the user's code.
        raise ConfigError.about(
            FLAG,
            flags.optimizer_class,
            f"fails to update a weight of shape {TRIAL_SHAPE}: {type(error).__name__}: {error}",
            "correct its `step`",
        ) from error


def check_optimizer(config: RunConfig) -> None:
    """Raise a ConfigError if a run cannot use the optimizer of ``--optimizer-class``."""
    flags = config.optimizer
    spec = flags.optimizer_class
    found = findings(flags)
    if flags.use_distributed_optimizer and not found.is_elementwise:
        raise ConfigError.about(
            FLAG,
            spec,
            "moves an element of a weight by more than the element's own gradients, which "
            "`--use-distributed-optimizer` divides among ranks",
            "leave the latter out",
        )
    checkpoint = config.checkpoint
    saves = checkpoint.is_used or checkpoint.non_persistent_save_interval is not None
    if found.odd is not None and (flags.use_distributed_optimizer or saves):
        needing = "--use-distributed-optimizer" if flags.use_distributed_optimizer else "--save"
        raise ConfigError.about(
            FLAG,
            spec,
            f"keeps {found.odd} for a weight of shape {TRIAL_SHAPE}, but `{needing}` needs state "
            "with one value for each element",
            f"leave out `{needing}`",
        )


def take_custom(
    optimizer: MegatronOptimizer, flags: OptimizerConfig, groups: ProcessGroupCollection
) -> None:
    """Replace each Adam in a chain of optimizers by the optimizer that ``--optimizer-class`` names.

    Rank 0 prints a note if tensor parallelism cuts the matrices that it looks at as a whole.
    """
    for part in parts_of(optimizer):
        if getattr(part, "optimizer", None) is not None:
            own = load_optimizer(flags)
            take_parameters(own, part.optimizer)
            part.optimizer = own
    ranks = groups.tp.size()
    if ranks > 1 and torch.distributed.get_rank() == 0 and not findings(flags).is_elementwise:
        print(
            f"> `--optimizer-class` ({flags.optimizer_class}) looks at more than one element of a "
            f"weight; each of the {ranks} tensor-parallel ranks gives it its own part of a matrix.",
            flush=True,
        )
