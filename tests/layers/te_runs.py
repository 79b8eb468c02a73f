"""Runs with the stand-in of Transformer Engine, in a process of their own: a program of the tests.

``python -m tests.layers.te_runs names...`` with ``tests/fake_te`` on the path trains each named
run of `RUNS` for a few steps, and prints as lines of JSON what it reported and what the stand-in
was asked for. The configuration is that of a GPU, the ranks run on the CPU.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformer_engine.record as record
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

from megatron_ext.device import Device
from megatron_ext.layers.transformer_engine import prepare_transformer_engine
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.reporting.files import read_metrics
from megatron_ext.train.reporting.loss_plot import LossPlot
from megatron_ext.train.run import Run
from tests.training_runs import TINY, config_of, mock_data, prepared, training_rows

STEPS = 2
TE = "--transformer-impl transformer_engine"
EXPERTS = (
    "--num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax --moe-ffn-hidden-size 64 "
    "--moe-token-dispatcher-type alltoall"
)
RUNS = {
    "torch": "--transformer-impl torch",
    "bf16": TE,
    "unfused": f"{TE} --no-rope-fusion --no-gradient-accumulation-fusion",
    "delayed": f"{TE} --fp8-format hybrid --fp8-amax-history-len 4 --fp8-amax-compute-algo max",
    "tensorwise": f"{TE} --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16",
    "blockwise": f"{TE} --fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8": f"{TE} --fp8-format e4m3 --fp8-recipe mxfp8",
    "parameters": f"{TE} --fp8-format e4m3 --fp8-recipe tensorwise --fp8-param-gather",
    "cross entropy": f"{TE} --cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
    "mtp": f"{TE} --mtp-num-layers 1 --fp8-format hybrid --fp8-recipe tensorwise",
    "experts": f"{TE} {EXPERTS} --moe-grouped-gemm --fp8-format hybrid --fp8-recipe tensorwise",
}


BREAK = " then "
"""Stands between two names: the second run resumes from the first one's first step."""


def flags_of(name: str, save: Path, more: str = "") -> list[str]:
    """Return flags of a run whose weights are drawn by name, the same in all implementations."""
    size = (
        "--bf16 --ffn-hidden-size 192 --num-layers 3 --global-batch-size 4 "
        "--no-use-cpu-initialization --train-iters 2 --no-bias-swiglu-fusion "
        "--no-bias-dropout-fusion"
    )
    return [*TINY, *mock_data(), *f"{size} {RUNS[name]} --save {save} {more}".split()]


def train(name: str, folder: Path, more: str = "") -> dict[str, Any]:
    if BREAK in name:
        first, name = name.split(BREAK)
        train(first, folder, "--save-interval 1 --exit-interval 1")
        return train(name, folder, f"--load {folder}")
    record.CALLS.clear()
    task, config, tokenizer = prepared(flags_of(name, folder, more), ranks=1, device="cuda")
    seen: dict[str, Any] = {}

    def look(run: Run) -> None:
        # Half of the time of so short a run would go into its picture.
        sinks = run.reporters.sinks
        run.reporters.sinks = [sink for sink in sinks if not isinstance(sink, LossPlot)]
        modules = [module for chunk in run.chunks for module in chunk.modules()]
        seen["modules"] = dict(Counter(type(module).__name__ for module in modules))
        engine = [m for m in modules if isinstance(m, TransformerEngineBaseModule)]
        seen["kept in 8 bits"] = [m.primary_weights_in_fp8 for m in engine]

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        cpu = Device("cpu", "gloo")
        pretrain(task, config, device=cpu, assets=tokenizer, prepare=look)
    rows = training_rows(read_metrics(folder / "metrics.jsonl"))
    said = [line for line in output.getvalue().splitlines() if line.startswith("> layers:")]
    return {
        "losses": [row["lm loss"] for row in rows],
        "said": said,
        "calls": record.CALLS[:],
        **seen,
    }


def set_up_buffers() -> dict[str, Any]:
    """Return what overlapped communication of two ranks asks for at the start of a run."""
    record.CALLS.clear()
    words = (
        f"{TE} --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --bf16 "
        "--tp-comm-bootstrap-backend gloo --train-iters 1 --deterministic-mode"
    )
    flags = [*TINY, *mock_data(), *words.split()]
    prepare_transformer_engine(config_of(flags, ranks=2, device="cuda"))
    names = ("NVTE_APPLY_QK_LAYER_SCALING", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    return {"calls": record.CALLS[:], "environment": [os.environ.pop(name) for name in names]}


def gather_one_by_one() -> None:
    """Gather one tensor after the other: Gloo mixes up bytes of different dtypes, NCCL does not.

    A model with weights in 8 bits and norms in bf16 gathers both at once.
    """

    def gather(group: Any, outputs: list[Any], inputs: list[Any], *_options: Any) -> Any:
        works = [group.all_gather_single(o, i) for o, i in zip(outputs, inputs, strict=True)]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    torch.distributed.ProcessGroup.all_gather_single_coalesced = gather


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    # What the rules about a GPU ask for: one that has all recipes.
    Device("cpu", "gloo").activate(0)
    torch.cuda.get_device_capability = lambda device=None: (10, 0)
    torch.version.cuda = "12.9"
    gather_one_by_one()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    for name in names or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            found = set_up_buffers() if name == "buffers" else train(name, Path(folder))
            print(json.dumps({"name": name, **found}, default=str), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
