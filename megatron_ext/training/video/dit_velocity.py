"""The velocity of latent videos by a video DiT as it lies on the ranks of a run."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megatron_ext.models.mmdit.tokens import LatentShape, grid, pack, unpack
from megatron_ext.sampling.flow import Velocity
from megatron_ext.training.video.dit import MAX_TIMESTEP
from megatron_ext.training.video.velocity import ParallelVelocity


class VideoDiTVelocity(ParallelVelocity):
    """Predictions of a `VideoDiT`, whose output is whole on every rank of its last stage.

    A causal one predicts all frames of a clip at once, under its mask.
    """

    gives_parts = False

    def of_shape(self, shape: LatentShape) -> Velocity:
        """The velocity of latents of (t, h, w); see `predict_whole`.

        Raises:
            DataError: a height or width that patches do not fill.
        """
        grid(shape, self.patch_size)
        return partial(self.predict_whole, shape)

    @torch.no_grad()
    def predict_whole(
        self, shape: LatentShape, x: Tensor, t: Tensor, text: Tensor, pooled: Tensor, cond: Tensor
    ) -> Tensor:
        """Predict, in evaluation mode and without gradients.

        Args:
            shape: (t, h, w) of the latents.
            x: tokens, ``[b, n, d]``, the same on all ranks of the replica, as are all others.
            t: times, ``[b]`` float32.
            text: ``[b, l, k]``.
            pooled, cond: not looked at.

        Returns:
            ``[b, n, d]`` float32, the same on all ranks of the replica.

        Raises:
            DataError: inputs that do not fit the model, on all ranks alike.
        """
        inputs = {
            "x": unpack(x, shape, self.patch_size).transpose(1, 2),
            "timesteps": MAX_TIMESTEP * t,
            "text": text,
        }
        outputs = self._run(inputs, self._models[0].boundary_shape(**inputs))
        whole = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        if self.context.is_last_stage:
            whole = pack(outputs[0].float().transpose(1, 2), self.patch_size)
        return self._from_last_stage(whole)
