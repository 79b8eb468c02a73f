"""Defaults that a checkpoint gives the sampling programs, and how long videos are sampled."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.errors import CheckpointError, ConfigError, DataError
from megatron_ext.video.config.run import SampleConfig
from megatron_ext.video.data.geometry import Bucket
from megatron_ext.video.sampling import tool
from megatron_ext.video.sampling.groups import shape_of
from megatron_ext.video.sampling.samples import free
from megatron_ext.video.streaming import decisions, long_videos
from megatron_ext.video.streaming import tool as streaming_tool
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.long_videos import LongVideoSampler, Throughput
from megatron_ext.video.streaming.prompts import Switch, VideoPrompt
from megatron_ext.video.task import VIDEO
from tests.training_runs import config_of
from tests.video.clips import FLAGS
from tests.video.streaming.runs import flags_of

ARGV = "--load saved --sample-dir out --sample-texts a"
PLAN = '{"64px":{"9":[1.0,2]}}'


def stored(words: str, usual: Sequence[str] = FLAGS) -> dict[str, Any]:
    return config_of([*usual, "--video-data-path", "x", *words.split()], VIDEO).to_dict()


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return a function from a stored configuration and words to the defaults of flags."""

    def call(content: dict[str, Any], words: str = "", of: Any = tool.defaults_of) -> Any:
        asked: list[Any] = []
        monkeypatch.setattr(tool, "read_run_config", lambda *x: asked.append(x) or content)
        found, places = tool._defaults([*ARGV.split(), *words.split()], of)
        assert places is None
        step = 7 if "--ckpt-step" in words else None
        assert asked == [(Path("saved"), step)]
        return found

    return call


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--flow-shift 3", {"flow_shift": 3.0}),
        ("--v2v-head-weight 1 --v2v-frames 3", {"v2v_frames": 3, "v2v_head_weight": 1.0}),
        ("--bf16", {"bf16": True, "fp16": False}),
        ("--fp16", {"bf16": False, "fp16": True}),
        (
            f"--online-encoding --video-buckets {PLAN} --codec-spatial 4 --text-length 9",
            {"online_encoding": True, "codec_spatial": 4, "text_length": 9},
        ),
        (f"--video-buckets {PLAN}", {"video_buckets": PLAN, "video_model": "mmdit"}),
        ("--video-model video-dit", {"video_model": "video-dit", "video_dit_size": "tiny"}),
        ("--num-attention-heads 2 --axes-dim 8 12 12", {"num_attention_heads": 2}),
        ("", {"eval_iters": 0, "micro_batch_size": 1, "skip_train": True, "ema_decay": None}),
        ("", {"video_data_path": ["x"], "for_sampling": True}),
    ],
)
def test_clips_are_sampled_as_the_run_trained(
    words: str, wanted: dict[str, Any], defaults: Callable[..., dict[str, Any]]
) -> None:
    usual = FLAGS if "video-dit" not in words else [x for x in FLAGS[2:] if "adaln" not in x]
    found = defaults(stored(words, usual))
    assert {name: found[name] for name in wanted} == wanted


def test_averages_are_sampled_unless_flags_or_the_run_say_otherwise(
    defaults: Callable[..., dict[str, Any]],
) -> None:
    averaged, plain = stored("--ema-decay 0.9"), stored("--ema-decay 0")
    assert defaults(averaged)["for_sampling"] is True
    assert defaults(averaged, "--no-sample-ema")["for_sampling"] is False
    assert defaults(plain, "--sample-ema")["for_sampling"] is False
    assert defaults(plain, "--ckpt-step 7")["ema_decay"] is None


def test_other_checkpoints_are_refused(defaults: Callable[..., dict[str, Any]]) -> None:
    for text in ({}, {"video": {}}, {"video": {"video": False}}):
        with pytest.raises(ConfigError, match=r"must be a checkpoint of pretrain_video\.py"):
            defaults(text)
    with pytest.raises(ConfigError, match="is a checkpoint of `--task streaming`"):
        defaults({"video": {"video": True, "task": "streaming"}})
    with pytest.raises(ConfigError, match="but is of a flow-matching run"):
        defaults({"video": {"video": True, "task": "flow"}}, of=streaming_tool.defaults_of)


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_needs_no_checkpoint(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tool.run_sampling(VIDEO, [word, "sample"], tool.defaults_of, lambda _: None)
    assert ended.value.code in (None, 0) and "--sample-texts" in capsys.readouterr().out


def test_videos_are_sampled_as_the_run_trained(
    tmp_path: Path, defaults: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--bf16 --codec-shift 0.5 --prompts-path x --seed 9 --lora-rank 4 --lora-alpha 6"
    content = config_of(flags_of(tmp_path, f"{words} --train-iters 1"), VIDEO).to_dict()
    content["checkpoint"]["pretrained_average"] = True
    monkeypatch.setattr(
        "megatron_ext.checkpoint.adapters.FrozenBase",
        SimpleNamespace(under=lambda load, step: under[load, step]),
    )

    def base(path: str | None) -> Any:
        return SimpleNamespace(path=path, flag=None)

    under = {(Path("saved"), None): None, (Path("saved"), 7): base(None)}

    def found(words: str = "") -> dict[str, Any]:
        return defaults(content, words, of=streaming_tool.defaults_of)

    usual = found()
    wanted = {
        "chunk_frames": 9, "codec_shift": 0.5, "codec_spatial": 2, "text_length": 8, "bf16": True,
        "lora_rank": 4, "lora_alpha": 6.0, "only_samples": True, "task": "streaming",
    }  # fmt: skip
    assert {name: usual[name] for name in wanted} == wanted
    assert "seed" not in usual and "pretrained_checkpoint" not in usual
    with pytest.raises(CheckpointError, match=r"`--pretrained-checkpoint` \(b\) has no effect"):
        found("--pretrained-checkpoint b")
    # Adapters on random weights, and on those of another checkpoint that may have moved.
    random = found("--ckpt-step 7")
    names = ("seed", "pretrained_checkpoint", "pretrained_average")
    assert [random[name] for name in names] == [9, None, False]
    under[Path("saved"), 7] = base(str(tmp_path))
    assert [found("--ckpt-step 7")[name] for name in names] == [9, str(tmp_path), True]
    under[Path("saved"), 7] = base(str(tmp_path / "gone"))
    with pytest.raises(CheckpointError, match="which are not there; give"):
        found("--ckpt-step 7")
    assert found("--ckpt-step 7 --pretrained-checkpoint b")["seed"] == 9


def test_the_size_of_clips_is_that_of_the_largest_bucket() -> None:
    """Let the longest bucket be smaller, and one of equal area shorter."""
    buckets = [Bucket("b", 9, 32, 64), Bucket("c", 13, 64, 32), Bucket("a", 17, 32, 32)]
    manifest = {
        "buckets": [{"shape": vars(bucket)} for bucket in buckets], "fps": 12, "encode": {}
    }  # fmt: skip
    found = shape_of(SampleConfig(), manifest)
    assert (found.num_frames, found.height, found.width, found.fps) == (13, 64, 32, 12)
    own = SampleConfig(sample_size=(16, 48), sample_frames=5, sample_fps=7.5)
    found = shape_of(own, manifest)
    assert (found.num_frames, found.height, found.width, found.fps) == (5, 16, 48, 7.5)


def test_windows_prompts_and_codecs_of_long_videos_are_looked_at_before_ranks_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "late.jsonl").write_text(
        '{"text": "a", "switches": [{"frame": 25, "text": "b"}]}\n'
    )
    late = f"--sample-interval 1 --sample-dir d --sample-prompts {tmp_path / 'late.jsonl'}"
    usual = "--sample-interval 1 --sample-dir d --sample-texts a"
    for words, said in (
        (f"{usual} --window-frames 5", r"`--window-frames` \(5\) must be at least"),
        (f"{usual} --recache-frames 10", r"`--recache-frames` \(10\) must be a positive multiple"),
        (late, "switches at latent frame 25, but the last frame block begins at 24"),
        (f"{usual} --codec-channels 8", "has 8 latent channels, but"),
    ):
        config = config_of(flags_of(tmp_path, f"--train-iters 1 {words}"), VIDEO)
        with pytest.raises((ConfigError, DataError), match=said):
            streaming_tool.prepare_sampling(config)


SEEN = Throughput(videos=2, blocks=6, frames=45, seconds=2.5, first_block=0.75)


def test_throughput_is_said_in_blocks_and_both_kinds_of_frames() -> None:
    assert streaming_tool.summary(SEEN, 20) == (
        "made 2 videos of 6 frame blocks (20 latent frames, 45 frames) in 2.5 s: 2.40 blocks/s, "
        "8.00 latent frames/s, 18.00 frames/s; first block after 0.75 s"
    )


def test_progress_is_printed_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Sampler:
        num_blocks, num_frames = 8, 10

        def __init__(self, *_: Any) -> None:
            pass

        def __call__(self, folder: Path, progress: Any) -> Throughput:
            for blocks, seconds in enumerate((0.5, 5.4, 5.5, 10.4, 11.0), 1):
                progress(Throughput(blocks=blocks, seconds=seconds))
            return SEEN

    monkeypatch.setattr(streaming_tool, "LongVideoSampler", Sampler)
    said: list[str] = []
    config = config_of(
        flags_of(Path(), "--train-iters 1 --prompts-path x --sample-interval 1 --sample-dir d "
                 "--sample-texts a"), VIDEO
    )  # fmt: skip
    streaming = config.section(StreamingConfig)
    config = config.with_section(type(streaming)(**{**vars(streaming), "text_features": 32}))
    run: Any = SimpleNamespace(
        config=config, device=torch.device("cpu"), context=None,
        reporters=SimpleNamespace(say=said.append),
    )  # fmt: skip
    streaming_tool.sample_at_once(run)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" of ")[0] for line in lines] == [
        f"> frame block {number}" for number in (1, 3, 5)
    ]
    assert lines[1] == "> frame block 3 of 8 after 5.5 s, 0.55 blocks/s"
    # Two videos of ten latent frames.
    assert said == [streaming_tool.summary(SEEN, 20)]


def sampler_of(dp_rank: int, batch: int) -> LongVideoSampler:
    """Return the sampler of one of two replicas for seven prompts, three of which begin alike."""
    found = LongVideoSampler.__new__(LongVideoSampler)
    late = (Switch(3, "late"),)
    prompts = [VideoPrompt("a", switches) for switches in ((), late, (), (), late, (), ())]
    context = SimpleNamespace(dp_rank=dp_rank, layout=SimpleNamespace(data_parallel_size=2))
    found._run = SimpleNamespace(context=context)  # type: ignore[assignment]
    found._sample = SampleConfig(sample_batch_size=batch)
    found._prompts = prompts
    found._starts = {2: torch.zeros(1), 6: torch.zeros(1)}
    found._streaming = StreamingConfig()
    found.num_frames = 12
    return found


def test_videos_of_a_batch_begin_and_switch_alike() -> None:
    first, second = (list(sampler_of(rank, 2)._batches()) for rank in range(2))
    assert first == [[0], [4], [2, 6]] and second == [[3, 5], [1]]
    assert list(sampler_of(0, 1)._batches()) == [[0], [4], [2], [6]]
    # Progress counts the four blocks of each video of this replica.
    assert [sampler_of(rank, 2).num_blocks for rank in range(2)] == [16, 12]


def test_blocks_and_frames_of_all_videos_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5, 12.0])
    monkeypatch.setattr(long_videos.time, "perf_counter", lambda: next(times))
    seen: list[tuple[int, float]] = []
    timer = long_videos._Timer(lambda now: seen.append((now.blocks, now.seconds)))
    timer.count(3, 9)
    timer.count(3, 12)
    found = timer.throughput
    assert (found.blocks, found.frames) == (6, 63)
    assert (found.first_block, found.seconds) == (0.5, 2.0) and seen == [(3, 0.5), (6, 2.0)]


def streaming_run(words: str) -> Any:
    flags = f"--train-iters 1 --prompts-path x --sample-interval 1 --sample-dir d {words}"
    config = config_of(flags_of(Path(), flags), VIDEO)
    return SimpleNamespace(
        config=config, context=None, device=torch.device("cpu"), chunks=["chunk"]
    )


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> LongVideoSampler:
    """Return a sampler of two videos that switch, whose codec draws random numbers."""
    monkeypatch.setattr(long_videos, "on_first_of_replica", lambda build, *_: build())
    asked: list[Sequence[str]] = []

    def encode(captions: Sequence[str]) -> torch.Tensor:
        asked.append(captions)
        return torch.arange(len(captions)).view(-1, 1, 1).expand(-1, 8, 32).float()

    words = "--sample-texts a b --sample-second-texts c d --sample-fps 7.5 --sample-seed 5"
    before = torch.get_rng_state()
    found = LongVideoSampler(streaming_run(words), encode, lambda: torch.rand(3))  # type: ignore[arg-type,return-value]
    assert torch.equal(torch.get_rng_state(), before)
    assert asked == [["a", "c", "b", "d"]]
    return found


def test_a_sampler_moves_no_random_state_and_keeps_the_captions_of_each_video(
    sampler: LongVideoSampler,
) -> None:
    assert [text[:, 0, 0].tolist() for text in sampler._texts] == [[0, 1], [2, 3]]
    assert (sampler.num_frames, sampler._fps, sampler._starts) == (27, 7.5, {})


def test_noise_of_a_video_follows_its_own_seed_or_its_number(
    sampler: LongVideoSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sample the second and the first video together, of which the second has a seed."""
    caches, given = list[Any](), list[Any]()
    network = SimpleNamespace(
        sizes=SimpleNamespace(channels=4), new_cache=lambda *sizes: caches.append(sizes)
    )
    monkeypatch.setattr(long_videos, "unwrap_model", lambda _: [network])
    monkeypatch.setattr(long_videos, "generate_blocks", lambda *x, **y: given.append((x, y)))
    sampler._prompts[1] = dataclasses.replace(sampler._prompts[1], seed=9)
    sampler._blocks([1, 0])
    ((generator, texts, noise), options) = given[0]
    assert generator.network == "chunk" and generator.schedule.streaming is sampler._streaming
    assert caches == [(2, 4, 4)] and options["num_frames"] == 27
    assert not options["keep_sink"] and options["start"] is None
    assert {frame: text[:, 0, 0].tolist() for frame, text in texts.items()} == {
        0: [2, 0], 15: [3, 1]
    }  # fmt: skip
    wanted = [
        decisions.block_noise(seed, [number], (3, 4, 4, 4), 6, 2, like=torch.empty(0))
        for seed, number in ((9, 0), (5, 0))
    ]
    assert torch.equal(noise(6, 2), torch.cat(wanted))
    sampler._starts = {0: torch.full((1, 3, 4, 4, 4), 7.0), 1: torch.full((1, 3, 4, 4, 4), 8.0)}
    sampler._streaming = dataclasses.replace(sampler._streaming, sink_at_switch="keep")
    sampler._blocks([1, 0])
    options = given[1][1]
    assert options["keep_sink"] and options["start"][:, 0, 0, 0, 0].tolist() == [8.0, 7.0]


def test_prompts_are_encoded_before_the_model_is_built_if_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Encode them once, however many chunks a rank builds, and free the model before decoding."""
    events: list[Any] = []

    def encode(config: Any, context: Any) -> str:
        events.append("encoded")
        return "prompts"

    def sampler(run: Any, prompts: Any, *, frees_model: bool) -> Any:
        events.append((prompts, frees_model))
        return events.append

    monkeypatch.setattr(tool, "encode_prompts", encode)
    monkeypatch.setattr(tool, "build_chunk", lambda *_, **stage: events.append(stage["vp_stage"]))
    monkeypatch.setattr(tool, "ClipSampler", sampler)
    for offloads in (True, False):
        flags = SampleConfig(sample_offload=offloads, sample_dir="out")
        config: Any = SimpleNamespace(section=lambda kind, flags=flags: flags)
        sampling = tool.Sampling()
        for stage in range(2):
            sampling.model_chunk(config, None, None, vp_stage=stage)
        sampling(SimpleNamespace(config=config))  # type: ignore[arg-type]
    assert events == [
        "encoded", 0, 1, ("prompts", True), Path("out"), 0, 1, (None, False), Path("out"),
    ]  # fmt: skip


def test_a_freed_model_keeps_no_memory() -> None:
    module = torch.nn.BatchNorm1d(4)
    held = [*module.parameters(), *module.buffers()]
    free([module])
    assert [tensor.untyped_storage().size() for tensor in held] == [0] * len(held)
