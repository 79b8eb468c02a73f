"""Launch scripts of Megatron-LM run unchanged, and every common flag gets an answer."""

from pathlib import Path

import pytest
import yaml

from megatron_ext.config.parser import read_words
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.text.config.positions import PositionConfig
from megatron_ext.text.data.config import DataConfig
from megatron_ext.text.task import TEXT
from tests.config.runs import SMALL
from tests.training_runs import config_of, errors_of, parsed

FOLDER = Path(__file__).parent
GPT3, LLAMA3, MIXTRAL, BY_USE = (
    (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    for name in ("gpt3", "llama3", "mixtral", "flags_by_use")
)
FP8 = "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gpt3_script(device: str) -> None:
    config = config_of(GPT3, ranks=128, device=device)
    assert config.precision.fp16
    assert config.training.rampup_batch_size == [16, 16, 5859375]
    assert config.parallel.data_parallel_size == 1
    assert config.model.ffn_hidden_size == 4 * 12288
    assert config.section(PositionConfig).position_embedding_type == "learned_absolute"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_llama3_script_also_with_fp8(device: str) -> None:
    """The array of its bash script passes on quotes."""
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
        for flag in ("--moe-permute-fusion", "--moe-router-fusion"):
            assert len([note for note in notes if f"`{flag}` has no effect" in note]) == 1
        grouped = [note for note in notes if "`--moe-grouped-gemm` has no effect" in note]
        assert len(grouped) == (device == "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_mixtral_script_keeps_rope(device: str) -> None:
    found = parsed(MIXTRAL, ranks=32, device=device)
    assert found.config.section(PositionConfig).position_embedding_type == "rope"
    assert found.config.section(MoEConfig).num_experts == 8
    assert any("`--no-position-embedding` has no effect" in note for note in found.notes)


@pytest.mark.parametrize("name", [name for name in BY_USE.split() if name != "--help"])
def test_none_of_342_common_flags_is_unknown(name: str) -> None:
    assert len(set(BY_USE.split())) == 342
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
    "--initial-loss-scale 8": "--fp16",
    "--min-loss-scale 2": "--fp16",
    "--loss-scale-window 9": "--fp16",
    "--hysteresis 3": "--fp16",
    "--recompute-modules mlp": "--recompute-granularity selective",
    "--exit-signal SIGUSR1": "--exit-signal-handler",
    "--profile-step-start 3": "--profile",
    "--profile-ranks 0": "--profile",
    "--spike-window 9": "--on-spike",
    "--spike-factor 9": "--on-spike",
    "--sgd-momentum 0.5": "--optimizer sgd",
    "--muon-extra-scale-factor 0.2": "--optimizer muon",
    "--lr-wsd-decay-iters 3": "--lr-decay-style WSD",
    "--no-data-sharding": "--dataloader-type cyclic",
}


@pytest.mark.parametrize("flags", IDLE)
def test_a_flag_that_does_nothing_without_another_says_so(flags: str) -> None:
    name, needed = flags.split()[0], IDLE[flags]
    notes = parsed(f"{SMALL} {flags}").notes
    assert notes == [f"`{name}` has no effect without `{needed}`."]
    value = {
        "--on-spike": " log",
        "--mtp-num-layers": " 1",
        "--num-experts": " 2 --moe-router-pre-softmax",
    }.get(needed)
    if needed == "--use-rope-scaling":
        value = " --position-embedding-type rope"
    both = f"{SMALL} {flags} {needed}{value or ''}"
    assert not parsed(both).notes


ON_A_CPU = (
    "--no-bias-dropout-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl --overlap-grad-reduce "
    "--overlap-param-gather --no-align-grad-reduce --no-align-param-gather --tp-comm-overlap "
    "--tp-comm-overlap-cfg --no-tp-comm-overlap-ag --no-tp-comm-overlap-rs "
    "--tp-comm-overlap-rs-dgrad --no-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad "
    "--tp-comm-bootstrap-backend --tp-comm-overlap-disable-qkv --tp-comm-overlap-disable-fc1 "
    "--ddp-bucket-size --ddp-average-in-collective --attention-backend --disable-jit-fuser "
    "--log-memory-to-tensorboard --muon-fp32-matmul-prec --empty-unused-memory-level"
).split()
VALUES = {
    "--cross-entropy-fusion-impl": "native",
    "--tp-comm-overlap-cfg": "file",
    "--tp-comm-bootstrap-backend": "gloo",
    "--ddp-bucket-size": "1000",
    "--attention-backend": "fused",
    "--muon-fp32-matmul-prec": "high",
    "--empty-unused-memory-level": "1",
}


def test_every_flag_for_gpus_says_that_a_cpu_does_nothing_with_it() -> None:
    words = [word for name in ON_A_CPU for word in (name, VALUES.get(name)) if word is not None]
    more = "--use-distributed-optimizer --tensorboard-dir t".split()
    notes = parsed([*SMALL.split(), *words, *more]).notes
    assert len(notes) == len(ON_A_CPU)
    assert all(" has no effect on a CPU: " in note for note in notes), notes
    # On a GPU the same flags have one, but for those of optimizers and layers of another kind.
    more += ["--tensorboard-dir", "t", "--cross-entropy-loss-fusion"]
    gpu = [word for word in ON_A_CPU if "tp-comm" not in word and "muon" not in word]
    words = [word for name in gpu for word in (name, VALUES.get(name)) if word is not None]
    assert parsed([*SMALL.split(), "--bf16", *words, *more], device="cuda").notes == []


def test_a_value_that_a_later_one_replaces_is_named() -> None:
    assert not parsed(f"{SMALL} --seed 5 --seed 5").notes
    found = parsed(f"{SMALL} --seed 5 --bf16 --seed 7 --no-bf16")
    assert found.config.training.seed == 7 and not found.config.precision.bf16
    assert found.notes == [
        "`--seed` (7) takes the place of the value (5) that was given before it.",
        "`--no-bf16` (False) takes the place of the value (True) that was given before it.",
    ]


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`--save` \(\) must not be empty, as it is where a var"):
        parsed([*SMALL.split(), "--save", "", "--wandb-entity", ""])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_kernel_that_no_attention_here_takes_is_named(device: str) -> None:
    words = [*SMALL.split(), "--no-masked-softmax-fusion"]
    (note,) = parsed(words, device=device).notes
    assert note.startswith("`--no-masked-softmax-fusion` has no effect: attention is computed by")


def test_a_run_with_muon_is_told_how_large_its_updates_are() -> None:
    (note,) = parsed(f"{SMALL} --optimizer muon").notes
    assert note.endswith("use `--muon-extra-scale-factor 0.2`.")
    for flags in ("--muon-extra-scale-factor 1", "--muon-scale-mode unit_rms_norm"):
        assert not parsed(f"{SMALL} --optimizer muon {flags}").notes
    # Vectors and embeddings are updated by Adam, so its flags count beside Muon.
    adam = "--adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-6"
    assert parsed(f"{SMALL} --optimizer muon {adam}").notes == [note]


def test_the_older_name_of_sharded_muon() -> None:
    optimizer = config_of(f"{SMALL} --optimizer dist_muon").optimizer
    assert optimizer.optimizer == "muon" and optimizer.use_distributed_optimizer
