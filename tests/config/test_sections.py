"""Sections of flags: derived values, accepted flags and notes; ``refusals.txt`` has the rest."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ext.checkpoint.compatibility import check_changes
from megatron_ext.config.finalize import finalize
from megatron_ext.config.inapplicable import of_program
from megatron_ext.config.optimizer import ALL_TARGETS, TARGETS, EmaConfig
from megatron_ext.config.parser import parse_args
from megatron_ext.config.precision import CudaGraphConfig, Fp8Config
from megatron_ext.config.rules.optimizer import ema_errors
from megatron_ext.config.run import RunConfig, in_present_sections
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.text.config.moe import MoEConfig
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.task import GPT, TEXT
from megatron_ext.video.streaming.task import STREAMING as STREAMING_TASK
from megatron_ext.video.task import VIDEO
from tests.config.runs import BF16, GRAPHS, SFT, SMALL, STREAMING
from tests.training_runs import check_refused, config_of, errors_of, parsed

LOCAL = "--cuda-graph-impl local"
EXPERTS = "--num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax"


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
    on_gpu = dataclasses.replace(run, device="cuda")
    assert RunConfig.from_dict(on_gpu.to_dict(), VIDEO.sections) == on_gpu
    # One that names layers without a rank is read as well.
    stored = adapters().to_dict()
    stored["lora"]["lora_target_modules"] = list(TARGETS)
    read = finalize(RunConfig.from_dict(stored, TEXT.sections), GPT, 1, "cpu")
    assert read.lora.lora_rank is None


def moved(run: RunConfig) -> dict[str, Any]:
    """Return a stored configuration with all fields in the section ``model``."""
    stored = run.to_dict()
    flat = {
        k: v for values in stored.values() if isinstance(values, dict) for k, v in values.items()
    }
    return {"model": flat, "device": stored["device"]}


def test_fields_that_were_stored_in_another_section_are_found() -> None:
    run = config_of(f"{SMALL} {EXPERTS}")
    assert RunConfig.from_dict(moved(run), TEXT.sections) == run
    taken = config_of(f"{SMALL} --use-checkpoint-args --load x", checkpoint_config=moved(run))
    assert taken.section(MoEConfig) == run.section(MoEConfig)
    clips = streaming()
    assert RunConfig.from_dict(moved(clips), VIDEO.sections) == clips


def test_a_value_in_the_section_of_its_field_counts() -> None:
    stored = {"model": {"num_experts": 2, "hidden_size": 8}, "moe": {"num_experts": 4}}
    placed = in_present_sections(stored, TEXT.sections)
    assert placed == {"model": {"hidden_size": 8}, "moe": {"num_experts": 4}}
    # A section of no use to the task is left alone, whatever its fields are called.
    other = {"mmdit": {"num_experts": 2}, "model": [1], "device": "cpu"}
    assert in_present_sections(other, TEXT.sections) == other


def test_changed_flags_are_found_in_a_checkpoint_that_stored_them_elsewhere() -> None:
    run = config_of(f"{SMALL} {EXPERTS}")
    how = {"weights_only": False, "with_optimizer": False}
    assert check_changes(Path("x"), run, moved(run), **how) == []
    other = config_of(f"{SMALL} {EXPERTS} --moe-router-topk 2")
    with pytest.raises(CheckpointError, match=r"`--moe-router-topk` \(2, before 1\)"):
        check_changes(Path("x"), other, moved(run), **how)


def test_a_printed_configuration_may_hold_defaults_of_the_other_program(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    words = f"{STREAMING} --config {file}".split()
    elsewhere = [of_program("pretrain_gpt.py", TEXT.sections)]

    def read(**values: Any) -> RunConfig:
        file.write_text(yaml.safe_dump({"moe": {"moe_router_topk": 2, **values}}))
        shared: Any = {"world_size": 1, "device": "cpu", "elsewhere": lambda: elsewhere}
        return parse_args(words, VIDEO, **shared).config

    assert read(num_experts=None) == streaming()
    told = "sets flags of pretrain_gpt.py, which this program lacks: `num_experts`; give the file"
    with pytest.raises(ConfigError, match=re.escape(told)):
        read(num_experts=4)


def test_alpha_over_rank_whose_error_is_told_once() -> None:
    assert adapters("--lora-rank 16").lora.scale == 2
    assert adapters("--lora-rank 16 --lora-rslora").lora.scale == 8
    assert adapters().lora.lora_alpha is None
    assert "\n".join(errors_of(f"{SMALL} --lora-rank -1")).count("`--lora-rank` (-1)") == 1


@pytest.mark.parametrize("source", ["--load", "--pretrained-checkpoint"])
def test_the_checkpoints_adapters_are_taken_with_its_shape(source: str) -> None:
    stored = adapters("--lora-rank 4 --lora-target-modules linear_qkv")
    words = f"{SMALL} --use-checkpoint-args {source} x"
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
