"""The base class of our GPTModel, with the forward pass and our MTP losses."""

import copy
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor

from megatron_ext.layers.auxiliary_loss import MTPTargets, OutputHead, attach
from megatron_ext.layers.linear import OutputLayer, WordEmbedding
from megatron_ext.layers.subclass import specialize


class TextModel(LanguageModule):  # type: ignore[misc]
    """The base class of our text models.

    A subclass names it before a model class of megatron-core, so that its methods take precedence.
    It differs from megatron-core's models in two main ways. The caller sets the weights of the MTP
    losses (`MTPTargets`), whereas megatron-core derives them from token counts of the local
    micro-batch. The copy of the word embedding on an MTP stage is marked as an embedding, so that
    the decoupled learning rate applies to every copy.

    Attributes:
        has_changed_layers: whether `build_gpt_chunk` was given ``change_layers``.
        logits_divisor: number by which the hidden states are divided before the output head
            multiplies them, which divides the logits (``--logits-scaling``).
    """

    has_changed_layers = False
    logits_divisor: float = 1.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logits_divisor = getattr(self.config, "logits_scaling", 1.0)
        if self.post_process:
            # Our layer can defer the gradient of its weight; it has no adapter and no 8-bit scales.
            specialize(self.output_layer, OutputLayer)
            self.output_layer.lora = self.output_layer.fp8 = None
            if self.share_embeddings_and_output_weights and self.mtp_process:
                # The copy of the embedding that multi-token prediction holds serves the output.
                self.output_layer.weight = None
        if hasattr(self, "embedding"):
            # Our embedding can add its gradients to the gradient buffer itself.
            specialize(self.embedding.word_embeddings, WordEmbedding)
            self.embedding.word_embeddings.config = self.config
        if hasattr(self, "embedding") and getattr(self.config, "deterministic_dropout", False):
            from megatron_ext.layers.dropout import HiddenDropout

            probability = self.config.hidden_dropout
            cut = self.config.sequence_parallel
            self.embedding.embedding_dropout = HiddenDropout(
                probability, "embedding", self.pg_collection, cut
            )
        if self.mtp_process:
            self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
            if self.config.recompute_num_layers is not None:
                for depth in self.mtp.layers:
                    depth.config = copy.copy(self.config)
                    # Core recomputes depths one by one; the flag counts layers of the decoder only.
                    depth.config.recompute_num_layers = 1
                    # A depth's input, which core would cut in place, is read again after it.
                    depth.config.distribute_saved_activations = False

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        labels: Tensor | None = None,
        mtp_targets: MTPTargets | None = None,
        hidden_states_only: bool = False,
    ) -> Tensor:
        """Run this chunk on a micro-batch; under context parallelism, s is the local length.

        Args:
            input_ids, position_ids, labels: ``[b, s]``.
            attention_mask: the document index of each position of the whole sequences
                ``[b, cp * s]``, or a dense mask ``[b, 1, s, cp * s]`` that is True where attention
                is forbidden; None means causal.
            mtp_targets: the targets of the MTP depths; None adds no MTP losses.
            hidden_states_only: whether to stop before the output head, for a loss function that
                applies the head itself.

        Returns:
            Before the last stage: hidden states ``[s, b, h]``. In training, a separate MTP stage
            appends the hidden states of the MTP depths: ``[(1 + depths) * s, b, h]``.
            On the last stage: losses ``[b, s]`` if ``labels`` are given, otherwise logits
            ``[b, s, v/tp]``. With ``hidden_states_only``, the last stage returns the input of the
            output head instead: the decoder's hidden states, then those of the MTP depths, if any.
        """
        decoder_input, rotary, cos, sin, offset, padding_mask = self._preprocess(
            input_ids=input_ids, position_ids=position_ids
        )[:6]
        hidden = self.decoder(
            hidden_states=decoder_input,
            attention_mask=attention_mask,
            rotary_pos_emb=rotary,
            rotary_pos_cos=cos,
            rotary_pos_sin=sin,
            sequence_len_offset=offset,
            padding_mask=padding_mask,
        )
        at_end = self.post_process or self.mtp_process
        if at_end and hidden.dtype != self.config.params_dtype:
            # A residual stream in float32 ends at the final norm, which an earlier stage may hold.
            hidden = hidden.to(self.config.params_dtype)
        has_depths = self._has_depths(mtp_targets)
        if self.mtp_process and has_depths:
            hidden = self.mtp(
                input_ids=input_ids,
                position_ids=position_ids,
                hidden_states=hidden,
                attention_mask=attention_mask,
                rotary_pos_emb=rotary,
                embedding=self.embedding,
            )
        if not self.post_process:
            return hidden.to(self.config.pipeline_dtype)  # type: ignore[no-any-return]
        hidden = self.before_head(hidden)
        if self.logits_divisor != 1.0:
            hidden = hidden / self.logits_divisor
        if hidden_states_only:
            return hidden
        if has_depths:
            hidden = self._with_mtp_losses(hidden, mtp_targets)
        logits = self.logits(hidden)
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(labels, logits)  # type: ignore[no-any-return]

    def before_head(self, hidden: Tensor) -> Tensor:
        """Return ``hidden`` as the input of the output head; a subclass may change it here.

        Every loss is computed from the result. Hidden states are ``[s, b, h]``, or ``[s/tp, b, h]``
        under sequence parallelism; those of the MTP depths follow along the first axis.
        """
        return hidden

    def _has_depths(self, targets: MTPTargets | None) -> bool:
        """Tell whether an MTP or last stage has hidden states of MTP depths in a forward pass."""
        # A separate MTP stage gets no targets; there, MTP runs whenever the model trains.
        if self.config.mtp_standalone:
            return bool(self.training)
        return targets is not None and self.mtp_process

    def output_head(self) -> OutputHead:
        return OutputHead(
            softcap=self._softcap,
            weight=self.output_layer(None, weight=self.head_weight(), weight_only=True),
            tp_group=self.output_layer.tp_group,
            sequence_parallel=self.config.sequence_parallel,
            config=self.config,
        )

    @property
    def _softcap(self) -> float | None:
        return getattr(self.config, "final_logit_softcapping", None)

    def head_weight(self) -> Tensor | None:
        """Return the weight of the output head if it is the embedding's; None if it is its own."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()  # type: ignore[no-any-return]
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return vocabulary-parallel logits ``[s, b, v/tp]`` of ``hidden`` from `before_head`."""
        logits: Tensor
        logits, _ = self.output_layer(hidden, weight=self.head_weight())
        return self.capped(logits)

    def capped(self, logits: Tensor) -> Tensor:
        """Return logits bounded by ``--final-logit-softcapping``, if it is given."""
        cap = self._softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _with_mtp_losses(self, states: Tensor, targets: MTPTargets | None) -> Tensor:
        """Return the decoder's hidden states ``[s, b, h]`` with the MTP losses attached to them.

        The attached losses do not change the values; the backward pass adds their gradients.
        ``states`` holds the decoder's hidden states, then those of each MTP depth, along the first
        axis.
        """
        hidden, *depths = torch.chunk(states, 1 + self.config.mtp_num_layers, dim=0)
        if targets is None:
            return hidden
        for depth, depth_hidden in enumerate(depths):
            logits = self.logits(depth_hidden)
            losses = self.compute_language_model_loss(targets.labels[depth], logits)
            targets.record(depth, losses)
            hidden = attach(hidden, targets.weights[depth] * losses, self.config)
        return hidden
