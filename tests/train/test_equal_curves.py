"""Recomputation, compilation, float32 residuals and sizes of micro-batches change no loss."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from megatron_ext.data.batch import Batch
from megatron_ext.layers.compiled import compiled_on_cpu
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepInputs
from tests.training_runs import TINY, check_refused, curve, mock_data, train, train_steps

MOCK = " ".join([*TINY, *mock_data()])
SMALL = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --position-embedding-type rope "
    "--seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 2 --lr 1e-3 --log-interval 1 --eval-iters 0 --num-workers 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 32 "
    "--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1"
)
UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
PP2 = "--pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"


@pytest.mark.parametrize(
    ("model", "recomputed", "layout", "ranks"),
    [
        ("", f"{UNIFORM} 2", "", 1),
        ("--mtp-num-layers 1", f"{UNIFORM} 2", "", 1),
        ("", f"{SELECTIVE} mlp", "", 1),
        ("", f"{SELECTIVE} core_attn mlp", TP2, 2),
        (
            "--mtp-num-layers 2",
            f"{UNIFORM} 2 --distribute-saved-activations",
            "--tensor-model-parallel-size 2",
            2,
        ),
        (
            "--num-experts 4 --disable-bias-linear --num-layers 4",
            f"{UNIFORM} 2",
            f"{PP2} --num-virtual-stages-per-pipeline-rank 2",
            2,
        ),
    ],
    ids=[
        "rest",
        "multi-token prediction",
        "mlp with biases",
        "both modules",
        "distributed activations",
        "virtual chunks",
    ],
)
def test_recomputation_changes_nothing(
    model: str, recomputed: str, layout: str, ranks: int, tmp_path: Path
) -> None:
    plain = curve(f"{SMALL} {model}", tmp_path / "plain")
    again = curve(f"{SMALL} {model} {recomputed} {layout}", tmp_path / "again", ranks)
    for got, want in zip(again, plain, strict=True):
        assert got == pytest.approx(want, rel=1e-6 if ranks == 1 else 1e-5)


def test_dropout_by_sample_does_not_depend_on_the_replicas(tmp_path: Path) -> None:
    """Each of two replicas has two micro-batches, whose samples are not neighbours."""
    words = f"{SMALL} --hidden-dropout 0.3 --attention-dropout 0.3 --deterministic-dropout"
    one = curve(words, tmp_path / "one")
    two = curve(words, tmp_path / "two", 2)
    for got, want in zip(two, one, strict=True):
        assert got == pytest.approx(want, rel=1e-6)


RUNS = {
    "recomputed": (1, f"{UNIFORM} 1", 1e-5),
    "zero bubble": (2, f"{PP2} --pipeline-schedule zb-h1", 1e-5),
    "sequence parallel, one mask on all layouts": (
        2, f"{TP2} --hidden-dropout 0.1 --deterministic-dropout", 1e-5),
    "adapters": (1, "--lora-rank 4", 1e-5),
    "8 bits": (1, "--bf16 --fp8-format hybrid --ffn-hidden-size 176", 1e-2),
    "bf16": (1, "--bf16", 1e-2),
}  # fmt: skip
"""Ranks, flags, and how far losses may be apart, relative: roundings grow with the steps."""

_open = ExitStack()


def compile_on_cpu(run: Run) -> None:
    """Compile for the rest of this rank's process; a file tells that a graph was made."""
    made = Path(run.config.checkpoint.save or "") / "graphs"

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        made.touch()
        return aot_eager(graph, example)

    _open.enter_context(compiled_on_cpu(backend))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_compiled_layers_give_the_losses_of_those_that_are_not(name: str, tmp_path: Path) -> None:
    ranks, flags, tolerance = RUNS[name]
    words = f"{MOCK} {flags} --train-iters 4"
    eager, compiled = tmp_path / "eager", tmp_path / "compiled"
    want = [loss for loss, _ in curve(words, eager, ranks)]
    got = [loss for loss, _ in curve(words, compiled, ranks, prepare=compile_on_cpu)]
    assert (compiled / "graphs").exists() and not (eager / "graphs").exists()
    assert len(want) == 4 and got == pytest.approx(want, rel=tolerance)


RESIDUAL = f"{SMALL} --fp32-residual-connection --num-layers 2"
MODELS = {
    "LayerNorm": "--bf16 --mtp-num-layers 1",
    "RMSNorm": "--bf16 --normalization RMSNorm --apply-layernorm-1p --deterministic-dropout "
    "--hidden-dropout 0.1",
    "experts": "--bf16 --num-experts 4",
    "fp16": "--fp16 --initial-loss-scale 256 --mtp-num-layers 1",
    "fp8": "--bf16 --fp8-format hybrid",
}


def losses_of_a_float32_stream(words: str, ranks: int, save: Path) -> list[float]:
    """Return the losses of two steps, and check the dtypes within every layer."""
    half = torch.float16 if "--fp16" in words else torch.bfloat16

    def prepare(run: Run) -> None:
        def check(layer: Any, _args: Any, kwargs: Any, output: Any) -> None:
            # A depth of multi-token prediction starts its own stream from a 16-bit product.
            if layer.layer_number <= 2:
                assert kwargs["hidden_states"].dtype == output[0].dtype == torch.float32

        def check_norm(_norm: Any, _args: Any, output: Any) -> None:
            assert output.dtype == half

        layers = [m for c in run.chunks for m in c.modules() if isinstance(m, TransformerLayer)]
        assert layers
        for layer in layers:
            layer.register_forward_hook(check, with_kwargs=True)
            layer.pre_mlp_layernorm.register_forward_hook(check_norm)

    rows = train_steps(f"{RESIDUAL} {words}", save, ranks, prepare=prepare)
    return [row["lm loss"] for row in rows]


@pytest.mark.parametrize("model", [*MODELS, "sequence parallel"])
def test_layouts_and_recomputation_keep_the_float32_stream(model: str, tmp_path: Path) -> None:
    words, more, tolerance = MODELS.get(model, "--bf16"), f"{PP2} {UNIFORM} 1", 1e-5
    if model not in MODELS:
        more, tolerance = TP2, 1e-3
    one = losses_of_a_float32_stream(words, 1, tmp_path / "one")
    two = losses_of_a_float32_stream(f"{words} {more}", 2, tmp_path / "two")
    assert two == pytest.approx(one, rel=tolerance)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        # The recomputed part would return its biases, which are parameters.
        (f"{SELECTIVE} mlp", "`--recompute-modules` (mlp) with Transformer Engine's layers needs "
         "an MLP without biases"),
        ("--fp32-residual-connection --bf16", "`--fp32-residual-connection` needs our torch"),
    ],
)  # fmt: skip
def test_what_transformer_engines_layers_lack(words: str, sentence: str) -> None:
    check_refused(f"{SMALL} {words} --transformer-impl transformer_engine", sentence, device="cuda")


def gradient(run: Run, batches: list[Batch]) -> Tensor:
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    run.runner.compute_gradients(StepInputs(batches, len(batches)))
    return torch.cat([p.main_grad.flatten() for chunk in run.chunks for p in chunk.parameters()])


@pytest.mark.parametrize(
    ("words", "fits"),
    [
        ("--cross-entropy-impl chunked", lambda error: error <= 1e-6),
        ("--cross-entropy-impl eager", lambda error: error <= 1e-6),
        ("--no-calculate-per-token-loss", lambda error: error > 0.1),
    ],
)
def test_only_a_mean_of_means_depends_on_unequal_micro_batches(
    words: str, fits: Callable[[float], bool], tmp_path: Path
) -> None:
    def prepare(run: Run) -> None:
        apart = run.train_source.next_step(2)
        for batch, targets in zip(apart, (8, 2), strict=True):
            batch.loss_weights.zero_()[:, :targets] = 1
        names = ("tokens", "labels", "loss_weights", "position_ids")
        whole = Batch(*(torch.cat([getattr(batch, name) for batch in apart]) for name in names))
        truth = gradient(run, [whole]).clone()
        assert fits(float((gradient(run, apart) - truth).norm() / truth.norm()))

    sizes = "--micro-batch-size 1 --global-batch-size 2 --train-iters 1"
    train(f"{MOCK} {sizes} {words}", tmp_path, prepare=prepare)
