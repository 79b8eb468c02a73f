"""Values that a search gives each flag, beside those that its type and choices say."""

from __future__ import annotations

import shlex

from tests.combinations import more_values


def _table(text: str) -> dict[str, list[str]]:
    found = {}
    for line in text.replace("\\\n", "").strip().splitlines():
        if not line:
            continue
        name, _, values = line.strip().partition(":")
        found[name] = [value.strip() for value in values.split("|")]
    return found


VALUES = _table(
    """
distributed-timeout-minutes: 1 | 5.5
num-layers: 1 | 3 | 4
hidden-size: 48 | 64
ffn-hidden-size: 36 | 96
num-attention-heads: 2 | 8
kv-channels: 8 | 12 | 16
num-query-groups: 1 | 2 | 4
seq-length: 16 | 24
max-position-embeddings: 64
rotary-base: 500 | 500000
rotary-percent: 0.25 | 0.5
rotary-seq-len-interpolation-factor: 2
rope-scaling-factor: 2.0
make-vocab-size-divisible-by: 1 | 64
padded-vocab-size: 128 | 192
norm-epsilon: 1e-6 | 1e-3
attention-dropout: 0.1
hidden-dropout: 0.1
init-method-std: 0.02
embedding-init-method-std: 0.05 | 1.0
window-size: 7 0 | (4,0) | -1 0 | 3 3
window-attn-skip-freq: 2
mtp-num-layers: 1 | 2
mtp-loss-scaling-factor: 0.3 | 0
recompute-num-layers: 1 | 2
recompute-modules: core_attn | mlp | moe | layernorm | moe_act | shared_experts | core_attn mlp \
| layernorm mlp | moe_act layernorm
moe-layer-freq: 2 | [0,1] | ([0]*1+[1]*1)
moe-ffn-hidden-size: 24 | 64
moe-shared-expert-intermediate-size: 24 | 32
moe-router-topk: 1 | 3 | 4
moe-aux-loss-coeff: 0.01 | 0 | 1.0
moe-z-loss-coeff: 0.001
moe-input-jitter-eps: 0.01
moe-router-num-groups: 2
moe-router-group-topk: 1
moe-router-topk-scaling-factor: 2.5
moe-router-bias-update-rate: 0.01 | 0
moe-expert-capacity-factor: 1.0 | 2.0 | 0.5
lora-rank: 2 | 4
lora-alpha: 8 | 1.5
lora-dropout: 0.1
lora-target-modules: linear_qkv | linear_proj linear_fc1 | \
linear_qkv linear_proj linear_fc1 linear_fc2
loss-scale: 1 | 128
initial-loss-scale: 65536 | 1
min-loss-scale: 2
loss-scale-window: 2
hysteresis: 1 | 3
fp8-margin: 1
fp8-amax-history-len: 4 | 16
num-layers-at-start-in-bf16: 0 | 1
num-layers-at-end-in-bf16: 0 | 1
cuda-graph-warmup-steps: 1
hierarchical-context-parallel-sizes: 1 2 | 2 1
micro-batch-size: 2
global-batch-size: 2 | 6 | 8
rampup-batch-size: 2 2 8 | 4 4 4
step-batch-size-schedule: '0:4 200:8'
train-samples: 16
train-epochs: 1 | 2
exit-interval: 3
exit-duration-in-mins: 100
exit-signal: SIGUSR1 | SIGINT
seed: 7 | 100000
check-invariants: 1 | 3
manual-gc-interval: 2
eval-iters: 1 | 2
eval-interval: 2 | 3
early-stop-patience: 1 | 5
early-stop-min-delta: 0.5 | 0.0
profile-step-start: 1 | 2
profile-step-end: 2 | 3
profile-ranks: 0 | 0 1
cross-entropy-chunk-size: 8 | 5 | 1000
label-smoothing: 0.1
z-loss-coeff: 1e-3
ignore-index: 5 | -100
loss: examples/custom_loss/focal.py:FocalLossConfig
loss-args: gamma=3
lr: 1e-3 | 3e-2
min-lr: 1e-4 | 1e-3
lr-decay-iters: 3 | 100
lr-decay-samples: 16 | 100
lr-wsd-decay-iters: 1 | 2
lr-wsd-decay-samples: 8
lr-warmup-fraction: 0.25 | 0.5
lr-warmup-iters: 1 | 2
lr-warmup-samples: 4 | 6
lr-warmup-init: 1e-4
decoupled-lr: 1e-3 | 5e-2
decoupled-min-lr: 1e-4
weight-decay: 0 | 0.1
start-weight-decay: 0.01
end-weight-decay: 0.1
clip-grad: 0 | 0.1 | 100
adam-beta1: 0 | 0.8
adam-beta2: 0.95
adam-eps: 1e-5 | 1e-15
sgd-momentum: 0 | 0.5
ddp-bucket-size: 1000 | 100000
ddp-num-buckets: 1 | 3
ema-decay: 0.9 | 0.5
ema-start: 0 | 2 | 3
data-cache-path: cache
num-workers: 1 | 2
num-dataset-builder-threads: 2
mid-level-dataset-surplus: 0 | 0.1
split: 90,5,5 | 100,0,0
save-interval: 1 | 3
save-retain-interval: 4
keep-last: 1 | 2
keep-best: 1
log-interval: 2
tensorboard-dir: tensorboard
tensorboard-log-interval: 2
tensorboard-queue-size: 1
logging-level: 10 | 30
vocab-size: 100 | 300
vocab-extra-ids: 8
dry-run-nodes: 1 | 2
dry-run-gpu: H100 | A100
text-length: 8 | 16
text-width: 12 | 32
pooled-width: 6
"""
    + more_values.SFT
    + more_values.FLOW
    + more_values.SAMPLES
    + more_values.STREAMING
)
"""Values of numbers and texts."""

NEEDS = _table(
    """
num-query-groups: --group-query-attention
group-query-attention: --num-query-groups 2
rotary-base: --position-embedding-type rope
rotary-percent: --position-embedding-type rope
rotary-interleaved: --position-embedding-type rope
rotary-seq-len-interpolation-factor: --position-embedding-type rope
use-rope-scaling: --position-embedding-type rope
rope-scaling-factor: --position-embedding-type rope --use-rope-scaling
window-attn-skip-freq: --window-size 7 0
mtp-loss-scaling-factor: --mtp-num-layers 1
deterministic-dropout: --hidden-dropout 0.1 --attention-dropout 0.1
recompute-method: --recompute-granularity full --recompute-num-layers 1
recompute-num-layers: --recompute-granularity full --recompute-method uniform
recompute-modules: --recompute-granularity selective
moe-shared-expert-gate: --moe-shared-expert-intermediate-size 24
moe-pad-expert-input-to-capacity: --moe-expert-capacity-factor 1.0
moe-token-drop-policy: --moe-expert-capacity-factor 1.0
moe-router-enable-expert-bias: --moe-router-score-function sigmoid
moe-router-bias-update-rate: --moe-router-score-function sigmoid --moe-router-enable-expert-bias
moe-router-num-groups: --moe-router-group-topk 1
moe-router-group-topk: --moe-router-num-groups 2
moe-router-load-balancing-type: --moe-aux-loss-coeff 0.01
moe-aux-loss-coeff: --moe-router-load-balancing-type aux_loss
loss-scale: --fp16
initial-loss-scale: --fp16
min-loss-scale: --fp16
loss-scale-window: --fp16 --initial-loss-scale 256
hysteresis: --fp16
grad-reduce-in-bf16: --bf16
fp32-residual-connection: --bf16
cuda-graph-warmup-steps: --cuda-graph-impl local
apply-query-key-layer-scaling: --fp16
cross-entropy-chunk-size: --cross-entropy-impl chunked
label-smoothing: --cross-entropy-impl chunked
z-loss-coeff: --cross-entropy-impl chunked
loss-args: --loss examples/custom_loss/focal.py:FocalLossConfig
lr-wsd-decay-style: --lr-decay-style WSD --lr-wsd-decay-iters 2
lr-wsd-decay-iters: --lr-decay-style WSD
lr-wsd-decay-samples: --lr-decay-style WSD --train-samples 16
lr-decay-samples: --train-samples 16
lr-warmup-samples: --train-samples 16
decoupled-min-lr: --decoupled-lr 1e-3
start-weight-decay: --end-weight-decay 0.1 --weight-decay-incr-style linear
end-weight-decay: --start-weight-decay 0.01 --weight-decay-incr-style cosine
weight-decay-incr-style: --start-weight-decay 0.01 --end-weight-decay 0.1
sgd-momentum: --optimizer sgd
ema-start: --ema-decay 0.9
eval-ema: --ema-decay 0.9 --eval-iters 1 --eval-interval 2
apply-wd-to-qk-layernorm: --qk-layernorm
manual-gc-interval: --manual-gc
manual-gc-eval: --manual-gc --eval-iters 1 --eval-interval 2
eval-interval: --eval-iters 1
early-stop-patience: --eval-iters 1 --eval-interval 1
early-stop-min-delta: --early-stop-patience 2 --eval-iters 1 --eval-interval 1
keep-best: --eval-iters 1 --eval-interval 2
full-validation: --eval-iters 1 --no-mock-data --data-path {data}/text --split 80,10,10
multiple-validation-sets: --eval-iters 1 --no-mock-data --train-data-path {data}/text \
--valid-data-path {data}/text {data}/other
profile: --profile-step-start 1 --profile-step-end 2
profile-step-start: --profile --profile-step-end 3
profile-step-end: --profile --profile-step-start 1
profile-ranks: --profile --profile-step-start 1 --profile-step-end 2
first-last-layers-bf16: --num-layers 4
num-layers-at-start-in-bf16: --first-last-layers-bf16 --num-layers 4
num-layers-at-end-in-bf16: --first-last-layers-bf16 --num-layers 4
mmap-bin-files: --no-mock-data --data-path {data}/text
ignore-index: --no-mock-data --data-path {data}/text
eod-mask-loss: --no-mock-data --data-path {data}/text
reset-position-ids: --no-mock-data --data-path {data}/text
reset-attention-mask: --no-mock-data --data-path {data}/text
dataloader-type: --no-mock-data --data-path {data}/text
data-cache-path: --no-mock-data --data-path {data}/text
split: --no-mock-data --data-path {data}/text
tensorboard-log-interval: --tensorboard-dir tensorboard
tensorboard-queue-size: --tensorboard-dir tensorboard
log-loss-scale-to-tensorboard: --tensorboard-dir tensorboard
log-validation-ppl-to-tensorboard: --tensorboard-dir tensorboard --eval-iters 1 --eval-interval 2
log-timers-to-tensorboard: --tensorboard-dir tensorboard
log-memory-to-tensorboard: --tensorboard-dir tensorboard
log-world-size-to-tensorboard: --tensorboard-dir tensorboard
dry-run-nodes: --dry-run
dry-run-gpu: --dry-run
"""
    + more_values.NEEDS
)
"""Flags that another flag must accompany, so that they do something at all."""

SECTION_NEEDS = {
    "moe": "--num-experts 4",
    "lora": "--lora-rank 4",
    "fp8": "--bf16 --fp8-format hybrid",
}
"""Flags that all of a section need."""

FIXED = {
    "num-experts": "every option of the section sets it",
    "train-iters": "the judge needs the length of the run",
    "save": "the judge names the folder",
    "load": "the judge names the folder",
    "pretrained-checkpoint": "the judge names the folder",
    "ckpt-step": "the judge says which step to go on from",
    "nproc-per-node": "a layout says it",
    "tensor-model-parallel-size": "a layout says it",
    "pipeline-model-parallel-size": "a layout says it",
    "context-parallel-size": "a layout says it",
    "expert-model-parallel-size": "a layout says it",
    "expert-tensor-parallel-size": "a layout says it",
    "num-layers-per-virtual-pipeline-stage": "a layout says it",
    "num-virtual-stages-per-pipeline-rank": "a layout says it",
    "pipeline-schedule": "a layout says it",
    "pipeline-model-parallel-layout": "a layout says it",
    "microbatch-group-size-per-vp-stage": "a layout says it",
    "sequence-parallel": "a layout says it",
    "cp-comm-type": "a layout says it",
    "decoder-first-pipeline-num-layers": "a layout says it",
    "decoder-last-pipeline-num-layers": "a layout says it",
    "account-for-embedding-in-pipeline-split": "a layout says it",
    "account-for-loss-in-pipeline-split": "a layout says it",
    "use-tp-pp-dp-mapping": "a layout says it",
    "tp-comm-overlap-cfg": "a file of Transformer Engine's",
    "fp8-quantizer-factory": "a user's own function for Transformer Engine",
    "wandb-project": "needs a server",
    "wandb-exp-name": "needs a server",
    "wandb-entity": "needs a server",
    "wandb-save-dir": "needs a server",
    "train-data-path": "whole lines name the data",
    "valid-data-path": "whole lines name the data",
    "test-data-path": "whole lines name the data",
    "data-path": "whole lines name the data",
    "data-args-path": "whole lines name the data",
    "per-split-data-args-path": "whole lines name the data",
    "per-dataset-sequences-path": "whole lines name the data",
    "tokenizer-model": "whole lines name the tokenizer",
    "video-data-path": "whole lines name the data",
    "codec": "weights of several GB, but for the usual one",
    "task": "each task is a program of its own",
    "video-model": "whole lines name the model with its window",
    "mmdit-size": "all but the tiny one take minutes",
    "generator-size": "all but the tiny one take minutes",
    "critic-size": "all but the tiny one take minutes",
    "teacher-size": "all but the tiny one take minutes",
    "video-dit-size": "all but the tiny one take minutes",
    "text-encoder": "weights of several GB, but for the usual one",
    "t5-path": "weights of several GB",
    "clip-path": "weights of several GB",
    "trust-remote-code": "runs code of strangers",
    "tokenizer-type": "a whole line chooses a tokenizer and its files",
    "tokenizer-metadata": "a whole line chooses a tokenizer and its files",
    "tokenizer-special-tokens": "tests/data/test_tokenizers.py has each kind with its files",
    "tiktoken-pattern": "tests/data/test_tokenizers.py has each kind with its files",
    "tiktoken-num-special-tokens": "tests/data/test_tokenizers.py has each kind with its files",
    "tiktoken-special-tokens": "tests/data/test_tokenizers.py has each kind with its files",
    "vocab-file": "tests/data/test_tokenizers.py has each kind with its files",
    "merge-file": "tests/data/test_tokenizers.py has each kind with its files",
}
"""Flags that do not vary here, with the reason."""

WHOLE = """
--no-mock-data --data-path {data}/text
--no-mock-data --data-path {data}/text --split 80,10,10 --eval-iters 2 --eval-interval 2
--no-mock-data --data-path 0.3 {data}/text 0.7 {data}/other
--no-mock-data --data-path {data}/text {data}/other
--no-mock-data --train-data-path {data}/text --valid-data-path {data}/other --eval-iters 1
--no-mock-data --train-data-path {data}/text --valid-data-path {data}/other --test-data-path \
{data}/text --eval-iters 1
--no-mock-data --data-args-path {data}/blend.txt
--no-mock-data --per-split-data-args-path {data}/splits.json --eval-iters 1
--no-mock-data --data-path {data}/text --reset-position-ids --reset-attention-mask --eod-mask-loss
--no-mock-data --data-path {data}/text --per-dataset-sequences-path {data}/sequences.json
--no-mock-data --data-path {data}/text --dataloader-type cyclic --no-data-sharding
--hidden-dropout 0.1 --attention-dropout 0.1
--hidden-dropout 0.1 --attention-dropout 0.1 --deterministic-dropout
--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope \
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2
--swiglu --disable-bias-linear
--recompute-granularity full --recompute-method block --recompute-num-layers 1
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
--distribute-saved-activations
--recompute-granularity selective
--bf16 --use-distributed-optimizer
--fp16 --initial-loss-scale 256
--fp16 --use-distributed-optimizer --initial-loss-scale 256
--bf16 --accumulate-allreduce-grads-in-fp32
--bf16 --fp8-format hybrid --fp8-recipe tensorwise
--bf16 --fp8-format e4m3 --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max
--fp16 --initial-loss-scale 256 --fp8-format hybrid --fp8-recipe tensorwise
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--use-distributed-optimizer --decoupled-lr 1e-3 --decoupled-min-lr 1e-4
--optimizer sgd --bf16
--train-samples 16 --lr-warmup-samples 4 --lr-decay-samples 12
--num-experts 4 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-router-topk 2
--num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias \
--moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 2 --moe-router-group-topk 1
--num-experts 4 --moe-shared-expert-intermediate-size 24 --moe-layer-freq [0,1]
--num-experts 4 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001
--num-experts 4 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01
--num-experts 4 --moe-router-load-balancing-type aux_loss global_aux_loss \
--moe-aux-loss-coeff 0.01 0.02
--num-experts 4 --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity \
--moe-token-dispatcher-type alltoall
--num-experts 4 --disable-bias-linear --moe-layer-recompute
--lora-rank 4 --lora-target-modules linear_qkv linear_proj --num-experts 4
--lora-rank 4 --lora-alpha 8 --lora-dropout 0.1 --hidden-dropout 0.1
--ema-decay 0.9 --use-distributed-optimizer --bf16
--finetune --no-load-optim --no-load-rng
--skip-train --eval-iters 1
--init-method-xavier-uniform --disable-bias-linear
--resume-mode auto
--tokenizer-type NullTokenizer --vocab-size 300 --vocab-extra-ids 8
--tokenizer-type HuggingFaceTokenizer --tokenizer-model {data}/tokenizer --tokenizer-hf-use-fast
"""
"""Flags that are usually given together, a line each."""

WHOLES = {
    "whole": WHOLE,
    "whole sft": more_values.WHOLE_SFT,
    "whole flow": more_values.WHOLE_FLOW,
    "whole streaming": more_values.WHOLE_STREAMING,
}


def whole(name: str) -> list[str]:
    """Return flags of a program that are usually given together."""
    return [line for line in WHOLES[name].replace("\\\n", "").strip().splitlines() if line]


def words_of(text: str, data: str) -> list[str]:
    """Return the words of a text, with the folder of the inputs in its place."""
    return [word.format(data=data) for word in shlex.split(text)]
