"""Predicts the velocity of latent videos with a model that is divided among a run's ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.schedules.forward import collect_outputs, evaluating
from megatron_ext.schedules.runtime import PipelineEngine
from megatron_ext.video.data.conditions import condition
from megatron_ext.video.data.dataset import pad_text
from megatron_ext.video.model.tokens import LatentShape, pack, position_ids
from megatron_ext.video.sampling.flow import References, Velocity

if TYPE_CHECKING:
    from megatron_ext.parallel.context import ParallelContext


def from_last_stage(x: Tensor, context: ParallelContext) -> Tensor:
    """Return, on all pipeline stages, the tensor ``x`` of the last stage.

    On other stages ``x`` is a buffer of the same shape and dtype, into which the result is written.
    """
    x = x.contiguous()
    torch.distributed.broadcast(x, group=context.pgs.pp, group_src=context.last_stage_pp_rank)
    return x


class ParallelVelocity:
    """Predicts velocities by a forward pass through all stages; a replica's ranks call it together.

    The model is any module with

    - ``forward`` with the keywords ``img``, ``img_ids``, ``txt``, ``txt_ids``, ``timesteps`` and
      ``y_vec``; ``guidance`` and ``cond`` are passed only to models that take them,
    - ``set_input_tensor``, which megatron-core's schedules call,
    - ``boundary_shape(num_text, num_image, micro_batch_size)``: shape of the tensor that is passed
      between stages,
    - ``image_tokens(num_text, num_image)``: slice of the image tokens in the output of this rank;
      it is needed with context parallelism,
    - ``guidance_embed`` and ``cond_embed``, on the module or on its ``sizes``: whether the model
      takes ``guidance`` and ``cond``; without these attributes it takes neither.

    All stages get all inputs. With ``--overlap-param-gather`` make predictions only within
    ``ParameterGather.paused()``, which gathers the parameters, as evaluation does.

    Args:
        engine: runs the forward passes: the engine of the training steps, or `forward_engine`.
        chunks: the model's chunks on this rank, wrapped as for training.
        guidance: strength of distilled guidance, an input of models with ``guidance_embed``; None
            for other models.

    Raises:
        ConfigError: the model lacks ``boundary_shape``, or ``image_tokens`` where it is needed.
    """

    gives_parts = True
    """Whether each context-parallel rank outputs only its own tokens, instead of all of them."""

    masks_text = False
    """Whether the model's attention leaves out rows of text that are all zero."""
    keeps_references = True
    """Whether reference frames stand in finished clips as they were given."""

    def __init__(
        self,
        engine: PipelineEngine,
        chunks: Sequence[torch.nn.Module],
        context: ParallelContext,
        *,
        patch_size: int,
        guidance: float | None = None,
    ) -> None:
        self.engine = engine
        self.chunks = list(chunks)
        self.context = context
        self.patch_size = patch_size
        self.guidance = guidance
        self._models = [_model_of(chunk) for chunk in chunks]
        cp_size = context.pgs.cp.size()
        if self.gives_parts and cp_size > 1 and not hasattr(self._models[0], "image_tokens"):
            raise ConfigError(
                f"`--context-parallel-size` ({cp_size}) needs a model with a method "
                f"`image_tokens`, which {type(self._models[0]).__name__} lacks; add it, or use 1."
            )
        tp_size = context.pgs.tp.size()
        self._multiple = cp_size * (tp_size if engine.transformer_config.sequence_parallel else 1)

    @property
    def device(self) -> torch.device:
        """Return the device of the model's inputs."""
        return next(p for chunk in self.chunks for p in chunk.parameters()).device

    @property
    def takes_references(self) -> bool:
        """Tell whether the model takes reference frames."""
        model = self._models[0]
        return bool(getattr(getattr(model, "sizes", model), "cond_embed", False))

    def of_shape(self, shape: LatentShape) -> Velocity:
        """Return a function that predicts the velocity of latents of shape (t, h, w).

        Raises DataError if the patch size does not divide h and w.
        """
        return partial(self.predict, position_ids(shape, self.patch_size, self.device))

    @torch.no_grad()
    def predict(
        self, ids: Tensor, x: Tensor, t: Tensor, text: Tensor, pooled: Tensor, given: References
    ) -> Tensor:
        """Predict the velocity of tokens, in evaluation mode and without gradients.

        Inputs and result are the same on all ranks of the replica. As in training, the text is
        padded with copies of its last row, or with zeros if the model masks them, so that the ranks
        can divide the sequence equally.

        Args:
            ids: positions of the tokens, ``[n, 3]``; the other arguments are those of `Velocity`.

        Returns:
            Velocity of the tokens, ``[b, n, d]`` float32.

        Raises:
            DataError: the inputs do not fit the model (raised on all ranks).
        """
        b, n, _ = x.shape
        text = pad_text(text, n, self._multiple, zeros=self.masks_text)
        inputs = {
            "img": x,
            "img_ids": ids.expand(b, -1, -1),
            "txt": text,
            "txt_ids": ids.new_zeros(b, text.size(1), 3),
            "timesteps": t,
            "y_vec": pooled,
        }
        if self.takes_references:
            cond = condition(given.latents, given.masks)
            inputs["cond"] = pack(cond, self.patch_size)
        if self.guidance is not None:
            inputs["guidance"] = torch.full_like(t, self.guidance)
        # Check this before a rank waits for another, so that all ranks raise the error.
        self.check_inputs(inputs)
        outputs = self._run(inputs, self._models[0].boundary_shape(text.size(1), n, b))
        return self._on_all_ranks(outputs, x, text.size(1))

    def check_inputs(self, inputs: Mapping[str, Tensor]) -> None:
        """Raise DataError or ConfigError for inputs that do not fit; a subclass may override this.

        ``inputs`` are the keyword arguments of ``forward``. The base class checks nothing.
        """
        return

    def _run(self, inputs: Mapping[str, Tensor], shape: Sequence[int]) -> Sequence[Tensor]:
        """Run a micro-batch in evaluation mode; return [output] on the last stage, [] on others.

        ``inputs`` are the keyword arguments of ``forward``; ``shape`` is the shape of the tensor
        sent between stages.
        """
        with evaluating(self.chunks):
            return collect_outputs(self.engine, [inputs], shape)

    def _on_all_ranks(self, outputs: Sequence[Tensor], x: Tensor, num_text: int) -> Tensor:
        """Join the outputs of the last stage's context-parallel ranks; return them on all ranks.

        The ranks' outputs are placed in tensors of zeros and summed, which is exact, since each
        token comes from one rank. The result has the shape of the input tokens ``x``.

        Raises:
            DataError: an output does not have the shape of this rank's tokens.
        """
        groups = self.context.pgs
        context = self.context
        whole = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if context.is_last_stage:
            own = slice(None)
            if groups.cp.size() > 1:
                own = self._models[-1].image_tokens(num_text, x.size(1))
            if outputs[0].shape != whole[:, own].shape:
                raise DataError(
                    f"The model's output has the shape {list(outputs[0].shape)}, but must be the "
                    f"velocity of its image tokens, {list(whole[:, own].shape)}; correct its "
                    "`forward` or `image_tokens`."
                )
            whole[:, own] = outputs[0].float()
            torch.distributed.all_reduce(whole, group=groups.cp)
        return from_last_stage(whole, context)


def _model_of(chunk: torch.nn.Module) -> Any:
    """Return the module inside the wrappers for data parallelism and 16-bit precision.

    Raises:
        ConfigError: the module has no method ``boundary_shape``.
    """
    try:
        return get_attr_wrapped_model(chunk, "boundary_shape", return_model_obj=True)
    except RuntimeError:
        inner: Any = chunk
        while hasattr(inner, "module"):
            inner = inner.module
        raise ConfigError(
            f"The model {type(inner).__name__} must have a method `boundary_shape(num_text, "
            "num_image, micro_batch_size)` to be sampled from; add it."
        ) from None
