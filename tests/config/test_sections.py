"""Sections of flags: derived values, accepted flags and notes; ``refusals.txt`` has the rest."""

import pytest

from megatron_ext.config.finalize import finalize
from megatron_ext.config.optimizer import ALL_TARGETS, TARGETS, EmaConfig
from megatron_ext.config.precision import CudaGraphConfig, Fp8Config
from megatron_ext.config.rules.optimizer import ema_errors
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.task import GPT, TEXT
from megatron_ext.video.streaming.task import STREAMING as STREAMING_TASK
from megatron_ext.video.task import VIDEO
from tests.config.runs import BF16, GRAPHS, SFT, SMALL, STREAMING
from tests.training_runs import check_refused, config_of, errors_of, parsed

LOCAL = "--cuda-graph-impl local"


def graphs(words: str, device: str = "cuda") -> CudaGraphConfig:
    return config_of(f"{GRAPHS} {words}", ranks=2, device=device).cuda_graphs


@pytest.mark.parametrize(
    "words",
    [
        "--cuda-graph-impl none --cuda-graph-warmup-steps 3",
        f"{LOCAL} --cuda-graph-warmup-steps 11 --hidden-dropout 0.1",
        f"{LOCAL} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        f"{LOCAL} --tensor-model-parallel-size 2 --sequence-parallel --attention-dropout 0.1",
        f"{LOCAL} --mtp-num-layers 1 --position-embedding-type rope --rampup-batch-size 8 8 16",
        "--enable-cuda-graph",
    ],
)
def test_flags_that_go_with_graphs(words: str) -> None:
    assert graphs(words).cuda_graph_impl == ("none" if "none" in words else "local")


def test_a_cpu_refuses_what_a_gpu_would_and_video_has_no_graphs() -> None:
    words = f"{GRAPHS} {LOCAL} --num-experts 2"
    check_refused(words, "does not go with `--num-experts`", ranks=2)
    words = f"--video --hidden-size 64 {LOCAL} --data-path x"
    check_refused(words, "--cuda-graph-impl", device="cuda")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_growing_segments_need_plain_buffers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL must not register them."""
    monkeypatch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
    with pytest.raises(ConfigError, match=rf"{name}.*needs `NCCL_GRAPH_REGISTER=0`"):
        graphs(LOCAL)
    graphs(LOCAL, "cpu")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    assert graphs(LOCAL).cuda_graph_impl == "local"

    notes = parsed(f"{GRAPHS} {LOCAL} --cuda-graph-warmup-steps 5").notes
    found = [note for note in notes if "cuda-graph" in note]
    flags = [note.partition(" has no effect on a CPU: ")[0] for note in found]
    assert flags == ["`--cuda-graph-impl`", "`--cuda-graph-warmup-steps`"]


def test_a_run_that_only_evaluates_needs_no_decay() -> None:
    ema = config_of(f"{SMALL} --skip-train --eval-ema --eval-iters 1").ema
    assert ema.keeps_average(trains=False)
    assert not ema.keeps_average(trains=True)


@pytest.mark.parametrize(
    ("words", "start"), [("--ema-decay 0.9", 1), ("--ema-decay 0.9 --ema-start 7", 7), ("", None)]
)
def test_the_first_averaged_step(words: str, start: int | None) -> None:
    config = config_of(f"{SMALL} {words}")
    assert config.ema.ema_start == start
    assert not list(ema_errors(EmaConfig(0.0).resolved(), config.training))


@pytest.mark.parametrize(
    "flags",
    [
        "--fp8-format hybrid",
        "--fp8-format e4m3 --fp8-recipe tensorwise --transformer-impl torch",
        "--fp8 hybrid --fp8-interval 1 --fp8-margin 0 --fp8-amax-history-len 1024 "
        "--fp8-amax-compute-algo max --no-fp8-wgrad",
        "--fp8-format hybrid --fp8-recipe rowwise --first-last-layers-bf16",
        "--fp8-format hybrid --num-experts 2 --moe-ffn-hidden-size 48",
        "--fp8-format hybrid --lora-rank 4",
    ],
)
def test_flags_that_go_with_8_bits(flags: str) -> None:
    assert config_of(f"{BF16} {flags}").fp8.fp8_format is not None


def test_sides_of_8_bit_products_are_a_ranks_and_their_interval_has_no_effect() -> None:
    flags = "--fp8-format hybrid --tensor-model-parallel-size 2 --ffn-hidden-size 176"
    sentence = "--ffn-hidden-size (176) over 2 rank(s) does not; use a multiple of 32."
    check_refused(f"{BF16} {flags}", sentence, ranks=2)
    notes = parsed(f"{BF16} --fp8-format hybrid --fp8-interval 4").notes
    assert any("`--fp8-interval` has no effect" in note for note in notes)


def test_layers_that_stay_in_bf16() -> None:
    ends = {"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 1}
    config = Fp8Config(first_last_layers_bf16=True, **ends)
    assert [number for number in range(1, 7) if config.keeps_bf16(number, 6)] == [1, 2, 6]
    assert not any(Fp8Config().keeps_bf16(number, 6) for number in range(1, 7))


def adapters(words: str = "") -> RunConfig:
    return config_of(f"{SMALL} {words}")


def streaming(words: str = "") -> RunConfig:
    return config_of(f"{STREAMING} {words}", VIDEO)


def test_adapters_of_a_streaming_run_lie_on_all_layers_of_its_blocks() -> None:
    assert streaming().lora.lora_rank is None
    lora = streaming("--lora-rank 256 --lora-alpha 256").lora
    assert lora.lora_target_modules == list(ALL_TARGETS) and lora.scale == 1
    assert adapters("--lora-rank 2").lora.lora_target_modules == list(TARGETS)
    one = streaming("--lora-rank 2 --lora-target-modules linear_kv").lora
    assert one.lora_target_modules == ["linear_kv"]


def test_a_resolved_configuration_is_one_that_can_be_given() -> None:
    run = streaming("--lora-rank 2")
    again = RunConfig.from_dict(run.to_dict(), VIDEO.sections)
    assert finalize(again, STREAMING_TASK, 1, "cpu") == run
    # One that names layers without a rank is read as well.
    stored = adapters().to_dict()
    stored["lora"]["lora_target_modules"] = list(TARGETS)
    read = finalize(RunConfig.from_dict(stored, TEXT.sections), GPT, 1, "cpu")
    assert read.lora.lora_rank is None


def test_alpha_over_rank_whose_error_is_told_once() -> None:
    assert adapters("--lora-rank 16").lora.scale == 2
    assert adapters("--lora-rank 16 --lora-rslora").lora.scale == 8
    assert adapters().lora.lora_alpha is None
    assert "\n".join(errors_of(f"{SMALL} --lora-rank -1")).count("`--lora-rank` (-1)") == 1


def test_the_checkpoints_adapters_are_taken_with_its_shape() -> None:
    stored = adapters("--lora-rank 4 --lora-target-modules linear_qkv")
    words = f"{SMALL} --use-checkpoint-args --load x"
    taken = {"checkpoint_config": stored.to_dict()}
    assert config_of(words, **taken).lora == stored.lora
    assert config_of(f"{words} --lora-rank 8", **taken).lora.lora_rank == 8


@pytest.mark.parametrize("given", [-100, 0, 7])
def test_a_label_to_ignore_is_an_id_or_none(given: int) -> None:
    assert config_of(f"{SMALL} --ignore-index {given}").loss.ignore_index == given


def test_the_longest_conversation_follows_the_row() -> None:
    padded = "--sft --sft-batching padded --deterministic-dropout"  # Its dropout can be numbered.
    rows = (("--sft", 16), ("--sft --sft-max-length 17", 17), ("", None), (padded, 16))
    for words, longest in rows:
        config = config_of(f"{SFT} {words}", ranks=0)
        assert config.section(SftConfig).sft_max_length == longest


def test_epochs_need_conversations() -> None:
    words = SFT.replace("--train-iters 2", "--train-epochs 2")
    check_refused(words, "`--train-epochs` needs `--sft`; give `--train-iters`", ranks=0)
    config_of(f"{words} --sft", ranks=0)
    none = f"{words} --sft --train-epochs 0"
    check_refused(none, "`--train-epochs` (0) must be at least 1", ranks=0)
