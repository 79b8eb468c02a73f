"""What is minimized, and how it is computed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_ext.config.flags import flag

REDUCTIONS = ("token", "sample", "square")


@dataclass(frozen=True)
class LossConfig:
    """Cross-entropy, its reduction, or a loss of the user's own."""

    cross_entropy_impl: str | None = flag(
        None,
        "chunked never holds the logits of more than a chunk of tokens (the default); eager holds "
        "all of them, as Megatron-LM does; te is Transformer Engine's kernel over all of them",
        choices=("chunked", "eager", "te"),
    )
    cross_entropy_chunk_size: int | None = flag(
        None, "of chunked; default: an eighth of a micro-batch's, 1024 at most", unit="tokens"
    )
    loss_reduction: str = flag(
        "token",
        "what weighs alike in the global batch: each token, each sample, or each sample by the "
        "square root of its tokens",
        choices=REDUCTIONS,
    )
    label_smoothing: float = flag(0.0, "share of each target spread over the vocabulary")
    z_loss_coeff: float = flag(
        0.0, "weight of the squared log-sum-exp of the logits (PaLM's z-loss)"
    )
    loss: str | None = flag(
        None, "a loss of your own: module:LossConfigClass or file.py:LossConfigClass"
    )
    loss_args: list[str] = flag([], "fields of --loss, such as gamma=2.0", nargs="+")

    def resolved(self, *, fused: bool, fusion_impl: str) -> LossConfig:
        """With the implementation settled; --cross-entropy-loss-fusion asks for whole logits."""
        if self.cross_entropy_impl is not None:
            return self
        impl = "chunked"
        if fused and self.loss is None:
            impl = "te" if fusion_impl == "te" else "eager"
        return dataclasses.replace(self, cross_entropy_impl=impl)

    def errors(self, *, per_token: bool, has_te: bool) -> list[str]:
        """What cannot be run, one sentence each."""
        found = []
        size = self.cross_entropy_chunk_size
        if size is not None and size < 1:
            found.append(f"`--cross-entropy-chunk-size` ({size}) must be at least 1; use 1024.")
        if not 0 <= self.label_smoothing < 1:
            found.append(
                f"`--label-smoothing` ({self.label_smoothing}) must be in [0, 1); use 0.1."
            )
        if self.z_loss_coeff < 0:
            found.append(f"`--z-loss-coeff` ({self.z_loss_coeff}) must be 0 or more; use 1e-4.")
        if self.loss_reduction != "token" and not per_token:
            found.append(
                f"`--loss-reduction {self.loss_reduction}` is calibrated over the global batch, "
                "which `--no-calculate-per-token-loss` gives up; leave one of them out."
            )
        if self.loss_args and self.loss is None:
            found.append("`--loss-args` needs `--loss`; name the loss that takes them.")
        return [*found, *self._whole_logits_errors(has_te)]

    def _whole_logits_errors(self, has_te: bool) -> list[str]:
        impl, found = self.cross_entropy_impl, []
        if impl == "te" and not has_te:
            found.append(
                "`--cross-entropy-impl te` needs Transformer Engine and a GPU, and one of them was "
                "not found; use chunked."
            )
        if impl == "chunked":
            return found
        for name, given in (
            ("--cross-entropy-chunk-size", self.cross_entropy_chunk_size is not None),
            ("--label-smoothing", self.label_smoothing != 0),
            ("--z-loss-coeff", self.z_loss_coeff != 0),
            ("--loss", self.loss is not None),
        ):
            if given:
                found.append(
                    f"`{name}` needs `--cross-entropy-impl chunked`, but it is {impl}; leave out "
                    "`--cross-entropy-impl` and `--cross-entropy-loss-fusion`."
                )
        return found
