"""A tiny streaming run: 4 clips in a sequence, 4 tokens in a frame, a switch of prompts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.optim.update import parts_of
from megatron_ext.train.run import Run
from megatron_ext.video.streaming.rollout import StreamClip
from megatron_ext.video.streaming.step import StreamingRunner
from megatron_ext.video.task import VIDEO
from tests.training_runs import train_on_ranks, training_rows

Rows = list[dict[str, Any]]
FLAGS = (
    "--task streaming --generator-size tiny --no-zero-head --latent-size 4 4 --frame-block 3 "
    "--window-frames 6 --sink-frames 3 --chunk-frames 9 --min-new-frames 6 --max-new-frames 6 "
    "--sequence-lengths 27 --recache-frames 9 --generator-interval 2 --micro-batch-size 1 "
    "--text-length 8 --text-width 32 --lr 1e-3 --critic-lr 2e-3 --ema-decay 0.8 --log-interval 1 "
    "--seed 7 --codec-spatial 2 --codec-channels 4"
).split()
CLIPS = 4
"""Number of chunks of a sequence; they end at frames 9, 15, 21 and 27."""


def write_prompts(folder: Path, *, switch: bool = True) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    words = []
    for name in ("prompts", "second_prompts")[: 1 + switch]:
        path = folder / f"{name}.txt"
        path.write_text("".join(f"{name} a {i} disc\n" for i in range(5)))
        words += [f"--{name.replace('_', '-')}-path", str(path)]
    return words


def flags_of(
    folder: Path, words: str, *, micro: int = 1, batch: int = 1, interval: int = 2, start: int = 2
) -> list[str]:
    own = (
        f"--micro-batch-size {micro} --global-batch-size {batch} --generator-interval {interval} "
        f"--ema-start {start} {words}"
    )
    prompts = [] if "--prompts-path" in words else write_prompts(folder)
    # Nothing looks at the codec without first frames, and its flags, the last four, are refused.
    usual = FLAGS[:-4] if "--no-encode-first-frame" in words else FLAGS
    return [*usual, *prompts, *own.split()]


def attempt(
    folder: Path, words: str, *, ranks: int = 1, save: str = "save",
    prepare: Callable[[Run], None] | None = None, **sizes: int,
) -> tuple[int, Rows]:  # fmt: skip
    flags = flags_of(folder, words, **sizes)
    code, rows = train_on_ranks(flags, ranks=ranks, save=folder / save, task=VIDEO, prepare=prepare)
    return code, training_rows(rows)


def run(folder: Path, words: str, **options: Any) -> Rows:
    code, rows = attempt(folder, words, **options)
    assert code == 0
    return rows


def observed(
    folder: Path, words: str, note: Callable[[Run], Any], *, save: str = "save", **options: Any
) -> tuple[Rows, list[Any]]:
    """Return the rows of a run, and by rank what ``note`` returned and filled during its steps."""

    def prepare(run: Run) -> None:
        content = note(run)
        path = folder / f"{save}_{run.context.rank}.pt"
        after_each_step(run, lambda _: torch.save(content, path))

    rows = run(folder, words, save=save, prepare=prepare, **options)
    return rows, [torch.load(x, weights_only=False) for x in sorted(folder.glob(f"{save}_*.pt"))]


def runner_of(run: Run) -> StreamingRunner:
    assert isinstance(run.runner, StreamingRunner)
    return run.runner


def after_each_step(run: Run, do: Callable[[Any], None]) -> None:
    """Call a function with the result of each step of a run, after it."""
    train = run.runner.train

    def wrapped(*args: Any) -> Any:
        result = train(*args)
        do(result)
        return result

    run.runner.train = wrapped  # type: ignore[method-assign]


def on_each_clip(run: Run, do: Callable[[StreamClip, bool], None]) -> None:
    """Call a function with each clip of a run, and with whether it trains the generator."""
    sequence = runner_of(run).sequence
    next_clip = sequence.next_clip

    def wrapped(*, trains_generator: bool) -> StreamClip:
        clip = next_clip(trains_generator=trains_generator)
        do(clip, trains_generator)
        return clip

    sequence.next_clip = wrapped  # type: ignore[method-assign]


def weights(module: Any) -> dict[str, Tensor]:
    """Return copies of the parameters of a network that this rank holds."""
    (bare,) = unwrap_model([module])
    return {name: p.detach().clone() for name, p in bare.named_parameters()}


def differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return any(not torch.equal(tensor, b[name]) for name, tensor in a.items())


def losses_of(row: dict[str, Any]) -> dict[str, float]:
    words = ("loss", "norm")
    return {k: v for k, v in row.items() if any(w in k for w in words) and k != "loss_scale"}


def by_network(run: Run, do: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: do(getattr(runner_of(run), name)) for name in NETWORKS}


STEPS, SAVED = 6, 3
ADAPTERS = "--lora-rank 4 --lora-alpha 8"
FAST = "--lr 1e-2 --critic-lr 1e-2"
PREFIXES = {"generator": "", "critic": "critic."}
"""Beginnings of the names of a network's weights in a checkpoint."""
NETWORKS = tuple(PREFIXES)


@dataclass(frozen=True)
class Tuned:
    """Folders of two runs, the second with adapters on the weights of the first, and its log."""

    root: Path
    words: str  # all flags of the second run but its number of steps
    rows: Rows
    seen: dict[str, Any]  # see `_networks`

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def saved(self) -> Path:
        return self.root / "save"

    def checkpoint(self, step: int = STEPS) -> Path:
        return self.saved / f"iter_{step:07d}"


def tune(root: Path) -> Tuned:
    run(root, "--train-iters 1 --seed 99", save="base")
    base = root / "base"
    words = f"--pretrained-checkpoint {base} --critic-checkpoint {base} {FAST}"
    steps = f"--train-iters {STEPS} --save-interval {SAVED}"
    rows, (seen,) = observed(root, f"{words} {ADAPTERS} {steps}", _networks)
    return Tuned(root, words, rows, seen)


def _networks(run: Run) -> dict[str, Any]:
    """Note weights and outputs before and after all steps, and what is optimized and averaged."""
    content = {
        "before": by_network(run, lambda x: weights(x.network)),
        "outputs_before": by_network(run, lambda x: output(x.network)),
        "optimized": by_network(run, num_optimized),
        "averaged": run.ema.parameters if run.ema is not None else [],
        "teacher": list(weights(runner_of(run).teacher)),
    }

    def update(_: Any) -> None:
        content["after"] = by_network(run, lambda x: weights(x.network))
        content["outputs"] = by_network(run, lambda x: output(x.network))

    after_each_step(run, update)
    return content


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, 6, 4, 4, 4, generator=generator)
    text = torch.randn(1, 8, 32, generator=generator)
    return {"x": x, "timesteps": torch.full((1, 6), 500.0), "text": text}


def output(network: Any) -> Tensor:
    with torch.no_grad():
        flow: Tensor = network(**inputs())
    return flow


def num_optimized(network: Any) -> int:
    parts = parts_of(network.optimizer)
    return sum(p.numel() for part in parts for p in part.get_parameters())
