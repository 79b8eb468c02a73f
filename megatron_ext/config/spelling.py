"""Other spellings of flags: older names, and names that never had an effect here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.config.run import RunConfig

RENAMED: dict[str, tuple[str, ...]] = {
    "--use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
    "--fp8": ("--fp8-format",),
    "--enable-cuda-graph": ("--cuda-graph-impl", "local"),
    "--recompute-activations": ("--recompute-granularity", "selective"),
    "--checkpoint-activations": (
        "--recompute-granularity", "full", "--recompute-method", "uniform",
        "--recompute-num-layers", "1",
    ),
    "--model-parallel-size": ("--tensor-model-parallel-size",),
    "--decoder-num-layers": ("--num-layers",),
    "--decoder-seq-length": ("--seq-length",),
    "--use-checkpoint-opt_param-scheduler": ("--use-checkpoint-opt-param-scheduler",),
    "--override-opt_param-scheduler": ("--override-opt-param-scheduler",),
}  # fmt: skip
"""Old spelling -> what stands for it now, values included."""

NO_EFFECT: dict[str, tuple[int | None, str]] = {
    "--use-mcore-models": (0, "models are always megatron-core's"),
    "--use-flash-attn": (0, "attention uses a flash kernel wherever torch has one"),
    "--use-distributed-checkpoint": (0, "checkpoints are always distributed"),
    "--use-dist-ckpt": (0, "checkpoints are always distributed"),
    "--dist-ckpt-format": (1, "the format is --ckpt-format"),
    "--auto-detect-ckpt-format": (0, "there is one format"),
    "--ckpt-assume-constant-structure": (0, "plans of checkpoints are not cached"),
    "--use-persistent-ckpt-worker": (0, "checkpoints are written by the ranks themselves"),
    "--data-impl": (1, "there is one kind of dataset"),
    "--local-rank": (1, "torchrun says it in the environment"),
    "--local_rank": (1, "torchrun says it in the environment"),
    "--no-create-attention-mask-in-dataloader": (0, "masks are never made in the data loader"),
    "--create-attention-mask-in-dataloader": (0, "masks are made on the device of the batch"),
    "--no-async-tensor-model-parallel-allreduce": (0, "megatron-core decides the overlap"),
    "--no-overlap-p2p-communication": (
        0, "virtual chunks need overlapped messages to be exact with two stages",
    ),
    "--no-scatter-gather-tensors-in-pipeline": (0, "megatron-core sends whole tensors"),
    "--no-check-for-nan-in-loss-and-grad": (
        0, "a step with a non-finite gradient is always skipped and counted",
    ),
    "--check-for-nan-in-loss-and-grad": (
        0, "a step with a non-finite gradient is always skipped and counted",
    ),
    "--timing-log-level": (1, "phases of a step are timed by --profile"),
    "--timing-log-option": (1, "phases of a step are timed by --profile"),
    "--barrier-with-L1-time": (0, "phases of a step are timed by --profile"),
    "--no-barrier-with-level-1-timing": (0, "phases of a step are timed by --profile"),
    "--no-one-logger": (0, "nothing is reported to NVIDIA"),
    "--enable-experimental": (0, "experimental parts are chosen by their own flags"),
    "--test-mode": (0, "tests call the package"),
    "--no-use-tokenizer-model-from-checkpoint-args": (0, "the tokenizer comes from the flags"),
    "--lazy-mpu-init": (1, "groups are always made at the start"),
    "--use-cpu-initialisation": (0, "the flag is --use-cpu-initialization"),
    "--exit-signal-handler-for-dataloader": (0, "data workers leave signals to the rank"),
    "--legacy-tokenizer": (0, "there is one set of tokenizers"),
    "--disable-msc": (0, "files are opened by Python"),
    "--fp8-interval": (1, "scales of the delayed recipe follow its history at every step"),
    "--fp16-lm-cross-entropy": (0, "the loss is always computed in fp32"),
    "--onnx-safe": (0, "models are not exported"),
}  # fmt: skip
"""Spelling -> number of values (None: any) and the reason."""

ALWAYS_ON = {
    "tokenizer_hf_use_fast": "Hugging Face tokenizers are always the fast ones here",
    "masked_softmax_fusion": "attention is computed by kernels that mask and normalize in one",
}
"""Field of a flag that Megatron-LM's scripts may give, whatever its value -> the reason."""

OF_ENGINE = {
    "fp8_param_gather": "the torch layers keep and gather their weights in bf16",
    "moe_grouped_gemm": "the torch layers compute one expert after the other",
    "moe_permute_fusion": "the torch layers have no such kernel",
    "moe_router_fusion": "the torch layers have no such kernel",
}
"""Field of a flag that only Transformer Engine's layers follow -> what happens without them."""

NEEDS: tuple[tuple[str, str, Callable[[RunConfig], bool]], ...] = (
    (
        "rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor "
        "use_rope_scaling",
        "--position-embedding-type rope",
        lambda run: run.model.position_embedding_type == "rope",
    ),
    ("rope_scaling_factor", "--use-rope-scaling", lambda run: run.model.use_rope_scaling),
    (
        "mtp_loss_scaling_factor",
        "--mtp-num-layers",
        lambda run: run.model.mtp_num_layers is not None,
    ),
    (
        "moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size "
        "moe_shared_expert_gate moe_router_topk moe_router_load_balancing_type moe_aux_loss_coeff "
        "moe_z_loss_coeff moe_input_jitter_eps moe_router_dtype moe_router_score_function "
        "moe_router_pre_softmax moe_router_num_groups moe_router_group_topk "
        "moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_router_bias_update_rate "
        "moe_router_force_load_balancing moe_token_dispatcher_type moe_expert_capacity_factor "
        "moe_pad_expert_input_to_capacity moe_token_drop_policy moe_layer_recompute "
        "moe_apply_probs_on_input",
        "--num-experts",
        lambda run: run.moe.num_experts is not None,
    ),
    (
        "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        "--fp16",
        lambda run: run.precision.fp16,
    ),
    ("exit_signal", "--exit-signal-handler", lambda run: run.training.exit_signal_handler),
    (
        "profile_step_start profile_step_end profile_ranks",
        "--profile",
        lambda run: run.training.profile,
    ),
    ("sgd_momentum", "--optimizer sgd", lambda run: run.optimizer.optimizer == "sgd"),
    (
        "adam_beta1 adam_beta2 adam_eps",
        "--optimizer adam",
        lambda run: run.optimizer.optimizer == "adam",
    ),
    (
        "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples",
        "--lr-decay-style WSD",
        lambda run: run.optimizer.lr_decay_style == "WSD",
    ),
    ("data_sharding", "--dataloader-type cyclic", lambda run: run.data.dataloader_type == "cyclic"),
)
"""Fields of flags, the flag without which they do nothing, and whether a run has it."""
