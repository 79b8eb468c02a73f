"""Counts, reports and the order of a streaming step, with networks that do nothing."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ext.losses.contract import pair
from megatron_ext.optim.update import UpdateResult
from megatron_ext.parallel.context import ParallelContext
from megatron_ext.train.step import StepInputs
from megatron_ext.video.streaming import run as module
from megatron_ext.video.streaming import step as step_module
from megatron_ext.video.streaming.config import StreamingConfig
from megatron_ext.video.streaming.long_videos import NotFiniteError, Throughput
from megatron_ext.video.streaming.prompts import FilePrompts
from megatron_ext.video.streaming.run import sampler_of, streaming_step_stats
from megatron_ext.video.streaming.sequence import Replica
from megatron_ext.video.streaming.step import StreamingRunner, WorkCounter
from megatron_ext.video.task import VIDEO
from tests.ranks import ranks
from tests.training_runs import config_of
from tests.video.streaming.runs import flags_of


class Network(torch.nn.Module):
    """A network on twelve ranks: two tensor, three context and two pipeline ranks."""

    num_stages = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.tp_group, self.cp_group = (SimpleNamespace(size=lambda n=n: n) for n in (2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.fixture
def twelve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each pass of a `Network` take as many operations as its input has numbers."""
    counted = SimpleNamespace(chunk=Network, pass_flops=lambda _, x: float(x.numel()))
    monkeypatch.setattr(step_module, "streamed_network", lambda: counted)


@pytest.mark.usefixtures("twelve")
def test_operations_are_those_of_passes_and_of_what_gets_gradients() -> None:
    first, frozen = Network(), Network().requires_grad_(False)
    work = WorkCounter([torch.nn.Sequential(first), frozen])
    x, moving = torch.ones(24), torch.ones(24, requires_grad=True)
    for network, given, passes in (
        (first, x, 3), (first, moving, 3), (frozen, x, 1), (frozen, moving, 2)
    ):  # fmt: skip
        network(x=given)
        assert work.take() == passes * 24 / 12
        with torch.no_grad():
            network(x=given)
        assert work.take() == 24 / 12
    first(x=x)
    with pytest.raises(ValueError, match="stop"), work.paused():
        first(x=x)
        raise ValueError("stop")
    with work.paused():
        frozen(x=x)
    assert (work.take(), work.take()) == (6.0, 0.0)


def runner(**settings: Any) -> StreamingRunner:
    found = StreamingRunner.__new__(StreamingRunner)
    found.streaming = StreamingConfig(chunk_frames=9, latent_size=(4, 6), **settings)
    return found


def test_averages_count_the_steps_of_the_generator() -> None:
    """Train it in steps 1, 6 and 11."""
    own = runner(generator_interval=5)
    steps = [own.model_steps(steps) for steps in (0, 1, 5, 6, 10, 11)]
    assert steps == [0, 1, 1, 2, 2, 3]
    assert [runner(generator_interval=1).model_steps(n) for n in (0, 1, 7)] == [0, 1, 7]


def update(flag: float, norm: float, zeros: float) -> UpdateResult:
    return UpdateResult(torch.tensor(bool(flag)), torch.tensor(norm), torch.tensor(zeros))


@pytest.mark.parametrize(("critic", "generator"), [(1, 1), (0, 1), (1, 0)])
def test_a_step_is_applied_if_all_its_networks_were_updated(
    critic: int, generator: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report the critic's norm as that of the step, and each network's under its own name."""
    monkeypatch.setattr(step_module, "reduce_reports", lambda entries, _: dict(*entries))
    own = runner()
    own.context = SimpleNamespace(layout=SimpleNamespace(world_size=12))  # type: ignore[assignment]
    own.work = SimpleNamespace(take=lambda: 5.0)  # type: ignore[assignment]
    reports = {
        "critic": [{"critic loss": pair(torch.tensor(6.0), torch.tensor(3.0))}],
        "generator": [{"generator loss": pair(torch.tensor(8.0), torch.tensor(2.0))}],
    }
    updates = {"critic": update(critic, 0.25, 3), "generator": update(generator, 0.5, 4)}
    result = own._result(reports, updates)  # type: ignore[arg-type]
    losses = {name: float(value) for name, value in result.losses.items()}
    assert losses == {
        "critic loss": 2.0, "generator loss": 4.0, "critic grad norm": 0.25,
        "generator grad norm": 0.5,
    }  # fmt: skip
    counts = {name: float(value) for name, value in result.counts.items()}
    assert counts == {
        "critic loss": 3.0, "generator loss": 2.0, "critic grad norm": 1.0,
        "generator grad norm": 1.0,
    }  # fmt: skip
    assert bool(result.update.flag) == (critic == generator == 1)
    assert result.update.norm is updates["critic"].norm
    assert result.update.zeros is updates["critic"].zeros
    assert result.model_update is updates["generator"] and result.flops == 60.0
    alone = own._result({"critic": reports["critic"]}, {"critic": updates["critic"]})  # type: ignore[arg-type,dict-item]
    assert alone.model_update is None and bool(alone.update.flag) == (critic == 1)


def test_all_schedules_go_on_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the generator's rate, without an update, where only the critic is trained."""
    moved: list[tuple[str, int]] = []

    def network(name: str) -> Any:
        step = SimpleNamespace(step=lambda increment: moved.append((name, increment)))
        return SimpleNamespace(scheduler=step)

    own = runner()
    own.generator, own.critic = network("generator"), network("critic")
    cleared: list[int] = []
    memo = SimpleNamespace(clear=lambda: cleared.append(1))
    own.sequence = SimpleNamespace(  # type: ignore[assignment]
        generator=SimpleNamespace(cache=SimpleNamespace(memo=memo))
    )
    own.extra_state = SimpleNamespace(steps=4)  # type: ignore[assignment]

    def follow(_: UpdateResult, scheduler: Any, num_samples: int) -> None:
        scheduler.step(increment=10 * num_samples)

    monkeypatch.setattr(own, "_follow", follow)
    own._advance_schedules({"critic": update(1, 1, 0)}, 3)
    assert sorted(moved) == [("critic", 30), ("generator", 3)] and cleared == []
    own._advance_schedules({"critic": update(1, 1, 0), "generator": update(1, 1, 0)}, 3)
    assert sorted(moved[2:]) == [("critic", 30), ("generator", 30)] and cleared == [1]
    assert own.extra_state.steps == 6


@ranks(tp=2, cp=2)
def test_gradients_of_inputs_are_joined_over_the_ranks_that_share_them(
    context: ParallelContext,
) -> None:
    """Give each rank a gradient of its own: 1, 10, 100 and 1000."""
    place = 2 * context.pgs.cp.rank() + context.pgs.tp.rank()
    own = torch.full((2, 3), float(10**place)).t()
    for shares_sequence, wanted in (
        (True, 1111 / 2),
        (False, (10**place + 10 ** ((place + 2) % 4)) / 2),
    ):
        config = SimpleNamespace(sequence_parallel=shares_sequence)
        fake: Any = SimpleNamespace(context=context, transformer_config=config)
        found = StreamingRunner._whole_gradient(fake, own)
        assert torch.equal(found, torch.full((3, 2), wanted))
        assert torch.equal(own, torch.full((3, 2), float(10**place)))


def run_of(own: StreamingRunner, said: list[str]) -> Any:
    config = SimpleNamespace(section=lambda kind: kind.__name__)
    return SimpleNamespace(
        runner=own, config=config, device="cpu", reporters=SimpleNamespace(say=said.append),
        batch_size=SimpleNamespace(samples_per_microbatch=4),
    )  # fmt: skip


def test_clips_of_all_passes_of_a_step_have_tokens() -> None:
    """Take clips of nine frames with six tokens, two in a step that trains both networks."""
    own = runner(generator_interval=2)
    for steps, clips in ((0, 2), (1, 1), (2, 2)):
        own.extra_state = SimpleNamespace(steps=steps)  # type: ignore[assignment]
        stats = streaming_step_stats(run_of(own, []), 3)
        assert (stats.samples, stats.tokens) == (3 * 4, 4 * 3 * clips * 9 * 6)
        assert stats.flops == 0.0


def test_samples_while_training_are_no_work_and_share_the_codec(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, events = list[str](), list[str]()

    class Sampler:
        def __init__(self, run: Any, encode: Any, build_codec: Any) -> None:
            events.append(f"codec {build_codec()}")

        def __call__(self, folder: Path) -> Throughput:
            events.append(str(folder))
            if folder.name == "infinite":
                raise NotFiniteError("not finite")
            return Throughput(videos=3, seconds=1.25)

    @contextmanager
    def paused() -> Any:
        events.append("paused")
        yield
        events.append("goes on")

    monkeypatch.setattr(module, "LongVideoSampler", Sampler)
    monkeypatch.setattr(module, "build_codec", lambda config, device: f"new {config} {device}")
    own, prompts = runner(), FilePrompts.__new__(FilePrompts)
    own.work = SimpleNamespace(paused=paused)  # type: ignore[assignment]
    own.sequence = SimpleNamespace(prompts=prompts)  # type: ignore[assignment]
    prompts.codec = "of first frames"  # type: ignore[assignment]
    sample = sampler_of(run_of(own, said))
    prompts.codec = None
    sampler_of(run_of(own, said))
    assert events == ["codec of first frames", "codec new CodecConfig cpu"]
    events.clear()
    sample(Path("videos"))
    assert events == ["paused", "videos", "goes on"]
    sample(Path("infinite"))
    assert said == [
        "sampled 3 videos into videos in 1.2 s",
        "the sampled videos are not finite and are not written",
    ]


class Recorder:
    """A recorder of phases that keeps their names."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    @contextmanager
    def phase(self, name: str) -> Any:
        self.events.append(name)
        yield


def training_runner(events: list[str], per_frame: bool) -> StreamingRunner:
    """Return a runner whose networks note what is done to them and whose clips have 2, 3 .. frames.

    The loss of a clip is its number of frames times the weight of the network.
    """
    own = runner(generator_interval=2)
    training = SimpleNamespace(calculate_per_token_loss=per_frame, seed=5)
    own.config = SimpleNamespace(training=training)  # type: ignore[assignment]
    own.context = SimpleNamespace(recorder=Recorder(events))  # type: ignore[assignment]
    own.schedule = "levels"  # type: ignore[assignment]
    own.observer = own.check_zeroed = None
    own.extra_state = SimpleNamespace(steps=0)  # type: ignore[assignment]
    made = iter(range(2, 99))

    def clip(*, trains_generator: bool) -> Any:
        events.append("gc"[not trains_generator])
        return SimpleNamespace(mask=torch.ones(1, next(made), dtype=torch.bool))

    def network(name: str) -> Any:
        def reduce(divisor: Tensor | None, everywhere: bool) -> None:
            shown = "mean" if divisor is None else str(int(divisor))
            events.append(f"{name} by {shown}{' everywhere' * everywhere}")

        return SimpleNamespace(
            zero_grad=lambda: events.append(f"{name} zero"), chunks=[name], reduce=reduce,
            update=lambda: events.append(f"{name} update"),
            weight=torch.ones((), requires_grad=True),
        )  # fmt: skip

    own.generator, own.critic = network("generator"), network("critic")
    own.sequence = SimpleNamespace(next_clip=clip)  # type: ignore[assignment]
    for name in ("generator", "critic"):
        weight: Any = getattr(own, name).weight

        def losses(clip: Any, _: Any, weight: Tensor = weight) -> Any:
            count = clip.mask.sum()
            # Two blocks of a clip, with a third and two thirds of its loss.
            for part in (1 / 3, 2 / 3):
                yield part * count * weight, count, {}

        setattr(own, f"_{name}_losses", losses)
    for name in ("settle", "_give_memory_back", "_advance_schedules"):
        setattr(own, name, lambda *_, name=name: events.append(name))
    own._result = lambda reports, updates: (reports, updates)  # type: ignore[assignment,method-assign,return-value]
    return own


@pytest.mark.parametrize("per_frame", [True, False])
def test_a_step_of_two_micro_batches_takes_four_clips(
    per_frame: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take clips of 2 and 4 frames for the generator, of 3 and 5 for the critic."""
    noised = list[tuple[int, Any, int, str]]()

    def noise(clip: Any, schedule: Any, seed: int, kind: str) -> None:
        noised.append((clip.mask.size(1), schedule, seed, kind))

    monkeypatch.setattr(step_module, "noised_clip", noise)
    events = list[str]()
    own = training_runner(events, per_frame)
    own.train(StepInputs(None, 2), 7)
    kinds = ("generator", "critic") * 2
    assert noised == [(frames, "levels", 5, kind) for frames, kind in enumerate(kinds, 2)]
    frames = {"generator": 6, "critic": 8}
    reduced = [
        part
        for name in ("critic", "generator")
        for part in ("reduce", f"{name} by {frames[name] if per_frame else 'mean'}")
    ]
    assert [event for event in events if "give" not in event] == [
        "critic zero", "generator zero", "forward", "g", "forward", "c", "forward", "g", "forward",
        "c", *reduced, "settle", "update", "critic update", "generator update",
        "_advance_schedules",
    ]  # fmt: skip
    for name, total in frames.items():
        weight: Any = getattr(own, name).weight
        # Means of clips are averaged over the clips; frames are summed until they are reduced.
        assert float(weight.grad) == pytest.approx(total if per_frame else 1.0)
    # In the next step the critic alone is trained.
    events.clear()
    own.extra_state.steps, own.observer = 1, lambda: events.append("observed")
    own.check_zeroed = lambda chunks: events.append(f"{chunks[0]} checked")  # type: ignore[assignment]
    own.train(StepInputs(None, 1), 7)
    divisor = "6" if per_frame else "mean"
    assert [event for event in events if "give" not in event] == [
        "critic zero", "critic checked", "forward", "c", "reduce",
        f"critic by {divisor} everywhere", "observed", "settle", "update", "critic update",
        "_advance_schedules",
    ]  # fmt: skip


def test_networks_and_scores_are_built_of_their_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "--train-iters 1 --negative-prompt blur --guidance-scale 3 --distribution-loss sid "
        "--sid-alpha 0.5 --clip-grad 7 --critic-clip-grad 5"
    )
    config = config_of(flags_of(tmp_path, words), VIDEO)

    def begin(self: Any, config: Any, task: Any, context: Any, *_: Any) -> None:
        self.config, self.context, self.device = config, context, "cpu"
        self.chunks, self.optimizer, self.scheduler = ["generator"], "optimizer", "schedule"

    def prompts(*_: Any) -> Any:
        return SimpleNamespace(encode=lambda captions: f"encoded {captions}")

    monkeypatch.setattr(step_module.StepRunner, "__init__", begin)
    monkeypatch.setattr(step_module, "FilePrompts", prompts)
    monkeypatch.setattr(
        step_module, "build_critic", lambda *_: SimpleNamespace(network="critic", chunks=[])
    )
    monkeypatch.setattr(step_module, "build_teacher", lambda *_: "teacher")
    monkeypatch.setattr(step_module, "StreamingState", lambda *given: given)
    monkeypatch.setattr(step_module, "WorkCounter", lambda networks: networks)
    monkeypatch.setattr(StreamingRunner, "_sequence", lambda *_: "sequence")
    own: Any = StreamingRunner(config, None, "context")  # type: ignore[arg-type]
    scores = own.scores
    assert (scores.critic, scores.teacher, scores.negative_text) == (
        "critic", "teacher", "encoded ['blur']"
    )  # fmt: skip
    assert (scores.guidance_scale, scores.sid_alpha) == (3.0, 0.5)
    generator = own.generator
    assert (generator.network, generator.optimizer) == ("generator", "optimizer")
    assert (generator.scheduler, generator.clip_grad) == ("schedule", 7.0)
    assert own.work == ["generator", "critic", "teacher"]
    assert own.streaming is config.section(StreamingConfig) is own.schedule.streaming


@pytest.mark.parametrize("encodes", [True, False])
def test_a_sequence_is_that_of_the_runs_seed_and_of_its_replica(
    encodes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generate two videos at a time on the second of three replicas, of six channels."""
    made: list[Any] = []
    words = "--train-iters 1 --latent-size 4 6 --latent-channels 6"
    words += " --codec-channels 6" if encodes else " --no-encode-first-frame"
    config = config_of(flags_of(tmp_path, words, micro=2, batch=2), VIDEO)
    own = StreamingRunner.__new__(StreamingRunner)
    own.config, own.streaming = config, config.section(StreamingConfig)
    layout = SimpleNamespace(data_parallel_size=3)
    own.context = SimpleNamespace(dp_rank=1, layout=layout)  # type: ignore[assignment]
    own.device, own.schedule, own.chunks = torch.device("cpu"), "levels", ["wrapped"]  # type: ignore[assignment]
    own.generator = SimpleNamespace(network="network")  # type: ignore[assignment]
    bare = SimpleNamespace(new_cache=lambda *sizes, **named: (*sizes, named))
    monkeypatch.setattr(step_module, "unwrap_model", lambda _: [bare])
    monkeypatch.setattr(step_module, "Generator", lambda *given: given)
    monkeypatch.setattr(step_module, "StreamingSequence", lambda *x, **y: made.append((x, y)))
    prompts: Any = SimpleNamespace(first_frame="first frame")
    own._sequence(prompts)
    (((streaming, generator), options),) = made
    cache = (2, 4, 6, {"chunk_frames": 9})
    assert streaming is own.streaming and generator == ("network", cache, "levels")
    like = options.pop("like")
    assert like.shape == (0, 0, 6, 4, 6) and like.dtype == torch.float32
    assert options == {
        "prompts": prompts, "replica": Replica(7, 2, 1, 3),
        "first_frame": "first frame" if encodes else None,
    }  # fmt: skip


@pytest.mark.parametrize("two_phase", [True, False])
@pytest.mark.parametrize("loss", ["dmd", "sid"])
def test_losses_are_those_of_the_flags(
    loss: str, two_phase: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tell the losses what critic and teacher say of the clip; sid tells its value, too."""
    noted: list[Any] = []

    def call(name: str, result: Any) -> Any:
        def noting(*given: Any, **named: Any) -> Any:
            noted.append((name, given, named))
            return result

        return noting

    monkeypatch.setattr(step_module, "generator_direction", call("dmd", "D of dmd"))
    monkeypatch.setattr(step_module, "sid_direction", call("sid", ("D of sid", "L_S")))
    monkeypatch.setattr(step_module, "generator_losses", call("blocks", ["one", "two"]))
    monkeypatch.setattr(step_module, "dmd_loss", call("clip", "whole"))
    monkeypatch.setattr(step_module, "critic_clip_loss", call("critic", "of the critic"))
    own = runner(distribution_loss=loss, two_phase=two_phase, denoising_loss="x0")
    own.scores = "scores"  # type: ignore[assignment]
    own.critic = SimpleNamespace(network="critic")  # type: ignore[assignment]
    own.sequence = SimpleNamespace(generator="generator")  # type: ignore[assignment]
    clip: Any = SimpleNamespace(latents="X", mask="M")
    noised: Any = "X_t"
    direction = f"D of {loss}"
    values = "L_S" if loss == "sid" else None
    given = (clip, noised, "scores") + ((own._whole_gradient,) if loss == "sid" else ())
    assert list(own._generator_losses(clip, noised)) == (["one", "two"] if two_phase else ["whole"])
    assert noted == [
        (loss, given, {}),
        ("blocks", (clip, direction, "generator", values), {})
        if two_phase
        else ("clip", ("X",), {"direction": direction, "mask": "M", "losses": values}),
    ]
    noted.clear()
    assert list(own._critic_losses(clip, noised)) == ["of the critic"]
    assert noted == [("critic", (clip, noised, "critic", "x0"), {})]
