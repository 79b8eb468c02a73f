"""A GPU computes what the CPU does: steps in fp32 and bf16, and checkpoints of either."""

import contextlib
import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_ext.device.rates import has_fp8
from megatron_ext.optim.update import decides_on_device
from megatron_ext.train.loop import IntervalMetrics
from tests.gpu.runs import LAYOUTS, losses, needs_gpus, one_gpu, train
from tests.runs_from_inside import build, one_step
from tests.training_runs import TINY, mock_data

pytestmark = pytest.mark.gpu

STEPS = 12
BREAK = 6
FLAGS = [*TINY, *mock_data(), "--train-iters", str(STEPS), "--eod-mask-loss"]


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of one rank with gloo, the truth."""
    return losses(train(FLAGS, tmp_path_factory.mktemp("cpu"), on="cpu"))


def test_nccl_on_one_gpu_follows_gloo(on_the_cpu: list[float], tmp_path: Path) -> None:
    assert losses(train(FLAGS, tmp_path, on="cuda")) == pytest.approx(on_the_cpu, rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nccl_follows_gloo_in_the_same_layout(layout: str, tmp_path: Path) -> None:
    needs_gpus(2)
    flags = [*FLAGS, *LAYOUTS[layout].split()]
    gloo = losses(train(flags, tmp_path / "cpu", on="cpu", ranks=2))
    nccl = losses(train(flags, tmp_path / "cuda", on="cuda", ranks=2))
    assert nccl == pytest.approx(gloo, rel=1e-5)


def test_bf16_stays_beside_fp32(on_the_cpu: list[float], tmp_path: Path) -> None:
    """bf16 rounds to 3 digits; over these steps its losses stay within 0.5% of fp32's, and fall."""
    found = losses(train([*FLAGS, "--bf16"], tmp_path, on="cuda"))
    assert all(map(math.isfinite, found))
    assert found == pytest.approx(on_the_cpu, rel=5e-3)
    assert found != pytest.approx(on_the_cpu, rel=1e-7)
    assert found[-1] < found[0]


@pytest.mark.parametrize(("first", "then"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_checkpoint_of_one_resumes_on_the_other(
    first: str, then: str, on_the_cpu: list[float], tmp_path: Path
) -> None:
    save = tmp_path / "run"
    words = [*FLAGS, "--save-interval", str(BREAK)]
    train([*words, "--exit-interval", str(BREAK)], save, on=first)  # type: ignore[arg-type]
    rows = train([*words, "--load", str(save)], save, on=then)  # type: ignore[arg-type]
    assert [row["iteration"] for row in rows] == list(range(1, STEPS + 1))
    assert losses(rows) == pytest.approx(on_the_cpu, rel=1e-5)


GRAPH_STEPS = 10
GRAPH_WORDS = f"--train-iters {GRAPH_STEPS} --eval-iters 1 --eval-interval 4"
GRAPH_FLAGS = [*TINY, *mock_data(), *GRAPH_WORDS.split()]
GRAPHS = ["--cuda-graph-impl", "local"]


def check(words: str, folder: Path, *, ranks: int = 1, tolerance: float = 1e-6) -> None:
    """Check that losses are equal to the last bit, since only the launches differ."""
    flags = [*GRAPH_FLAGS, *words.split()]
    without = losses(train(flags, folder / "without", on="cuda", ranks=ranks))
    recorded = losses(train([*flags, *GRAPHS], folder / "with", on="cuda", ranks=ranks))
    assert len(recorded) == GRAPH_STEPS
    assert recorded == pytest.approx(without, rel=tolerance)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--bf16",
        "--bf16 --hidden-dropout 0.1",
        "--bf16 --reset-attention-mask",
        "--rampup-batch-size 4 4 16",
    ],
)
def test_one_gpu(words: str, tmp_path: Path) -> None:
    check(words, tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        *(f"{layout} --bf16" for layout in LAYOUTS.values()),
        "--bf16 --overlap-grad-reduce --overlap-param-gather",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ],
)
def test_two_gpus(words: str, tmp_path: Path) -> None:
    """The end of the run also shows that the graphs go before the communicators of NCCL."""
    needs_gpus(2)
    check(words, tmp_path, ranks=2)


SYNC_FLAGS = [*TINY, *mock_data(), "--train-iters", "100"]
WAITED = "called a synchronizing CUDA operation"
CASES = [
    "",
    "--bf16 --ema-decay 0.9",
    "--bf16 --cross-entropy-impl eager --log-num-zeros-in-grad",
    "--bf16 --mtp-num-layers 1",
    "--bf16 --no-use-distributed-optimizer",
    "--bf16 --ffn-hidden-size 192 --fp8-format hybrid",
    "--bf16 --ffn-hidden-size 192 --fp8-format hybrid --fp8-recipe rowwise",
]


@contextlib.contextmanager
def sync_debug(mode: str) -> Iterator[None]:
    """Let torch raise (``error``) or warn (``warn``) where the host would wait."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("words", CASES)
def test_a_whole_step_never_waits(words: str) -> None:
    if "--fp8-format" in words and not has_fp8(torch.device("cuda", 0)):
        pytest.skip(f"{torch.cuda.get_device_name()} does not multiply 8-bit floats")
    with one_gpu() as context:
        run = build([*SYNC_FLAGS, *words.split()], context)
        window = IntervalMetrics(run)
        for _ in range(2):  # compilers and libraries set themselves up
            one_step(run, window)
        with sync_debug("error"):
            one_step(run, window)
        assert not run.runner.settled
        assert run.progress.skipped_iterations == 0
        window.settle()
        assert run.runner.settled


def test_the_queue_never_drains() -> None:
    """The host is ahead: when it has launched a step, the GPU has not finished it."""
    with one_gpu() as context:
        run = build([*SYNC_FLAGS, "--bf16"], context)
        window = IntervalMetrics(run)
        one_step(run, window)
        number = run.batch_size.num_microbatches
        batches = run.train_source.next_step(number)
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 30)  # about half a second, which all that follows waits for
        one_step(run, window, batches)
        assert not torch.cuda.current_stream().query()


def test_a_bad_gradient_skips_the_step_on_the_gpu() -> None:
    with one_gpu() as context:
        run = build([*SYNC_FLAGS, "--bf16"], context)
        assert run.optimizer is not None and decides_on_device(run.optimizer)
        window = IntervalMetrics(run)
        one_step(run, window)
        window.settle()
        before = [p.detach().clone() for chunk in run.chunks for p in chunk.parameters()]
        rate = run.optimizer.param_groups[0]["lr"]
        first = next(run.chunks[0].parameters())
        run.runner.observer = lambda: first.main_grad.fill_(math.nan)
        one_step(run, window)
        run.runner.observer = None
        assert run.progress.skipped_iterations == 0
        window.settle()
        assert run.progress.skipped_iterations == 1
        assert run.optimizer.param_groups[0]["lr"] == rate
        after = [p.detach() for chunk in run.chunks for p in chunk.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        one_step(run, window)
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_waits_is_seen() -> None:
    x = torch.ones(3, device="cuda")
    with sync_debug("error"), pytest.raises(RuntimeError, match=WAITED):
        x.sum().item()
    with sync_debug("warn"), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        x.sum().item()
        x.tolist()
    assert sum(WAITED in str(warning.message) for warning in seen) == 2
