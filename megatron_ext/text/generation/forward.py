"""Runs forward passes over the new tokens of several texts, in the model's parallel layout.

All ranks of a replica have the same texts and call these functions together. With pipeline stages
the texts are split into as many micro-batches as there are stages, so that all stages work at once.
On one stage no pipeline runs, and where its layers are known to `layers.inference`, a pass calls
torch's functions instead of modules.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.distributed import ReduceOp

from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.layers.inference import InferenceDecoder, Product, inference_decoder
from megatron_ext.layers.kv_cache import KeyValueCache, PackedTokens, Segment
from megatron_ext.layers.linear import OutputLayer
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.schedules.forward import collect_outputs, evaluating, forward_engine
from megatron_ext.schedules.runtime import PipelineEngine
from megatron_ext.text.config.hugging_face import HuggingFaceConfig
from megatron_ext.text.config.positions import PositionConfig
from megatron_ext.text.model.language import TextModel

if TYPE_CHECKING:
    from megatron_ext.train.run import Run


@dataclass(frozen=True)
class NewTokens:
    """The next tokens of a text to run, and the cache segment that takes their keys and values."""

    segment: Segment
    ids: Sequence[int]


@dataclass(frozen=True)
class MicroBatch:
    """The new tokens of some texts, and the keyword arguments to call model chunks with."""

    tokens: PackedTokens
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Hidden:
    """The hidden states ``[s, 1, h]`` of a micro-batch before the output head; s counts padding."""

    tokens: PackedTokens
    states: Tensor


def check_model(config: RunConfig) -> None:
    """Raise a ConfigError if text cannot be generated or scored with these flags.

    This needs a key-value cache, which context parallelism and Transformer Engine do not have here.
    """
    errors = []
    if config.parallel.context_parallel_size > 1:
        errors.append(
            f"`--context-parallel-size` ({config.parallel.context_parallel_size}) must be 1 where "
            "text is generated or scored; give these ranks to `--tensor-model-parallel-size`."
        )
    if config.model.transformer_impl == "transformer_engine":
        errors.append(
            "`--transformer-impl` (transformer_engine) has no cache of keys and values here; give "
            "`--transformer-impl torch` where text is generated or scored."
        )
    if errors:
        raise ConfigError(errors)


class PackedForward:
    """Runs model chunks over the new tokens of several texts, which share one key-value cache.

    `run` may be called only inside ``with ready(...)``. If expert parallelism spans replicas, all
    replicas must call `run` equally often; a replica without texts passes an empty list.

    Args:
        engine: the pipeline engine of a training run; None builds one for forward passes only, if
            there are several stages.

    Raises:
        ConfigError: the model is not a `TextModel`.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        transformer_config: Any,
        config: RunConfig,
        context: ParallelContext,
        device: torch.device,
        engine: PipelineEngine | None = None,
    ) -> None:
        model = unwrap_model(chunks[-1])
        if not isinstance(model, TextModel):
            raise ConfigError(
                f"The model `{type(model).__name__}` cannot write or score texts; derive it from "
                "`megatron_ext.text.model.gpt.GPTModel`."
            )
        self.chunks = list(chunks)
        self.context = context
        self.device = device
        self._model: TextModel = model
        self._engine: PipelineEngine | None = None
        if context.layout.pipeline_model_parallel_size > 1:
            self._engine = engine or forward_engine(chunks, transformer_config, context)
        self._config = transformer_config
        self._run_config = config
        self._halves = config.precision.bf16 or config.precision.fp16
        self._multiple = context.pgs.tp.size() if config.parallel.sequence_parallel else 1
        layout = context.layout
        expert_ranks = layout.expert_model_parallel_size * layout.expert_tp
        self._in_step = expert_ranks > layout.tensor_model_parallel_size
        self._cache = KeyValueCache(0, 0)
        self._decoder: InferenceDecoder | None = None
        self._head: Product | None = None

    @classmethod
    def of_run(cls, run: Run) -> PackedForward:
        """Return a `PackedForward` of the model that a run holds."""
        runner = run.runner
        config = runner.transformer_config
        return cls(run.chunks, config, run.config, run.context, run.device, runner.engine)

    @property
    def max_length(self) -> int:
        """Return the largest number of tokens in a text: the model's number of positions."""
        longest = self._run_config.section(PositionConfig).max_position_embeddings
        assert longest is not None
        return longest

    @property
    def decides(self) -> bool:
        """Tell whether this rank is the one of its replica that chooses tokens and has results."""
        return self.context.rank == self.deciding_rank

    @functools.cached_property
    def short_length(self) -> int | None:
        """Return the largest length of a text for which LongRoPE uses its short divisors.

        When a text grows beyond it, all positions are rotated differently, so that all of its
        tokens must be run again. Return None for models without LongRoPE.
        """
        lengths = (getattr(module, "short_length", None) for module in self._rotary_embeddings)
        return next((length for length in lengths if length is not None), None)

    @functools.cached_property
    def deciding_rank(self) -> int:
        """Return the rank that chooses the tokens of this replica.

        It is a rank of the last pipeline stage, which has the logits.
        """
        layout = self.context.layout
        own = self.context.layout.position(self.context.rank)
        position = {
            **own,
            "pp": self.context.last_stage_pp_rank,
            "tp": self.context.pgs.tp.size() - 1,
        }
        return layout.rank_at(position)

    @contextmanager
    def ready(self, num_slots: int, max_length: int) -> Iterator[None]:
        """Prepare the model for `run` in a ``with`` block: evaluation mode, no gradients, a cache.

        The key-value cache has ``num_slots`` slots of ``max_length`` tokens. The weights must not
        change in the block.
        """
        self._cache = cache = KeyValueCache(num_slots, max_length)
        trains = any(p.requires_grad for chunk in self.chunks for p in chunk.parameters())
        with ExitStack() as undo:
            # Autograd cannot save what is made in inference mode, and modules keep some tensors.
            undo.enter_context(torch.no_grad() if trains else torch.inference_mode())
            if self._run_config.optimizer.shards_weights:
                from megatron_ext.layers.weight_shards import whole_weights

                # The replicas write texts of their own, so layers cannot be gathered in step.
                undo.enter_context(whole_weights(self.chunks))
            undo.enter_context(evaluating(self.chunks))
            for module in self._modules:
                new_cache: Any = getattr(module, "new_cache", None)
                if new_cache is not None:
                    module.cache = new_cache(cache)
                    undo.callback(setattr, module, "cache", None)
            undo.callback(self._forget_decoder)
            self._prepare_decoder()
            for module in self._rotary_embeddings:
                undo.callback(module.register_forward_pre_hook(cache.all_positions).remove)
                undo.callback(module.register_forward_hook(cache.token_angles).remove)
            yield

    def _prepare_decoder(self) -> None:
        """Look up what a pass on one stage needs of the model, if `layers.inference` knows it."""
        model: Any = self._model
        positions = model.position_embedding_type
        hooked = any(each._forward_hooks or each._forward_pre_hooks for each in self._modules)
        if (
            self._engine is not None
            or hooked
            or model.has_changed_layers
            or type(model).forward is not TextModel.forward
            or positions not in ("learned_absolute", "none", "rope")
        ):
            return
        latent = getattr(self._config, "multi_latent_attention", False)
        rotary = model.rotary_pos_emb if positions == "rope" and not latent else None
        self._decoder = inference_decoder(model.decoder, self._cache, rotary)
        head = model.output_layer
        adapted = head.lora is not None or head.fp8 is not None
        is_plain = type(head) is OutputLayer and type(model).logits is TextModel.logits
        if self._decoder is not None and is_plain and not adapted:
            weight = model.head_weight()
            self._head = Product(head.weight if weight is None else weight, head.bias)

    def _forget_decoder(self) -> None:
        self._decoder = self._head = None

    @property
    def _modules(self) -> list[torch.nn.Module]:
        return [module for chunk in self.chunks for module in chunk.modules()]

    @functools.cached_property
    def _rotary_embeddings(self) -> list[torch.nn.Module]:
        """Return the rotary embeddings of all chunks.

        An embedding that several layers share is listed once.
        """
        embeddings = (getattr(module, "rotary_pos_emb", None) for module in self._modules)
        own = [each for each in embeddings if isinstance(each, RotaryEmbedding)]
        return list(dict.fromkeys(own))

    def any_left(self, has_texts: bool) -> bool:
        """Tell whether `run` must be called again, because a replica has texts left.

        ``has_texts`` tells whether this replica has. The other replicas matter only if expert
        parallelism spans replicas.
        """
        if not self._in_step:
            return has_texts
        left = torch.tensor(int(has_texts), device=self.device)
        torch.distributed.all_reduce(left, op=ReduceOp.MAX, group=self.context.pgs.dp)
        return bool(left)

    def run(self, texts: Sequence[NewTokens]) -> list[Hidden]:
        """Run the model over the new tokens of texts; return the hidden states of each micro-batch.

        Ranks of pipeline stages before the last return [].
        """
        batches = self._micro_batches(texts)
        if self._engine is None:
            (batch,) = batches
            self._cache.tokens = batch.tokens
            return [Hidden(batch.tokens, self._gathered(self._on_one_stage(batch)))]
        length = batches[0].tokens.length // self._multiple
        shape = length, 1, self._config.hidden_size

        def before(index: int) -> None:
            self._cache.tokens = batches[index].tokens

        inputs = [batch.arguments for batch in batches]
        outputs = collect_outputs(self._engine, inputs, shape, before)
        return [
            Hidden(batch.tokens, self._gathered(output))
            for batch, output in zip(batches, outputs, strict=False)
        ]

    def _on_one_stage(self, batch: MicroBatch) -> Tensor:
        """Return the hidden states of a micro-batch on the only pipeline stage."""
        if self._decoder is None:
            output: Tensor = self.chunks[0](**batch.arguments)
            return output
        embedded = self._model.embedding(
            input_ids=batch.arguments["input_ids"], position_ids=batch.arguments["position_ids"]
        )
        hidden = self._model.before_head(self._decoder(embedded).to(self._config.params_dtype))
        divisor = self._model.logits_divisor
        return hidden if divisor == 1.0 else hidden / divisor

    def _gathered(self, output: Tensor) -> Tensor:
        """Gather hidden states, split by sequence parallelism, into ``[s, 1, h]``."""
        if self._multiple == 1:
            return output
        whole: Tensor = gather_from_sequence_parallel_region(output, group=self.context.pgs.tp)
        return whole

    def _micro_batches(self, texts: Sequence[NewTokens]) -> list[MicroBatch]:
        """Split texts into micro-batches with about equally many texts each.

        All micro-batches are padded to the same number of tokens.
        """
        count = min(self.context.layout.pipeline_model_parallel_size, max(1, len(texts)))
        bounds = [len(texts) * i // count for i in range(count + 1)]
        groups = [texts[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
        longest = max(sum(len(text.ids) for text in group) for group in groups)
        if self._in_step:
            sizes = torch.tensor([count, longest], device=self.device)
            torch.distributed.all_reduce(sizes, op=ReduceOp.MAX, group=self.context.pgs.dp)
            count, longest = sizes.tolist()
            groups += [[] for _ in range(count - len(groups))]
        longest = -(-max(longest, 1) // self._multiple) * self._multiple
        return [self._micro_batch(group, longest) for group in groups]

    def _micro_batch(self, texts: Sequence[NewTokens], length: int) -> MicroBatch:
        tokens = PackedTokens([text.segment for text in texts], length, self.device)
        ids_of = {text.segment.slot: text.ids for text in texts}
        ids = [i for segment in tokens.segments for i in ids_of[segment.slot]]
        ids += [0] * (length - len(ids))
        arguments: dict[str, Any] = {
            "input_ids": torch.tensor([ids], device=self.device),
            "position_ids": tokens.positions.unsqueeze(0),
            "attention_mask": None,
            "hidden_states_only": True,
        }
        if self._halves:
            # megatron-core's wrapper of 16-bit models would cast the hidden states to float32.
            arguments["fp32_output"] = False
        return MicroBatch(tokens, arguments)

    @functools.cached_property
    def model_vocab_size(self) -> int | None:
        """Return the vocabulary size of the Hugging Face model from which the run's weights came.

        Without such a model, return the tokenizer's vocabulary size; None if it is unknown.
        """
        if self._run_config.has(HuggingFaceConfig):
            source = self._run_config.section(HuggingFaceConfig).model()
            if source is not None:
                return source.vocab_size
        return self._run_config.model.unpadded_vocab_size

    def logits(self, states: Tensor, vocab_size: int | None = None) -> Tensor:
        """Return float32 logits ``[n, v]`` of hidden states ``[n, 1, h]``.

        v is ``vocab_size``; if that is None, the tokenizer's vocabulary size. Call this on all
        tensor-parallel ranks of the last pipeline stage together, and on no others.
        """
        number = states.size(0)
        tp = self.context.pgs.tp
        if self._multiple > 1:
            # Under sequence parallelism the output layer gathers its input from all ranks, so give
            # it this rank's part.
            padded = torch.nn.functional.pad(states, (0, 0, 0, 0, 0, -number % tp.size()))
            states = padded.chunk(tp.size())[tp.rank()]
        if self._head is None:
            found = self._model.logits(states)[:number, 0]
        else:
            found = self._model.capped(self._head(states[:, 0]))
        own = found.float().contiguous()
        parts = [own]
        if tp.size() > 1:
            parts = [torch.empty_like(own) for _ in range(tp.size())]
            torch.distributed.all_gather(parts, own, group=tp)
        size = self._run_config.model.unpadded_vocab_size if vocab_size is None else vocab_size
        return torch.cat(parts, dim=-1)[:, :size]

    def next_logits(self, texts: Sequence[NewTokens]) -> dict[int, Tensor]:
        """Run new tokens; return the logits ``[v]`` of each text's next token, by cache slot.

        Ranks of pipeline stages before the last return {}.
        """
        by_slot: dict[int, Tensor] = {}
        for hidden in self.run(texts):
            if hidden.tokens.segments:
                tokens = hidden.tokens
                last = slice(None) if tokens.only_singles else tokens.last_tokens
                logits = self.logits(hidden.states[last])
                slots = [segment.slot for segment in hidden.tokens.segments]
                by_slot |= dict(zip(slots, logits, strict=True))
        return by_slot
