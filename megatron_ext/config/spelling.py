"""Other spellings of flags: older names, and names that never had an effect here."""

from __future__ import annotations

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

ALWAYS_ON = {"tokenizer_hf_use_fast": "Hugging Face tokenizers are always the fast ones here"}
"""Field of a flag that Megatron-LM's scripts may give, whatever its value -> the reason."""
