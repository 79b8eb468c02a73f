"""Tables of Megatron-LM's flags that are renamed, have no effect here, or are refused.

They cover every flag of releases 0.16 to 0.20 that this package lacks, and the flags that launch
scripts of Pai-Megatron-Patch and MindSpeed-LLM (both built on Megatron-LM) give to every model. A
flag that changes no result, because it logs, overlaps, or saves memory, is noted. The reason for a
refusal says what the flag is for and what to do instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

RENAMED: dict[str, tuple[str, ...]] = {
    "--use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
    "--fp8": ("--fp8-format",),
    "--enable-cuda-graph": ("--cuda-graph-impl", "local"),
    "--external-cuda-graph": ("--cuda-graph-impl", "transformer_engine"),
    "--no-pad-vocab-size": ("--make-vocab-size-divisible-by", "1"),
    "--dataloader-inter-document-masking": ("--reset-attention-mask",),
    "--recompute-activations": ("--recompute-granularity", "selective"),
    "--checkpoint-activations": (
        "--recompute-granularity", "full", "--recompute-method", "uniform",
        "--recompute-num-layers", "1",
    ),
    "--qk-nope-head-dim": ("--qk-head-dim",),
    "--qk-rope-head-dim": ("--qk-pos-emb-head-dim",),
    "--num-mtp-predictor": ("--mtp-num-layers",),
    "--tokenizer-name-or-path": ("--tokenizer-model",),
    "--rope-scaling-mscale": ("--mscale",),
    "--rope-scaling-mscale-all-dim": ("--mscale-all-dim",),
    "--model-parallel-size": ("--tensor-model-parallel-size",),
    "--decoder-num-layers": ("--num-layers",),
    "--decoder-seq-length": ("--seq-length",),
    "--use-checkpoint-opt_param-scheduler": ("--use-checkpoint-opt-param-scheduler",),
    "--override-opt_param-scheduler": ("--override-opt-param-scheduler",),
}  # fmt: skip
"""Old spelling -> the words that replace it, values included."""


def _by_name(text: str) -> dict[str, str]:
    """Return a reason by name; in ``text`` a reason ends with a colon before its indented names."""
    return {
        name: " ".join(reason.split()).removesuffix(":")
        for reason, names in re.findall(r"((?:^\S.*\n)+)((?:^ .*\n)+)", text, re.MULTILINE)
        for name in names.split()
    }


_NO_EFFECT = """
layers are built for training, not in the forms that ModelOpt exports:
    export-model-type export-legacy-megatron export-te-mcore-model export-default-te-spec
    export-force-local-attention modelopt-enabled
samples of text are never padded, and `--sft-max-length` cuts conversations:
    max-padding-length
`--sft` tells conversations from indexed datasets:
    dataset
`--mtp-num-layers` says how many further tokens are predicted:
    use-multi-token-prediction
shared experts are as wide as `--moe-shared-expert-intermediate-size` says:
    enable-shared-expert
kernels are chosen by the device:
    fused-padded-mla-attention use-fused-rotary-pos-emb use-fused-swiglu use-fused-rmsnorm
    use-fused-softmax use-fused-ring-attention-update use-fused-moe-token-permute-and-unpermute
    mla-fa-without-pad no-shared-storage coc-fused-kernel use-ascend-coc use-ascend-mc2 use-mc2
communication runs beside computation as the schedule allows:
    moe-permutation-async-comm moe-alltoall-overlap-comm moe-fb-overlap use-cp-send-recv-overlap
memory is saved by `--recompute-granularity` and `--cross-entropy-chunk-size`:
    swap-attention reuse-fp32-param mtp-mem-efficient-logits
`--profile` always records the same:
    profile-level profile-with-cpu profile-with-memory profile-with-stack profile-record-shapes
    profile-save-path profile-export-type profile-data-simplification
models are always megatron-core's:
    use-mcore-models
attention uses a flash kernel wherever torch or Transformer Engine has one:
    use-flash-attn flash-attention-version
checkpoints are always distributed:
    use-distributed-checkpoint use-dist-ckpt
the format is `--ckpt-format`, and a checkpoint names its own when it is loaded:
    dist-ckpt-format auto-detect-ckpt-format dist-ckpt-save-pre-mcore-014
whether the structure is constant is checked at each save:
    ckpt-assume-constant-structure
`--async-save` has one way to write, with processes that persist:
    use-persistent-ckpt-worker use-persistent-ckpt-worker-process async-strategy dist-ckpt-workers
    async-ckpt-cpu-priority async-ckpt-io-priority async-ckpt-use-cpu-shm
ranks share the writing and reading of a checkpoint in one way:
    ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-save-process-group
    ckpt-fully-parallel-load-process-group ckpt-fully-parallel-load-per-rank-objects
    ckpt-pg-tensors-cache-path ckpt-pg-tensors-cache-create
    distrib-optim-fully-reshardable-mem-efficient ckpt-drop-redundant-extra-state
    stream-ckpt-dequant
checkpoints are always checked against the checksums of their files:
    verify-integrity ckpt-load-validate-sharding-integrity
the tokenizer's files stay where the flags name them:
    save-tokenizer-assets
a checkpoint that does not stay is kept as `--non-persistent-ckpt-type` says:
    non-persistent-local-ckpt-algo most-recent-k
a second copy of each rank's state is kept with `--peer-checkpoint-interval`:
    replication replication-jump replication-factor
there is one kind of dataset:
    data-impl
indexed data is mapped into memory when it is first read:
    dataloader-fast-cache-load dataloader-defer-npy-index-mmap
files are opened by Python:
    enable-msc disable-msc
the launcher sets the rank in the environment:
    local-rank lazy-mpu-init
masks are made on the device of the batch, never in the data loader:
    no-create-attention-mask-in-dataloader create-attention-mask-in-dataloader
megatron-core decides how tensor-parallel communication overlaps:
    no-async-tensor-model-parallel-allreduce
virtual chunks need overlapped messages to be exact with two stages:
    no-overlap-p2p-communication
megatron-core sends whole tensors:
    no-scatter-gather-tensors-in-pipeline
a step with a non-finite gradient is always skipped and counted:
    check-for-nan-in-loss-and-grad
steps with a large loss or gradient norm are reported with `--on-spike log`:
    check-for-large-grads check-for-spiky-loss
repeated steps that disagree are reported in the log:
    result-rejected-tracker-filename
phases of a step are timed by `--profile`:
    timing-log-level timing-log-option barrier-with-L1-time no-barrier-with-level-1-timing
    use-pytorch-profiler pytorch-profiler-collect-shapes pytorch-profiler-collect-callstack
    pytorch-profiler-collect-chakra record-shapes nvtx-ranges
a step's loss, times and memory go to the console, TensorBoard and metrics.jsonl, nothing more:
    log-straggler straggler-ctrlr-port straggler-minmax-count disable-straggler-on-startup
    log-energy log-memory-interval log-device-memory-used record-memory-history
    memory-snapshot-path config-logger-dir log-max-attention-logit moe-per-layer-logging
    run-workload-inspector-server gpu-sniff-test-interval
weights, gradients and activations are not written to files while training:
    save-wgrads-interval save-dgrads-interval save-params-interval save-activations-interval
    save-tokens-per-expert-interval moe-routing-trace-path moe-routing-trace-max-training-iters
    moe-routing-trace-capture-logits moe-routing-trace-capture-hidden-states
    moe-routing-trace-dump-weights
nothing is reported to NVIDIA or to another service:
    no-one-logger enable-one-logger one-logger-project one-logger-run-name one-logger-async
    app-tag-run-name app-tag-run-version otel-enabled otel-service-name otel-span-groups
a run that hangs writes the stack of each rank to the log:
    flight-recorder-dump-path flight-recorder-trace-buffer-size flight-recorder-dump-on-timeout
    flight-recorder-include-stack-trace flight-recorder-include-only-active
    flight-recorder-extra-dump-on-exec
failed ranks are started again with `--max-restarts`:
    inprocess-restart inprocess-max-iterations inprocess-monitor-thread-interval
    inprocess-monitor-process-interval inprocess-progress-watchdog-interval
    inprocess-heartbeat-interval inprocess-soft-timeout inprocess-hard-timeout
    inprocess-heartbeat-timeout inprocess-barrier-timeout inprocess-completion-timeout
    inprocess-last-call-wait inprocess-termination-grace-time inprocess-granularity
    inprocess-active-world-size inprocess-empty-cuda-cache enable-ft-package calc-ft-timeouts
    ft-num-warmup-iters adlr-autoresume adlr-autoresume-interval
signals end the training as `--exit-signal-handler` says, without a traceback:
    exit-signal-handler-for-dataloader exit-signal-handler-for-training
experimental parts are chosen by their own flags:
    enable-experimental
tests call the package:
    test-mode
the tokenizer comes from the flags:
    no-use-tokenizer-model-from-checkpoint-args
there is one set of tokenizers, those of Hugging Face in their fast form:
    legacy-tokenizer use-gigatoken
training reads token ids; how text becomes ids is told by the tokenizer's own files:
    tokenizer-sentencepiece-ignore-extra-whitespaces
special tokens are added only with `--tokenizer-hf-include-special-tokens`:
    tokenizer-hf-no-include-special-tokens
validation sets are named after their paths:
    validation-set-names
validation counts tokens, so the size of its micro-batches changes no loss:
    eval-micro-batch-size
the flag is `--use-cpu-initialization`:
    use-cpu-initialisation
weights are made on the device or the CPU, as `--use-cpu-initialization` says:
    init-model-with-meta-device
scales of the delayed recipe follow its history at every step:
    fp8-interval
the loss is always computed in fp32:
    fp16-lm-cross-entropy
models are not exported:
    onnx-safe
the size of the experts' tensor parallelism is `--expert-tensor-parallel-size`:
    moe-extended-tp
data-parallel ranks share what `--data-parallel-sharding-strategy` says; the largest share is
`--data-parallel-sharding-strategy optim_grads`, and weights stay whole on each of them:
    use-megatron-fsdp use-custom-fsdp use-torch-fsdp2 torch-fsdp2-no-reshard-after-forward
    outer-dp-sharding-strategy fsdp-double-buffer fsdp-manual-registration
    suggested-communication-unit-size enable-full-sharding-in-hsdp strict-fsdp-dtensor-load
    megatron-fsdp-main-params-dtype megatron-fsdp-main-grads-dtype megatron-fsdp-grad-comm-dtype
    megatron-fsdp-version megatron-fsdp-enable-fine-grained-param-gather
    megatron-fsdp-max-pool-double-buffer fsdp-db-use-persist-buf-on-alloc-fail
    keep-fp8-transpose-cache num-distributed-optimizer-instances
    tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards
    gtp-remat-opt-in-modules gtp-remat-reduce-scatter-with-fp32-accumulation gtp-remat-nccl-ub
    gtp-expert-remat-nccl-ub use-layer-wise-param-layout
the optimizer's state stays on the device; `--use-distributed-optimizer` shares it among ranks:
    optimizer-cpu-offload optimizer-offload-fraction use-torch-optimizer-for-cpu-offload
    overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params optimizer-cuda-graph
activations stay on the device; `--recompute-granularity` saves their memory:
    cpu-offloading-num-layers cpu-offloading cpu-offloading-activations cpu-offloading-weights
    cpu-offloading-double-buffering cpu-offloading-retain-pinned-cpu-buffers
    fine-grained-activation-offloading offload-modules min-offloaded-tensor-size
    fine-grained-offloading-max-inflight-offloads delay-offload-until-cuda-graph
    delta-offload-bytes-across-pp-ranks activation-offload-fraction moe-paged-stash
    moe-paged-stash-page-size moe-paged-stash-buffer-size-factor-cuda
    moe-paged-stash-buffer-size-factor-cpu clone-scatter-output-in-embedding
    num-microbatches-with-partial-activation-checkpoints mlp-chunks-for-training
pipeline stages overlap as their schedule says:
    overlap-p2p-communication-warmup-flush overlap-p2p-comm-warmup-flush
    defer-embedding-wgrad-compute wgrad-deferral-limit delay-wgrad-compute mtp-standalone
    pipeline-model-parallel-comm-backend use-ring-exchange-p2p
    overlap-dispatch-backward-with-experts-wgrad
NCCL and the optimizer choose their own groups, buffers and streams:
    use-sharp sharp-enabled-group create-all-gather-group high-priority-stream-groups
    nccl-communicator-config-path distributed-timeout-seconds-after-init
    ddp-pad-buckets-for-high-nccl-busbw disable-gloo-process-groups enable-gloo-process-groups
    nccl-ub use-nccl-ub disable-symmetric-registration symmetric-ar-type
    gradient-reduce-div-fusion overlap-param-gather-with-optimizer-step train-sync-interval
    high-priority-a2a-comm-stream
Transformer Engine overlaps tensor-parallel communication as `--tp-comm-overlap` says:
    tp-comm-split-ag tp-comm-split-rs tp-comm-atomic-ag tp-comm-atomic-rs
graphs are those of whole transformer layers, as `--cuda-graph-impl` says:
    cuda-graph-scope cuda-graph-modules cuda-graph-use-single-mempool
    cuda-graph-retain-backward-graph te-rng-tracker inference-rng-tracker
experts exchange their tokens as `--moe-token-dispatcher-type` says, without overlap:
    moe-enable-deepep moe-flex-dispatcher-backend moe-deepep-num-sms moe-hybridep-num-sms
    moe-flex-dispatcher-num-sms moe-permute-fusion-into-hybridep moe-hybridep-num-blocks-permute
    moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms-preprocessing
    moe-hybridep-pad-uneven-dispatch-inputs moe-ncclep-static-shape moe-ncclep-zero-copy
    moe-dispatch-fwd-dtype moe-combine-bwd-dtype moe-shared-expert-overlap
    overlap-moe-expert-parallel-comm ep-overlap-early-attn-memory-release
the layers choose their own kernels:
    moe-use-legacy-grouped-gemm moe-use-grouped-tensor use-grouped-gemm-for-dense-mlp
    use-grouped-gemm-for-shared-expert moe-single-grouped-weight moe-single-grouped-bias
    use-fused-weighted-squared-relu fused-single-qkv-rope fused-residual-rmsnorm
    memory-efficient-layer-norm use-te-activation-func mla-down-proj-fusion muon-use-syrk
    use-transformer-engine-op-fuser batch-invariant-backend use-kitchen-attention
    kitchen-attention-backend disable-parameter-transpose-cache
it belongs to generating text, which `tools/generate_text.py` does with flags of its own:
    inference-batch-times-seqlen-threshold max-tokens-to-oom use-legacy-static-engine
    inference-max-requests inference-max-seq-length inference-max-batch-size
    inference-dynamic-batching inference-dynamic-batching-buffer-size-gb
    inference-dynamic-batching-paused-buffer-size-gb inference-dynamic-batching-block-size
    inference-dynamic-batching-max-requests inference-dynamic-batching-max-tokens
    inference-dynamic-batching-num-cuda-graphs inference-dynamic-batching-logprobs-mode
    inference-dynamic-batching-track-paused-request-events decode-only-cuda-graphs
    inference-dynamic-batching-unified-memory-level nccl-all-reduce-for-prefill
    enable-chunked-prefill disable-chunked-prefill inference-dynamic-batching-cuda-graph-max-tokens
    inference-dynamic-batching-cuda-graph-mixed-prefill-count inference-logging-step-interval
    inference-wandb-logging inference-coordinator-port flash-decode inference-sampling-seed
    use-inference-optimized-layers inference-fuse-tp-communication cache-mla-latents
    mlp-chunks-for-prefill moe-pad-experts-for-cuda-graph-inference moe-enable-routing-replay
    inference-disable-triton-nvls-kernels inference-grouped-gemm-backend
    inference-moe-disable-fused-quant-kernels inference-dynamic-batching-mamba-memory-ratio
    inference-dynamic-batching-track-generated-token-events num-speculative-tokens
    inference-dynamic-batching-prefix-caching
    inference-dynamic-batching-prefix-caching-eviction-policy
    inference-dynamic-batching-prefix-caching-coordinator-policy
    inference-dynamic-batching-prefix-caching-routing-alpha
    inference-dynamic-batching-prefix-caching-mamba-gb inference-text-gen-server-logging
    mamba-inference-conv-states-dtype mamba-inference-ssm-states-dtype
    inference-use-synchronous-zmq-collectives inference-cuda-graph-scope
    inference-moe-token-dispatcher-type inference-cuda-graph-all-prefills
    inference-dynamic-batching-sampling-backend inference-disable-ep-consensus
    inference-cuda-graph-max-tokens inference-dynamic-batching-cuda-graph-sizing-distribution
    use-same-sampling-seed-across-dp-ranks inference-dynamic-batching-async-sched-mode
    inference-shards
it belongs to `--perform-rl-step`, and a run without that flag ignores it:
    rl-prompts-per-eval grpo-prompts-per-step grpo-group-size grpo-iterations
    grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-kl-beta grpo-entropy-term-weight
    grpo-filter-groups-with-same-reward langrl-inference-server-type
    langrl-inference-server-conversation-template langrl-external-server langrl-env-config
    rl-default-temperature rl-default-top-p rl-default-top-k rl-offload-optimizer-during-inference
    rl-offload-kv-cache-during-training rl-remove-kv-cache-during-training rl-reset-cuda-graphs
    rl-partial-rollouts rl-inference-logprobs-is-correction rl-importance-sampling-truncation-coef
    rl-use-sequence-packing rl-sequence-packing-max-sequences-per-bin
    rl-sequence-packing-algo rl-inference-tensor-model-parallel-size refit-method
    rl-verify-model-weights-swap rl-inference-expert-model-parallel-size
    rl-inference-expert-tensor-model-parallel-size rl-inference-model-unified-memory-level
    rl-inference-pipeline-model-parallel-size rl-offload-inference-model-weights-when-idle
    rl-parallel-generation-tasks rl-skip-bos-token rl-training-cuda-graphs
    rl-num-parallel-generations rl-num-parallel-generation-batches rl-generation-batch-size
    rl-kv-cache-management-mode rl-persist-cuda-graphs rl-inference-parsers rl-generation-lag
    rl-submission-granularity rl-consumption-granularity rl-profile rl-profile-dir
    rl-max-inflight-requests rl-durable-rollout-bank rl-rollout-bank-dir rl-rollout-bank-max-bytes
it belongs to programs for BERT, retrieval and images, and Megatron-LM's GPT ignores it too:
    output-bert-embeddings bert-embedder-type bert-no-binary-head mask-prob short-seq-prob
    ict-head-size biencoder-projection-dim biencoder-shared-query-context-model ict-load bert-load
    titles-data-path query-in-block-prob use-one-sent-docs evidence-data-path
    retriever-report-topk-accuracies retriever-score-scaling block-data-path embedding-path
    indexer-batch-size indexer-log-interval num-classes img-h img-w num-channels patch-dim
    classes-fraction data-per-class-fraction head-lr-mult vision-pretraining vision-pretraining-type
    vision-backbone-type swin-backbone-type mask-type mask-factor iter-per-epoch sample-rate
    dino-local-img-size dino-local-crops-number dino-head-hidden-size dino-bottleneck-size
    dino-freeze-last-layer dino-norm-last-layer dino-warmup-teacher-temp dino-teacher-temp
    dino-warmup-teacher-temp-epochs
it belongs to `--use-mup`, and a run without that flag ignores it:
    mup-width-mult mup-base-hidden-size mup-embedding-mult mup-output-mult mup-base-head-dim
    mup-attn-scale-power
it belongs to `--optimizer lion`, and other optimizers ignore it:
    lion-beta1 lion-beta2
it belongs to `--logits-save-dir`, and a run without that flag ignores it:
    logits-save-top-k logits-save-top-p logits-save-top-p-min-k logits-save-dtype
it belongs to `--logits-load-dir`, and a run without that flag ignores it:
    logits-load-decode-threads logits-load-prefetch-factor logits-load-msc-prefetch-depth
    logits-load-kd-loss-alpha logits-load-ignore-errors
it belongs to `--experimental-attention-variant`, and a run without that flag ignores it:
    linear-attention-freq linear-conv-kernel-dim linear-key-head-dim linear-value-head-dim
    linear-num-key-heads linear-num-value-heads dsa-indexer-n-heads dsa-indexer-head-dim
    dsa-indexer-topk dsa-indexer-loss-coeff dsa-indexer-use-sparse-loss dsa-indexer-topk-freq
    dsa-indexer-skip-topk-offset dsa-kernel-backend dsa-indexer-rope-interleaved
    dsa-indexer-rotate-activation dsa-indexer-scoring-relu dsa-indexer-k-norm-epsilon
    dsa-indexer-k-norm-fp32
it belongs to layers of state-space models, which `--hybrid-layer-pattern` refuses:
    mamba-state-dim mamba-head-dim mamba-num-groups mamba-num-heads use-mamba-mem-eff-path
    mamba-mem-eff-path mamba-training-ssm-states-dtype gdp-num-householder gdp-cutedsl-kernel
    gdp-num-chunk-states-to-recompute
it belongs to `--qk-clip`, and a run without that flag ignores it:
    qk-clip-alpha qk-clip-threshold
it belongs to `--enable-mhc-connections`, and a run without that flag ignores it:
    mhc-num-residual-streams mhc-sinkhorn-iterations mhc-init-gating-factor mhc-recompute-layer-num
it belongs to kinds of `--position-embedding-type` that are refused:
    mrope-section relative-attention-num-buckets relative-attention-max-distance
it belongs to `--moe-router-load-balancing-type quantile_balancing`, which is refused:
    moe-router-quantile-balancing-ema
it belongs to `--moe-use-upcycling`, and a run without that flag ignores it:
    moe-upcycling-granularity
it belongs to `--hybrid-context-parallel`, and a run without that flag ignores it:
    max-seqlen-per-dp-cp-rank
it belongs to `--fp4-format`, and a run without that flag ignores it:
    fp4-recipe fp4-param-gather fp4-param fp4-quantizer-factory
it belongs to `--ckpt-convert-format`, and a run without that flag ignores it:
    ckpt-convert-save
it belongs to `--error-injection-rate`, and a run without that flag ignores it:
    error-injection-type
evaluations change no weight, and start with the first `--eval-interval`:
    start-eval-at-iter
"""
NO_EFFECT = {f"--{name}": reason for name, reason in _by_name(_NO_EFFECT).items()}
"""Flag that is accepted without effect -> the reason; ``--no-`` or ``--disable-`` may precede."""

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
    ddp_num_buckets tp_comm_overlap tp_comm_overlap_cfg tp_comm_overlap_ag tp_comm_overlap_rs
    tp_comm_overlap_rs_dgrad tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_bootstrap_backend
    tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1
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
    "--recompute-granularity selective": "recompute_modules",
    "--use-rope-scaling": "rope_scaling_factor",
    "--multi-latent-attention": (
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type "
        "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale "
        "mscale_all_dim"
    ),
    "--rope-type yarn": "original_max_position_embeddings beta_fast beta_slow mscale",
    "--mtp-num-layers": "mtp_loss_scaling_factor",
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


def unmet(needs: Mapping[str, str], values: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield each key of a table like `NEEDS` that values of fields do not meet, and its fields."""
    for needed, names in needs.items():
        name, _, accepted = needed.removeprefix("--").partition(" ")
        value = values[name.replace("-", "_")]
        if (str(value) not in accepted.split(" or ")) if accepted else value in (None, False):
            yield needed, names.split()


_REFUSED = """
it computes more of the model in fp8, which changes results; leave it out, and `--fp8-format` with
`--fp8-recipe` decides what is computed in fp8:
    fp8-dot-product-attention fp8-multi-head-attention te-precision-config-file fp8-output-proj
    activation-func-fp8-input-store
weights in fp8 are asked for by another flag; use `--fp8-param-gather`:
    fp8-param
it computes in fp4, and there is no fp4 here; use `--fp8-format` with `--fp8-recipe`:
    fp4-format
it quantizes with a library of NVIDIA's own; use `--fp8-format` with `--fp8-recipe`:
    use-kitchen kitchen-config-file kitchen-recipe-number quant-recipe
it sets torch's rules of casting by itself; use `--bf16` or `--fp16`:
    enable-autocast autocast-dtype
it makes products of bf16 matrices add in float32 everywhere; leave it out, or train without
`--bf16`:
    disable-bf16-reduced-precision-matmul
it makes logits independent of the size of a batch, for a reinforcement learner and its server;
leave it out, and use `--deterministic-mode` for runs that repeat to the bit:
    batch-invariant-mode
it computes the logits in another precision than the model; leave it out, as the loss takes them in
float32 anyway:
    output-logit-dtype logit-dtype
it names a format of conversations that is compiled into Megatron-LM; use `--sft-chat-template` with
a file, or the tokenizer's own template:
    sft-tokenizer-prompt-format=nemotron-h-aligned
it names the template that conversations are written by; use `--sft-chat-template`:
    chat-template
it names one shared folder for checkpoints that do not stay; use `--non-persistent-ckpt-type` local
or in_memory:
    non-persistent-global-ckpt-dir
it makes faults in the middle of a run, to test what follows; leave it out, and use
`tools/chaos.py`:
    error-injection-rate=0 fault-injector-ranks fault-injector-num-ranks fault-injector-fault-types
    fault-injector-fault-probabilities fault-injector-fault-delay
    fault-injector-delay-start-iteration fault-injector-mtti-seconds fault-injector-offset-seconds
    fault-injector-seed
it maps single weights to groups with a learning rate of their own; leave it out, as only
`--decoupled-lr` gives some weights another rate:
    dump-param-to-param-group-map
it chooses by another rule which weights decay; leave it out, as biases and one-dimensional weights
do not decay, and all others do:
    no-weight-decay-cond-type
gradients and the weights that Adam updates are kept in float32; leave it out, or save the memory of
the moments with `--exp-avg-dtype`:
    main-grads-dtype=fp32 main-params-dtype=fp32
it adds up gradients in float32 for some weights, or only on the way; use
`--accumulate-allreduce-grads-in-fp32`, which does so for all:
    ddp-param-name-patterns-for-fp32-local-accumulation
    ddp-reduce-scatter-with-fp32-accumulation
it gives each packed sequence its own number of context-parallel ranks; leave it out, as
`--context-parallel-size` is one size for all:
    hybrid-context-parallel
it scales learning rates and initial weights with the width; leave it out, and give `--lr` and
`--init-method-std` for this width:
    use-mup
it rescales queries and keys whose logits grow too large; leave it out, or use `--qk-layernorm`:
    qk-clip qk-l2-norm
it adds a gate to the output of attention; leave it out:
    attention-output-gate
it replaces softmax attention in some layers by a linear or sparse one; leave it out, or give the
layers by a model provider as `examples/custom_model` does:
    experimental-attention-variant
it widens the residual stream to several streams; leave it out, or give the layers by a model
provider as `examples/custom_model` does:
    enable-mhc-connections
it interleaves the two halves of a gated layer's weights; leave it out, as weights here are stored
half by half:
    moe-mlp-glu-interleave-size moe-shared-expert-glu-interleave-size
it lets depths of multi-token prediction share weights, mix their input or stop their gradient;
leave it out, and weigh them with `--mtp-loss-scaling-factor`:
    mtp-use-repeated-layer mtp-hsm mtp-detach-heads
it projects the experts' input to a smaller width; leave it out, or choose a smaller
`--moe-ffn-hidden-size`:
    moe-latent-size
it makes a model of experts from a dense checkpoint; leave it out, and load a checkpoint that has
experts, such as one from `tools/convert_checkpoint.py`:
    moe-use-upcycling
it limits the tokens that one rank's experts take; use `--moe-expert-capacity-factor`, which limits
those of each expert:
    moe-expert-rank-capacity-factor moe-token-dropping
it makes a token's experts stay on a few ranks; use `--moe-router-num-groups` with
`--moe-router-group-topk`:
    moe-router-topk-limited-devices
it routes tokens at random, for measurements of speed; use `--moe-router-force-load-balancing`:
    moe-router-force-biased
it builds the layers from a function or a file of your own; leave it out, and give the model by a
model provider as `examples/custom_model` does:
    spec heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json
    heterogeneous-block-specs hetereogenous-dist-checkpoint
it builds models of before megatron-core; leave it out:
    use-legacy-models
it mixes attention with layers of state-space models; use `--hybrid-layer-pattern` with *, - and E:
    hybrid-attention-ratio=0.0 hybrid-mlp-ratio=0.0 is-hybrid-model mtp-hybrid-override-pattern
it trains by reinforcement; leave it out, and take a framework for that, which can load what
`--save-hf` writes:
    perform-rl-step
it writes the logits of a model to files, to teach another one; leave it out:
    logits-save-dir
it learns from the stored logits of another model; leave it out, or give a loss of your own with
`--loss`:
    logits-load-dir
it runs the model without training any weight; leave it out, and use `--skip-train` to evaluate:
    freeze-all-layers
it lets a run go on from another iteration than the checkpoint's; leave it out, and use `--finetune`
to take only the weights and begin at iteration 0:
    override-ckpt-iteration
it starts one rank as if the others were there; use `--dry-run`, which tells the memory of each
rank:
    fake-process-group
it writes a checkpoint in another format; leave it out, and use `tools/convert_checkpoint.py`:
    ckpt-convert-format ckpt-convert-update-legacy-dist-opt-format
it takes the float32 weights of a checkpoint without its optimizer; leave it out, as `--finetune`
loads the weights in the precision of the model:
    load-main-params-from-ckpt
it takes the parallel sizes of the checkpoint; leave it out, and give `--tensor-model-parallel-size`
and the like, as a checkpoint loads in every layout:
    use-mp-args-from-checkpoint-args
it divides the samples of a run among phases with an index of their own; leave it out, and use
`--data-schedule` with `--data-order direct`:
    phase-transition-iterations
it passes over the batches of given iterations; leave it out, as `--on-spike skip` finds the steps
whose update is not applied:
    iterations-to-skip
it evaluates with another batch than it trains with; leave it out, and choose `--eval-iters` so that
`--eval-iters` times `--global-batch-size` are the samples you want:
    eval-global-batch-size
it takes the slow form of a Hugging Face tokenizer; leave it out, as the fast one writes the same
ids, and try both with `tools/preview_batch.py`:
    tokenizer-hf-no-use-fast
it moves the special ids of NullTokenizer; leave it out, as its end of a document is `--vocab-size`
itself and there is no padding:
    null-tokenizer-eod-id null-tokenizer-pad-id=-1
it is for NVIDIA's ModelOpt, which quantizes a trained model or makes it smaller; leave it out, and
give ModelOpt what `--save-hf` writes:
    export-kv-cache-quant export-real-quant-cfg export-quant-cfg export-offline-model
it learns from a teacher by ModelOpt; leave it out, or give a loss of your own with `--loss`:
    export-kd-teacher-load export-kd-teacher-model-config export-kd-teacher-ckpt-format
    export-kd-cfg
it reads conversations from the Hugging Face hub for ModelOpt; use `--sft` with `--data-path`:
    finetune-hf-dataset finetune-data-split finetune-data-files
it trains a part of the model only; leave it out, or use `--lora-rank` for few trained weights:
    qad-train-target freeze-base-for-mtp
it normalizes queries and keys without weights, as Llama 4 does; leave it out, or use
`--qk-layernorm`, which has weights:
    export-qk-l2-norm
it multiplies the input of experts by their probabilities; use `--moe-apply-probs-on-input`:
    export-moe-apply-probs-on-input
it turns on gpt-oss's scaling of rotary positions; use `--rope-type yarn` and its flags, or
`--load-hf` with a folder of the model:
    enable-gpt-oss
it reads a configuration in Megatron-LM's own YAML; use `--config`, whose names are those of the
flags:
    yaml-cfg
"""
"""Below each reason, the flags that are refused for it; ``name=value`` gives the default of
Megatron-LM, which asks for nothing and is therefore not refused."""


_REFUSED_OF_PAI = """
it names the tokenizer of a family of models; use `--tokenizer-type HuggingFaceTokenizer` with
`--tokenizer-model`:
    patch-tokenizer-type
it adds entries to the vocabulary; use `--padded-vocab-size` with the number of all entries:
    extra-vocab-size=0
it trains on the answers of conversations; use `--sft`:
    train-mode=pretrain
it gives the number of shared experts; use `--moe-shared-expert-intermediate-size` with the width of
all of them together:
    num-shared-experts
it adds tokens that every other one sees; leave it out, or use `--softmax-type learnable`:
    attention-sink-k=0
"""
_REFUSED_OF_MINDSPEED = """
it makes the first layers dense; use `--moe-layer-freq` with a list such as [0]*1+[1]*3:
    first-k-dense-replace=0
it gives the number of shared experts; use `--moe-shared-expert-intermediate-size` with the width of
all of them together:
    n-shared-experts
it balances the experts within each sequence; use `--moe-router-load-balancing-type seq_aux_loss`:
    seq-aux
it makes the weights of a token's experts add up to 1; leave it out, as they do so without
`--moe-router-pre-softmax`:
    norm-topk-prob
it deals whole experts to tensor-parallel ranks; use `--expert-tensor-parallel-size 1`:
    moe-tp-extend-ep
it scales rotary positions; use `--rope-type yarn`:
    rope-scaling-type
it tells for how many positions the model was trained before; use `--rope-type yarn` with
`--original-max-position-embeddings`:
    rope-scaling-original-max-position-embeddings
it chooses how ranks share a sequence; use `--cp-comm-type` with p2p for a ring, or a2a for Ulysses:
    context-parallel-algo
it chooses the order of micro-batches in the pipeline; use `--pipeline-schedule`:
    schedules-method
it leaves places of the pipeline without a layer; use `--pipeline-model-parallel-layout`:
    noop-layers
"""
"""Reasons in the form of `_REFUSED`, for flags of Pai-Megatron-Patch and of MindSpeed-LLM."""


@dataclass(frozen=True)
class Refusal:
    """The reason why a flag is refused.

    Attributes:
        default: the value, if any, that is accepted for it.
        source: the program that has the flag.
    """

    reason: str
    default: str | None = None
    source: str = "Megatron-LM"


def _refusals(text: str, source: str) -> Iterator[tuple[str, Refusal]]:
    for entry, reason in _by_name(text).items():
        name, has_default, default = entry.partition("=")
        yield f"--{name}", Refusal(reason, default if has_default else None, source)


UNSUPPORTED = {
    **dict(_refusals(_REFUSED, "Megatron-LM")),
    **dict(_refusals(_REFUSED_OF_PAI, "Pai-Megatron-Patch")),
    **dict(_refusals(_REFUSED_OF_MINDSPEED, "MindSpeed-LLM")),
}


def answer_in(table: Mapping[str, T], name: str) -> T | None:
    """Return a table's entry for a flag, or for the flag that ``--no-`` or ``--disable-`` negates.

    Megatron-LM gives each switch that is on by default these two negative spellings.
    """
    for prefix in ("--disable-", "--no-"):
        if name not in table and name.startswith(prefix):
            bare = name.removeprefix(prefix)
            name = next((x for x in (f"--no-{bare}", f"--{bare}") if x in table), name)
    return table.get(name)
