"""Scripts in the form of Megatron-LM's examples, shortened, are audited as their flags deserve."""

import pytest

from megatron_ext.inspect.audit.report import audit
from megatron_ext.inspect.audit.script import read_text

GPT3 = """
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
DATA_PATH=$1 #<Specify path>
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
)
MODEL_ARGS=(
    --num-layers 96
    --attention-backend auto # (flash/fused)
)
MODEL_PARALLEL_ARGS=(
\t--tensor-model-parallel-size 8
\t--pipeline-model-parallel-size 16
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${MODEL_ARGS[@]} \\
    ${MODEL_PARALLEL_ARGS[@]} \\
    --fp16 --micro-batch-size 1 --data-path $DATA_PATH
"""
LLAMA3 = """
DTYPE="fp8"
CKPT=${1:-"checkpoints/llama3"}
PRETRAIN_SCRIPT_PATH="pretrain_gpt.py"
TRAINING_ARGS=(
    --bf16
    --decoupled-lr 5.0e-4      # for the embedding
    --cross-entropy-loss-fusion
    --calculate-per-token-loss
)
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
    )
fi
DDP_ARGS=(--use-distributed-optimizer --overlap-grad-reduce)
TRAINING_ARGS+=("${DDP_ARGS[@]}")
if [ ! -f "$PRETRAIN_SCRIPT_PATH" ]; then
    exit 1
fi
torchrun --nproc_per_node 8 "$PRETRAIN_SCRIPT_PATH" ${TRAINING_ARGS[@]} ${DTYPE_ARGS[@]} \\
    --mock-data --load "$CKPT"
"""
MIXTRAL = """
NNODES=${SLURM_NNODES:-"1"}
MOE_ARGS=(
    --num-experts 8
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
)
LOGGING_ARGS=(
    --log-interval 1 \\
    --load $1
)
if [ -n "${WANDB_API_KEY}" ]; then
    LOGGING_ARGS+=(--wandb-project ${WANDB_PROJECT:-"Mixtral"})
fi
torchrun --nnodes $NNODES pretrain_gpt.py ${MOE_ARGS[@]} ${LOGGING_ARGS[@]} \\
    --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 --bf16
"""
MAMBA = """
MODEL_SCALE="800M" # or "8B"
case "${MODEL_SCALE}" in
    "800M")
        TP=1
        ;;
    *)
        echo "Invalid version specified"
        exit 1
        ;;
esac
options=" \\
       --tensor-model-parallel-size ${TP} \\
       --sequence-parallel \\
       --hidden-size 1024 \\
       --bf16"
torchrun --nproc_per_node 8 ../../pretrain_mamba.py ${options}
"""
DEEPSEEK = """
EP=${EP:-8}
MBS=${MBS:-4}
PRETRAIN_ARGS=(
    --expert-model-parallel-size ${EP}
    --micro-batch-size ${MBS}
    --no-check-for-nan-in-loss-and-grad
    --seq-length 4096
    --position-embedding-type rope
    --num-experts 256
    --moe-layer-freq [0]*3+[1]*58
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-4
    --mtp-num-layers 1
    --bf16
)
if [ "${USE_FSDP:-1}" = 1 ]; then
    PRETRAIN_ARGS=(
        "${PRETRAIN_ARGS[@]}"
        --calculate-per-token-loss
    )
fi
CMD="cd /opt/megatron && ${PROFILE_CMD:-} python -u pretrain_gpt.py ${PRETRAIN_ARGS[*]}"
sbatch <<EOF
#!/bin/bash
srun --mpi=pmix -l bash -c "${CMD}"
EOF
"""


@pytest.mark.parametrize(
    ("text", "on_16", "on_19"),
    [
        (GPT3, set(), set()),
        (LLAMA3, {"D38"}, set()),
        (MIXTRAL, set(), set()),
        (MAMBA, set(), set()),
        (DEEPSEEK, {"D3", "D5", "D21"}, {"D21"}),
    ],
    ids=["gpt3", "llama3", "mixtral", "mamba", "deepseek"],
)
def test_examples_are_accused_of_what_they_hit_alone(
    text: str, on_16: set[str], on_19: set[str]
) -> None:
    script = read_text(text)
    assert {x.number for x in audit(script, "0.16.1").certain} == on_16
    assert {x.number for x in audit(script, "0.19.2").certain} == on_19


def test_a_value_of_the_environment_changes_the_judgement() -> None:
    script = read_text(DEEPSEEK, {"MBS": "1", "USE_FSDP": "0"})
    assert {x.number for x in audit(script, "0.16.1").certain} == {"D21"}
