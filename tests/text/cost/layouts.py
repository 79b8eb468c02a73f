"""Small runs whose memory is measured, and Llama 3 8B, whose figures are known."""

from megatron_ext.config.run import RunConfig
from megatron_ext.text.cost.network import GptNetwork
from tests.training_runs import config_of

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 192 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--seq-length 128 --max-position-embeddings 128 --attention-dropout 0 --hidden-dropout 0 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 1 --num-workers 0 "
    "--log-interval 1 --split 90,5,5 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 500"
).split()

LATENT = (
    "--no-group-query-attention --multi-latent-attention --qk-layernorm --kv-lora-rank 32 "
    "--qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 16 "
    "--original-max-position-embeddings 128"
)

SPARSE = (
    f"{LATENT} --rope-type rope --experimental-attention-variant dsa --dsa-indexer-n-heads 8 "
    "--dsa-indexer-head-dim 16 --dsa-indexer-topk 24"
)
GATED = (
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 16 "
    "--linear-value-head-dim 24"
)
KIMI = GATED.replace("--linear-num-key-heads 2", "--linear-num-key-heads 4")
MAMBA = "--mamba-num-heads 4 --mamba-head-dim 24 --mamba-num-groups 2 --mamba-state-dim 16"

LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2 --nproc-per-node 2",
    "tp2sp": "--tensor-model-parallel-size 2 --sequence-parallel --nproc-per-node 2",
    "pp2": "--pipeline-model-parallel-size 2 --nproc-per-node 2",
    "pp2vpp2": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
    "--nproc-per-node 2",
    "cp2": "--context-parallel-size 2 --nproc-per-node 2",
    "dp2": "--use-distributed-optimizer --nproc-per-node 2",
    "mtp1": "--mtp-num-layers 1",
    "ep2": "--num-experts 4 --expert-model-parallel-size 2 --moe-ffn-hidden-size 96 "
    "--moe-aux-loss-coeff 0.01 --nproc-per-node 2",
}

MORE = {
    "bf16 dp2": "--bf16 --use-distributed-optimizer --ema-decay 0.9 --nproc-per-node 2",
    "moments in bf16": "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer "
    "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --nproc-per-node 2",
    "muon dp2": "--optimizer muon --bf16 --use-distributed-optimizer --nproc-per-node 2",
    "bf16 dp1": "--bf16 --ema-decay 0.9",
    "gpt2": "--no-swiglu --add-bias-linear --normalization LayerNorm --position-embedding-type "
    "learned_absolute --no-untie-embeddings-and-output-weights --num-query-groups 4 "
    "--qk-layernorm",
    "sinks, norms and biases tp2": "--softmax-type learnable --sandwich-norm --add-proj-bias "
    "--add-mlp-bias --window-size 31 0 --window-attn-skip-freq [1,0,1,1] "
    "--tensor-model-parallel-size 2 --nproc-per-node 2",
    "outputs and all heads normalized tp2": "--reordered-norm --qk-layernorm "
    "--qk-layernorm-all-heads --tensor-model-parallel-size 2 --nproc-per-node 2",
    "gates tp2": "--attention-output-gate --qk-layernorm --tensor-model-parallel-size 2 "
    "--nproc-per-node 2",
    "gates bf16": "--attention-output-gate --bf16",
    "side by side tp2": "--use-parallel-residual --normalization LayerNorm --add-mlp-bias "
    "--tensor-model-parallel-size 2 --nproc-per-node 2",
    "side by side behind one norm": "--use-parallel-residual --shared-input-norm "
    "--normalization LayerNorm --no-norm-bias",
    "rotated heads normalized, factors": "--qk-layernorm --qk-layernorm-after-rope "
    "--residual-multiplier 0.3 --logits-scaling 6",
    "xielu tp2": "--no-swiglu --xielu --tensor-model-parallel-size 2 --nproc-per-node 2",
    "tied pp2": "--no-untie-embeddings-and-output-weights --pipeline-model-parallel-size 2 "
    "--use-distributed-optimizer --nproc-per-node 2",
    "mtp1 pp2": "--mtp-num-layers 1 --pipeline-model-parallel-size 2 --nproc-per-node 2 "
    "--use-distributed-optimizer",
    "one part tp2sp": "--hybrid-layer-pattern **--E --num-experts 4 --moe-ffn-hidden-size 96 "
    "--sandwich-norm --tensor-model-parallel-size 2 --sequence-parallel --nproc-per-node 2",
    "one part pp2 mtp1": "--hybrid-layer-pattern *-|*--/* --pipeline-model-parallel-size 2 "
    "--num-layers 3 --use-distributed-optimizer --nproc-per-node 2",
    "gated delta experts tp2sp": f"--hybrid-layer-pattern GE*EGEG {GATED} --num-experts 4 "
    "--moe-ffn-hidden-size 96 --tensor-model-parallel-size 2 --sequence-parallel "
    "--nproc-per-node 2",
    "gated delta bf16 pp2": f"--hybrid-layer-pattern G-*-|G-G {GATED} --bf16 "
    "--use-distributed-optimizer --pipeline-model-parallel-size 2 --nproc-per-node 2",
    "gated delta mtp1 tp2": f"--hybrid-layer-pattern G-*-G-G-/G- {GATED} "
    "--tensor-model-parallel-size 2 --nproc-per-node 2",
    "kimi delta bf16 tp2sp": f"--hybrid-layer-pattern K-*-K-K- {KIMI} --bf16 "
    "--tensor-model-parallel-size 2 --sequence-parallel --nproc-per-node 2",
    "kimi delta cp2": f"--hybrid-layer-pattern K-*-K-K- {KIMI} --context-parallel-size 2 "
    "--nproc-per-node 2",
    "mamba tp2sp": f"--hybrid-layer-pattern MM-*- {MAMBA} --num-layers 3 --sequence-parallel "
    "--tensor-model-parallel-size 2 --nproc-per-node 2",
    "mamba bf16 ep2": f"--hybrid-layer-pattern ME*EM-M {MAMBA} --num-experts 4 --bf16 "
    "--moe-ffn-hidden-size 96 --expert-model-parallel-size 2 --nproc-per-node 2",
    "mamba odd length": f"--hybrid-layer-pattern M-*-M-M {MAMBA} --no-mamba-conv-bias "
    "--mamba-num-groups 1 --mamba-time-step-max 0.5 --seq-length 100",
    "zbv": "--pipeline-schedule zb-v --pipeline-model-parallel-size 2 --nproc-per-node 2",
    "uneven": "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 "
    "--nproc-per-node 2",
    "layout": "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tttL "
    "--nproc-per-node 2",
    "moe ep2 dp2 tp2": "--num-experts 4 --expert-model-parallel-size 2 --moe-layer-freq [0,1,1,0] "
    "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate --sequence-parallel "
    "--tensor-model-parallel-size 2 --use-distributed-optimizer --nproc-per-node 4",
    "small vectors for experts ep2 tp2": "--num-experts 4 --expert-model-parallel-size 2 "
    "--moe-latent-size 24 --moe-shared-expert-intermediate-size 64 --sequence-parallel "
    "--no-swiglu --squared-relu --tensor-model-parallel-size 2 --nproc-per-node 4",
}

PEAKS = {
    "bf16": "--bf16",
    "fp8": "--bf16 --fp8-format hybrid --fp8-recipe tensorwise",
    "fp8 tp2sp": "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --sequence-parallel "
    "--tensor-model-parallel-size 2 --nproc-per-node 2",
    "mla": f"{LATENT} --rope-type rope",
    "mla sparse": SPARSE,
    "mla sparse learns": f"{SPARSE} --dsa-indexer-loss-coeff 0.1",
    "mla sparse bf16": f"{SPARSE} --dsa-indexer-loss-coeff 0.1 --bf16",
    "mla sparse tp2sp": f"{SPARSE} --dsa-indexer-loss-coeff 0.1 --sequence-parallel "
    "--tensor-model-parallel-size 2 --nproc-per-node 2",
    "mla sparse cp2": f"{SPARSE} --dsa-indexer-loss-coeff 0.1 --context-parallel-size 2 "
    "--nproc-per-node 2",
    "mla tp2": f"{LATENT} --q-lora-rank 48 --tensor-model-parallel-size 2 --nproc-per-node 2",
    "mla cp2": f"{LATENT} --q-lora-rank 48 --context-parallel-size 2 --nproc-per-node 2",
    "mla tp2sp bf16": f"{LATENT} --q-lora-rank 48 --bf16 --tensor-model-parallel-size 2 "
    "--sequence-parallel --use-distributed-optimizer --nproc-per-node 2",
    "mla recomputed bf16": f"{LATENT} --q-lora-rank 48 --bf16 --recompute-granularity selective "
    "--recompute-modules mla_up_proj",
    "mla fp8 tp2sp": f"{LATENT} --q-lora-rank 48 --bf16 --fp8-format hybrid --sequence-parallel "
    "--fp8-recipe tensorwise --tensor-model-parallel-size 2 --nproc-per-node 2",
    "gated delta cp2": f"--hybrid-layer-pattern G-*-G-G- {GATED} --context-parallel-size 2 "
    "--nproc-per-node 2",
    "gated delta": f"--hybrid-layer-pattern GG-G-G- {GATED}",
    "fp8 gated delta": f"--hybrid-layer-pattern G-*-G-G- {GATED} --linear-num-value-heads 8 "
    "--linear-num-key-heads 4 --bf16 --fp8-format hybrid --fp8-recipe tensorwise",
    "lora gated delta": f"--hybrid-layer-pattern G-*-G-G- {GATED} --lora-rank 8",
    "mamba cp2": f"--hybrid-layer-pattern M-*-M-M {MAMBA} --context-parallel-size 2 "
    "--nproc-per-node 2",
    "lora mamba bf16": f"--hybrid-layer-pattern M-*-M-M {MAMBA} --lora-rank 8 --bf16",
    "lora": "--lora-rank 8",
    "lora bf16 dp2": "--lora-rank 8 --bf16 --use-distributed-optimizer --ema-decay 0.9 "
    "--nproc-per-node 2",
    "lora dropout tp2sp": "--lora-rank 4 --lora-dropout 0.1 --tensor-model-parallel-size 2 "
    "--sequence-parallel --nproc-per-node 2",
    "dora dropout tp2sp": "--lora-rank 4 --lora-use-dora --lora-init pissa --lora-dropout 0.1 "
    "--tensor-model-parallel-size 2 --sequence-parallel --nproc-per-node 2",
    "dora experts": "--lora-rank 4 --lora-use-dora --num-experts 4 --moe-ffn-hidden-size 96",
    "lora of qkv pp2": "--lora-rank 4 --lora-target-modules linear_qkv "
    "--pipeline-model-parallel-size 2 --nproc-per-node 2",
    "lora tied pp2": "--lora-rank 4 --no-untie-embeddings-and-output-weights "
    "--pipeline-model-parallel-size 2 --use-distributed-optimizer --nproc-per-node 2",
    "frozen pp2": "--freeze embeddings layers.0-1 layers.3.attention norms --ema-decay 0.9 "
    "--pipeline-model-parallel-size 2 --use-distributed-optimizer --nproc-per-node 2",
    "frozen tied pp2": "--freeze embeddings mlp --no-untie-embeddings-and-output-weights --bf16 "
    "--pipeline-model-parallel-size 2 --nproc-per-node 2",
    "frozen moe": "--freeze-all-but experts --num-experts 4 --expert-model-parallel-size 2 "
    "--moe-ffn-hidden-size 96 --moe-aux-loss-coeff 0.01 --nproc-per-node 2",
    "moe two hops": "--num-experts 8 --moe-router-topk 4 --expert-model-parallel-size 4 "
    "--moe-ffn-hidden-size 96 --moe-token-dispatcher-type flex --moe-ranks-per-node 2 "
    "--nproc-per-node 4",
    "mtp1 recomputed": "--mtp-num-layers 1 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "lora moe": "--lora-rank 4 --num-experts 4 --expert-model-parallel-size 2 "
    "--moe-ffn-hidden-size 96 --moe-aux-loss-coeff 0.01 --nproc-per-node 2 "
    "--lora-target-modules linear_qkv linear_proj",
    "lora experts": "--lora-rank 4 --num-experts 4 --expert-model-parallel-size 2 "
    "--moe-ffn-hidden-size 96 --moe-shared-expert-intermediate-size 96 --nproc-per-node 2 "
    "--lora-separate-projections --lora-modules-to-save embedding router norm",
    "lora mla": f"{LATENT} --q-lora-rank 48 --rope-type rope --lora-rank 4 --lora-target-modules "
    "linear_q_down_proj linear_kv_down_proj linear_kv_up_proj linear_fc1 "
    "--tensor-model-parallel-size 2 --sequence-parallel --nproc-per-node 2",
}
"""Formats and adapters, whose state and peak are measured."""
QUICK = (
    "tp2sp",
    "pp2",
    "dp2",
    "ep2",
    "tied pp2",
    "lora",
    "fp8 tp2sp",
    "mla tp2sp bf16",
    "mtp1 recomputed",
)
"""Runs of all three tables that are measured in every run of the tests."""


def flags_of(name: str) -> list[str]:
    return [*MODEL, *{**LAYOUTS, **MORE, **PEAKS}[name].split()]


LLAMA_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--padded-vocab-size 128256 --micro-batch-size 1 --global-batch-size 128 --train-iters 10 "
    "--lr 1e-4 --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 128000"
)


def llama(more: str = "", world: int = 8) -> RunConfig:
    return config_of(f"{LLAMA_8B} {more}", ranks=world, device="cuda")


def llama_network(more: str = "") -> GptNetwork:
    return GptNetwork.of(llama(more))
