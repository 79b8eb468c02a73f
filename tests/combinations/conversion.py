"""Round trips: public weights are imported, loaded in a layout and exported as the same bits."""

import argparse
import random
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_ext.programs import convert_checkpoint
from tests.combinations import layouts
from tests.combinations.execute import Ended, execute, judge_all, work_directory
from tests.combinations.layouts import Layout

MODELS = ("llama", "llama 3.1 tied", "mistral without groups", "qwen2 tied", "qwen3")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Case:
    """One round trip; `run` are flags of the run between import and export.

    With a ``quantization`` the model is exported in that format too, and imported again.
    """

    model: str
    stored: str
    imported: str | None
    pad: str
    layout: Layout
    run: str
    shards: str
    quantization: str | None


def draw(dice: random.Random) -> Case:
    pads = ("", "--target-tensor-parallel-size 2", "--make-vocab-size-divisible-by 1")
    runs = ("", "", "--use-distributed-optimizer", "--bf16", "--ckpt-fully-parallel-load")
    # Two layers and heads for two groups are what the models have.
    layout = layouts.draw(dice, ranks=(1, 2, 2, 4), limits=(2, 2, 2), stages=("plain", "zb-h1"))
    return Case(
        dice.choice(MODELS),
        dice.choice(DTYPES),
        dice.choice((None, None, *DTYPES)),
        dice.choice(pads),
        Layout(layout.ranks, layout.pieces),
        dice.choice(runs),
        dice.choice(("5GB", "100KB")),
        dice.choice((None, None, "fp8", "mxfp4")),
    )


def judge(case: Case, data: Path, limit: float) -> tuple[str, str]:
    """Return "equal", "refused" or the kind of failure, with the commands that were run."""
    from megatron_ext.text.task import TEXT
    from megatron_ext.train.main import main as train
    from tests.text.convert.models import make

    commands: list[str] = []
    with work_directory(data) as folder:

        def tool(name: str, words: str) -> Ended:
            commands.append(f"python tools/convert_checkpoint.py {words}")
            return execute(
                lambda: convert_checkpoint.main(shlex.split(words)), folder, name=name, limit=limit
            )

        make(case.model, folder / "hf", getattr(torch, case.stored))
        dtype = f"--dtype {case.imported}" if case.imported else ""
        first = tool("import", f"import --hf hf --save ours --seq-length 32 {dtype} {case.pad}")
        if first.code != 0:
            return _ended(first, commands)
        words = first.out.strip().splitlines()[-1]
        words += (
            " --mock-data --tokenizer-type NullTokenizer --vocab-size 299 --micro-batch-size 1 "
            "--global-batch-size 4 --train-iters 1 --lr 0 --weight-decay 0 --save trained "
            f"--save-interval 1 --eval-iters 0 --num-workers 0 --log-interval 1 {case.run} "
        )
        given = [*shlex.split(words), *case.layout.words]
        commands.append(f"python pretrain_gpt.py {shlex.join(given)}")
        second = execute(lambda: train(TEXT, given), folder, name="run", limit=2 * limit)
        if second.code != 0:
            return _ended(second, commands)
        back = f"--hf back --vocab-size 300 --max-shard-size {case.shards}"
        third = tool("export", f"export --load trained {back}")
        if third.code != 0:
            return _ended(third, commands)
        name = _difference(folder, case)
        if name:
            return "differs", "\n".join([*commands, name])
        if case.quantization is not None:
            small = f"--hf small --vocab-size 300 --quantization {case.quantization}"
            for words in (f"export --load trained {small}", "import --hf small --save again"):
                done = tool(words.split()[0], words)
                if done.code != 0:
                    return _ended(done, commands)
        return "equal", ""


def _ended(ended: Ended, commands: list[str]) -> tuple[str, str]:
    if ended.code == 2 and "Traceback" not in ended.err and "error: " in ended.err:
        if not ended.started:
            return "refused", ended.err.strip()
    return f"exit code {ended.code}", "\n".join([*commands, ended.err[-1500:]])


def _difference(folder: Path, case: Case) -> str | None:
    """Name the first tensor that has changed, in the narrowest type that it passed through."""
    before, after = _tensors(folder / "hf"), _tensors(folder / "back")
    if before.keys() != after.keys():
        return f"names differ: {sorted(before.keys() ^ after.keys())}"
    for name, tensor in before.items():
        wanted, got = tensor, after[name]
        if case.imported:
            wanted = wanted.to(getattr(torch, case.imported))
        if "--bf16" in case.run:
            wanted, got = wanted.bfloat16(), got.bfloat16()
        if not torch.equal(wanted.double(), got.double()):
            return f"{name} differs by {float((wanted.double() - got.double()).abs().max()):.1e}"
    return None


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    paths = sorted(folder.glob("*.safetensors"))
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


def search(arguments: argparse.Namespace, data: Path) -> int:
    return judge_all(draw, judge, arguments, data)
