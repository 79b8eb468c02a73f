"""Plans of published training runs beside what their reports say.

Each run is described by its flags, with the layout that its report names. The table has the
published and the planned time of a step, the model FLOPs utilization (MFU) of both by the rule by
which the report counts operations, and the planned memory of the fullest rank. What a report leaves
open is assumed, and each assumption is printed.

    python benchmarks/plan_published.py [--only NAME] [--save]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_ext.config.parser import parse_args
from megatron_ext.device.gpus import GB, GPUS, Gpu
from megatron_ext.planning.hardware import DEFAULT
from megatron_ext.planning.memory import worst_case
from megatron_ext.planning.step_time import Estimate, estimate
from megatron_ext.text.task import TEXT

CLOSE = 0.10
"""The largest relative difference between a planned and a published time that counts as close."""

HOPPER_2024 = replace(DEFAULT, products=720 / 989)
"""Rates of H100 and H800 with the libraries of the reports.

SemiAnalysis (MI300X vs H100 vs H200, 2024) measured 720 of 989 TFLOP/s in large bf16 products with
CUDA 12.4 on H100; plans of new runs assume what CUDA 13 reaches.
"""

H800 = replace(GPUS["H100"], name="H800", link=200 * GB)
"""An H100 whose NVLink has 400 GB/s in both directions together, instead of 900 (NVIDIA)."""

LLAMA_405B = (
    "--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 "
    "--group-query-attention --num-query-groups 8 --kv-channels 128 --padded-vocab-size 128256 "
    "--untie-embeddings-and-output-weights --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --bf16 "
    "--micro-batch-size 1 --tensor-model-parallel-size 8 --sequence-parallel "
    "--pipeline-model-parallel-size 16 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --train-iters 1 --lr 1e-4"
)
EIGHT_K = (
    "--seq-length 8192 --max-position-embeddings 8192 --global-batch-size 2048 "
    "--pipeline-model-parallel-layout E|(t|)*126,L"
)
GPT = (
    "--padded-vocab-size 131072 --seq-length 4096 --max-position-embeddings 4096 "
    "--attention-dropout 0 --hidden-dropout 0 --bf16 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --position-embedding-type learned_absolute "
    "--cross-entropy-impl eager --train-iters 1 --lr 1e-4"
)
ASSUMED = (
    "large bf16 products run at 720 TFLOP/s (CUDA 12.4); all other rates are those of "
    "`tools/plan.py`",
)


SHARDED = "--data-parallel-sharding-strategy optim_grads"
GATHERED_AGAIN = "--recompute-granularity selective --recompute-modules core_attn"


@dataclass(frozen=True)
class Published:
    """A training run of a report.

    Attributes:
        flags: flags of pretrain_gpt.py.
        tflops: operations per second and GPU that the report gives, in 10^12; None if it gives the
            time instead.
        seconds: time of a step, if the report gives no operations.
        whole_scores: whether the report counts attention as if queries saw all keys.
        for_memory: flags with which memory is planned, but not time. `SHARDED` is for reports that
            shard gradients but reduce them once a step, where this project's sharded gradients are
            reduced for each micro-batch.
        source: where the figures are from.
        assumed: what the report leaves open.
    """

    name: str
    gpus: int
    flags: str
    source: str
    assumed: tuple[str, ...] = ()
    tflops: float | None = None
    seconds: float | None = None
    whole_scores: bool = False
    gpu: Gpu = GPUS["H100"]
    for_memory: str = ""


def llama(
    gpus: int, tflops: float, length: str, flags: str, *assumed: str, for_memory: str = SHARDED
) -> Published:
    """Return a run of Llama 3 405B."""
    return Published(
        f"Llama 3 405B, {length}",
        gpus,
        f"{LLAMA_405B} {flags}",
        "arXiv:2407.21783, table 4 and section 3.3",
        (
            "operations count causal attention as half",
            "a virtual stage has one of the 126 layers, the embedding or the head (section 3.3.2)",
            "gradients are sharded over the replicas and reduced once a step (section 3.3.2: FSDP "
            "shards optimizer states and gradients)",
            *assumed,
        ),
        tflops,
        for_memory=for_memory,
    )


def gpt(
    size: str, heads: int, hidden: int, layers: int, tp: int, pp: int, batch: int, tflops: float
) -> Published:
    """Return a run of the table in Megatron-LM's README, with 48 replicas."""
    flags = (
        f"{GPT} --num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} "
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
        f"--global-batch-size {batch} --micro-batch-size 1"
    )
    if tp > 1:
        flags += " --sequence-parallel --transformer-impl transformer_engine --tp-comm-overlap"
    assumed = [
        "micro-batches of 1",
        "operations count attention without a mask, as that release's log does",
        "the loss holds all logits of a micro-batch, as that release does",
        "the table's times include data loading and logging, of which a plan knows nothing; they "
        "may be part of the 0.07 s by which steps of both 1.7B and 7.1B took longer than planned",
    ]
    if pp > 1:
        assumed.append(
            "no virtual chunks: the table names none, and its 92 layers on 4 stages could have "
            "them of one layer only"
        )
    source = "NVIDIA/Megatron-LM, README.md, images/model_table.png (Megatron-Core 0.8)"
    return Published(
        f"GPT {size}", 48 * tp * pp, flags, source, tuple(assumed), tflops, whole_scores=True
    )


EVERY_LAYER = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
DEEPSEEK = (
    (
        "bf16",
        "",
        "products in bf16, where the report's are in FP8, so that a plan is slower",
    ),
    (
        "FP8",
        "--fp8-format e4m3 --fp8-recipe blockwise --transformer-impl transformer_engine",
        "products in FP8, but tokens travel in bf16, where the report sends them out in FP8 (with "
        "casts as fast as memory, this saves less than 0.1 s more)",
    ),
)
"""Plans of DeepSeek-V3 by the format of matrix products."""


def deepseek(name: str, flags: str, *assumed: str) -> Published:
    """Return a run of DeepSeek-V3 with the report's layout."""
    return Published(
        f"DeepSeek-V3, {name}",
        2048,
        "--config recipes/deepseek_v3.yaml --layout none --pipeline-model-parallel-size 16 "
        "--pipeline-model-parallel-layout Et*4|(t*4|)*14,tmL --expert-model-parallel-size 64 "
        "--expert-tensor-parallel-size 1 --nproc-per-node 8 --moe-token-dispatcher-type flex "
        f"--overlap-moe-expert-parallel-comm --moe-keep-dispatched-tokens {EVERY_LAYER} {flags}",
        "arXiv:2412.19437, sections 1 and 3.2: 180,000 GPU hours per 10^12 tokens",
        (
            *assumed,
            "the last stage has the MTP depth and the output layers of two losses, and its passes "
            "take 7% longer than those of the others, or 21% if the next three points were as in "
            "the report; DualPipe's ranks have a stage of either end, so that the ends even out",
            "every layer is recomputed, with the tokens of its experts kept, where the report "
            "recomputes norms and up-projections (a plan of 24.8 s instead of 27.4 in FP8): 1F1B "
            "with pairs holds twice as many micro-batches as DualPipe, so that more does not fit",
            "a token is sent to a node once; pairs of passes hide the exchange between nodes, but "
            "not the one inside, where DualPipe hides both (then 22.9 s)",
        ),
        seconds=15360 * 4096 * 180_000 * 3600 / 1e12 / 2048,
        gpu=H800,
    )


RUNS = (
    llama(8192, 430, "8k", EIGHT_K),
    llama(16384, 400, "8k", EIGHT_K),
    llama(
        16384,
        380,
        "131k",
        "--seq-length 131072 --max-position-embeddings 131072 --global-batch-size 128 "
        "--context-parallel-size 16 --cp-comm-type all_gather "
        "--pipeline-model-parallel-layout E|(t|)*126,L",
        "attention is causal over the whole sequence, documents are not masked",
        "memory: the backward pass gathers keys and values again, as context parallelism with "
        "all-gather does in Transformer Engine, where this project keeps the gathered ones",
        for_memory=f"{SHARDED} {GATHERED_AGAIN}",
    ),
    *(deepseek(name, flags, *assumed) for name, flags, *assumed in DEEPSEEK),
    gpt("1.7B", 16, 2048, 24, 1, 1, 192, 408.8),
    gpt("7.1B", 32, 4096, 30, 2, 1, 192, 465.9),
    gpt("16B", 48, 6144, 32, 4, 1, 192, 489.1),
    gpt("32B", 56, 7168, 48, 8, 1, 192, 459.6),
    gpt("70B", 64, 8192, 84, 8, 2, 384, 419.7),
    gpt("119B", 80, 10240, 92, 8, 4, 768, 420.5),
    gpt("177B", 96, 12288, 96, 8, 6, 1152, 432.8),
    gpt("314B", 128, 16384, 96, 8, 8, 1536, 474.4),
    gpt("462B", 144, 18432, 112, 8, 16, 3072, 459.9),
)


@dataclass(frozen=True)
class Compared:
    """A published run and its plan.

    Attributes:
        plan: the plan whose time is compared.
        fitting: the plan whose memory is compared.
        published: seconds of a step by the report.
        flops: operations of a step, as the report counts them.
    """

    run: Published
    plan: Estimate
    fitting: Estimate
    published: float
    flops: float

    @property
    def difference(self) -> float:
        """Return how much longer the planned step takes, as a fraction of the published time."""
        return self.plan.seconds / self.published - 1

    def mfu(self, seconds: float) -> float:
        """Return the MFU of a step that takes ``seconds``."""
        return self.flops / (seconds * self.run.gpus * self.run.gpu.bf16)


def planned(run: Published, more: str = "") -> Estimate:
    """Return the plan of a published run with ``more`` flags."""
    words = f"{run.flags} {more}".split()
    defaults = {"dry_run": True, "dry_run_gpu": "H100", "mock_data": True}
    arguments = parse_args(words, TEXT, world_size=run.gpus, device="cuda", defaults=defaults)
    network, ranks = worst_case(arguments.task.cost.cases(arguments.config))
    return estimate(network, run.gpu, HOPPER_2024, ranks)


def compared(run: Published) -> Compared:
    """Plan a published run."""
    plan = planned(run)
    fitting = planned(run, run.for_memory) if run.for_memory else plan
    network = plan.network
    flops = plan.flops
    if run.whole_scores:
        # The other half of attention's products, in the forward and the backward pass.
        x = network.sizes
        scores = sum(network.flops(stage).scores for stage in network.stages()) * x.tp * x.cp
        flops += 3 * scores / x.b * network.config.training.batch_sizes[1]
    if run.seconds is not None:
        return Compared(run, plan, fitting, run.seconds, flops)
    assert run.tflops is not None
    return Compared(run, plan, fitting, flops / (run.tflops * 1e12 * run.gpus), flops)


COLUMNS: dict[str, Callable[[Compared], str]] = {
    "run": lambda x: x.run.name,
    "GPUs": lambda x: f"{x.run.gpus:,} {x.run.gpu.name}",
    "published (s)": lambda x: f"{x.published:.2f}",
    "planned (s)": lambda x: f"{x.plan.seconds:.2f}",
    "difference": lambda x: f"{x.difference:+.0%}",
    "within 10%": lambda x: "yes" if abs(x.difference) <= CLOSE else "no",
    "MFU, published": lambda x: f"{x.mfu(x.published):.1%}",
    "MFU, planned": lambda x: f"{x.mfu(x.plan.seconds):.1%}",
    "bubble": lambda x: f"{x.plan.price.bubble_share:.1%}",
    "planned peak (GB)": lambda x: f"{x.fitting.peak / GB:.1f}",
    "with reserve": lambda x: f"{x.fitting.needed / GB:.1f}",
    "of the GPU's memory": lambda x: f"{x.fitting.needed / x.run.gpu.memory:.0%}",
}


def table(entries: Sequence[Compared]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    lines += [" | ".join(show(entry) for show in COLUMNS.values()) for entry in entries]
    return [f"| {line} |" for line in lines]


def main(argv: Sequence[str]) -> int:
    """Print the table and the assumptions; return 1 if a plan is not close to its report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="NAME", help="runs whose name has this text")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args(argv)
    entries = [compared(run) for run in RUNS if args.only in run.name]
    lines = [f"{date.today()}  python benchmarks/plan_published.py {' '.join(argv)}".rstrip(), ""]
    lines += table(entries)
    lines += ["", "Assumed for all runs:", *(f"- {text}" for text in ASSUMED)]
    for entry in entries:
        lines += ["", f"{entry.run.name}, {entry.run.gpus:,} GPUs: {entry.run.source}"]
        lines += [f"- {text}" for text in entry.run.assumed]
    print("\n".join(lines))
    if args.save:
        path = Path(__file__).parent / "results" / f"plan_published_{date.today()}.md"
        path.write_text("\n".join(lines) + "\n")
    return 0 if all(abs(entry.difference) <= CLOSE for entry in entries) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
