"""Launch scripts of Megatron-LM run unchanged, and every common flag gets an answer."""

from pathlib import Path

import pytest
import yaml

from megatron_ext.config.parser import read_words
from megatron_ext.config.run import RunConfig
from megatron_ext.text.config import DataConfig
from megatron_ext.text.task import TEXT
from tests.config.runs import SMALL
from tests.training_runs import config_of, errors_of, parsed

GPT3 = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
    "--max-position-embeddings 2048 --attention-backend auto --micro-batch-size 1 "
    "--global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-iters 500000 "
    "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 "
    "--clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 "
    "--lr-warmup-fraction .001 --lr-decay-iters 430000 --tensor-model-parallel-size 8 "
    "--pipeline-model-parallel-size 16 --data-path D --vocab-file V --merge-file M --split "
    "949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 --save C --load C "
    "--eval-iters 10 --tensorboard-dir T "
)
LLAMA3 = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 "
    "--max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 "
    "--rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu "
    "--init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p "
    "--untie-embeddings-and-output-weights --disable-bias-linear --use-mcore-models "
    "--micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 "
    "--lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 "
    "--decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 "
    "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 "
    "--cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc "
    "--empty-unused-memory-level 1 --exit-duration-in-mins 235 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --tensor-model-parallel-size 1 "
    "--context-parallel-size 1 --sequence-parallel --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 128256 --data-cache-path P --tiktoken-pattern v2 --split '99,1,0' "
    "--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 "
    "--log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 "
    "--log-throughput --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format "
    "torch_dist --distributed-timeout-minutes 60 --save C --load C --tensorboard-dir T "
)
MIXTRAL = (
    "--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings "
    "32768 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads "
    "32 --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization "
    "RMSNorm --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights "
    "--group-query-attention --num-query-groups 8 --no-masked-softmax-fusion "
    "--no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce "
    "--tokenizer-type Llama2Tokenizer --tokenizer-model TM --data-path D --split 99990,8,2 "
    "--micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 "
    "--lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 "
    "--lr-warmup-iters 500 --clip-grad 1.0 --bf16 --tensor-model-parallel-size 1 "
    "--pipeline-model-parallel-size 4 --expert-model-parallel-size 8 "
    "--use-distributed-optimizer --sequence-parallel --log-interval 1 --save-interval 10000 "
    "--eval-interval 1000 --eval-iters 10 --save C --load C --tensorboard-dir C/tensorboard "
    "--no-load-optim --no-load-rng --wandb-project Mixtral --wandb-exp-name X "
)
FP8 = "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max"
BY_USE = (Path(__file__).parent / "flags_by_use.txt").read_text(encoding="utf-8").split()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gpt3_script(device: str) -> None:
    config = config_of(GPT3, ranks=128, device=device)
    assert config.precision.fp16
    assert config.training.rampup_batch_size == [16, 16, 5859375]
    assert config.parallel.data_parallel_size == 1
    assert config.model.ffn_hidden_size == 4 * 12288
    assert config.model.position_embedding_type == "learned_absolute"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_llama3_script_also_with_fp8(device: str) -> None:
    """Its bash array passes on quotes."""
    found = parsed(LLAMA3, ranks=8, device=device)
    assert found.config.section(DataConfig).split == "99,1,0"
    assert found.config.optimizer.decoupled_lr == 5.0e-4
    assert found.config.parallel.sequence_parallel is False
    found = parsed(f"{LLAMA3} {FP8} --fp8-param-gather", ranks=8, device=device)
    assert found.config.fp8.fp8_recipe == "delayed"
    assert found.config.fp8.fp8_amax_history_len == 1024
    assert not found.config.fp8.fp8_param_gather
    (note,) = [note for note in found.notes if "`--fp8-param-gather` has no effect" in note]
    assert note.endswith("without Transformer Engine: the torch layers keep and gather their "
                         "weights in bf16.")  # fmt: skip


def test_groups_of_queries_without_grouped_attention_get_a_note() -> None:
    (note,) = parsed(f"{SMALL} --num-query-groups 2").notes
    assert note.startswith("`--num-query-groups` has no effect without `--group-query-attention`: ")


def test_kernels_of_experts_get_one_note_on_any_device() -> None:
    for device in ("cpu", "cuda"):
        words = f"{MIXTRAL} --moe-permute-fusion --moe-router-fusion".split()
        notes = parsed(words, ranks=32, device=device).notes
        for flag in ("--moe-grouped-gemm", "--moe-permute-fusion", "--moe-router-fusion"):
            assert len([note for note in notes if f"`{flag}` has no effect" in note]) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_mixtral_script_keeps_rope(device: str) -> None:
    found = parsed(MIXTRAL, ranks=32, device=device)
    assert found.config.model.position_embedding_type == "rope"
    assert found.config.moe.num_experts == 8
    assert any("`--no-position-embedding` has no effect" in note for note in found.notes)


@pytest.mark.parametrize("name", [name for name in BY_USE if name != "--help"])
def test_none_of_342_common_flags_is_unknown(name: str) -> None:
    assert len(set(BY_USE)) == 342
    assert not [e for e in read_words([name], TEXT).errors if "not a flag of this program" in e]


def test_all_errors_are_reported_together() -> None:
    assert len(errors_of(f"{SMALL} --hiden-size 8 --bf16 --fp16 --seed 0")) == 3


def test_printed_configuration_can_be_fed_back(tmp_path: Path) -> None:
    config = config_of(SMALL)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.to_dict()), encoding="utf-8")
    assert config_of(["--config", str(file)]) == config
    again = config_of(["--config", str(file), "--seed", "7"])
    assert again.training.seed == 7
    assert RunConfig.from_dict(config.to_dict(), TEXT.sections) == config


def test_dashes_and_underscores_mean_the_same() -> None:
    dashed = config_of(SMALL)
    lined = [
        word.replace("-", "_").replace("__", "--", 1) if word.startswith("--") else word
        for word in SMALL.split()
    ]
    assert config_of(lined) == dashed


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_switch_that_is_always_on_says_so(device: str) -> None:
    without, given = (
        set(parsed(f"{MIXTRAL} {more}", ranks=32, device=device).notes)
        for more in ("", "--tokenizer-hf-use-fast")
    )
    (note,) = given - without
    assert note.startswith("`--tokenizer-hf-use-fast` has no effect: Hugging Face tokenizers are")


IDLE = {
    "--rotary-base 500000": "--position-embedding-type rope",
    "--rope-scaling-factor 4": "--use-rope-scaling",
    "--mtp-loss-scaling-factor 0.3": "--mtp-num-layers",
    "--moe-router-topk 1": "--num-experts",
    "--loss-scale 8": "--fp16",
    "--exit-signal SIGUSR1": "--exit-signal-handler",
    "--profile-step-start 3": "--profile",
    "--sgd-momentum 0.5": "--optimizer sgd",
    "--lr-wsd-decay-iters 3": "--lr-decay-style WSD",
    "--no-data-sharding": "--dataloader-type cyclic",
}


@pytest.mark.parametrize("flags", IDLE)
def test_a_flag_that_does_nothing_without_another_says_so(flags: str) -> None:
    name, needed = flags.split()[0], IDLE[flags]
    notes = parsed(f"{SMALL} {flags}").notes
    assert notes == [f"`{name}` has no effect without `{needed}`."]
    value = {"--mtp-num-layers": " 1", "--num-experts": " 2 --moe-router-pre-softmax"}.get(needed)
    if needed == "--use-rope-scaling":
        value = " --position-embedding-type rope"
    both = f"{SMALL} {flags} {needed}{value or ''}"
    assert not parsed(both).notes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_kernel_that_no_attention_here_takes_is_named(device: str) -> None:
    words = [*SMALL.split(), "--no-masked-softmax-fusion"]
    (note,) = parsed(words, device=device).notes
    assert note.startswith("`--no-masked-softmax-fusion` has no effect: attention is computed by")
