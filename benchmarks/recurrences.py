"""Time and memory of recurrences on a CPU, beside the torch fall-backs of transformers.

Each case is one layer's recurrence in float32, forward and backward, measured in a process of its
own: the shortest of several repetitions in seconds of the process, and how far its memory grows
over that of its inputs. It prints a table as Markdown:

    OMP_NUM_THREADS=1 python benchmarks/recurrences.py
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

Run = Callable[[], Tensor]


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).requires_grad_()


def mamba2(length: int, *, heads: int, groups: int, chunk: int) -> dict[str, Run]:
    """Return the recurrence of Mamba-2, heads of 64 channels and states of 128."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    from megatron_ext.layers.mixers.state_space import StateSpace, time_steps

    x, dt, bias = normal(1, length, heads, 64), normal(1, length, heads), normal(heads)
    a = (-1 - 15 * torch.rand(heads)).requires_grad_()
    b, c = (normal(1, length, groups, 128, scale=0.3) for _ in range(2))
    d = normal(heads)
    limits = (0.0, float("inf"))

    def ours() -> Tensor:
        return StateSpace(x, time_steps(dt, bias, limits), a, b, c, d).outputs()[0]

    def theirs() -> Tensor:
        y: Tensor = mamba2_chunk_scan(
            x, dt, a, b, c, chunk, D=d, dt_bias=bias, dt_softplus=True, dt_limit=limits
        )
        return y

    return {"ours": ours, "transformers": theirs}


def delta_inputs(length: int, heads: int, key_heads: int, decays: int) -> list[Tensor]:
    """Return queries, keys, values, log decays and beta; heads have 128 channels.

    A head has one log decay, or that many.
    """
    unit = torch.nn.functional.normalize
    queries, keys = (unit(torch.randn(1, length, key_heads, 128), dim=-1) for _ in range(2))
    shape = (1, length, heads) if decays == 1 else (1, length, heads, decays)
    rows = [queries, keys, torch.randn(1, length, heads, 128), -torch.rand(shape)]
    return [x.requires_grad_() for x in (*rows, torch.rand(1, length, heads))]


def gated_delta(length: int, *, heads: int, key_heads: int) -> dict[str, Run]:
    """Return the recurrence of gated DeltaNet."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    from megatron_ext.layers.mixers.delta_rule import DeltaRule

    inputs = delta_inputs(length, heads, key_heads, 1)
    return {
        "ours": lambda: DeltaRule(*inputs).outputs()[0],
        "transformers": lambda: torch_chunk_gated_delta_rule(*inputs)[0],
    }


def kimi_delta(length: int, *, heads: int) -> dict[str, Run]:
    """Return the recurrence of Kimi Delta Attention."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    from megatron_ext.layers.mixers.delta_rule import DeltaRule

    inputs = delta_inputs(length, heads, heads, 128)
    return {
        "ours": lambda: DeltaRule(*inputs).outputs()[0],
        "transformers": lambda: chunk_kimi_delta_attention(*inputs)[0],
    }


CASES: dict[str, Callable[[int], dict[str, Run]]] = {
    "Mamba-2, 32 heads, 1 group (Bamba)": lambda s: mamba2(s, heads=32, groups=1, chunk=256),
    "Mamba-2, 32 heads, 8 groups (Nemotron-H)": lambda s: mamba2(s, heads=32, groups=8, chunk=128),
    "gated DeltaNet, 16 / 32 heads (Qwen3-Next)": lambda s: gated_delta(s, heads=32, key_heads=16),
    "Kimi Delta Attention, 4 heads (of 32)": lambda s: kimi_delta(s, heads=4),
}
"""By name, what builds the two functions of a case for a length."""


def measure(run: Run, repeats: int) -> dict[str, float]:
    """Return seconds and MiB of a forward and a backward pass."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        run().square().mean().backward()
        seconds.append(time.process_time() - start)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": min(seconds), "mib": (after - before) / 1024}


def in_own_process(case: str, side: str, options: Any) -> dict[str, float]:
    words = ["--case", case, "--side", side, "--length", str(options.length)]
    words += ["--repeats", str(options.repeats)]
    done = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case")
    parser.add_argument("--side")
    options = parser.parse_args()
    torch.manual_seed(1)
    if options.side:
        run = CASES[options.case](options.length)[options.side]
        print(json.dumps(measure(run, options.repeats)))
        return
    print(
        f"Length {options.length}, {torch.get_num_threads()} thread(s), torch {torch.__version__}"
    )
    print("\n| recurrence | ours | transformers | times as fast | ours | transformers | share |")
    print("|---|---|---|---|---|---|---|")
    for case in [options.case] if options.case else CASES:
        mine, other = (in_own_process(case, side, options) for side in ("ours", "transformers"))
        speed = other["seconds"] / mine["seconds"]
        share = mine["mib"] / other["mib"]
        print(
            f"| {case} | {mine['seconds']:.2f} s | {other['seconds']:.2f} s | {speed:.1f} | "
            f"{mine['mib']:.0f} MiB | {other['mib']:.0f} MiB | {share:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
