"""One pipeline chunk of a network of double and single blocks on [text; image].

A network adds how it embeds the text, and the arguments of ``forward``.

Every block of every stage needs ``vec``, the embedding of timestep and pooled text. It is sent as
one more row of the hidden tensor, ``[s + 1, b, h]``. The pipeline's own messages then carry its
gradient back to the first stage, and only that stage holds the embedders.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.video.config.joint import JointSizes
from megatron_ext.video.config.sizes import TIMESTEP_WIDTH
from megatron_ext.video.model.attention import rotary_table
from megatron_ext.video.model.chunk import Blocks, Blueprint, Part, VideoChunk
from megatron_ext.video.model.joint_blocks import (
    DoubleBlock,
    FinalLayer,
    SingleBlock,
    stage_blocks,
)
from megatron_ext.video.model.linear import (
    VectorEmbedder,
    mark_new_branch,
    mark_replicated,
    start_at_zero,
)
from megatron_ext.video.model.tokens import LocalTokens, TokenRange

SWITCHES = {"guidance": "guidance_embed", "cond": "cond_embed"}
"""Optional inputs, each with the field of `JointSizes` that enables it."""


def check_inputs(
    sizes: JointSizes, given: Mapping[str, Tensor | None], *, is_first_stage: bool
) -> None:
    """Check the arguments of a chunk's ``forward``, held in ``given`` by name, None if left out.

    Stages after the first need only ``img_ids`` and ``txt_ids``.

    Raises:
        ConfigError: an input of `SWITCHES` is missing, or is given to a model built without it.
        DataError: a required input is missing, or an input's shape or type does not fit.
    """
    for name, switch in SWITCHES.items():
        taken = getattr(sizes, switch)
        tensor = given[name]
        if taken and tensor is None and is_first_stage:
            raise ConfigError(
                f"`{name}` is missing, but the model was built with `{switch}`; give it."
            )
        if not taken and tensor is not None:
            raise ConfigError(
                f"`{name}` was given, but the model was built without `{switch}` and would ignore "
                f"it; leave it out or set `{switch}`."
            )
    for name, tensor in given.items():
        is_ids = name.endswith("_ids")
        if tensor is None and (is_ids or is_first_stage) and name not in SWITCHES:
            raise DataError(
                f"`{name}` is None, but every stage needs the ids, and the first all inputs; "
                "give it."
            )
        if is_ids and tensor is not None and tensor.dim() != 3:
            raise DataError(
                f"`{name}` has the shape {list(tensor.shape)}, but must be [batch, tokens, 3]."
            )
    image = given["img_ids"]
    text = given["txt_ids"]
    assert image is not None and text is not None
    batch = image.size(0)
    num_image = image.size(1)
    num_text = text.size(1)
    shapes = {
        "img": (batch, num_image, sizes.token_width),
        "img_ids": (batch, num_image, 3),
        "txt": (batch, num_text, sizes.text_width),
        "txt_ids": (batch, num_text, 3),
        "timesteps": (batch,),
        "y_vec": (batch, sizes.pooled_width),
        "guidance": (batch,),
        "cond": (batch, num_image, sizes.cond_width),
    }
    exact = (torch.float32, torch.float64)
    for name, shape in shapes.items():
        tensor = given[name]
        if tensor is not None and tensor.shape != shape:
            raise DataError(
                f"`{name}` has the shape {list(tensor.shape)}, but the model takes {list(shape)}; "
                "see the widths in its sizes."
            )
        if name in ("timesteps", "guidance") and tensor is not None and tensor.dtype not in exact:
            raise DataError(
                f"`{name}` has the type {tensor.dtype}, but must be float32: in 16 bits 1000 t "
                "has steps of up to 4."
            )


MAX_PERIOD = 10_000.0
TIME_FACTOR = 1000.0


def timestep_sinusoid(u: Tensor) -> Tensor:
    """Return 128 cosines of ``1000 u * 10000 ** (-j / 128)``, j from 0 to 127, then 128 sines.

    ``u`` ``[b]`` holds timesteps from 0 to 1, or guidance strengths; the result is ``[b, 256]``
    float32.
    """
    half = TIMESTEP_WIDTH // 2
    steps = torch.arange(half, dtype=torch.float32, device=u.device)
    frequencies = torch.exp(-math.log(MAX_PERIOD) * steps / half)
    angles = (TIME_FACTOR * u.float())[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class JointEmbedding(Part, ABC):
    """The layers by which the first stage embeds tokens, timestep, pooled text and guidance.

    The layer for ``cond`` (reference frames and their mask) starts at zero, so that adding it to a
    model that was trained without it changes no output.

    Attributes:
        cond_bias: whether that layer has a bias beside that of the layer for the latents.
    """

    cond_bias: ClassVar[bool] = True

    def __init__(self, plan: Blueprint) -> None:
        super().__init__(plan)
        sizes = plan.sizes
        h = plan.sizes.hidden_size
        self.img_in = torch.nn.Linear(sizes.token_width, h)
        self.txt_in = self.text_layer(plan)
        self.time_in = VectorEmbedder(TIMESTEP_WIDTH, h)
        self.pooled_in = VectorEmbedder(sizes.pooled_width, h)
        self.guidance_in = VectorEmbedder(TIMESTEP_WIDTH, h) if sizes.guidance_embed else None
        self.cond_in: torch.nn.Linear | None = None
        if sizes.cond_embed:
            self.cond_in = torch.nn.Linear(sizes.cond_width, h, bias=self.cond_bias)
            start_at_zero(self.cond_in)
            mark_new_branch(self.cond_in)
        mark_replicated(self, plan.config)

    @abstractmethod
    def text_layer(self, plan: Blueprint) -> torch.nn.Module:
        """Return the module that embeds the text tokens."""

    @abstractmethod
    def text(self, given: Mapping[str, Any], part: TokenRange) -> Tensor:
        """Return the embedded text tokens of ``part``, ``[b, l, h]``; ``given`` as in `forward`."""

    def forward(self, given: Mapping[str, Any], part: TokenRange) -> tuple[Tensor, Tensor]:
        """Return (embedded tokens of ``part``, ``[s, b, h]``; the conditioning vec, ``[b, h]``).

        ``given`` holds the arguments of the chunk's ``forward`` by name. vec is the sum of the
        embeddings of timestep, pooled text and, with ``guidance_embed``, guidance.
        """
        dtype = self.img_in.weight.dtype
        image = self.img_in(given["img"][:, part.image].to(dtype))
        if self.cond_in is not None:
            image = image + self.cond_in(given["cond"][:, part.image].to(dtype))
        text = self.text(given, part)
        vec = self.time_in(timestep_sinusoid(given["timesteps"])) + self.pooled_in(given["y_vec"])
        if self.guidance_in is not None:
            vec = vec + self.guidance_in(timestep_sinusoid(given["guidance"]))
        return torch.cat((text, image), dim=1).transpose(0, 1), vec


class JointChunk(VideoChunk):
    """One pipeline chunk; the first holds the embedding, the last the final layer.

    Attributes:
        embedding_class: the network's class of the embedding.
    """

    embedding_class: ClassVar[type[JointEmbedding]]

    def __init__(self, plan: Blueprint, stage: int, num_stages: int) -> None:
        super().__init__(plan, stage, num_stages)
        self.embedding = self.embedding_class(plan) if self.pre_process else None
        first_single = plan.sizes.num_double_blocks
        self.double_blocks = Blocks()
        self.single_blocks = Blocks()
        for number in stage_blocks(plan.sizes, num_stages, plan.options.double_block_cost)[stage]:
            if number < first_single:
                self.double_blocks[str(number)] = DoubleBlock(plan)
            else:
                self.single_blocks[str(number - first_single)] = SingleBlock(plan)
        self.final_layer = FinalLayer(plan) if self.post_process else None

    def local_tokens(self, num_text: int, num_image: int) -> LocalTokens:
        """Return the tokens of this rank, out of ``num_text`` text and ``num_image`` image tokens.

        DataError is raised if the ranks cannot hold equal numbers of tokens.
        """
        whole = TokenRange.whole(num_text, num_image)
        cp_slice = whole.part(self.cp_group.rank(), self.cp_group.size())
        if not self.config.sequence_parallel:
            return LocalTokens(cp_slice, cp_slice)
        return LocalTokens(cp_slice, cp_slice.part(self.tp_group.rank(), self.tp_group.size()))

    def image_tokens(self, num_text: int, num_image: int) -> slice:
        """Return the slice of the image tokens whose velocity `forward` returns on this rank.

        Ranks may hold unequal numbers of image tokens, or none.
        """
        return self.local_tokens(num_text, num_image).cp_slice.image

    def boundary_shape(self, num_text: int, num_image: int, micro_batch_size: int) -> list[int]:
        """Return the shape of this rank's tensor between pipeline stages, ``[s + 1, b, h]``."""
        part = self.local_tokens(num_text, num_image).part
        return [len(part) + 1, micro_batch_size, self.sizes.hidden_size]

    def run(self, given: Mapping[str, Any], tokens: LocalTokens) -> Tensor:
        """Run this chunk on the tokens of this rank, and return what ``forward`` must return.

        That is on the last stage the velocity of the tokens ``image_tokens(L, N)`` of L text and N
        image tokens, ``[b, local N, C * p * p]``; on other stages hidden states and vec,
        ``[s + 1, b, h]``. ``given`` holds the arguments of ``forward`` by name.
        """
        if self.embedding is not None:
            hidden, vec = self.embedding(given, tokens.part)
        else:
            assert self.entering is not None
            hidden = self.entering[:-1]
            vec = self.entering[-1]
        ids = torch.cat((given["txt_ids"], given["img_ids"]), dim=1)
        ids = ids[:, tokens.cp_slice.start : tokens.cp_slice.end]
        sizes = self.sizes
        table = rotary_table(ids, sizes.axes_dim, sizes.head_dim, sizes.rope_theta)
        for blocks, recomputed in (
            (self.double_blocks, self.options.recompute_double_blocks),
            (self.single_blocks, self.options.recompute_single_blocks),
        ):
            for number, block in blocks.items():
                if int(number) < recomputed and self.training and torch.is_grad_enabled():
                    run = partial(_run_block, block, tokens)
                    hidden = tensor_parallel.checkpoint(run, False, hidden, vec, *table)
                else:
                    hidden = block(hidden, vec, table, tokens)
        if self.final_layer is None:
            return torch.cat((hidden, vec.unsqueeze(0)))
        output = self.final_layer(hidden, vec)
        if self.config.sequence_parallel:
            # Text rows went through the final layer too: equal parts are gathered at once, and the
            # gradient of vec comes, as in the blocks, from the tokens that the rank holds.
            output = gather_from_sequence_parallel_region(
                output, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return output[tokens.cp_slice.local_text :].transpose(0, 1).contiguous()  # type: ignore[no-any-return]


def _run_block(
    block: torch.nn.Module, tokens: LocalTokens, hidden: Tensor, vec: Tensor, *table: Tensor
) -> Tensor:
    return block(hidden, vec, table, tokens)  # type: ignore[no-any-return]
