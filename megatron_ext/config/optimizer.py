"""Flags of the optimizer, its schedules, gradient reduction, averages, adapters and freezing."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from megatron_ext.config.flags import (
    BELOW_ONE,
    COUNT,
    FACTOR,
    LONG_COUNT,
    LONG_NATURAL,
    NATURAL,
    NORM,
    RATE,
    SIZE,
    Changeable,
    Range,
    flag,
    resumed_flag,
    said_flag,
)

DECAY = Range(0, 100)
QUINTIC_STEPS = 5
"""Number of polynomials of ``--muon-coefficient-type quintic``, applied one per step in turn."""


@dataclass(frozen=True)
class OptimizerConfig(Changeable):
    """Flags of the optimizer and its schedules; names and defaults are Megatron-LM's."""

    optimizer: str = flag(
        "adam",
        "rule that updates the weights; muon updates embeddings, output layers, norms and biases "
        "by adam; dist_muon is muon with --use-distributed-optimizer; custom is that of "
        "--optimizer-class, which chooses it",
        choices="adam muon dist_muon sgd custom",
        advice="use adam",
    )
    optimizer_class: str | None = flag(
        None,
        "an optimizer of your own, a subclass of torch.optim.Optimizer: module:Class or "
        "file.py:Class",
        from_checkpoint=False,
    )
    optimizer_args: list[str] = flag(
        [],
        "arguments of --optimizer-class, such as betas=[0.9,0.99]",
        nargs="+",
        if_changed="keep",
        from_checkpoint=False,
    )
    lr: float | None = flag(None, "largest learning rate", RATE)
    min_lr: float = flag(0.0, "smallest learning rate after the warm-up", RATE)
    lr_decay_style: str = flag(
        "linear",
        "shape of the learning rate's decay",
        choices="constant linear cosine inverse-square-root WSD",
    )
    lr_decay_iters: int | None = flag(
        None,
        "step at which the learning rate's decay ends; default: the end of the run",
        COUNT,
        "steps",
    )
    lr_decay_samples: int | None = flag(
        None,
        "sample at which the learning rate's decay ends; default: the end of the run",
        LONG_COUNT,
        "samples",
    )
    lr_wsd_decay_style: str = said_flag(
        "exponential",
        "shape of the last phase of --lr-decay-style WSD",
        choices="exponential linear cosine minus_sqrt",
        renamed={"1-sqrt": "minus_sqrt"},
    )
    lr_wsd_decay_iters: int | None = said_flag(
        None, "steps of the last phase of --lr-decay-style WSD", COUNT, "steps"
    )
    lr_wsd_decay_samples: int | None = said_flag(
        None, "samples of the last phase of --lr-decay-style WSD", LONG_COUNT, "samples"
    )
    lr_warmup_fraction: float | None = flag(
        None, "share of the decay's length that warms the learning rate up", BELOW_ONE
    )
    lr_warmup_iters: int | None = flag(
        None,
        "steps of the warm-up; default: 0, or the task's usual warm-up, at most a tenth of the run",
        NATURAL,
        "steps",
        names="--warmup",
    )
    lr_warmup_samples: int = flag(0, "samples of the warm-up", LONG_NATURAL, "samples")
    lr_warmup_init: float = said_flag(0.0, "learning rate at the start of the warm-up", RATE)
    decoupled_lr: float | None = flag(
        None, "largest learning rate of the embedding and the output layer; default: --lr", RATE
    )
    decoupled_min_lr: float | None = flag(
        None, "smallest learning rate of the embedding and the output layer", RATE
    )
    weight_decay: float = flag(0.01, "decoupled weight decay", DECAY)
    start_weight_decay: float | None = flag(None, "weight decay at the start", DECAY)
    end_weight_decay: float | None = flag(None, "weight decay at the end", DECAY)
    weight_decay_incr_style: str = flag(
        "constant",
        "shape of the weight decay between --start-weight-decay and --end-weight-decay",
        choices="constant linear cosine",
    )
    clip_grad: float = said_flag(1.0, "largest global gradient norm, 0 for no clipping", NORM)
    adam_beta1: float = flag(0.9, "decay rate of Adam's first moment", BELOW_ONE, if_changed="keep")
    adam_beta2: float = flag(
        0.999, "decay rate of Adam's second moment", BELOW_ONE, if_changed="keep"
    )
    adam_eps: float = flag(
        1e-8, "epsilon in Adam's denominator", Range(1e-30, 1), if_changed="keep"
    )
    use_precision_aware_optimizer: bool = flag(
        False, "let --exp-avg-dtype and --exp-avg-sq-dtype choose how Adam's moments are kept"
    )
    exp_avg_dtype: str = flag(
        "fp32",
        "type of Adam's first moment between steps; bf16 saves 2 of 4 bytes for each weight",
        choices="fp32 bf16",
    )
    exp_avg_sq_dtype: str = flag(
        "fp32",
        "type of Adam's second moment between steps; bf16 saves 2 of 4 bytes for each weight",
        choices="fp32 bf16",
    )
    sgd_momentum: float = flag(0.9, "momentum of SGD", BELOW_ONE, if_changed="keep")
    muon_momentum: float = said_flag(0.9, "momentum of Muon, the share that it keeps", BELOW_ONE)
    muon_use_nesterov: bool = said_flag(
        False, "let Muon look ahead by Nesterov's momentum", names="--muon-nesterov"
    )
    muon_split_qkv: bool = said_flag(
        True,
        "let Muon orthogonalize queries, keys and values one by one, not the fused weight",
        negative="--muon-no-split-qkv",
    )
    muon_scale_mode: str = said_flag(
        "spectral",
        "factor of Muon's update of a matrix: spectral is the root of its longer side, which gives "
        "elements a root mean square of 1; unit_rms_norm is the root of rows over columns; "
        "shape_scaling is that, but at least 1",
        choices="spectral unit_rms_norm shape_scaling",
    )
    muon_extra_scale_factor: float = said_flag(
        1.0,
        "factor of Muon's updates beside that of --muon-scale-mode; 0.2 with spectral gives them "
        "the size of AdamW's, so that its learning rate can stay",
        FACTOR,
    )
    muon_coefficient_type: str = said_flag(
        "quintic",
        "polynomials of Muon's Newton-Schulz steps",
        choices="simple quintic polar_express",
    )
    muon_num_ns_steps: int = said_flag(5, "Newton-Schulz steps of each of Muon's updates", COUNT)
    muon_fp32_matmul_prec: str = flag(
        "medium",
        "precision of the products of Newton-Schulz steps on a GPU: medium is bfloat16, high is "
        "TF32, highest is float32",
        choices="medium high highest",
    )
    muon_tp_mode: str = said_flag(
        "duplicated",
        "how tensor-parallel ranks orthogonalize a matrix that they share: duplicated gathers it "
        "on each, distributed sums Gram matrices; blockwise takes each rank's share as a matrix of "
        "its own, which changes the update with the layout",
        choices="duplicated distributed blockwise",
    )
    muon_scalar_optimizer: str = flag(
        "adam", "rule that updates the weights that Muon leaves out", choices="adam"
    )
    apply_wd_to_qk_layernorm: bool = said_flag(
        False, "decay the weights of the norms of queries and keys too"
    )
    use_distributed_optimizer: bool = flag(False, "share optimizer state over replicas")
    data_parallel_sharding_strategy: str = flag(
        "no_shard",
        "what data-parallel ranks share: no_shard leaves it to --use-distributed-optimizer, optim "
        "is optimizer state, as that flag says, and optim_grads gradients too (ZeRO-2); gradients "
        "then take 4 bytes for each weight over the data-parallel size, plus a few buckets of "
        "--ddp-bucket-size, but are reduced in every micro-batch instead of once a step; "
        "optim_grads_params is weights too (ZeRO-3): each layer's are gathered before its forward "
        "and its backward pass, while the layer before it computes, and freed after it",
        choices="no_shard optim optim_grads optim_grads_params",
    )
    overlap_grad_reduce: bool = flag(False, "reduce replicas' gradients during the backward pass")
    overlap_param_gather: bool = flag(False, "gather replicas' parameters during the forward pass")
    align_grad_reduce: bool = flag(True, "let all pipeline stages reduce their gradients together")
    align_param_gather: bool = flag(
        True, "let all pipeline stages gather their parameters together"
    )
    ddp_bucket_size: int | None = flag(None, "parameters of a gradient bucket", COUNT)
    ddp_num_buckets: int | None = flag(None, "number of gradient buckets", COUNT)
    ddp_average_in_collective: bool = flag(False, "average gradients inside of the collective")
    log_num_zeros_in_grad: bool = flag(False, "count and log zero gradients")
    override_opt_param_scheduler: bool = flag(
        False,
        "take the schedule of rates from the flags, and go on at the checkpoint's place in it",
    )
    use_checkpoint_opt_param_scheduler: bool = flag(False, "schedule from checkpoint, not flags")
    usual_warmup_iters: int = 0
    """The task's default number of warm-up steps; 0 for none. A flag overrides it."""

    @property
    def shards_gradients(self) -> bool:
        """Return whether each data-parallel rank keeps only its shard of the summed gradients."""
        return self.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params")

    @property
    def shards_weights(self) -> bool:
        """Return whether each data-parallel rank keeps only its shard of the weights."""
        return self.data_parallel_sharding_strategy == "optim_grads_params"

    @property
    def gathers_in_forward(self) -> bool:
        """Return whether megatron-core's hooks gather updated weights in the forward pass."""
        return self.overlap_param_gather and not self.shards_weights

    def bucket_size(self, num_parameters: int, replicas: int) -> int | None:
        """Return the number of parameters in a gradient bucket; None means one bucket per chunk.

        It is None unless gradients are sharded or their reduction overlaps the backward pass. With
        sharded weights it is 1, and the buckets of a layer's parameters are joined.
        Without sharded gradients, megatron-core applies the size only to the first chunk of the
        first pipeline rank; all other chunks have one bucket. ``replicas`` is the number of ranks
        over which gradients are reduced.
        """
        if self.shards_weights:
            return 1  # the buckets of a layer are joined
        if not (self.overlap_grad_reduce or self.shards_gradients):
            return None
        if self.ddp_num_buckets is not None:
            return num_parameters // self.ddp_num_buckets
        return self.ddp_bucket_size or max(40_000_000, 1_000_000 * replicas)

    def muon_notes(self) -> list[str]:
        """Return a note on the size of Muon's updates with spectral scaling, else []."""
        if self.optimizer != "muon" or self.muon_scale_mode != "spectral":
            return []
        return [
            "The elements of Muon's updates have a root mean square of "
            f"{self.muon_extra_scale_factor:g} times the learning rate, and those of AdamW's about "
            "0.2 times; with the learning rate of AdamW use `--muon-extra-scale-factor 0.2`."
        ]

    def warmup_notes(self) -> list[str]:
        """Return a note if a short learning-rate decay shortened the default warm-up, else []."""
        usual = self.usual_warmup_iters
        warmup = self.lr_warmup_iters
        if warmup is None or warmup >= usual or self.lr_warmup_fraction is not None:
            return []
        return [
            f"The usual warm-up of {usual} steps is shortened to {warmup}, a tenth of the learning "
            "rate's decay; `--lr-warmup-iters` decides otherwise."
        ]


@dataclass(frozen=True)
class EmaConfig:
    """Flags of averaged weights: ``average = decay * average + (1 - decay) * weights``."""

    ema_decay: float | None = flag(
        None,
        "keep an average of the weights that retains this share at each update, 0 for none",
        BELOW_ONE,
        advice="use 0.9999",
    )
    ema_start: int | None = flag(
        None,
        "first step that is averaged, until then the average is the weights; default: 1, or "
        "as the task says",
        COUNT,
    )
    ema_update_every: int = flag(
        1,
        "average only every so many steps that train the model, with an unchanged decay",
        COUNT,
        "steps",
    )
    ema_warmup: bool | None = flag(
        None,
        "let the share that is retained rise to --ema-decay: at the nth update it is at most "
        "n / (9 + n), so that the weights of the start are soon forgotten; default: yes, or as the "
        "task says",
    )
    eval_ema: bool = flag(False, "evaluate with the averaged weights too", if_changed="allow")
    for_sampling: bool = False
    """Whether a run that does not train samples with the averaged weights."""

    def resolved(self) -> EmaConfig:
        """Return a copy; if an average is kept, unset ``ema_start`` is 1, ``ema_warmup`` True."""
        if not self.ema_decay:
            return self
        start = 1 if self.ema_start is None else self.ema_start
        warmup = True if self.ema_warmup is None else self.ema_warmup
        return dataclasses.replace(self, ema_start=start, ema_warmup=warmup)

    def keeps_average(self, *, trains: bool) -> bool:
        """Return whether the run holds averaged weights.

        A run that trains (``trains``) holds them if ``ema_decay`` is above 0; any other run only
        if it evaluates or samples with them.
        """
        return bool(self.ema_decay) if trains else self.eval_ema or self.for_sampling


TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Linear layers of a GPT's blocks; adapters are added to all of them by default."""

LATENT_TARGETS = (
    "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_proj", "linear_fc1",
    "linear_fc2",
)  # fmt: skip
"""LoRA targets in blocks with multi-latent attention: the linear layers that TP ranks split."""

LATENT_DOWN_TARGETS = ("linear_q_down_proj", "linear_kv_down_proj")
"""The linear layers of multi-latent attention that are whole on each TP rank; named, they adapt."""

RECURRENT_TARGETS = ("in_proj", "out_proj")
"""The linear layers of recurrent mixers, to which adapters are added by default, too."""

EXPERT_TARGETS = (
    "mlp.linear_fc1", "mlp.linear_fc2", "experts.linear_fc1", "experts.linear_fc2",
    "shared_experts.linear_fc1", "shared_experts.linear_fc2",
)  # fmt: skip
"""Names of the dense layers, routed and shared experts alone, of which ``linear_fc1`` is all."""

ALL_TARGETS = (*TARGETS, "linear_q", "linear_kv", "linear_vision_kv")
"""Linear layers that may have adapters; the last three are projections of cross-attention."""

WHOLE_PARTS = ("embedding", "output_layer", "router", "norm")
"""Values of ``--lora-modules-to-save``."""

DEFAULT_ALPHA = 32.0

KAIMING = "kaiming"
PRINCIPAL = re.compile(r"pissa(_niter_(?P<iterations>[1-9]\d{0,2}))?")
"""Matches values of ``--lora-init`` that start adapters from a weight's singular values."""
STARTS = (KAIMING, "gaussian", "orthogonal")
"""The other values of ``--lora-init``."""


@dataclass(frozen=True)
class LoraConfig(Changeable):
    """Flags of low-rank adapters: ``y = W x + scale * B A dropout(x)`` with a frozen W."""

    lora_rank: int | None = flag(None, "rank of the adapters; without it all weights train", SIZE)
    lora_alpha: float | None = resumed_flag(
        None,
        f"adapters are scaled by this over the rank; default {DEFAULT_ALPHA:g}",
        FACTOR,
        advice="use 32",
    )
    lora_dropout: float = said_flag(0.0, "dropout of the inputs of adapters", BELOW_ONE)
    lora_target_modules: list[str] | None = flag(
        None, "linear layers that get an adapter; default: all of a block", nargs="+"
    )
    lora_modules_to_save: list[str] | None = resumed_flag(
        None,
        "parts of the model that are trained whole beside the adapters; norm is all norms, router "
        "the routers of experts",
        nargs="+",
        choices=WHOLE_PARTS,
    )
    lora_rslora: bool = resumed_flag(
        False,
        "scale adapters by --lora-alpha over the root of the rank, not the rank (arXiv:2312.03732)",
        names="--lora-use-rslora",
    )
    lora_use_dora: bool = resumed_flag(
        False,
        "train the lengths of the adapted weights' rows apart from their directions (DoRA, "
        "arXiv:2402.09353)",
    )
    lora_init: str = flag(
        KAIMING,
        "start of the adapters: kaiming and gaussian draw A, and B is 0; orthogonal draws both, "
        "with a product of 0; pissa takes the largest singular values of the weight and subtracts "
        "this start from it (arXiv:2404.02948), pissa_niter_N approximates them in N iterations",
        advice="use kaiming, gaussian, orthogonal, pissa or pissa_niter_16",
    )
    lora_plus_lr_ratio: float | None = flag(
        None,
        "learning rate of the matrices B, and of all trained vectors, over that of the matrices A "
        "(LoRA+, arXiv:2402.12354)",
        Range(1, 1e6),
        advice="use 16",
    )

    lora_separate_projections: bool = resumed_flag(
        False,
        "an adapter each, as in peft, for the projections that a fused layer joins: queries, keys "
        "and values, or gate and up; default: one for the layer",
    )

    lora_quantize_weights: str | None = resumed_flag(
        None,
        "keep the frozen weights of linear layers in 4 bits (QLoRA, arXiv:2305.14314), by "
        "bitsandbytes; they come from --load-hf, and checkpoints hold the adapters alone",
        choices="nf4 fp4",
    )

    saves_adapters_only: bool = False
    """Whether checkpoints hold the adapters but not the frozen weights."""

    @property
    def scale(self) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) with ``--lora-rslora``; a rank must be set."""
        assert self.lora_rank is not None
        alpha = DEFAULT_ALPHA if self.lora_alpha is None else self.lora_alpha
        return alpha / (math.sqrt(self.lora_rank) if self.lora_rslora else self.lora_rank)

    @property
    def is_principal(self) -> bool:
        """Return whether adapters start from the largest singular values of their weights."""
        return PRINCIPAL.fullmatch(self.lora_init) is not None

    @property
    def is_variant(self) -> bool:
        """Return whether adapters are of another kind, or start otherwise, than LoRA's."""
        return self.lora_use_dora or self.lora_init != KAIMING

    @property
    def starts_from_weights(self) -> bool:
        """Return whether adapters can start only when the frozen weights are there."""
        return self.lora_rank is not None and (self.lora_use_dora or self.is_principal)

    def resolved(self) -> LoraConfig:
        """Return a copy with default alpha and target layers filled in, if there are adapters."""
        if self.lora_rank is None:
            return self
        alpha = DEFAULT_ALPHA if self.lora_alpha is None else self.lora_alpha
        targets = list(TARGETS) if self.lora_target_modules is None else self.lora_target_modules
        whole = self.lora_modules_to_save
        return dataclasses.replace(
            self,
            lora_alpha=alpha,
            lora_target_modules=targets,
            lora_modules_to_save=None if whole is None else [x for x in WHOLE_PARTS if x in whole],
        )


@dataclass(frozen=True)
class FreezeConfig(Changeable):
    """Flags of the parts of the model that are not trained; `config.frozen_parts` reads them."""

    freeze: list[str] | None = said_flag(
        None,
        "parts that are not trained: embeddings, output, attention, mlp, experts, router, norms, "
        "mtp, layers, layers.0-3, layers.0-3.attention, or modules such as linear_qkv; their "
        "weights get no gradient, no optimizer state and no weight decay",
        nargs="+",
    )
    freeze_all_but: list[str] | None = said_flag(
        None, "parts that alone are trained, by the names that --freeze takes", nargs="+"
    )
    freeze_base_for_mtp: bool = said_flag(
        False, "train multi-token prediction alone, as --freeze-all-but mtp does"
    )

    @property
    def trained_alone(self) -> list[str]:
        """Return the names of the parts that alone are trained; [] if the flags name none."""
        return ["mtp"] if self.freeze_base_for_mtp else self.freeze_all_but or []

    def trains_as(self, other: FreezeConfig) -> bool:
        """Return whether both name the same parts."""
        both = [(set(x.freeze or ()), set(x.trained_alone)) for x in (self, other)]
        return both[0] == both[1]

    @property
    def is_used(self) -> bool:
        """Return whether the flags freeze anything."""
        return bool(self.freeze or self.trained_alone)
