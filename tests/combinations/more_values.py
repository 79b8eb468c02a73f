"""Values for flags of fine-tuning, video flow and streaming; see `values.py` for the notation."""

from __future__ import annotations

SFT = """
sft-messages-key: messages
sft-prompt-key: question
sft-response-key: answer
sft-conversations-key: conversations
sft-system-key: system
sft-tools-key: tools
sft-enable-thinking-key: enable_thinking
sft-chat-template: {data}/chatml_generation.jinja | {data}/zephyr.jinja
sft-template-kwargs: '{{"a": 1}}'
sft-max-length: 40 | 96 | 128
"""

FLOW = """
num-double-blocks: 1 | 3
num-single-blocks: 1 | 4 | 0
axes-dim: 4 6 6 | 8 4 4
patch-size: 1 | 2 | 4
mlp-ratio: 2
guidance: 2.0
recompute-double-blocks: 0 | 1
recompute-single-blocks: 0 | 1
double-block-cost: 2.0
sigma-min: 0 | 1e-3
timestep-mean: 0.5
timestep-std: 0.5
shift-base-tokens: 16
shift-base: 1.5
shift-max-tokens: 64
shift-max: 2.0
flow-shift: 1 | 3
t2v-weight: 0 | 3
i2v-head-weight: 0 | 1
i2v-tail-weight: 0 | 2
i2v-loop-weight: 0 | 2
v2v-head-weight: 1
v2v-tail-weight: 1
v2v-head-easy-weight: 1
v2v-tail-easy-weight: 1
v2v-frames: 1
v2v-easy-frames: 1
text-dropout: 0 | 0.5
pooled-dropout: 0 | 0.5
codec-spatial: 8 | 4
codec-temporal: 4
codec-channels: 4 | 8
codec-shift: 0.1
codec-scale: 2.0
fps-cap: 12
reference-lengths: 1 2
clip-seed: 5
video-buckets: '{{"64px": {{"1": [1.0, 2], "9": [0.5, 1]}}}}' | '{{"64px": {{"9": [1.0, null]}}}}'
video-valid-path: {data}/valid_clips
"""

SAMPLES = """
sample-interval: 2 | 3
sample-prompts: {data}/prompts.txt
sample-texts: disc square | bar
sample-dir: samples
sample-steps: 2
sample-text-scale: 1 | 2
sample-image-scale: 1
sample-size: 32 32
sample-frames: 1 | 5
sample-fps: 5
sample-seed: 7
sample-batch-size: 1
sample-latent-frames: 9
sample-second-texts: bar wheel
sample-switch-frame: 5
"""

STREAMING = """
critic-checkpoint: {data}/none
teacher-checkpoint: {data}/none
teacher-tensor-model-parallel-size: 1 | 2
teacher-pipeline-model-parallel-size: 2
recompute-blocks: 1 | 2
prompts-path: {data}/prompts.txt
second-prompts-path: {data}/second_prompts.txt
negative-prompt: blurred
latent-channels: 4 | 8
latent-size: 4 8 | 8 4
frame-block: 1
window-frames: 9 | 12
sink-frames: 0 | 3
chunk-frames: 6 | 12
min-new-frames: 3
max-new-frames: 9
sequence-lengths: 15 27 | 18
switch-frames: 9 15 | 12
recache-frames: 3 | 6
generator-interval: 1 | 3
timestep-shift: 1 | 8.0
denoising-steps: 1000 500 | 1000
min-timestep: 0
max-timestep: 1000
context-noise: 10
guidance-scale: 1 | 2.5
critic-lr: 1e-4
sid-alpha: 0.5 | 1.2
critic-clip-grad: 0 | 1
ema-update-every: 2
"""

NEEDS = """
sft-prompt-key: --sft-row-format prompt-response --train-data-path {data}/chats_questions.jsonl
sft-response-key: --sft-row-format prompt-response --train-data-path {data}/chats_questions.jsonl
sft-conversations-key: --sft-row-format sharegpt --train-data-path {data}/chats_shared.jsonl
sft-system-key: --sft-row-format sharegpt --train-data-path {data}/chats_shared.jsonl
sft-truncation: --sft-max-length 40
guidance: --guidance-embed
independent-block-timesteps: --video-model causal-video-dit --frame-block 1 --window-frames 2 \
--sink-frames 1
video-dit-size: --video-model video-dit
v2v-frames: --v2v-head-weight 1
v2v-easy-frames: --v2v-head-easy-weight 1
video-valid-path: --eval-iters 1 --eval-interval 2
sample-prompts: --sample-interval 2 --sample-steps 2
sample-texts: --sample-interval 2 --sample-steps 2
sample-dir: --sample-interval 2 --sample-texts disc square --sample-steps 2
sample-steps: --sample-interval 2 --sample-texts disc square
sample-text-scale: --sample-interval 2 --sample-texts disc square --sample-steps 2
sample-image-scale: --sample-interval 2 --sample-texts disc square --sample-steps 2
sample-size: --sample-interval 2 --sample-texts disc square --sample-steps 2
sample-frames: --sample-interval 2 --sample-texts disc square --sample-steps 2
sample-fps: --sample-interval 2 --sample-texts disc square
sample-seed: --sample-interval 2 --sample-texts disc square
sample-batch-size: --sample-interval 2 --sample-texts disc square
sample-interval: --sample-texts disc square
sample-ema: --sample-interval 2 --sample-texts disc square
sample-oscillation: --sample-interval 2 --sample-texts disc square --sample-steps 2
sample-scale-by-frame: --sample-interval 2 --sample-texts disc square --sample-steps 2
sample-latent-frames: --sample-interval 2 --sample-texts disc square
sample-second-texts: --sample-interval 2 --sample-texts disc square
sample-switch-frame: --sample-interval 2 --sample-texts disc square --sample-second-texts bar \
wheel --sample-latent-frames 9
context-noise-from-table: --context-noise 10
switch-frames: --second-prompts-path {data}/second_prompts.txt --sequence-lengths 27
recache-frames: --second-prompts-path {data}/second_prompts.txt --sequence-lengths 27
sink-at-switch: --second-prompts-path {data}/second_prompts.txt --sequence-lengths 27
ema-update-every: --ema-decay 0.8
sid-alpha: --distribution-loss sid
"""

WHOLE_SFT = """
--sft-batching packed
--sft-batching padded
--sft-batching token-budget
--sft-batching token-budget --loss-reduction sample
--sft-batching padded --loss-reduction square
--sft-row-format prompt-response --train-data-path {data}/chats_questions.jsonl
--sft-row-format sharegpt --train-data-path {data}/chats_shared.jsonl
--sft-max-length 40 --sft-truncation left
--sft-max-length 40 --sft-truncation right --sft-batching padded
--train-data-path {data}/chats.jsonl {data}/more_chats.jsonl
--valid-data-path {data}/more_chats.jsonl --eval-iters 1 --eval-interval 2
--valid-data-path {data}/more_chats.jsonl --eval-iters 1 --full-validation
--data-path {data}/chats.jsonl --split 80,20,0 --eval-iters 1
--train-epochs 1
--train-epochs 2 --sft-batching padded --global-batch-size 8
--lora-rank 4
--lora-rank 4 --lora-alpha 8 --lora-rslora --lora-target-modules linear_qkv linear_fc1
--lora-rank 4 --lora-dropout 0.1 --hidden-dropout 0.1
--sft-batching padded --hidden-dropout 0.1 --deterministic-dropout
--lora-rank 2 --lora-target-modules linear_proj linear_fc2 --bf16 --use-distributed-optimizer
--num-experts 4
--mtp-num-layers 1
--tokenizer-type HuggingFaceTokenizer --tokenizer-model {data}/tokenizer --tokenizer-hf-use-fast
"""

WHOLE_FLOW = """
--video-model video-dit
--video-model causal-video-dit --frame-block 1 --window-frames 2 --sink-frames 1
--video-model causal-video-dit --frame-block 1 --window-frames 2 --sink-frames 1 \
--independent-block-timesteps
--mixed-buckets
--video-valid-path {data}/valid_clips --eval-iters 1 --eval-interval 2
--guidance-embed --guidance 3
--v2v-head-weight 1 --v2v-frames 1
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--recompute-granularity full --recompute-method block --recompute-num-layers 1
--bf16 --use-distributed-optimizer
--fp16 --initial-loss-scale 256
--bf16 --fp8-format hybrid --fp8-recipe tensorwise
--sample-interval 2 --sample-texts disc square --sample-steps 2
--video-data-path {data}/one_bucket
--loss-normalization per_sample
--reference-loss all
--no-adaln-zero --text-dropout 0
--train-epochs 1
--optimizer sgd --bf16
"""

WHOLE_STREAMING = """
--second-prompts-path {data}/second_prompts.txt --sequence-lengths 27
--sequence-lengths 15 27
--second-prompts-path {data}/second_prompts.txt --sink-at-switch keep --sequence-lengths 27
--generator-interval 1
--lora-rank 2
--lora-rank 2 --lora-alpha 4 --bf16
--bf16 --use-distributed-optimizer
--optimizer sgd
--micro-batch-size 2 --global-batch-size 2
--micro-batch-size 1 --global-batch-size 4
--no-two-phase
--no-encode-first-frame
--no-train-first-chunk
--last-step-only
--no-decode-history
--recompute-blocks 2
--sample-interval 2 --sample-texts disc square --sample-latent-frames 9
"""
