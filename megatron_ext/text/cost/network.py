"""A GPT as a plan sees it: `GPT_COST`, which a task hands to `planning`.

sizes.py has the numbers of a run and the layers of each stage; parameters.py, activations.py and
flops.py count from them, and the messages stand here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_ext.config.run import RunConfig
from megatron_ext.planning.network import Case, Flops, Network, TaskCost, Volume, fp8_bytes, ring
from megatron_ext.planning.stages import LayerBytes, Stage
from megatron_ext.planning.state import Weight
from megatron_ext.text.cost.activations import Activations
from megatron_ext.text.cost.flops import GptFlops, step_flops
from megatron_ext.text.cost.parameters import Parameters, in_8_bits
from megatron_ext.text.cost.sizes import Sizes, stages

RECOMPUTATION: dict[str, dict[str, object]] = {
    "none": {"recompute_granularity": None},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "recompute_modules": None,
    },
}
"""The modes of recomputation, as fields of `ModelConfig`."""


@dataclass(frozen=True)
class GptNetwork(Network):
    """The formulas of a GPT; see `Network`."""

    config: RunConfig
    sizes: Sizes

    @classmethod
    def of(cls, config: RunConfig) -> GptNetwork:
        """Return the network of a resolved run.

        Raises:
            ConfigError: no vocabulary.
        """
        return cls(config, Sizes.of(config))

    @property
    def _activations(self) -> Activations:
        return Activations(self.config, self.sizes)

    def stages(self) -> list[Stage]:
        """See `sizes.stages`."""
        return stages(self.config)

    def weights(self, stage: Stage) -> list[Weight]:
        """See `Parameters.stage`."""
        return Parameters(self.config, self.sizes).stage(stage)

    def activations(self, stage: Stage) -> LayerBytes:
        """See `Activations.stage`."""
        return self._activations.stage(stage)

    def deferred(self, stage: Stage) -> int:
        """See `Activations.deferred`."""
        return self._activations.deferred(stage)

    def fp8_weights(self, stage: Stage) -> int:
        """Return the bytes of the matrices of 8-bit layers; others may be kept in bf16."""
        eight = [n for n, layer in enumerate(stage.layers) if in_8_bits(self.config, layer)]
        names = tuple(f"decoder.layers.{n}." for n in eight)
        held = [weight for weight in self.weights(stage) if weight.name.startswith(names)]
        return fp8_bytes(self.config.fp8, held)

    def layer(self) -> LayerBytes:
        """Return the last layer."""
        return self._activations.layer(self.sizes.layers - 1)

    @property
    def layer_input(self) -> int:
        """Return the bytes of the residual stream."""
        return self._activations.residual

    @property
    def boundary(self) -> int:
        """Return the bytes of the residual stream."""
        return self.layer_input

    def loss(self) -> LayerBytes:
        """See `Activations.head`."""
        return self._activations.head()

    def flops(self, stage: Stage) -> Flops:
        """See `GptFlops.stage`."""
        return GptFlops.of(self.config, self.sizes).stage(stage)

    def step_flops(self) -> float:
        """See `flops.step_flops`."""
        return step_flops(self.config, self.sizes, self.stages())

    @property
    def tokens(self) -> int:
        """Return ``--seq-length``."""
        return self.sizes.s

    def traffic(self, stage: Stage) -> Volume:
        """See `Network.traffic`."""
        x, total = self.sizes, Volume()
        layers = [x.experts[layer] for layer in stage.layers] + [x.experts[-1]] * stage.depths
        for experts in layers:
            total += self.layer_traffic(experts)
        total += Volume(pipeline=self.messages(stage))
        if stage.head:
            total += Volume(tensor=2 * self._gather() * (1 + x.depths))
        if stage.embedding or stage.depths:
            total += Volume(tensor=2 * self._gather() * (stage.embedding + stage.depths))
        return total

    def layer_traffic(self, experts: bool) -> Volume:
        """Return one layer, forward and backward, and what recomputation repeats of it."""
        x = self.sizes
        forward = Volume(
            tensor=(2 if experts else 4) * self._gather(),
            context=self._context(),
            expert=self._dispatch() if experts else 0.0,
        )
        # Under sequence parallelism the inputs of two matrices are gathered once more.
        backward = forward + Volume(tensor=(1 if experts else 2) * self._gather())
        if not x.sequence_parallel:
            backward = forward
        model = self.config.model
        if model.recompute_granularity == "full":
            return forward * 2 + backward
        modules = model.recompute_modules or ["core_attn"]
        again = model.recompute_granularity == "selective" and "core_attn" in modules
        return forward + backward + Volume(context=forward.context if again else 0.0)

    def _gather(self) -> float:
        """Return one gather of ``[s, b, h]`` over the tensor-parallel ranks."""
        x = self.sizes
        return ring(x.tp) * x.tokens * x.h * x.width

    def _context(self) -> float:
        """Return what the attention of one layer sends between context ranks, forward."""
        x = self.sizes
        tokens, size = x.tokens, x.d * x.width // x.tp
        if self.config.parallel.cp_comm_type[0] == "a2a":
            return ring(x.cp) * tokens * (2 * x.n + 2 * x.g) * size
        return (x.cp - 1) * tokens * 2 * x.g * size

    def _dispatch(self) -> float:
        """Return the tokens that one layer sends to its experts and back, forward."""
        x, moe = self.sizes, self.config.moe
        ranks = x.ep * x.etp
        tokens = x.residual_tokens * x.h * x.width
        if moe.moe_token_dispatcher_type == "allgather":
            return 2 * (ranks - 1) * tokens
        return 2 * (ring(x.ep) + x.etp - 1) * tokens * moe.moe_router_topk


def cases(config: RunConfig) -> Sequence[Case]:
    """Return the one kind of batch of a run: all sequences have the same length."""
    return [Case(GptNetwork.of(config))]


def with_recomputation(config: RunConfig, mode: str) -> RunConfig:
    """Return the same run with another mode of `RECOMPUTATION`."""
    model = replace(config.model, **RECOMPUTATION[mode])  # type: ignore[arg-type]
    return replace(config, model=model)


GPT_COST = TaskCost(
    cases=cases, modes=tuple(RECOMPUTATION), recompute=with_recomputation, from_flags=True
)
