"""Number formats of parameters, gradients and losses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_ext.config.flags import flag
from megatron_ext.config.ranges import COUNT, Range

SCALE = Range(0, 2.0**64, above=True)
"""A loss scale."""


@dataclass(frozen=True)
class PrecisionConfig:
    """fp32 unless ``--bf16`` or ``--fp16``.

    Attributes:
        bf16_on_gpu: ``--bf16`` is the default on a GPU.
    """

    bf16: bool = flag(
        False,
        "parameters and activations in bfloat16; the default of pretrain_video.py on a GPU, where "
        "--no-bf16 is fp32",
    )
    fp16: bool = flag(False, "parameters and activations in float16, with loss scaling")
    loss_scale: float | None = flag(
        None, "fixed loss scale of fp16; default: dynamic", bounds=SCALE
    )
    initial_loss_scale: float = flag(2.0**32, "first dynamic loss scale", bounds=SCALE)
    min_loss_scale: float = flag(1.0, "smallest dynamic loss scale", bounds=SCALE)
    loss_scale_window: float = flag(
        1000, "steps without overflow before it doubles", unit="steps", bounds=Range(1, 1e9)
    )
    hysteresis: int = flag(2, "overflows before it halves", bounds=COUNT)
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "sum gradients in fp32; always on with --bf16 unless --grad-reduce-in-bf16"
    )
    grad_reduce_in_bf16: bool = flag(False, "sum gradients in bf16")
    bf16_on_gpu: bool = False

    def resolved(self, device: str) -> PrecisionConfig:
        """With the format of parameters and gradients settled."""
        bf16 = self.bf16 or (self.bf16_on_gpu and device == "cuda")
        in_fp32 = self.accumulate_allreduce_grads_in_fp32
        if bf16:
            in_fp32 = not self.grad_reduce_in_bf16
        return dataclasses.replace(
            self, bf16=bf16, bf16_on_gpu=False, accumulate_allreduce_grads_in_fp32=in_fp32
        )

    def errors(self) -> list[str]:
        """What cannot be run, one sentence each."""
        found = []
        if self.bf16 and self.fp16:
            found.append("`--bf16` and `--fp16` exclude each other; give one.")
        return found
