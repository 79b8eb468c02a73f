"""Tables of Megatron-LM 0.16.1's flags that are renamed, have no effect here, or are refused.

The reason for a refusal includes what to use instead.
"""

from __future__ import annotations

import re

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
"""Old spelling -> the words that replace it, values included."""

_SKIPPED = "a step with a non-finite gradient is always skipped and counted"
NO_EFFECT: dict[str, str] = {
    "--use-mcore-models": "models are always megatron-core's",
    "--use-flash-attn": "attention uses a flash kernel wherever torch has one",
    "--use-distributed-checkpoint": "checkpoints are always distributed",
    "--use-dist-ckpt": "checkpoints are always distributed",
    "--dist-ckpt-format": "the format is --ckpt-format",
    "--auto-detect-ckpt-format": "there is one format",
    "--ckpt-assume-constant-structure": "whether the structure is constant is checked at each save",
    "--use-persistent-ckpt-worker": "the processes of --async-save always persist",
    "--use-persistent-ckpt-worker-process": "the processes of --async-save always persist",
    "--async-strategy": "--async-save has one way to write",
    "--data-impl": "there is one kind of dataset",
    "--local-rank": "torchrun says it in the environment",
    "--local_rank": "torchrun says it in the environment",
    "--no-create-attention-mask-in-dataloader": "masks are never made in the data loader",
    "--create-attention-mask-in-dataloader": "masks are made on the device of the batch",
    "--no-async-tensor-model-parallel-allreduce": "megatron-core decides the overlap",
    "--no-overlap-p2p-communication": (
        "virtual chunks need overlapped messages to be exact with two stages"
    ),
    "--no-scatter-gather-tensors-in-pipeline": "megatron-core sends whole tensors",
    "--no-check-for-nan-in-loss-and-grad": _SKIPPED,
    "--check-for-nan-in-loss-and-grad": _SKIPPED,
    "--timing-log-level": "phases of a step are timed by --profile",
    "--timing-log-option": "phases of a step are timed by --profile",
    "--barrier-with-L1-time": "phases of a step are timed by --profile",
    "--no-barrier-with-level-1-timing": "phases of a step are timed by --profile",
    "--no-one-logger": "nothing is reported to NVIDIA",
    "--enable-experimental": "experimental parts are chosen by their own flags",
    "--test-mode": "tests call the package",
    "--no-use-tokenizer-model-from-checkpoint-args": "the tokenizer comes from the flags",
    "--lazy-mpu-init": "groups are always made at the start",
    "--use-cpu-initialisation": "the flag is --use-cpu-initialization",
    "--exit-signal-handler-for-dataloader": "data workers leave signals to the rank",
    "--legacy-tokenizer": "there is one set of tokenizers",
    "--disable-msc": "files are opened by Python",
    "--fp8-interval": "scales of the delayed recipe follow its history at every step",
    "--fp16-lm-cross-entropy": "the loss is always computed in fp32",
    "--onnx-safe": "models are not exported",
}
"""Spelling of a flag without effect -> the reason."""

ALWAYS_ON = {
    "tokenizer_hf_use_fast": "Hugging Face tokenizers are always the fast ones here",
    "masked_softmax_fusion": "attention is computed by kernels that mask and normalize in one",
}
"""Field of a flag that is accepted but has no effect, whatever its value -> the reason."""

_GPU_ONLY = """
a fused kernel of a GPU:
    bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion apply_rope_fusion persist_layer_norm
    gradient_accumulation_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl
a kernel of Hopper GPUs, or of Transformer Engine:
    moe_grouped_gemm
a kernel of Transformer Engine:
    moe_permute_fusion moe_router_fusion
communication on a CPU does not run beside computation:
    overlap_grad_reduce overlap_param_gather align_grad_reduce align_param_gather ddp_bucket_size
    ddp_num_buckets
gloo cannot average:
    ddp_average_in_collective
the launches of kernels that graphs save are a GPU's:
    cuda_graph_impl cuda_graph_warmup_steps
attention is computed there as megatron-core's own layers do or by torch's SDPA:
    attention_backend
nothing is compiled there:
    compile
memory of a GPU:
    log_memory_to_tensorboard
a CPU multiplies in float32:
    muon_fp32_matmul_prec
a CPU keeps no memory cache:
    empty_unused_memory_level
"""


def _by_name(text: str) -> dict[str, str]:
    """Return a reason by name; in ``text`` a reason ends with a colon before its indented names."""
    return {
        name: " ".join(reason.split()).removesuffix(":")
        for reason, names in re.findall(r"((?:^\S.*\n)+)((?:^ .*\n)+)", text, re.MULTILINE)
        for name in names.split()
    }


GPU_ONLY = _by_name(_GPU_ONLY)
"""Field of a flag that has no effect on a CPU -> the reason."""

OF_ENGINE = {
    "fp8_param_gather": "the torch layers keep and gather their weights in bf16",
    "moe_permute_fusion": "the torch layers have no such kernel",
    "moe_router_fusion": "the torch layers have no such kernel",
}
"""Field of a flag that only Transformer Engine's layers follow -> what happens without them."""

NEEDS = {
    "--position-embedding-type rope": (
        "rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor "
        "use_rope_scaling rope_scaling rope_local_base_freq no_rope_freq"
    ),
    "--window-size": "window_attn_skip_freq",
    "--use-rope-scaling": "rope_scaling_factor",
    "--multi-latent-attention": (
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type "
        "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale "
        "mscale_all_dim"
    ),
    "--rope-type yarn": "original_max_position_embeddings beta_fast beta_slow mscale",
    "--mtp-num-layers": "mtp_loss_scaling_factor",
    "--num-experts": (
        "moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size "
        "moe_shared_expert_gate moe_router_topk moe_router_load_balancing_type moe_aux_loss_coeff "
        "moe_z_loss_coeff moe_input_jitter_eps moe_router_dtype moe_router_score_function "
        "moe_router_pre_softmax moe_router_num_groups moe_router_group_topk "
        "moe_router_group_scores "
        "moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_router_bias_update_rate "
        "moe_router_force_load_balancing moe_token_dispatcher_type moe_expert_capacity_factor "
        "moe_pad_expert_input_to_capacity moe_token_drop_policy moe_layer_recompute "
        "moe_apply_probs_on_input"
    ),
    "--fp16": "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis",
    "--exit-signal-handler": "exit_signal",
    "--on-spike": "spike_window spike_factor",
    "--profile": "profile_step_start profile_step_end profile_ranks",
    "--optimizer sgd": "sgd_momentum",
    "--optimizer adam or muon": (
        "adam_beta1 adam_beta2 adam_eps use_precision_aware_optimizer exp_avg_dtype "
        "exp_avg_sq_dtype"
    ),
    "--optimizer muon": (
        "muon_momentum muon_use_nesterov muon_split_qkv muon_scale_mode muon_extra_scale_factor "
        "muon_coefficient_type muon_num_ns_steps muon_fp32_matmul_prec muon_tp_mode "
        "muon_scalar_optimizer"
    ),
    "--lr-decay-style WSD": "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples",
}
"""A flag, with the value that it must have -> fields of flags that do nothing without it."""

_REFUSED = """
it is an option of Transformer Engine's fp8 and fp4 that is not supported; use `--fp8-format` with
one of `--fp8-recipe`:
    fp8-param fp8-dot-product-attention fp8-multi-head-attention te-precision-config-file fp4-format
    fp4-recipe fp4-param-gather fp4-param fp4-quantizer-factory keep-fp8-transpose-cache
    disable-parameter-transpose-cache use-transformer-engine-op-fuser
    activation-func-fp8-input-store
the tokenizer's chat template decides; use `--sft-chat-template`:
    sft-tokenizer-prompt-format
checkpoints that do not stay are kept by each rank for itself; use `--non-persistent-ckpt-type`
local or in_memory:
    non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo most-recent-k
a neighbour holds a copy of a checkpoint in memory; use `--peer-checkpoint-interval`:
    replication replication-jump replication-factor
faults are put into a run from outside, and events go to faults.jsonl in the save folder; leave it
out:
    error-injection-rate error-injection-type result-rejected-tracker-filename
fully sharded data parallelism saves no checkpoint that other layouts load; use
`--use-distributed-optimizer` with `--data-parallel-sharding-strategy optim_grads`:
    use-megatron-fsdp use-custom-fsdp use-torch-fsdp2 torch-fsdp2-no-reshard-after-forward
    outer-dp-sharding-strategy fsdp-double-buffer fsdp-manual-registration
    no-gradient-reduce-div-fusion suggested-communication-unit-size
    enable-full-sharding-in-hsdp init-model-with-meta-device strict-fsdp-dtensor-load
    gradient-reduce-div-fusion nccl-ub use-nccl-ub disable-symmetric-registration
parts of the optimizer are not moved to the CPU; use `--use-distributed-optimizer`:
    optimizer-cpu-offload optimizer-offload-fraction use-torch-optimizer-for-cpu-offload
    overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params dump-param-to-param-group-map
    overlap-param-gather-with-optimizer-step num-distributed-optimizer-instances
gradients and the weights that Adam updates are kept in float32; use `--exp-avg-dtype`:
    main-grads-dtype main-params-dtype
the pipeline is not supported in this form; use `--num-layers-per-virtual-pipeline-stage`:
    overlap-p2p-communication-warmup-flush overlap-p2p-comm-warmup-flush
    defer-embedding-wgrad-compute wgrad-deferral-limit delay-wgrad-compute
    num-microbatches-with-partial-activation-checkpoints mtp-standalone
    pipeline-model-parallel-comm-backend use-ring-exchange-p2p
context parallelism is not supported in this form; use `--cp-comm-type all_gather`:
    hybrid-context-parallel max-seqlen-per-dp-cp-rank
Transformer Engine overlaps tensor-parallel communication in another way since its version 1.6; use
`--tp-comm-overlap`:
    tp-comm-split-ag tp-comm-split-rs tp-comm-atomic-ag tp-comm-atomic-rs disable-tp-comm-split-ag
    disable-tp-comm-split-rs symmetric-ar-type
graphs are those of whole transformer layers; use `--cuda-graph-impl local` alone:
    cuda-graph-scope external-cuda-graph cuda-graph-use-single-mempool
    cuda-graph-retain-backward-graph te-rng-tracker inference-rng-tracker rl-training-cuda-graphs
    moe-pad-experts-for-cuda-graph-inference
activations are not moved to the CPU; use `--recompute-granularity`:
    cpu-offloading-num-layers cpu-offloading cpu-offloading-activations cpu-offloading-weights
    cpu-offloading-double-buffering fine-grained-activation-offloading offload-modules
    min-offloaded-tensor-size
the expert option is not supported; use `--moe-token-dispatcher-type alltoall` with torch's experts:
    moe-enable-deepep moe-flex-dispatcher-backend moe-deepep-num-sms moe-hybridep-num-sms
    moe-use-legacy-grouped-gemm moe-shared-expert-overlap overlap-moe-expert-parallel-comm
    ep-overlap-early-attn-memory-release moe-use-upcycling moe-upcycling-granularity moe-latent-size
    moe-token-dropping moe-router-topk-limited-devices moe-enable-routing-replay
    moe-per-layer-logging
the layer option is not supported; use the standard transformer layer:
    attention-output-gate qk-l2-norm qk-clip qk-clip-alpha qk-clip-threshold
    log-max-attention-logit experimental-attention-variant linear-attention-freq
    linear-conv-kernel-dim linear-key-head-dim linear-value-head-dim linear-num-key-heads
    linear-num-value-heads dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk
    dsa-indexer-loss-coeff dsa-indexer-use-sparse-loss
    use-fused-weighted-squared-relu fused-single-qkv-rope memory-efficient-layer-norm
    mrope-section relative-attention-num-buckets relative-attention-max-distance
    disable-bf16-reduced-precision-matmul batch-invariant-mode use-te-activation-func use-kitchen
    use-kitchen-attention kitchen-attention-backend kitchen-config-file kitchen-recipe-number
    quant-recipe clone-scatter-output-in-embedding enable-autocast autocast-dtype
    mla-down-proj-fusion
layers of your own are given by a model provider; see examples/custom_model:
    spec heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json
    heterogeneous-block-specs hetereogenous-dist-checkpoint use-legacy-models
layers of state-space models are not supported; use `--hybrid-layer-pattern` with *, - and E:
    hybrid-attention-ratio hybrid-mlp-ratio is-hybrid-model mtp-hybrid-override-pattern
    mamba-state-dim mamba-head-dim mamba-num-groups mamba-num-heads use-mamba-mem-eff-path
    mlp-chunks-for-prefill
training by reinforcement is not supported; use a framework for it:
    perform-rl-step rl-prompts-per-eval grpo-prompts-per-step grpo-group-size grpo-iterations
    grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-kl-beta grpo-entropy-term-weight
    grpo-filter-groups-with-same-reward langrl-inference-server-type
    langrl-inference-server-conversation-template langrl-external-server langrl-env-config
    rl-default-temperature rl-default-top-p rl-default-top-k rl-offload-optimizer-during-inference
    rl-offload-kv-cache-during-training rl-remove-kv-cache-during-training rl-reset-cuda-graphs
    rl-partial-rollouts rl-inference-logprobs-is-correction rl-importance-sampling-truncation-coef
    rl-use-sequence-packing no-rl-use-sequence-packing rl-sequence-packing-max-sequences-per-bin
    rl-sequence-packing-algo rl-inference-tensor-model-parallel-size refit-method
    rl-verify-model-weights-swap rl-inference-expert-model-parallel-size
    rl-inference-expert-tensor-model-parallel-size rl-inference-model-unified-memory-level
    rl-inference-pipeline-model-parallel-size rl-offload-inference-model-weights-when-idle
    rl-parallel-generation-tasks rl-skip-bos-token
serving is not supported; export the model to an inference server:
    inference-batch-times-seqlen-threshold max-tokens-to-oom use-legacy-static-engine
    inference-max-requests inference-max-seq-length inference-max-batch-size
    inference-dynamic-batching inference-dynamic-batching-buffer-size-gb
    inference-dynamic-batching-paused-buffer-size-gb inference-dynamic-batching-block-size
    inference-dynamic-batching-max-requests inference-dynamic-batching-max-tokens
    inference-dynamic-batching-num-cuda-graphs
    inference-dynamic-batching-track-paused-request-events decode-only-cuda-graphs
    inference-dynamic-batching-unified-memory-level nccl-all-reduce-for-prefill
    enable-chunked-prefill disable-chunked-prefill inference-dynamic-batching-cuda-graph-max-tokens
    inference-dynamic-batching-cuda-graph-mixed-prefill-count inference-logging-step-interval
    inference-wandb-logging inference-coordinator-port flash-decode inference-sampling-seed
    use-inference-optimized-layers inference-fuse-tp-communication cache-mla-latents
restarts are left to the launcher; use torchrun's `--max-restarts` with `--load`:
    inprocess-restart inprocess-max-iterations inprocess-monitor-thread-interval
    inprocess-monitor-process-interval inprocess-progress-watchdog-interval
    inprocess-heartbeat-interval inprocess-soft-timeout inprocess-hard-timeout
    inprocess-heartbeat-timeout inprocess-barrier-timeout inprocess-completion-timeout
    inprocess-last-call-wait inprocess-termination-grace-time inprocess-granularity
    inprocess-active-world-size inprocess-empty-cuda-cache enable-ft-package calc-ft-timeouts
    ft-num-warmup-iters adlr-autoresume adlr-autoresume-interval
the monitoring tool is not supported; use `--profile` or metrics.jsonl:
    run-workload-inspector-server one-logger-project one-logger-run-name one-logger-async
    enable-one-logger app-tag-run-name app-tag-run-version log-straggler straggler-ctrlr-port
    straggler-minmax-count disable-straggler-on-startup log-energy log-memory-interval
    log-device-memory-used record-memory-history memory-snapshot-path use-pytorch-profiler
    config-logger-dir save-wgrads-interval save-dgrads-interval train-sync-interval
the communication option is not supported; leave it out:
    use-sharp sharp-enabled-group create-all-gather-group high-priority-stream-groups
    nccl-communicator-config-path distributed-timeout-seconds-after-init
    ddp-pad-buckets-for-high-nccl-busbw ddp-reduce-scatter-with-fp32-accumulation
    disable-gloo-process-groups fake-process-group
the checkpoint option is not supported; use the default format and `--use-checkpoint-args`:
    ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format
    load-main-params-from-ckpt use-mp-args-from-checkpoint-args dist-ckpt-save-pre-mcore-014
    distrib-optim-fully-reshardable-mem-efficient save-tokenizer-assets
the data option is not supported; use `--data-path`:
    phase-transition-iterations dataloader-fast-cache-load dataloader-defer-npy-index-mmap
    iterations-to-skip sample-rate manual-gc-eval no-weight-decay-cond-type
models other than GPT are not supported; use the program made for them:
    output-bert-embeddings bert-embedder-type bert-no-binary-head mask-prob short-seq-prob
    ict-head-size biencoder-projection-dim biencoder-shared-query-context-model ict-load bert-load
    titles-data-path query-in-block-prob use-one-sent-docs evidence-data-path
    retriever-report-topk-accuracies retriever-score-scaling block-data-path embedding-path
    indexer-batch-size indexer-log-interval num-classes img-h img-w num-channels patch-dim
    classes-fraction data-per-class-fraction head-lr-mult vision-pretraining vision-pretraining-type
    vision-backbone-type swin-backbone-type mask-type mask-factor iter-per-epoch dino-local-img-size
    dino-local-crops-number dino-head-hidden-size dino-bottleneck-size dino-freeze-last-layer
    dino-norm-last-layer dino-warmup-teacher-temp dino-teacher-temp dino-warmup-teacher-temp-epochs
it is a switch that newer versions give as a size; use `--expert-tensor-parallel-size`:
    moe-extended-tp
the file of flags is `--config`; it takes the same names:
    yaml-cfg
"""
"""Reasons and what to use instead, and below each the flags that are refused for it."""

UNSUPPORTED = {f"--{name}": reason for name, reason in _by_name(_REFUSED).items()}
