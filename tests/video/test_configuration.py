"""Configurations that are printed, fed back, taken from checkpoints, tried dry, or in epochs."""

import math
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.optimizer import ALL_TARGETS
from megatron_ext.config.parser import parse_args
from megatron_ext.errors import ConfigError
from megatron_ext.train.exit_codes import EXIT_CODE_USER_ERROR
from megatron_ext.train.main import main
from megatron_ext.video.data.setup import prepare_video
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.task import FLOW, VIDEO
from tests.training_runs import errors_of
from tests.video.clips import FLAGS, IMAGE, LONG, SHORT, steps, train, write_clips
from tests.video.cost.test_cost import COMMON
from tests.video.streaming.runs import flags_of

WORDS = {
    "plain": "",
    "layout": (
        "--nproc-per-node 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--sequence-parallel --pipeline-schedule zb-v --use-distributed-optimizer --bf16"
    ),
    "model": (
        "--hidden-size 96 --num-attention-heads 2 --axes-dim 16 16 16 --num-single-blocks 0 "
        "--guidance-embed --guidance 3 --recompute-double-blocks 1 --t2v-weight 2"
    ),
    "encoding": (
        '--online-encoding --video-buckets {"64px":{"9":[1.0,2]}} --reference-lengths 1 9 '
        "--ema-decay 0 --sample-interval 2 --sample-texts a --sample-size 64 64"
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_printing_is_lossless(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--video-data-path", "x", "--save", "y", *WORDS[name].split()]
    assert main(FLOW, [*flags, "--print-config"]) == 0
    printed = capfd.readouterr().out
    (tmp_path / "run.yaml").write_text(printed)
    again = ["--config", str(tmp_path / "run.yaml"), "--print-config"]
    assert main(FLOW, again) == 0
    assert capfd.readouterr().out == printed
    # The command line still wins, and what would be ignored is still refused.
    changed = [*again[:2], "--lr", "7e-5"]
    config = parse_args(changed, VIDEO, world_size=0, device="cpu").config
    assert config.optimizer.lr == 7e-5
    assert main(FLOW, [*again, "--num-layers", "77"]) == 2
    assert "`--num-layers` has no effect on a video model" in capfd.readouterr().err


def test_defaults_of_a_program_choose_the_task_unless_a_flag_does() -> None:
    def chosen(*words: str) -> Any:
        flags = "--video-data-path x --micro-batch-size 1 --lr 1e-3 --train-iters 1 --eval-iters 0"
        defaults = {"video_model": "video-dit"}
        how: Any = {"world_size": 1, "device": "cpu", "defaults": defaults}
        return parse_args([*flags.split(), *words], VIDEO, **how).task

    assert chosen().defaults["i2v_head_weight"] == 0.0
    assert chosen() is chosen("--video-model", "causal-video-dit")
    assert chosen("--video-model", "mmdit") is FLOW


def test_a_checkpoint_tells_the_model(clips: Path, valid: Path, tmp_path: Path) -> None:
    save = tmp_path / "save"
    model = "--num-double-blocks 1 --num-single-blocks 1 --mlp-ratio 2 --i2v-loop-weight 0"
    data = f"--video-valid-path {valid} --eval-iters 1"
    wanted = train(clips, save, f"{data} {model} --train-iters 2")[-1]
    words = f"{data} --i2v-loop-weight 0 --use-checkpoint-args --load {save} --skip-train"
    (found,) = train(clips, tmp_path / "again", words)
    assert found["kind"] == wanted["kind"] == "evaluation"
    assert math.isclose(found["loss"], wanted["loss"], rel_tol=1e-6)


FAULTS = {
    "": "`--video-data-path` is missing",
    "--recompute-double-blocks -1": "`--recompute-double-blocks` (-1) must be at least",
    "--double-block-cost 0": "`--double-block-cost` (0.0) must be above 0",
    "--guidance 3": "needs `--guidance-embed`",
    "--sample-steps 0": "`--sample-steps` (0) must be at least 1",
    "--pipeline-schedule core-1f1b": "takes sequences of one length only",
}
"""Flags with one fault each, which may come together."""
STREAMING = {
    "--fp16": "three networks have no common loss scale",
    "--critic-lr 0": "`--critic-lr` (0.0) must be above 0",
    "--critic-clip-grad -1": "`--critic-clip-grad` (-1.0) must be at least 0",
    "--recompute-blocks -1": "`--recompute-blocks` (-1) must be at least",
    "--eval-iters 3": "`--eval-iters` (3) does not go with `--task streaming`",
}
VIDEO_FAULTS = {
    "--generator-size mini": "has an effect only with `--task streaming`",
    "--pipeline-model-parallel-layout Et|L": "blocks are dealt to stages by their cost",
    "--online-encoding --video-data-path x": "needs `--video-buckets`",
}
STREAMING_FAULTS = {
    "--pipeline-model-parallel-size 2 --nproc-per-node 2": "pipeline stages would wait",
    "--teacher-tensor-model-parallel-size 3 --nproc-per-node 2": "`--teacher-tensor-model-paral",
    "--video-data-path x": "`--video-data-path` has no effect with `--task streaming`",
}
CASES = [
    ("video", FAULTS),
    ("streaming", STREAMING),
    *(("video", dict([fault])) for fault in VIDEO_FAULTS.items()),
    *(("streaming", dict([fault])) for fault in STREAMING_FAULTS.items()),
]


@pytest.mark.parametrize(("kind", "faults"), CASES)
def test_all_faults_are_told_in_one_dry_run(
    kind: str, faults: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = " ".join([*faults, "--dry-run"])
    flags = flags_of(tmp_path, words) if kind == "streaming" else [*COMMON, *words.split()]
    assert main(VIDEO, flags) == EXIT_CODE_USER_ERROR
    lines = capfd.readouterr().err.strip().splitlines()
    assert lines and all(line.startswith("error: ") for line in lines), lines
    for flags, sentence in faults.items():
        assert any(sentence in line for line in lines), (flags, lines)


def test_worst_and_typical_bucket_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = write_clips(tmp_path / "clips", {SHORT: 40, LONG: 16})
    flags = [*COMMON, "--video-data-path", str(data), "--dry-run", "--dry-run-gpu", "H200"]
    assert main(VIDEO, flags) == 0
    shown = capfd.readouterr().out
    assert any("64px 9x64x64" in line and "typical" in line for line in shown.splitlines())
    assert any("64px 17x64x64" in line and "worst" in line for line in shown.splitlines())
    assert "estimated on H200" in shown and "double" not in shown
    # Activations are compared with those of a run that keeps, and of one that recomputes all.
    rows = {line.strip(" │|").partition(" ")[0] for line in shown.splitlines()}
    assert {"none", "full"} <= rows


PER_EPOCH = 6
"""The steps of four clips in an epoch: 9, 9 and 8 clips fill 2 of each bucket."""
EPOCHS = "--global-batch-size 4 --lr-decay-style cosine"
WITHOUT_ITERS = [x for x in FLAGS if x not in ("--train-iters", "3")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("epochs") / "clips", {IMAGE: 9, SHORT: 9, LONG: 8})


def test_steps_of_epochs(data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = {"flags": WITHOUT_ITERS}
    num_steps = 2 * PER_EPOCH
    wanted = steps(data, tmp_path / "steps", f"{EPOCHS} --train-iters {num_steps}", **flags)
    shown = capfd.readouterr().out
    assert "| epoch: 0.500 |" in shown and "| videos/s: " in shown
    rows = steps(data, tmp_path / "epochs", f"{EPOCHS} --train-epochs 2", ranks=2, **flags)
    epochs = [row["train/epoch"] for row in rows]
    assert epochs == [step / PER_EPOCH for step in range(1, num_steps + 1)]
    for row, want in zip(rows, wanted, strict=True):
        assert row["learning_rate"] == want["learning_rate"]
        assert math.isclose(row["loss"], want["loss"], rel_tol=1e-6)


@pytest.mark.slow
def test_a_run_of_epochs_goes_on_in_its_epoch_bit_for_bit(data: Path, tmp_path: Path) -> None:
    words = f"{EPOCHS} --train-epochs 2 --save-interval 8"
    whole = steps(data, tmp_path / "whole", words, flags=WITHOUT_ITERS)
    words += f" --load {tmp_path / 'whole'} --ckpt-step 8"
    rows = steps(data, tmp_path / "again", words, flags=WITHOUT_ITERS)
    assert rows[0]["train/epoch"] == 9 / PER_EPOCH
    for row, want in zip(rows, whole[8:], strict=True):
        for key in ("loss", "grad_norm", "learning_rate", "train/epoch", "consumed_samples"):
            assert row[key] == want[key], key


def _parsed(words: str, device: str = "cpu") -> Any:
    flags = ["--micro-batch-size", "2", "--video-data-path", "x", *words.split()]
    return parse_args(flags, VIDEO, world_size=1, device=device)


def test_short_runs_shorten_the_warm_up(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    short, long = _parsed("--train-iters 60"), _parsed("--train-iters 1001")
    assert short.config.optimizer.lr_warmup_iters == 6
    assert "The usual warm-up of 1000 steps is shortened to 6, a tenth of" in short.notes[-1]
    assert long.config.optimizer.lr_warmup_iters == 1000
    # A warm-up must end before the decay does.
    assert _parsed("--train-iters 1000").config.optimizer.lr_warmup_iters == 100
    assert not [note for note in long.notes if "warm-up" in note]
    given = _parsed("--train-iters 60 --lr-warmup-iters 6")
    assert given.config.optimizer.lr_warmup_iters == 6 and given.notes == long.notes
    fraction = _parsed("--train-iters 60 --lr-warmup-fraction 0.1")
    assert fraction.config.optimizer.lr_warmup_iters == 0 and fraction.notes == long.notes
    with pytest.raises(ConfigError, match=r"`--lr-warmup-iters` \(1000\) must be less than the"):
        _parsed("--train-iters 60 --lr-warmup-iters 1000")

    def prepared(words: str) -> Any:
        path = f"--video-data-path {data} --global-batch-size 4"
        return prepare_video(_parsed(f"{path} {words}").config)[0]

    config = prepared("--train-epochs 5")
    assert (config.training.train_iters, config.optimizer.lr_warmup_iters) == (5 * PER_EPOCH, 3)
    assert "shortened to 3" in capfd.readouterr().out
    assert prepared("--train-epochs 200").optimizer.lr_warmup_iters == 1000
    assert "shortened" not in capfd.readouterr().out
    with pytest.raises(ConfigError, match=r"`--lr-warmup-iters` \(30\) must be less than .*\(30\)"):
        prepared("--train-epochs 5 --lr-warmup-iters 30")


def test_defaults_of_open_sora() -> None:
    """Report every 10 steps, save every 1000, and keep 16-bit weights on a GPU by default."""
    config = _parsed("--train-iters 2000 --save x").config
    assert optimizer_of(config) == (1e-4, 1000, "constant", 0.9, 0.95, 1e-15, 1.0)
    assert config.ema.ema_decay == 0.9999
    assert (config.logging.log_interval, config.checkpoint.save_interval) == (10, 1000)
    assert _parsed("--train-iters 2000").config.checkpoint.save_interval is None
    assert not config.precision.bf16
    for words, bf16 in {"": True, "--no-bf16": False, "--fp16": False, "--bf16": True}.items():
        precision = _parsed(f"--train-iters 2000 {words}", "cuda").config.precision
        assert precision.bf16 is bf16, words
        assert precision.accumulate_allreduce_grads_in_fp32 is bf16


def optimizer_of(config: Any) -> tuple[Any, ...]:
    own = config.optimizer
    rates = own.lr, own.lr_warmup_iters, own.lr_decay_style
    return (*rates, own.adam_beta1, own.adam_beta2, own.adam_eps, own.clip_grad)


def test_defaults_of_longlive() -> None:
    flags = "--task streaming --prompts-path x --micro-batch-size 1 --train-iters 2000 --save x"
    config = parse_args(flags.split(), VIDEO, world_size=1, device="cpu").config
    assert optimizer_of(config) == (1e-5, 0, "constant", 0.0, 0.999, 1e-8, 10.0)
    assert (config.ema.ema_decay, config.ema.ema_start, config.ema.ema_warmup) == (0.99, 200, False)
    assert (config.logging.log_interval, config.checkpoint.save_interval) == (10, 1000)
    assert config.training.eval_iters == 0
    # Videos of Wan 2.1 are 480 pixels high and 832 wide.
    assert config.section(StreamingConfig).latent_size == (60, 104)


STREAMED_ALONE = "does not go with `--task streaming`: "
REFUSED_BY_STREAMING = {
    "--num-workers 1": f"`--num-workers` (1) {STREAMED_ALONE}no clips are read; leave it out.",
    "--pooled-width 32": f"`--pooled-width` (32) {STREAMED_ALONE}its networks take no pooled text",
    "--train-epochs 2": f"`--train-epochs` (2) {STREAMED_ALONE}prompts follow one another",
    "--apply-wd-to-qk-layernorm": f"(True) {STREAMED_ALONE}the norms of its queries and keys never",
    "--overlap-grad-reduce": f"(True) {STREAMED_ALONE}blocks are trained one by one",
    "--overlap-grad-reduce --overlap-param-gather --use-distributed-optimizer": "`--overlap-param-"
    f"gather` (True) {STREAMED_ALONE}blocks are generated one by one",
    "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads": "`--data-parallel-"
    f"sharding-strategy` (optim_grads) {STREAMED_ALONE}blocks are trained one by one; use optim.",
    "--lora-rank 4 --lora-dropout 0.1": "`--lora-dropout` (0.1) does not go with `--task streaming",
    "--lora-rank 4 --lora-target-modules linear_x": "linear_x",
    "--text-dropout 0.5": "`--text-dropout` has no effect with `--task streaming`, whose data is",
    "--i2v-head-weight 0.5": "`--i2v-head-weight` has no effect with `--task streaming`",
    "--sigma-min 0.5": "`--sigma-min` has no effect with `--task streaming`",
    "--fps-cap 12": "`--fps-cap` has no effect with `--task streaming`",
    "--mmdit-size small": "`--mmdit-size` has no effect with `--task streaming`",
    "--sample-negative-prompt blur --sample-interval 1 --sample-texts a --sample-dir d": "`--sample"
    "-negative-prompt` has no effect with `--task streaming`, whose videos follow the flags",
}


@pytest.mark.parametrize("words", REFUSED_BY_STREAMING)
def test_what_streaming_would_ignore_is_refused(words: str, tmp_path: Path) -> None:
    said = errors_of(flags_of(tmp_path, f"--train-iters 1 {words}"), VIDEO)
    assert any(REFUSED_BY_STREAMING[words] in line for line in said), said


def test_layers_get_adapters_where_they_are_asked_for() -> None:
    flags = "--task streaming --prompts-path x --micro-batch-size 1 --train-iters 1 --lora-rank 2"
    for words, wanted in (("", ALL_TARGETS), ("--lora-target-modules linear_q", ["linear_q"])):
        found = parse_args([*flags.split(), *words.split()], VIDEO, world_size=1, device="cpu")
        assert found.config.lora.lora_target_modules == list(wanted)
        assert found.config.lora.saves_adapters_only
