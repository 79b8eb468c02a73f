"""Where CUDA graphs are refused, and what a CPU says of them."""

from __future__ import annotations

import pytest

from megatron_ext.config.acceleration import CudaGraphConfig
from megatron_ext.config.parser import parse_args
from megatron_ext.errors import ConfigError
from megatron_ext.text.task import TEXT

TINY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 16 --train-iters 12 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --attention-dropout 0 "
)
LOCAL = "--cuda-graph-impl local"

GOOD = [
    "--cuda-graph-impl none --cuda-graph-warmup-steps 3",
    f"{LOCAL} --cuda-graph-warmup-steps 11 --hidden-dropout 0.1",
    f"{LOCAL} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    f"{LOCAL} --tensor-model-parallel-size 2 --sequence-parallel --attention-dropout 0.1",
    f"{LOCAL} --mtp-num-layers 1 --position-embedding-type rope --rampup-batch-size 8 8 16",
    "--enable-cuda-graph",
]

BAD = [
    ("--cuda-graph-warmup-steps 4", "`--cuda-graph-warmup-steps` (4) needs `--cuda-graph-impl"),
    (f"{LOCAL} --cuda-graph-warmup-steps 0", "`--cuda-graph-warmup-steps` (0) must be at least 1"),
    (
        "--cuda-graph-impl transformer_engine",
        "`--cuda-graph-impl` (transformer_engine), graphs by Transformer Engine, is not supported",
    ),
    (f"{LOCAL} --cuda-graph-scope attn", "graphs are those of whole transformer layers"),
    (f"{LOCAL} --skip-train", "`--cuda-graph-impl local` has no effect with `--skip-train`"),
    (
        f"{LOCAL} --transformer-impl transformer_engine",
        "records torch's layers, not Transformer Engine's; give `--transformer-impl torch`.",
    ),
    (f"{LOCAL} --num-experts 2", "does not go with `--num-experts`"),
    (f"{LOCAL} --lora-rank 4", "does not go with `--lora-rank`"),
    (f"{LOCAL} --bf16 --fp8-format hybrid", "does not go with `--fp8-format` yet"),
    (
        f"{LOCAL} --recompute-granularity selective",
        "does not go with `--recompute-granularity` (selective)",
    ),
    (
        f"{LOCAL} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "does not go with `--recompute-granularity` (full)",
    ),
    (f"{LOCAL} --deterministic-dropout", "does not go with `--deterministic-dropout`"),
    (
        f"{LOCAL} --attention-dropout 0.1",
        "needs `--attention-dropout` (0.1) to be 0 without `--sequence-parallel`",
    ),
    (
        f"{LOCAL} --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
        "does not go with `--pipeline-schedule` (zb-h1)",
    ),
    (
        f"{LOCAL} --pipeline-schedule core-no-pipelining",
        "does not go with `--pipeline-schedule` (core-no-pipelining)",
    ),
    (
        f"{LOCAL} --tensor-model-parallel-size 2 --distributed-backend gloo",
        "does not go with `--distributed-backend gloo`",
    ),
    (f"{LOCAL} --empty-unused-memory-level 1", "`--empty-unused-memory-level` (1) would give back"),
]


def parsed(words: str, device: str = "cuda") -> CudaGraphConfig:
    found = parse_args([*TINY.split(), *words.split()], TEXT, world_size=2, device=device)
    return found.config.cuda_graphs


@pytest.mark.parametrize("words", GOOD)
def test_what_goes_together_is_taken(words: str) -> None:
    assert parsed(words).cuda_graph_impl == ("none" if "none" in words else "local")


@pytest.mark.parametrize(("words", "sentence"), BAD)
def test_what_does_not_is_said(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        parsed(words)
    matching = [text for text in error.value.messages if sentence in text]
    assert len(matching) == 1
    assert matching[0].endswith(".")


def test_a_cpu_refuses_what_a_gpu_would() -> None:
    with pytest.raises(ConfigError, match="does not go with `--num-experts`"):
        parsed(f"{LOCAL} --num-experts 2", "cpu")


def test_video_has_no_graphs() -> None:
    words = "--video --hidden-size 64 --cuda-graph-impl local --data-path x"
    with pytest.raises(ConfigError) as error:
        parse_args(words.split(), TEXT, world_size=1, device="cuda")
    assert any("--cuda-graph-impl" in text for text in error.value.messages)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_that_grow_need_buffers_that_nccl_does_not_register(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
    with pytest.raises(ConfigError, match=rf"{name}.*needs `NCCL_GRAPH_REGISTER=0`"):
        parsed(LOCAL)
    parsed(LOCAL, "cpu")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    assert parsed(LOCAL).cuda_graph_impl == "local"


def test_a_cpu_says_that_it_has_none() -> None:
    words = [*TINY.split(), *LOCAL.split(), "--cuda-graph-warmup-steps", "5"]
    notes = parse_args(words, TEXT, world_size=1, device="cpu").notes
    found = [note for note in notes if "cuda-graph" in note]
    assert [note.partition(" has no effect on a CPU: ")[0] for note in found] == [
        "`--cuda-graph-impl`",
        "`--cuda-graph-warmup-steps`",
    ]
