"""Rules of low-rank adapters; only runs that set one of their flags import this file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from megatron_ext.config.model import ModelConfig
from megatron_ext.config.optimizer import KAIMING, STARTS, TARGETS, LoraConfig, OptimizerConfig
from megatron_ext.errors import FlagError


def target_errors(lora: LoraConfig, names: Sequence[str]) -> list[FlagError]:
    """Return an error if ``--lora-target-modules`` is empty or has names not in ``names``."""
    targets = lora.lora_target_modules
    unknown = [name for name in targets or () if name not in names]
    if not unknown and targets != []:
        return []
    return [
        FlagError(
            "--lora-target-modules", " ".join(unknown), f"must be names among {', '.join(names)}"
        )
    ]


def lora_errors(
    lora: LoraConfig, model: ModelConfig, optimizer: OptimizerConfig
) -> Iterator[FlagError]:
    """Yield an error for each fault in adapters' flags, and each flag that adapters exclude."""
    if lora.lora_rank is None:
        for field in dataclasses.fields(lora):
            # Stored configurations may name the layers of a GPT's blocks though nothing asks it.
            if getattr(lora, field.name) not in (getattr(LoraConfig(), field.name), list(TARGETS)):
                name = field.name.replace("_", "-")
                yield FlagError(f"--{name}", None, "needs `--lora-rank`", "give a rank such as 16")
        return
    if model.transformer_impl == "transformer_engine":
        yield FlagError(
            "--lora-rank",
            None,
            "needs our torch layers, not `--transformer-impl transformer_engine`",
            "use torch",
        )
    yield from _start_errors(lora, optimizer)
    if lora.lora_dropout and model.deterministic_dropout:
        yield FlagError(
            "--lora-dropout",
            None,
            "does not go with `--deterministic-dropout`, which gives adapters no masks",
            "use a dropout of 0 for one of them",
        )
    if optimizer.optimizer == "muon":
        yield FlagError(
            "--optimizer muon",
            None,
            "does not go with `--lora-rank`, whose matrices are factors of an update and not to "
            "be orthogonalized one by one",
            "use `--optimizer adam`",
        )
    whole = lora.lora_modules_to_save or []
    if optimizer.decoupled_lr is not None and not {"embedding", "output_layer"} & {*whole}:
        yield FlagError(
            "--decoupled-lr",
            None,
            "is for the embedding and the output layer, which `--lora-rank` freezes",
            "leave it out, or give `--lora-modules-to-save embedding output_layer`",
        )
    if "output_layer" in whole and not model.untie_embeddings_and_output_weights:
        yield FlagError(
            "--lora-modules-to-save output_layer",
            None,
            "is the word embedding without `--untie-embeddings-and-output-weights`",
            "use embedding, which trains both",
        )


def _start_errors(lora: LoraConfig, optimizer: OptimizerConfig) -> Iterator[FlagError]:
    """Yield an error for each fault in the flags of the adapters' start and learning rates."""
    start = lora.lora_init
    if start not in STARTS and not lora.is_principal:
        yield FlagError(
            "--lora-init",
            start,
            f"must be {', '.join(STARTS)}, pissa or pissa_niter_N with N from 1 to 999",
            f"use {KAIMING}",
        )
    if start == "orthogonal" and (lora.lora_rank or 0) % 2:
        yield FlagError(
            "--lora-init orthogonal",
            None,
            f"needs an even `--lora-rank` ({lora.lora_rank}): A and B share the rows of a matrix",
            "give an even rank",
        )
    if lora.lora_plus_lr_ratio is not None and optimizer.lr_warmup_init:
        yield FlagError(
            "--lr-warmup-init",
            optimizer.lr_warmup_init,
            "is one rate for all matrices, which does not go with `--lora-plus-lr-ratio`",
            "leave it out",
        )
