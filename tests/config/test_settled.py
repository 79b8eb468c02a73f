"""A configuration takes values from flags, defaults, files and the environment."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ext.config.fault_tolerance import FaultToleranceConfig
from megatron_ext.config.flags import COUNT, changed, must_divide
from megatron_ext.config.inapplicable import answer_to, by_flag, names_of, without
from megatron_ext.config.layers import (
    layers_with_experts,
    layers_without_rope,
    read_pattern,
    windowed_layers,
)
from megatron_ext.config.optimizer import EmaConfig, LoraConfig, OptimizerConfig
from megatron_ext.config.output import CheckpointConfig, split_address, staging_folder
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.parser import all_errors, parse_args, read_words
from megatron_ext.config.precision import PrecisionConfig
from megatron_ext.config.rules.optimizer import has_usual_warmup, with_warmup
from megatron_ext.config.rules.parallel import mtp_stage
from megatron_ext.config.rules.pipeline_layout import stages_of
from megatron_ext.config.training import TrainingConfig
from megatron_ext.errors import ConfigError
from megatron_ext.text.config.attention import (
    AttentionConfig,
    LatentAttentionConfig,
    softmax_scale,
)
from megatron_ext.text.config.rules import stored_text_model
from megatron_ext.text.config.sft import SftConfig
from megatron_ext.text.config.sft_rules import row_errors
from megatron_ext.text.task import TEXT
from megatron_ext.video.task import VIDEO
from tests.config.runs import BF16, SMALL
from tests.training_runs import config_of, errors_of, parsed
from tests.training_runs import without as words_without


def test_a_run_that_somebody_may_start_again_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRON_EXT_GENERATION", raising=False)
    assert not FaultToleranceConfig().may_be_restarted
    assert FaultToleranceConfig(max_restarts=1).may_be_restarted
    assert FaultToleranceConfig(elastic_min_nodes=1).may_be_restarted
    monkeypatch.setenv("MEGATRON_EXT_GENERATION", "1")
    assert FaultToleranceConfig().may_be_restarted
    for words, passes in (("", False), ("--max-restarts 1", True)):
        assert config_of(f"{SMALL} {words}").checkpoint.passes_over_damaged is passes


def test_no_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert config_of(SMALL)
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    assert errors_of(SMALL) == ("`OMP_NUM_THREADS` (0) must be at least 1.",)


def test_a_number_of_ranks_is_that_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on GPUs starts torchrun with its own flags, and layouts of recipes have this one."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    words = f"{SMALL} --nproc-per-node 4"
    assert config_of(words, ranks=2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for fitting in (SMALL, f"{SMALL} --nproc-per-node 2"):
        assert config_of(fitting, ranks=4)
    assert errors_of(words, ranks=2) == (
        "`--nproc-per-node` (4) must be the number of ranks that torchrun has started on this "
        "machine (2); leave it out, or give it to torchrun.",
    )


def test_planned_machines_have_ranks_too() -> None:
    words = f"{SMALL} --dry-run --nproc-per-node 2 --dry-run-nodes 4"
    assert config_of(words, ranks=0).parallel.world_size == 8
    assert config_of(f"{SMALL} --nproc-per-node 2", ranks=0).parallel.world_size == 2
    gpu = config_of(f"{SMALL} --dry-run --dry-run-gpu H100")
    assert (gpu.device, gpu.model.transformer_impl) == ("cuda", "torch")


def test_formats_of_numbers_follow_the_device() -> None:
    for flags, device, bf16, in_fp32 in (
        ({}, "cuda", False, False),
        ({"bf16": True}, "cpu", True, True),
        ({"bf16": True, "grad_reduce_in_bf16": True}, "cpu", True, False),
        ({"accumulate_allreduce_grads_in_fp32": True}, "cpu", False, True),
        ({"bf16_on_gpu": True}, "cuda", True, True),
        ({"bf16_on_gpu": True}, "cpu", False, False),
    ):
        found = PrecisionConfig(**flags).resolved(device)
        assert (found.bf16, found.accumulate_allreduce_grads_in_fp32) == (bf16, in_fp32), flags


def test_an_address_is_that_of_a_run_or_of_one_checkpoint() -> None:
    for name in ("iter_0000100", "iter_12345678"):
        assert split_address(f"s3://b/run/{name}/") == ("s3://b/run", name)
        assert staging_folder(f"s3://b/run/{name}") == staging_folder("s3://b/run") / name
    for address in ("s3://b/run/iter_100", "s3://b/run"):
        assert split_address(address) == (address, "")
    assert staging_folder("s3://b/run") != staging_folder("s3://b/run2")


def test_intervals_of_saves_come_with_a_folder() -> None:
    usual = {"usual_save_interval": 1000}
    assert CheckpointConfig(save="s", **usual).resolved().save_interval == 1000
    assert CheckpointConfig(save="s", save_interval=3, **usual).resolved().save_interval == 3
    assert CheckpointConfig(load="l", **usual).resolved().save_interval is None
    for name in ("save", "load", "pretrained_checkpoint", "resume_mode"):
        assert CheckpointConfig(**{name: "x"}).is_used  # type: ignore[arg-type]
    assert not CheckpointConfig().is_used
    config = config_of(f"{SMALL} --load s3://b/run")
    assert config.checkpoint.load == str(staging_folder("s3://b/run"))
    assert config.to_dict()["checkpoint"]["load"] == "s3://b/run"


def test_a_usual_warm_up_is_shorter_than_the_decay() -> None:
    def warmup(usual: int, **lengths: Any) -> int | None:
        length = lengths.pop("train_iters", None)
        optimizer = OptimizerConfig(usual_warmup_iters=usual, **lengths)
        training = TrainingConfig(train_iters=length)
        found = with_warmup(optimizer, training)
        assert has_usual_warmup(found, training) == (
            bool(usual) and optimizer.lr_warmup_fraction is None
        )
        return found.lr_warmup_iters

    assert warmup(100, train_iters=101) == 100
    assert warmup(100, train_iters=100) == 10
    assert warmup(100, train_iters=1000, lr_decay_iters=50) == 5
    assert warmup(100) is None
    assert warmup(0, train_iters=9) == warmup(9, train_iters=99, lr_warmup_fraction=0.1) == 0
    notes = OptimizerConfig(usual_warmup_iters=100, lr_warmup_iters=5)
    assert len(notes.warmup_notes()) == 1
    assert OptimizerConfig(usual_warmup_iters=100, lr_warmup_iters=100).warmup_notes() == []
    fraction = OptimizerConfig(usual_warmup_iters=9, lr_warmup_iters=0, lr_warmup_fraction=0.5)
    assert fraction.warmup_notes() == []


def test_communication_that_gloo_cannot_do_is_switched_off_on_a_cpu() -> None:
    words = (
        f"{SMALL} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--ddp-average-in-collective"
    )
    for device in ("cpu", "cuda"):
        optimizer = config_of(words, device=device).optimizer
        found = (
            optimizer.overlap_grad_reduce,
            optimizer.overlap_param_gather,
            optimizer.ddp_average_in_collective,
        )
        assert found == (device == "cuda",) * 3


def test_averages_are_held_by_runs_that_use_them() -> None:
    assert EmaConfig(for_sampling=True).keeps_average(trains=False)
    assert EmaConfig(eval_ema=True).keeps_average(trains=False)
    assert not EmaConfig(0.9).keeps_average(trains=False)
    assert EmaConfig(0.9).keeps_average(trains=True)
    assert EmaConfig(0.9).resolved() == EmaConfig(0.9, ema_start=1, ema_warmup=True)
    kept = EmaConfig(0.9, ema_start=5, ema_warmup=False)
    assert kept.resolved() == kept and EmaConfig().resolved() == EmaConfig()
    assert LoraConfig(lora_rank=4, lora_alpha=2.0).scale == 0.5


def test_patterns_of_layers_count_from_one_and_experts_from_none() -> None:
    assert layers_with_experts(2, 5) == [True, False, True, False, True]
    assert layers_with_experts([0, 1], 2) == [False, True]
    assert windowed_layers("2", 5) == [True, False, True, False, True]
    assert layers_without_rope("2", 5) == [False, True, False, True, False]
    assert layers_without_rope("3", 5) == [False, False, True, False, False]
    assert windowed_layers(None, 2) == [True, True] and layers_without_rope(None, 1) == [False]
    assert windowed_layers("[1,0]", 2) == [True, False]
    assert windowed_layers("[0]", 1) == [False] and layers_without_rope("[1]", 1) == [True]
    assert read_pattern("([0]*1+[1,0]*2)") == [0, 1, 0, 1, 0]
    assert len(read_pattern("[1]*1000000")) == 10**6  # type: ignore[arg-type]
    for text in ("[1]*0", "[1]*-1", "[1]*1000001", "[1,x]"):
        with pytest.raises(ValueError):
            read_pattern(text)


def test_stages_of_a_layout_and_the_one_of_multi_token_prediction() -> None:
    layout = "Et*2|t|tmL"
    assert stages_of(layout) == ["Ett", "t", "tmL"]
    assert len(stages_of("t*10000")[0]) == 10_000
    with pytest.raises(ValueError, match="more than 10000 times"):
        stages_of("t*10001")
    four = {"pipeline_model_parallel_size": 4}
    assert mtp_stage(ParallelConfig(**four)) == 3
    assert mtp_stage(ParallelConfig(**four, virtual_pipeline_model_parallel_size=2)) == 7
    given = ParallelConfig(**four, pipeline_model_parallel_layout="Et|t|tm|L")
    assert mtp_stage(given) == 2


def test_entries_of_flags_that_do_not_apply_are_found_by_what_they_need() -> None:
    entry = without("--name a or b", "x")
    assert entry.holds is not None
    assert [entry.holds({"name": value}) for value in ("a", "b", "c", None)] == [
        False, False, True, True,
    ]  # fmt: skip
    plain = without("--name", "x y")
    assert plain.holds is not None
    assert [plain.holds({"name": value}) for value in (None, False, 0, True, "a")] == [
        True, True, True, False, False,
    ]  # fmt: skip
    first, last = without("--one", "x"), without("--other", "x y")
    values = {"one": None, "other": None, "name": None}
    table = by_flag([first, last], values)
    assert table == {"--x": first, "--y": last}
    for word in ("--no-y", "--disable-y", "--y"):
        assert answer_to(word, table) is last
    assert answer_to("--no-z", table) is None


KEEPING = (
    "--num-experts 4 --disable-bias-linear --moe-router-pre-softmax "
    "--moe-token-dispatcher-type alltoall --moe-keep-dispatched-tokens"
)


def notes_of(words: str, device: str = "cpu", ranks: int = 1) -> list[str]:
    return parsed(f"{SMALL} {words}", device=device, ranks=ranks).notes


def test_a_note_tells_that_no_experts_run_again() -> None:
    keeping = f"{KEEPING} --expert-model-parallel-size 2"
    selective = "--recompute-granularity selective"
    for words in ("--moe-layer-recompute", f"{selective} --recompute-modules moe"):
        assert notes_of(f"{keeping} {words}", ranks=2) == []
    for words in ("", selective):
        (note,) = notes_of(f"{keeping} {words}", ranks=2)
        assert note == (
            "`--moe-keep-dispatched-tokens` has no effect, since no layer of experts is recomputed."
        )


def test_notes_follow_the_device_and_the_other_flags() -> None:
    buckets = "--ddp-bucket-size 1000 --use-distributed-optimizer"
    assert any("`--ddp-bucket-size` has no effect on a CPU" in x for x in notes_of(buckets))
    assert notes_of(f"{buckets} --data-parallel-sharding-strategy optim_grads") == []
    assert notes_of("--sgd-momentum 0.5 --optimizer muon --muon-extra-scale-factor 1") == [
        "`--sgd-momentum` has no effect without `--optimizer sgd`."
    ]
    (note,) = notes_of("--transformer-impl local")
    assert note == "`--transformer-impl` (local) is torch here: there are no other local layers."
    rope = "--position-embedding-type yarn --yarn-rotary-scaling-factor 2"
    rope += " --yarn-original-max-position-embeddings 32 --no-position-embedding"
    (note,) = notes_of(rope)
    assert note.startswith("`--no-position-embedding` has no effect: `--position-embedding-type y")
    for words, said in (
        ("--window-attn-skip-freq 2", "without `--window-size`"),
        (
            "--moe-permute-fusion --num-experts 2 --moe-router-pre-softmax",
            "a kernel of Transformer",
        ),
        ("--beta-fast 8", "without `--multi-latent-attention`"),
        (
            f"{KEEPING} --moe-layer-recompute",
            "without `--expert-model-parallel-size` above 1",
        ),
    ):
        (note,) = notes_of(words)
        assert said in note
    latent = "--position-embedding-type rope --multi-latent-attention --beta-fast 8"
    assert notes_of(latent) == []
    (note,) = notes_of(f"{latent} --rope-type rope")
    assert note.startswith("`--beta-fast` has no effect without `--rope-type yarn`")
    sizes = words_without(SMALL.split(), "--tokenizer-type", "--vocab-size")
    for kind in ("NullTokenizer", "TikTokenizer", "ByteLevelTokenizer"):
        given = [*sizes, "--tokenizer-type", kind, "--vocab-size", "512"]
        assert not [x for x in parsed(given).notes if "--vocab-size" in x], kind
    kernels = parsed(
        f"{SMALL} --moe-permute-fusion --num-experts 2 --moe-router-pre-softmax "
        "--transformer-impl torch",
        device="cuda",
    ).notes
    assert [x for x in kernels if "`--moe-permute-fusion` has no effect without Transformer" in x]


def test_advice_rounds_up_to_what_fits() -> None:
    (error,) = must_divide("--a", 5, "--b", 4)
    assert error == "`--a` (5) must be divisible by `--b` (4); use 8."
    assert list(must_divide("--a", 8, "--b", 4)) == list(must_divide("--a", None, "--b", 4)) == []
    assert [COUNT.integer("3"), COUNT.number("2.5")] == [3, 2.5]
    for text, said in (("0", "at least 1"), ("9999999999", "at most"), ("x", "an integer")):
        with pytest.raises(argparse.ArgumentTypeError, match=said):
            COUNT.integer(text)


def test_changed_flags_are_those_asked_for() -> None:
    run = config_of(f"{SMALL} --clip-grad 2 --no-log-loss-scale-to-tensorboard")
    assert changed(run, ["logging"]) == ["--no-log-loss-scale-to-tensorboard"]
    named = changed(run, ["optimizer", "logging"], only=["clip_grad", "sgd_momentum"])
    assert named == ["--clip-grad"]


def test_a_defaults_wrong_type_is_a_sentence() -> None:
    how: Any = {"world_size": 1, "device": "cpu"}
    with pytest.raises(ConfigError, match="do not fit together"):
        parse_args(SMALL.split(), TEXT, defaults={"kv_channels": {}, "clip_grad": "x"}, **how)


def test_all_errors_are_told_even_if_one_check_ended_early() -> None:
    words = [*SMALL.split(), "--seed", "0"]

    def inputs(task: Any, config: Any) -> list[str]:
        return ["a file is missing"]

    found = all_errors(["first"], words, TEXT, input_errors=inputs)
    assert found == ["first", "`--seed` (0) must be at least 1; 1234 is the default.", "a file is "
                     "missing"]  # fmt: skip
    printed = all_errors(["first"], [*words, "--print-config"], TEXT, input_errors=inputs)
    assert printed == ["first"]


def test_a_flag_given_twice_with_other_values_is_given_once() -> None:
    reading = read_words("--seed 5 --seed=7".split(), TEXT)
    assert [named for _, named in reading.given.values()] == ["`--seed`"]


def test_a_file_may_hold_flags_that_its_run_does_not_use(tmp_path: Path) -> None:
    """A printed configuration has all fields; a value that the run contradicts is refused."""
    file = tmp_path / "run.yaml"
    flow = "--micro-batch-size 1 --train-iters 6 --video-data-path d --eval-iters 0".split()
    words = [*flow, "--config", str(file)]
    resolved = config_of(flow, VIDEO).to_dict()
    file.write_text(yaml.safe_dump(resolved))
    assert config_of(words, VIDEO).to_dict() == resolved
    file.write_text("num_layers: 99\n")
    (error,) = errors_of(words, VIDEO)
    assert error.startswith(f"`num_layers` in `{file}` (99) has no effect on a video model")
    file.write_text("adam_eps: 1.0e-8\n")
    assert config_of(words, VIDEO).optimizer.adam_eps == 1e-8


def test_help_shows_the_values_that_a_task_usually_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        config_of("--help all", VIDEO)
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "--save-interval N save after each multiple of this many steps; without it at the end"
        in (shown)
    )
    assert "at the end only [1000]" in shown
    assert "--no-bf16 is fp32 [on a GPU]" in shown


def test_documents_are_told_apart_where_rows_hold_several() -> None:
    words = (
        "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 "
        "--max-position-embeddings 16 --micro-batch-size 1 --lr 1e-3 --train-iters 2 "
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model t --data-path f"
    )
    for more, masks in (
        ("", False),
        ("--reset-attention-mask", True),
        ("--sft", True),
        ("--sft --sft-batching token-budget", True),
        ("--sft --sft-batching padded", False),
    ):
        assert config_of(f"{words} {more}").model.document_masks is masks, more
    assert config_of(SMALL).lora.lora_target_modules is None


def test_columns_and_dates_of_conversations() -> None:
    columns = {
        "messages": ("question", "answer"),
        "prompt-response": ("question", "answer"),
        "prompt-completion": ("prompt", "completion"),
    }
    for name, pair in columns.items():
        sft = SftConfig(sft_row_format=name)
        assert (sft.prompt_column, sft.response_column) == pair
    own = SftConfig(sft_prompt_key="p", sft_response_key="r")
    assert (own.prompt_column, own.response_column) == ("p", "r")
    for date, is_right in (("2024-07-26", True), ("20240726", False), ("2024-7-26", False)):
        assert (row_errors(SftConfig(sft_date=date)) == []) is is_right
    assert SftConfig().resolved(9).sft_max_length is None
    assert SftConfig(sft=True).resolved(9).sft_max_length == 9


def test_latent_attention_scales_scores_by_its_keys_and_lengths() -> None:
    latent = LatentAttentionConfig(
        multi_latent_attention=True, qk_head_dim=12, qk_pos_emb_head_dim=4, v_head_dim=6,
        kv_lora_rank=8, mscale=2.0, mscale_all_dim=0.5, rotary_scaling_factor=40.0,
    )  # fmt: skip
    # 0.1 * 0.5 * ln(40) + 1 is 1.184444; its square over the root of 16 channels.
    assert softmax_scale(latent, rotates=True) == pytest.approx(1.18444397**2 / 4)
    run = config_of(f"{SMALL} --nproc-per-node 2 --tensor-model-parallel-size 2", ranks=0)
    sides = {width: parts for _, width, parts in latent.attention_sides(run) or ()}
    assert sides == {None: 1, 8: 1, 12: 1, 64: 2, 72: 2, 24: 2}
    resolved = latent.resolved_model(config_of(f"{BF16} --add-qkv-bias").model)
    assert (resolved.kv_channels, resolved.add_qkv_bias) == (6, False)
    assert "multi_latent_attention" not in LatentAttentionConfig().unused_fields()
    assert "q_lora_rank" in LatentAttentionConfig().unused_fields()
    assert latent.unused_fields() == frozenset()


def test_flags_of_a_section_are_named_with_their_negative_spellings() -> None:
    names = names_of(TrainingConfig).split()
    assert {"calculate-per-token-loss", "no-calculate-per-token-loss"} <= set(names)
    left = names_of(TrainingConfig, but=["calculate_per_token_loss"]).split()
    assert "seed" in left
    assert not [name for name in left if name.endswith("calculate-per-token-loss")]


def test_adapters_are_by_default_on_the_layers_that_the_model_has() -> None:
    for words, names in (
        ("", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]),
        (
            "--position-embedding-type rope --multi-latent-attention",
            "linear_q_proj linear_q_up_proj linear_kv_up_proj linear_proj linear_fc1 "
            "linear_fc2".split(),
        ),
    ):
        lora = config_of(f"{SMALL} --lora-rank 2 {words}").lora
        assert sorted(lora.lora_target_modules or ()) == sorted(names)
    assert config_of(SMALL).lora.lora_target_modules is None


def test_windows_that_rings_cannot_serve_are_refused_with_an_engine() -> None:
    run = config_of(SMALL)
    windowed = AttentionConfig(window_size=(8, 0))

    def told(kind: str, impl: str = "transformer_engine", ranks: int = 2) -> list[str]:
        parallel = replace(run.parallel, cp_comm_type=[kind], context_parallel_size=ranks)
        model = replace(run.model, transformer_impl=impl)
        return [*map(str, windowed.errors(replace(run, parallel=parallel, model=model)))]

    for kind in ("p2p", "a2a+p2p"):
        (error,) = told(kind)
        assert f"does not go with `--cp-comm-type` ({kind})" in error
        assert told(kind, impl="torch") == told(kind, ranks=1) == []
    assert told("a2a") == told("all_gather") == []


def test_a_checkpoint_of_another_task_gives_no_text_model() -> None:
    stored = config_of(f"{SMALL} --lora-rank 2").to_dict()
    shapes = stored_text_model(stored, config_of(SMALL))
    assert shapes["model"]["hidden_size"] == 64 and shapes["lora"]["lora_rank"] == 2
    assert {"model", "positions", "attention", "latent_attention", "moe"} <= shapes.keys()
    with pytest.raises(ConfigError, match="is of a model that this program does not train"):
        stored_text_model({**stored, "model": {"blocks_dealt_by_cost": True}}, config_of(SMALL))
