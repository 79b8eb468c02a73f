"""The loss that is minimized, and how it is computed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_ext.config.flags import BELOW_ONE, COUNT, WEIGHT, Range, flag

REDUCTIONS = ("token", "sample", "square")
CROSS_ENTROPY = "cross-entropy"
"""The value of ``--loss`` that asks for no loss of the user's own."""


@dataclass(frozen=True)
class LossConfig:
    """Cross-entropy, its reduction, or a loss of the user's own."""

    cross_entropy_impl: str | None = flag(
        None,
        "chunked never holds the logits of more than a chunk of tokens (the default); eager holds "
        "all of them, as Megatron-LM does; te is Transformer Engine's kernel over all of them",
        choices=("chunked", "eager", "te"),
        if_changed="allow",
    )
    cross_entropy_chunk_size: int | None = flag(
        None,
        "tokens of a chunk; by default an eighth of a micro-batch's, 1024 at most, and for "
        "cross-entropy of 16-bit logits on a GPU a quarter, 4096 or twice the hidden size at most",
        unit="tokens",
        bounds=COUNT,
        if_changed="allow",
    )
    ignore_index: int = flag(
        -100,
        "labels that equal this id weigh nothing in the loss, in training and evaluation",
        bounds=Range(-100),
    )
    loss_reduction: str = flag(
        "token",
        "what weighs alike in the global batch: each token, each sample, or each sample by the "
        "square root of its tokens",
        choices=REDUCTIONS,
    )
    label_smoothing: float = flag(
        0.0, "share of each target spread over the vocabulary", bounds=BELOW_ONE
    )
    z_loss_coeff: float = flag(
        0.0, "weight of the squared log-sum-exp of the logits (PaLM's z-loss)", bounds=WEIGHT
    )
    loss: str | None = flag(
        None,
        "a loss of your own: module:LossConfigClass or file.py:LossConfigClass; cross-entropy in a "
        "program that has another by default",
    )
    loss_args: list[str] = flag([], "fields of --loss, such as gamma=2.0", nargs="+")

    def resolved(self, *, fused: bool, fusion_impl: str) -> LossConfig:
        """Return the section with its implementation; loss fusion takes whole logits."""
        loss = None if self.loss == CROSS_ENTROPY else self.loss
        impl = self.cross_entropy_impl or "chunked"
        if self.cross_entropy_impl is None and fused and loss is None:
            impl = "te" if fusion_impl == "te" else "eager"
        return dataclasses.replace(self, cross_entropy_impl=impl, loss=loss)

    def errors(self, *, per_token: bool, has_te: bool) -> list[str]:
        """Return a sentence for everything that cannot be run."""
        found = []
        if self.ignore_index < 0 and self.ignore_index != -100:
            found.append(
                f"`--ignore-index` ({self.ignore_index}) must be a token id, 0 or more, or -100 "
                "for none; give the id whose labels are to weigh nothing."
            )
        if self.loss_reduction != "token" and not per_token:
            found.append(
                f"`--loss-reduction {self.loss_reduction}` is calibrated over the global batch, "
                "which `--no-calculate-per-token-loss` gives up; leave one of them out."
            )
        if self.loss_args and self.loss is None:
            found.append("`--loss-args` needs `--loss`; name the loss that takes them.")
        for name, value in (
            ("--label-smoothing", self.label_smoothing),
            ("--z-loss-coeff", self.z_loss_coeff),
        ):
            if value and self.loss is not None:
                found.append(
                    f"`{name}` ({value}) is a part of cross-entropy, which `--loss` ({self.loss}) "
                    f"replaces; leave it out, or give `--loss {CROSS_ENTROPY}`."
                )
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
                other = f", or give `--loss {CROSS_ENTROPY}`" if name == "--loss" else ""
                found.append(
                    f"`{name}` needs `--cross-entropy-impl chunked`, but it is {impl}; leave out "
                    f"`--cross-entropy-impl` and `--cross-entropy-loss-fusion`{other}."
                )
        return found
