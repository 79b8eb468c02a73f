"""The cost of sparse attention (`layers.mixers.sparse_attention`) on latent attention.

The indexer adds projections that every tensor-parallel rank holds whole, a score for each pair of
tokens, and masks of the chosen keys. Attention computes the products of all pairs, block by block
of queries, and hides those that are not chosen.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.config.run import RunConfig
from megatron_ext.planning.kernels import Phase
from megatron_ext.planning.network import ring
from megatron_ext.planning.products import FORWARD_AND_BACKWARD, MULTIPLY_AND_ADD, Linear
from megatron_ext.planning.stages import FP32, LayerBytes, layer_norm
from megatron_ext.planning.weights import Weight
from megatron_ext.text.config.attention import LatentAttentionConfig
from megatron_ext.text.config.hybrid import MixerConfig
from megatron_ext.text.cost.mixer import Mixer, Run
from megatron_ext.text.cost.products import attention_matrices, score_channels

INDEXER = "core_attention.indexer"
"""The path of the indexer in a layer's attention."""
CPU_BLOCK = 2**24
GPU_BLOCK = 2**27
"""Largest number of scores of all heads that a device computes at a time."""
KERNELS_OF_BLOCK = 20
"""The number of kernels that score the keys of a block of queries, and choose among them."""
COPIES_OF_BLOCK = {False: 2, True: 4}
"""Tensors with the scores of all heads of a block at a time, by whether the indexer learns."""
CHOICE_PASSES = 12
"""How many times the scores of a block, summed over heads, are read or written to choose keys."""


@dataclass(frozen=True)
class SparseAttention(Mixer):
    """The cost of a layer's sparse attention; channels are counted per token.

    Attributes:
        config: the resolved configuration.
        h: channels of the hidden state.
        query_inputs: channels of the vector from which the indexer's queries are computed.
        heads, channels: number of the indexer's heads, and channels of each of them.
        topk: number of keys that a query chooses.
        learns: whether the indexer has a loss, and is trained.
    """

    attends: ClassVar[bool] = True
    config: RunConfig
    h: int
    query_inputs: int
    heads: int
    channels: int
    topk: int
    learns: bool

    @classmethod
    def of(cls, config: RunConfig) -> SparseAttention:
        sizes = config.section(MixerConfig)
        h = config.model.hidden_size or 0
        return cls(
            config=config,
            h=h,
            query_inputs=config.section(LatentAttentionConfig).q_lora_rank or h,
            heads=sizes.dsa_indexer_n_heads or 0,
            channels=sizes.dsa_indexer_head_dim or 0,
            topk=sizes.dsa_indexer_topk or 0,
            learns=bool(sizes.dsa_indexer_loss_coeff),
        )

    def of_indexer(self) -> list[Linear]:
        """Return the indexer's linear layers, in the module's order; a norm follows the second."""
        outputs = self.heads * self.channels
        return [
            Linear(f"{INDEXER}.linear_wq_b", outputs, self.query_inputs, bias=False),
            Linear(f"{INDEXER}.linear_wk", self.channels, self.h, bias=False),
            Linear(f"{INDEXER}.linear_weights_proj", self.heads, self.h, bias=False),
        ]

    def matrices(self, tp: int) -> list[Linear]:
        return [*self.of_indexer(), *attention_matrices(self.config, tp)]

    @property
    def length(self) -> int:
        """Return the number of tokens of a sequence."""
        return self.config.model.seq_length or 0

    @property
    def is_dense(self) -> bool:
        """Return whether each query attends to all keys, so that none has to be chosen."""
        return self.length <= self.topk

    @property
    def scored(self) -> int:
        """Return the multiplications of the indexer's scores per token, half of all pairs."""
        return self.heads * (self.channels + 1) * self.length // 2

    @property
    def mixing(self) -> int:
        """Return the multiplications of the chosen keys, and of the indexer's scores.

        Training takes three times as many. But the scores of an indexer without a loss have no
        backward pass, and are a third here.
        """
        count = min(self.topk, self.length)
        # The length of a causal sequence whose queries have as many keys on average.
        chosen = 2 * count - 1 - count * (count - 1) // max(1, self.length)
        scores = 0 if self.is_dense and not self.learns else self.scored
        if not self.learns:
            scores //= FORWARD_AND_BACKWARD
        return score_channels(self.config) * chosen + scores

    def chunk_flops(self, run: Run) -> float:
        """Return the operations for pairs that are not chosen, and for what the indexer learns."""
        count = min(self.topk, self.length)
        chosen = 2 * count - 1 - count * (count - 1) // max(1, self.length)
        hidden = score_channels(self.config) * (self.length - chosen)
        target = run.sizes.n * run.sizes.key * self.length // 2 if self.learns else 0
        per_token = hidden + target / FORWARD_AND_BACKWARD
        return float(MULTIPLY_AND_ADD * per_token * run.sizes.tokens / run.sizes.tp)

    def weights(self, run: Run, name: str) -> list[Weight]:
        queries, keys, weights = self.of_indexer()
        norm = f"{name}.{INDEXER}.k_norm"
        found = run.linear_weights(name, [queries, keys])
        if run.block.norm_elementwise_affine:
            found.append(Weight(f"{norm}.weight", self.channels))
            if run.block.norm_bias:
                found.append(Weight(f"{norm}.bias", self.channels))
        found += run.linear_weights(name, [weights])
        if not self.learns:
            found = [dataclasses.replace(weight, frozen=True) for weight in found]
        return [*found, *run.attention_weights(name)]

    def inputs(self, run: Run) -> dict[str, int]:
        # The indexer's linear layers have the inputs of others.
        found: dict[str, int] = run.attention_inputs()
        return found

    def deferred(self, run: Run) -> int:
        # Without gradients of inputs, weight gradients do not wait.
        return int(run.attention_deferred())

    def blocks(self, run: Run) -> int:
        """Return the number of blocks of a rank's queries."""
        x = run.sizes
        heads = self.heads
        if self.learns or run.attends_eagerly:
            heads = max(heads, x.n // x.tp)
        numbers = GPU_BLOCK if x.gpu else CPU_BLOCK
        rows = max(1, numbers // (x.b * heads * x.s))
        slices = 2 if x.cp > 1 else 1
        return int(slices * -(-(x.s // x.cp // slices) // rows))

    def mean_keys(self, run: Run) -> int:
        """Return the mean number of keys up to the end of a block of queries."""
        blocks = self.blocks(run) * run.sizes.cp
        return int(run.sizes.s * (blocks + 1) // (2 * blocks))

    def kept(self, run: Run) -> LayerBytes:
        x = run.sizes
        heads = x.n // x.tp
        width = x.width
        out = x.tokens * heads * x.d * width
        kept = run.qk() + out
        if x.cp > 1 and not self.is_dense and x.latent is not None:
            kept += (x.cp - 1) * x.residual_tokens * x.latent.rank * width
        scores = run.scores()
        if not self.is_dense:
            keys = self.mean_keys(run)
            # Kernels keep a mask as a bias of scores; outputs of blocks are copied into one.
            scores = x.tokens * (keys * width + heads * FP32) + (out if self.blocks(run) > 1 else 0)
            if run.attends_eagerly:
                numbers = x.tokens * heads * keys
                scores = numbers * (FP32 if x.half else width) + x.tokens * keys
                scores += numbers * width if x.half else 0
        scores += self._learned(run)
        block = self.block(run)
        # Keys are chosen in the forward pass, before outputs and masks of all blocks are kept.
        transient = max(run.attention_transient() - run.residual, block - scores - out)
        if run.recomputes("core_attn"):
            return LayerBytes(kept, transient + scores + out)
        return LayerBytes(kept + scores, transient)

    def block(self, run: Run) -> int:
        """Return the bytes of the scores of a block of queries, while keys are chosen.

        Tensor-parallel ranks share the queries of a block.
        """
        if self.is_dense and not self.learns:
            return 0
        x = run.sizes
        slices = 2 if x.cp > 1 else 1
        numbers = x.tokens // slices * self.heads * x.s
        numbers = min(numbers, GPU_BLOCK if x.gpu else CPU_BLOCK) // x.tp
        return int(numbers * FP32 * COPIES_OF_BLOCK[self.learns])

    def _learned(self, run: Run) -> int:
        """Return the bytes kept for the indexer's own backward pass."""
        if not self.learns:
            return 0
        x = run.sizes
        queries = x.tokens * self.heads * self.channels * x.width
        keys = x.s * x.b * self.channels * FP32
        weights = x.tokens * self.heads * FP32
        norm = x.residual_tokens * self.channels * x.width + layer_norm(x.residual_tokens)
        return int(queries + keys + weights + norm)

    def gathers(self, run: Run) -> float:
        """Return the bytes of small vectors and of what the indexer needs of all queries.

        They are index vectors, masks of the chosen keys, and probabilities to learn from.
        """
        x = run.sizes
        small = 0 if x.latent is None else x.latent.small
        projected = self.heads * (self.channels + 1) + self.channels
        total = run.gather() * (small + projected) / x.h
        if not self.is_dense or self.learns:
            pairs = x.tokens * self.mean_keys(run)
            total += ring(x.tp) * pairs * (1 + FP32 * self.learns)
        return float(total)

    def context(self, run: Run) -> float:
        x = run.sizes
        index = (x.cp - 1) * x.tokens * self.channels * x.width
        if self.is_dense or x.latent is None:
            keys = (x.cp - 1) * x.tokens * x.width // x.tp * x.g * x.key
            return float(run.context() + (index + keys if self.learns else 0))
        small = x.residual_tokens * x.latent.rank + x.tokens * x.latent.rotated
        return float((x.cp - 1) * small * x.width + index)

    def kernels(self, run: Run) -> dict[tuple[str, Phase], int]:
        linears = len(self.of_indexer())
        blocks = self.blocks(run)
        chooses = 0 if self.is_dense and not self.learns else KERNELS_OF_BLOCK * blocks
        return {
            ("linear", Phase.FORWARD): 2 + linears,
            ("linear", Phase.INPUT): 2,
            ("linear", Phase.WEIGHT): 2 + linears * self.learns,
            ("attention", Phase.FORWARD): 1 if self.is_dense else blocks,
            ("attention", Phase.INPUT): 3 if self.is_dense else 3 * blocks,
            ("pointwise", Phase.FORWARD): 3 + chooses * (2 if self.learns else 1),
            ("pointwise", Phase.INPUT): 1,
        }

    def moved(self, run: Run) -> tuple[float, float]:
        x = run.sizes
        qkv = 2 * x.tokens * x.projected // x.tp * x.width
        pairs = x.tokens * self.mean_keys(run) // x.tp
        scores = 0 if self.is_dense and not self.learns else pairs * FP32
        # The products of each head are rectified, and summed; learning reads them again.
        of_heads = scores * self.heads * (3 + 4 * self.learns)
        learned = pairs * x.n * FP32 * 4 * self.learns
        return float(qkv + of_heads + scores * CHOICE_PASSES + learned), float(qkv)

    def hosted(self, run: Run, part: str) -> tuple[int, int]:
        x = run.sizes
        out = x.tokens * x.n // x.tp * x.d * x.width
        most = {
            "qkv_linear": run.residual + run.qk(),
            "core_attn": self.kept(run).kept + out,
            "attn_proj": out,
        }
        return 0, int(most[part])

    def described(self, run: Run) -> dict[str, float | None]:
        return {"message": self.context(run)}
