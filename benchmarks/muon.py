"""Steps that Muon needs to reach the final loss of AdamW, on the quickstart's corpus and model.

Each run has the flags of examples/quickstart.sh on one rank. Both optimizers are given every
learning rate of ``--lr``; Muon has ``--muon-extra-scale-factor 0.2``, which makes its updates as
large as AdamW's. The mark is the best of AdamW's final losses on held-out batches; Muon's steps are
those after which its loss is first at most the mark. Then Muon trains at its best learning rate
with whole schedules of fewer steps. It prints tables as Markdown:

    python benchmarks/muon.py --out /tmp/muon
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
MODEL = (
    "--num-layers 4 --hidden-size 128 --ffn-hidden-size 344 --num-attention-heads 4 "
    "--seq-length 128 --max-position-embeddings 128 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
TRAINING = (
    "--micro-batch-size 16 --global-batch-size 16 --lr-decay-style cosine --lr-warmup-iters 10 "
    "--weight-decay 0.1 --clip-grad 1.0 --use-distributed-optimizer --split 95,5,0 "
    "--tokenizer-type SentencePieceTokenizer --eval-interval 10 --eval-iters 8 --log-interval 10"
)
MUON = "--optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2"
RULES = {"AdamW": "", "Muon": MUON}


def python(*words: str) -> None:
    """Run a script of the repository; raise an error with its output if it fails."""
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])


def prepare(out: Path) -> str:
    """Make the quickstart's corpus and tokenizer in a folder; return the flags that name them."""
    corpus, tokenizer = out / "corpus.jsonl", str(out / "tokenizer.model")
    kind = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tokenizer)
    if not (out / "corpus_text_document.bin").exists():
        made = ("--output", str(corpus), "--tokenizer", tokenizer)
        python("examples/make_corpus.py", "--documents", "4000", *made)
        given = ("--input", str(corpus), "--output-prefix", str(out / "corpus"), "--append-eod")
        python("tools/preprocess_data.py", *given, *kind, "--workers", "2")
    return f"--data-path {out / 'corpus_text_document'} --tokenizer-model {tokenizer}"


def losses(out: Path, data: str, rule: str, rate: float, steps: int) -> dict[int, float]:
    """Train; return the held-out loss by the number of steps done."""
    folder = out / f"{rule}_{rate:g}_{steps}"
    schedule = f"--train-iters {steps} --lr {rate} --min-lr {rate / 10}"
    if not (folder / "metrics.jsonl").exists():
        words = f"{MODEL} {TRAINING} {data} {schedule} {RULES[rule]} --save {folder}"
        python("pretrain_gpt.py", *words.split())
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    key = "lm loss"
    return {x["iteration"]: x[key] for x in rows if x["kind"] == "evaluation" and not x["final"]}


def main() -> None:
    """Run all learning rates of both rules, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of corpus and runs")
    parser.add_argument("--steps", type=int, default=100, help="steps of each run")
    parser.add_argument("--lr", type=float, nargs="+", default=[2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2])
    parser.add_argument("--fewer", type=int, nargs="*", default=[40, 50, 60, 70], help="schedules")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    data = prepare(given.out)
    found = {
        rule: {rate: losses(given.out, data, rule, rate, given.steps) for rate in given.lr}
        for rule in RULES
    }
    mark = min(curve[given.steps] for curve in found["AdamW"].values())
    print(f"# Muon and AdamW on the quickstart's corpus, {given.steps} steps\n")
    print(f"torch {torch.__version__}, CPU, fp32, one rank. Mark: AdamW's best, {mark:.4f}.\n")
    print("| optimizer | learning rate | final loss | steps to the mark |")
    print("|---|---|---|---|")
    for rule, curves in found.items():
        for rate, curve in curves.items():
            reached = [step for step, loss in sorted(curve.items()) if loss <= mark]
            steps = str(reached[0]) if reached else "not reached"
            print(f"| {rule} | {rate:g} | {curve[given.steps]:.4f} | {steps} |")
    best = min(given.lr, key=lambda rate: found["Muon"][rate][given.steps])
    print(f"\nMuon at {best:g} with a whole schedule of fewer steps:\n")
    print("| steps | final loss | at most the mark |")
    print("|---|---|---|")
    for steps in given.fewer:
        final = losses(given.out, data, "Muon", best, steps)[steps]
        print(f"| {steps} | {final:.4f} | {'yes' if final <= mark else 'no'} |")


if __name__ == "__main__":
    main()
