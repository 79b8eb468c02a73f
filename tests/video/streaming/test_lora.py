"""Adapters in streaming runs, and the networks that a checkpoint tells the next run."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_ext.config.parser import parse_args
from megatron_ext.config.run import RunConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.video.config.encoding import TextEncoderConfig
from megatron_ext.video.config.run import VideoConfig
from megatron_ext.video.networks.wan.config import VideoDiTConfig
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.task import VIDEO
from tests.checkpoint.tiny import whole_tensors
from tests.training_runs import train_on_ranks, training_rows, without
from tests.video.streaming import runs

LAYERS = 2 * 7
"""Linear layers in the blocks of a tiny network."""


def test_only_adapters_are_trained_and_held_by_a_checkpoint(tuned: runs.Tuned) -> None:
    for network in runs.NETWORKS:
        before, after = tuned.seen["before"][network], tuned.seen["after"][network]
        adapters = {name for name in before if ".lora." in name}
        assert len(adapters) == 2 * LAYERS
        for name, weight in before.items():
            assert torch.equal(after[name], weight) == (name not in adapters), name
        assert tuned.seen["optimized"][network] == sum(before[name].numel() for name in adapters)
    assert len(tuned.seen["averaged"]) == 2 * LAYERS
    assert not any(".lora." in name for name in tuned.seen["teacher"])
    stored = FileSystemReader(str(tuned.checkpoint())).read_metadata()
    names = list(stored.state_dict_metadata)
    for prefix in ("", "critic.", "ema.", "optimizer.state.exp_avg.", "critic.optimizer.state."):
        here = [name for name in names if name.startswith(f"{prefix}blocks.")]
        assert len(here) == 2 * LAYERS or "optimizer" in prefix, prefix
    about_weights = [n for n in names if "blocks." in n or "head." in n or "embedder." in n]
    assert about_weights and all(".lora." in name for name in about_weights)
    assert {name.split("/")[0] for name in names} >= {"streaming_sequence", "streaming_cache"}


def test_adapters_change_nothing_at_the_start(tuned: runs.Tuned, tmp_path: Path) -> None:
    (plain,) = runs.run(tmp_path, f"{tuned.words} --train-iters 1")
    first = tuned.rows[0]
    # The steps of the run that made the weights do not count.
    assert first["iteration"] == 1
    names = [name for name in plain if name.endswith("loss")]
    assert {"generator loss", "critic loss"} <= set(names)
    assert {name: first[name] for name in names} == {name: plain[name] for name in names}
    base = whole_tensors(tuned.base / "iter_0000001", tmp_path / "base.pt")
    for network in runs.NETWORKS:
        prefix = runs.PREFIXES[network]
        for name, weight in tuned.seen["before"][network].items():
            assert ".lora." in name or torch.equal(weight, base[f"{prefix}{name}"]), name


TP2 = "--tensor-model-parallel-size 2"
SGD = "--optimizer sgd --weight-decay 0 --clip-grad 0 --critic-clip-grad 0 --lr 5 --critic-lr 2"


def trained(tuned: runs.Tuned, folder: Path, layout: str, ranks: int) -> dict[str, Tensor]:
    """Return how far updates that are linear in their gradients move the adapters."""
    runs.run(folder, f"{tuned.words} {runs.ADAPTERS} {SGD} --train-iters 3 {layout}", ranks=ranks)
    found = whole_tensors(folder / "save" / "iter_0000003", folder / "whole.pt")
    before = tuned.seen["before"]
    return {
        f"{prefix}{name}": found[f"{prefix}{name}"] - weight
        for network, prefix in runs.PREFIXES.items()
        for name, weight in before[network].items()
        if ".lora." in name
    }


@pytest.fixture(scope="module")
def one_rank(tuned: runs.Tuned, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return trained(tuned, tmp_path_factory.mktemp("one"), "", 1)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (TP2, 2),
        pytest.param(f"{TP2} --sequence-parallel", 2, marks=pytest.mark.slow),
        pytest.param("--context-parallel-size 2", 2, marks=pytest.mark.slow),
        ("--recompute-blocks 2", 1),
        pytest.param("--no-two-phase", 1, marks=pytest.mark.slow),
    ],
)
def test_layouts_and_recomputation_train_as_one_rank(
    tuned: runs.Tuned, one_rank: dict[str, Tensor], tmp_path: Path, layout: str, ranks: int
) -> None:
    found = trained(tuned, tmp_path, layout, ranks)
    assert found.keys() == one_rank.keys() and len(found) == 2 * 2 * LAYERS
    for name, change in found.items():
        want = one_rank[name]
        size = float(want.abs().max())
        assert size > 1e-4, name
        # A, of up to 0.25, is rounded with each update.
        assert float((change - want).abs().max()) <= 1e-5 * size + 3e-8, name


def failed(folder: Path, words: str, capfd: pytest.CaptureFixture[str], *messages: str) -> None:
    code, _ = runs.attempt(folder, words, save="failed")
    assert code != 0
    said = capfd.readouterr().err
    assert all(message in said for message in messages), said


UNDER = "(not given; seed 7) must be the weights under the adapters"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pretrained-checkpoint {base} --load {saved}", f"`--critic-checkpoint` {UNDER}"),
        ("--pretrained-checkpoint {saved}", "holds adapters without the weights under them, so that"
         " no run can start from it; merge them first with `tools/lora.py merge`."),
    ],
)  # fmt: skip
def test_adapters_do_not_go_on_without_their_weights(
    tuned: runs.Tuned, tmp_path: Path, capfd: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    where = {"base": tuned.base, "saved": tuned.saved}
    resumes = "--override-opt-param-scheduler" if "--load" in words else ""
    words = f"{runs.ADAPTERS} --train-iters 9 {resumes} {words.format(**where)}"
    failed(tmp_path, words, capfd, message.format(**where))


def test_a_resume_without_weights_is_refused_before_a_rank_starts(
    tuned: runs.Tuned, tmp_path: Path
) -> None:
    words = f"{runs.ADAPTERS} --train-iters 9 --override-opt-param-scheduler"
    with pytest.raises(CheckpointError) as error:
        runs.attempt(tmp_path, f"{words} --critic-checkpoint {tuned.base} --load {tuned.saved}")
    assert str(error.value) == (
        f"`--pretrained-checkpoint` is missing: {tuned.saved}/iter_0000006 holds adapters without "
        f"the weights under them, which are those of {tuned.base}/iter_0000001; give these."
    )


def test_random_weights_have_their_seed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = f"{runs.ADAPTERS} --train-iters 2"
    runs.run(tmp_path, f"{words} --exit-interval 1")
    words += f" --load {tmp_path / 'save'}"
    (row,) = runs.run(tmp_path, words, save="more")
    assert row["iteration"] == 2
    failed(tmp_path, f"{words} --seed 8", capfd, "which were random ones of seed 7; leave it out.")


OTHERS = (
    "--generator-size small --critic-size tiny --teacher-size small --latent-channels 6 "
    "--codec-spatial 2 --codec-channels 6 --text-length 9 --text-width 24 --window-frames 9 "
    "--lora-rank 4 --lora-alpha 3 --lora-target-modules linear_q linear_fc1 --lora-rslora"
)


def streaming(words: str, stored: dict[str, Any] | None = None) -> RunConfig:
    flags = "--task streaming --prompts-path p --micro-batch-size 1 --global-batch-size 1"
    return parse_args(
        f"{flags} --train-iters 1 {words}".split(), VIDEO, world_size=1, device="cpu",
        checkpoint_config=stored,
    ).config  # fmt: skip


KEPT = "generator_size critic_size teacher_size latent_channels frame_block window_frames"


@pytest.mark.parametrize("words", ["", OTHERS])
def test_the_networks_are_those_of_the_checkpoint(words: str) -> None:
    whole = streaming(f"{words} --latent-size 8 8 --guidance-scale 2")
    again = streaming("--use-checkpoint-args --load x", whole.to_dict())
    for section in ("lora", "codec", "text_encoder", "model"):
        assert again.by_name()[section] == whole.by_name()[section], section
    found, stored = again.section(StreamingConfig), whole.section(StreamingConfig)
    for name in KEPT.split():
        assert getattr(found, name) == getattr(stored, name), name
    # How they are trained is not what they are.
    assert found.guidance_scale == 4.0 and found.latent_size == (60, 104)


def test_the_command_line_wins() -> None:
    whole = streaming(OTHERS)
    words = "--use-checkpoint-args --load x --text-width 48 --critic-size small --lora-rank 8"
    again = streaming(words, whole.to_dict())
    encoder = again.section(TextEncoderConfig)
    assert encoder.text_width == 48 and encoder.text_length == 9
    assert again.section(StreamingConfig).critic_size == "small" and again.lora.lora_rank == 8
    assert again.lora.lora_target_modules == ["linear_q", "linear_fc1"]


DESCRIBING = (
    "--generator-size --frame-block --window-frames --sink-frames --text-length --text-width "
    "--codec-spatial --codec-channels"
).split()


@pytest.mark.slow
def test_adapters_go_on_without_flags_of_the_networks(tuned: runs.Tuned, tmp_path: Path) -> None:
    """Compare with a run that is given all flags, bit for bit."""
    found = []
    onward = f"--override-opt-param-scheduler --load {tuned.saved} --train-iters {runs.STEPS + 1}"
    for name, words in (("short", "--use-checkpoint-args"), ("whole", runs.ADAPTERS)):
        flags = runs.flags_of(tmp_path, f"{tuned.words} {words} {onward}")
        if name == "short":
            flags = without(flags, *DESCRIBING)
        code, rows = train_on_ranks(flags, save=tmp_path / name, task=VIDEO)
        assert code == 0
        found += training_rows(rows)
    short, whole = found
    assert short["iteration"] == runs.STEPS + 1
    assert runs.losses_of(short) == runs.losses_of(whole)


FLOW = "--video-data-path v --micro-batch-size 1 --train-iters 1001 --video-model"


def flow(words: str, stored: dict[str, Any] | None = None) -> RunConfig:
    flags = f"{FLOW} {words}".split()
    return parse_args(flags, VIDEO, world_size=1, device="cpu", checkpoint_config=stored).config


WINDOW = "--frame-block 2 --window-frames 8 --sink-frames 2"


def test_streaming_and_flow_matching_take_the_size_and_the_window_of_each_other() -> None:
    stored = flow(f"causal-video-dit --video-dit-size mini {WINDOW} --independent-block-timesteps")
    dit = dataclasses.replace(stored.section(VideoDiTConfig), dit_channels=6)
    stored = stored.with_section(dit)
    words = "--use-checkpoint-args --pretrained-checkpoint x --chunk-frames 4"
    words += " --min-new-frames 2 --max-new-frames 2 --recache-frames 4"
    found = streaming(words, stored.to_dict()).section(StreamingConfig)
    assert (found.generator_size, found.latent_channels) == ("mini", 6)
    assert (found.frame_block, found.window_frames, found.sink_frames) == (2, 8, 2)
    teacher = dataclasses.replace(stored.section(VideoConfig), video_model="video-dit")
    stored = stored.with_section(teacher)
    found = streaming(words.split(" --chunk")[0], stored.to_dict()).section(StreamingConfig)
    assert (found.generator_size, found.window_frames) == ("mini", 12)
    stored = streaming("--generator-size small --window-frames 9 --guidance-scale 2").to_dict()
    words = "--use-checkpoint-args --pretrained-checkpoint x"
    causal = flow(f"causal-video-dit {words}", stored)
    assert causal.section(StreamingConfig).window_frames == 9
    whole = flow(f"video-dit {words}", stored)
    both = flow(f"video-dit {words}", causal.to_dict())
    sizes = [found.section(VideoDiTConfig).video_dit_size for found in (causal, whole, both)]
    assert sizes == ["small"] * 3


HELD = {
    "mmdit": lambda: flow("mmdit --t2v-weight 1"),
    "causal-video-dit": lambda: flow("causal-video-dit"),
    "streaming": lambda: streaming(""),
    "adapters": lambda: streaming("--lora-rank 4"),
    "text": RunConfig,
}
TO_MMDIT = "but this run builds an MMDiT"


@pytest.mark.parametrize(
    ("held", "wanted", "sentence"),
    [
        ("mmdit", "streaming", "The checkpoint is of an MMDiT, but this run builds the networks"),
        ("streaming", "mmdit", f"the networks of `--task streaming`, {TO_MMDIT}"),
        ("causal-video-dit", "mmdit", f"of a causal video DiT, {TO_MMDIT}"),
        ("text", "mmdit", f"of a model that this program does not train, {TO_MMDIT}"),
        (
            "adapters",
            "video-dit",
            "finds adapters of the networks of `--task streaming`, but",
        ),
    ],
)
def test_another_kind_of_model_is_one_sentence(held: str, wanted: str, sentence: str) -> None:
    stored, words = HELD[held]().to_dict(), "--use-checkpoint-args --load x"
    with pytest.raises(ConfigError, match=re.escape(sentence)) as caught:
        streaming(words, stored) if wanted == "streaming" else flow(f"{wanted} {words}", stored)
    assert len(caught.value.messages) == 1
