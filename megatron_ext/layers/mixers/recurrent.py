"""A sequence mixer that carries a state from position to position.

The hidden states are projected, and some of the projections pass a short convolution (see
`short_convolution`) before they enter the recurrence. Tensor parallelism splits the heads. Under
context parallelism each slice of the sequence starts from the state that the slices before it leave
(see `state_passing`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig, build_module
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from megatron_ext.layers.initialization import Initialize, device_of, initialize_split
from megatron_ext.layers.linear import unbiased
from megatron_ext.layers.masks import newest
from megatron_ext.layers.mixers import state_passing
from megatron_ext.layers.mixers.documents import documents_of_mask
from megatron_ext.layers.mixers.short_convolution import short_convolution
from megatron_ext.layers.transformer_layer import WithBias

if TYPE_CHECKING:
    from megatron_ext.layers.kv_cache import KeyValueCache
    from megatron_ext.layers.mixers.state_cache import StateCache, States


class Cut(NamedTuple):
    """Where documents begin in the slices of a rank, see `state_passing`.

    Attributes:
        own: the document of each position, ``[b, s]``.
        before: the documents of the positions before each slice that the convolution sees.
        segments: how many documents have begun in the slice, ``[b, s]``.
    """

    own: Tensor
    before: Tensor
    segments: Tensor


class RecurrentMixer(MegatronModule):  # type: ignore[misc]
    """A sequence mixer whose subclasses set the projections and the recurrence.

    Args:
        width: number of positions of the short convolution.

    Attributes:
        NAME: what errors call the mixer.
        conv_weight, conv_bias: of the short convolution, ``[channels, w]`` and ``[channels]`` of
            this rank's heads; the bias may be None.
        cache: the states of earlier tokens, in generation; else None.
    """

    NAME: ClassVar[str]
    cache: StateCache | None = None
    out_proj: Any
    conv_weight: torch.nn.Parameter
    conv_bias: torch.nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        width: int,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.layer_number = layer_number
        self.width = width
        self.tp_group = groups.tp
        self.cp_group = groups.cp
        self.register_parameter("conv_bias", None)

    def linear(self, kind: Any, inputs: int, outputs: int) -> Any:
        """Return a linear layer of this class without a bias, see `layers.linear.unbiased`."""
        return unbiased(kind, inputs, outputs, self.config, self.tp_group)

    def row_linear(self, kind: Any, inputs: int) -> Any:
        """Return the linear layer that projects the outputs of all heads back."""
        return build_module(
            kind,
            inputs,
            self.config.hidden_size,
            config=self.config,
            init_method=self.config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def parameter(self, method: Initialize, *shape: int) -> torch.nn.Parameter:
        """Return a parameter of this shape, whose first axis the ranks split."""
        values = torch.empty(shape, dtype=self.config.params_dtype, device=device_of(self.config))
        parameter = torch.nn.Parameter(values)
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        initialize_split(parameter, method, self.config, self.tp_group)
        return parameter

    def taps(self, channels: int) -> torch.nn.Parameter:
        """Return the weight of the short convolution of this rank's channels, ``[channels, w]``."""
        weight = self.parameter(self.uniform, channels, self.width)
        weight.is_table = True  # type: ignore[attr-defined]
        return weight

    def uniform(self, draws: Tensor) -> Tensor:
        """Fill a parameter of the short convolution, as torch and Megatron-LM do."""
        bound = self.width**-0.5
        return draws.uniform_(-bound, bound)

    def projected(self, hidden: Tensor) -> Tensor:
        """Return ``[s, b, c]``, all that the mixer reads of the hidden states ``[s, b, h]``.

        Under sequence parallelism the hidden states are ``[s/tp, b, h]``.
        """
        raise NotImplementedError

    def mixed(self, projected: Tensor, documents: Tensor | None) -> Tensor:
        """Return the outputs of this rank's slices ``[b, s, d]``, before they are projected back.

        ``projected`` is ``[b, s, c]``, and ``documents`` those of the whole sequences, or None.
        """
        raise NotImplementedError

    def recur(self, projected: Tensor, states: States | None) -> tuple[Tensor, States]:
        """Return the outputs ``[b, s, d]`` of tokens, and the states after them.

        Args:
            projected: ``[b, s, c]``.
            states: the last inputs of the convolution ``[b, w - 1, channels]``, and the states of
                the recurrence, before these tokens; None at the beginning of sequences.
        """
        raise NotImplementedError

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_unused: Any
    ) -> WithBias:
        """Return the output ``[s, b, h]``, and None or a bias that the caller must add.

        Under sequence parallelism input and output are ``[s/tp, b, h]``.

        Args:
            attention_mask: documents or a dense mask, see `layers.masks`; None means one document.

        Raises:
            ConfigError: the mask is dense, and not causal.
        """
        projected = self.projected(hidden_states)
        if self.cache is not None:
            mixed = self.cache.run(projected, self.recur)
        else:
            group = self.cp_group
            documents = documents_of_mask(attention_mask, self.NAME)
            rows = self.mixed(state_passing.slices(projected, group), documents)
            mixed = state_passing.joined(rows, group)
        output: WithBias = self.out_proj(mixed)
        return output

    def convolved(self, inputs: Tensor, cut: Cut | None) -> Tensor:
        """Return the short convolution of this rank's slices, ``[b, s, channels]``."""
        before = None
        if self.cp_group.size() > 1:
            before = state_passing.inputs_before(inputs, self.width - 1, self.cp_group)
        return short_convolution(
            inputs,
            self.conv_weight,
            self.conv_bias,
            documents=None if cut is None else cut.own,
            before=before,
            documents_before=None if cut is None or before is None else cut.before,
        )

    def continued(self, inputs: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the short convolution of tokens ``[b, s, channels]``, and its last inputs.

        ``before`` has the last inputs before these tokens, ``[b, w - 1, channels]``; None for the
        beginning of sequences.
        """
        if before is None:
            before = inputs.new_zeros(len(inputs), self.width - 1, inputs.size(2))
        convolved = short_convolution(inputs, self.conv_weight, self.conv_bias, before=before)
        return convolved, torch.cat((before, inputs), dim=1)[:, inputs.size(1) :]

    def cut(self, documents: Tensor | None) -> Cut | None:
        """Return where the documents ``[b, cp * s]`` begin in this rank's slices; None for None."""
        if documents is None:
            return None
        group = self.cp_group
        reach = self.width - 1

        def made() -> Cut:
            return Cut(
                state_passing.documents_of_slices(documents, group),
                state_passing.documents_before(documents, reach, group),
                state_passing.segments_of_slices(documents, group),
            )

        return newest.find(documents, ("slices", group.rank(), group.size(), reach), made)

    def new_cache(self, cache: KeyValueCache) -> StateCache:
        """Return an empty cache of this layer; ``cache`` is the state that all layers share."""
        from megatron_ext.layers.mixers.state_cache import StateCache

        return StateCache(cache)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sharded state; tensor-parallel ranks split the heads."""
        own = dict(self.named_parameters(recurse=False))
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return state


def decay_rate(draws: Tensor) -> Tensor:
    """Fill ``A_log`` with logarithms of numbers between 1 and 16, as Megatron-LM does."""
    return draws.uniform_(1, 16).log_()
