"""Number formats of parameters, gradients and losses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_ext.config.flags import flag


@dataclass(frozen=True)
class PrecisionConfig:
    """fp32 unless ``--bf16`` or ``--fp16``."""

    bf16: bool = flag(False, "parameters and activations in bfloat16")
    fp16: bool = flag(False, "parameters and activations in float16, with loss scaling")
    loss_scale: float | None = flag(None, "fixed loss scale of fp16; default: dynamic")
    initial_loss_scale: float = flag(2.0**32, "first dynamic loss scale")
    min_loss_scale: float = flag(1.0, "smallest dynamic loss scale")
    loss_scale_window: float = flag(1000, "steps without overflow before it doubles", unit="steps")
    hysteresis: int = flag(2, "overflows before it halves")
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "sum gradients in fp32; always on with --bf16 unless --grad-reduce-in-bf16"
    )
    grad_reduce_in_bf16: bool = flag(False, "sum gradients in bf16")

    def resolved(self) -> PrecisionConfig:
        """With the format of the gradients settled."""
        in_fp32 = self.accumulate_allreduce_grads_in_fp32
        if self.bf16:
            in_fp32 = not self.grad_reduce_in_bf16
        return dataclasses.replace(self, accumulate_allreduce_grads_in_fp32=in_fp32)

    def errors(self) -> list[str]:
        """What cannot be run, one sentence each."""
        found = []
        if self.bf16 and self.fp16:
            found.append("`--bf16` and `--fp16` exclude each other; give one.")
        return found
