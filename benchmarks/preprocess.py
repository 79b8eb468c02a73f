#!/usr/bin/env python3
"""Speed and memory of tools/preprocess_data.py against plain loops and the read/write floor.

Makes a deterministic corpus and two 32k tokenizers in `--cache` (once), then times, each as a
whole process with its start-up: a loop over transformers' tokenizer and one over SentencePiece in
2 processes the way Megatron-LM's tool has it (`Pool.imap` in chunks of 32 lines, ids sent back
and written by the parent), our tool with 1 and 2 workers, and reading plus parsing, writing plus
fsync. `--big` repeats the corpus ten times and runs our tool alone, for its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 32_000
LEXICON = 120_000
_SEED = 20_261_120
_LOOP_CHUNK = 32


@dataclass(frozen=True)
class Run:
    """One timed process: wall and CPU seconds, peak resident bytes of its largest process."""

    name: str
    wall: float
    cpu: float
    peak: int


# ------------------------------------------------------------------------------------ material


def make_corpus(path: Path, megabytes: float) -> None:
    """Write jsonl of about so many MB: Zipf words, sentences, paragraphs, some other scripts."""
    import numpy as np

    rng = np.random.default_rng(_SEED)
    words = _lexicon(rng)
    forms = np.empty((5, len(words)), dtype=object)
    forms[0] = [f"{w} " for w in words]
    forms[1] = [f"{w}, " for w in words]
    forms[2] = [f"{w}. " for w in words]
    forms[3] = [f"{w}.\n\n" for w in words]
    forms[4] = [f"{w.capitalize()} " for w in words]
    ranks = np.arange(1, len(words) + 1)
    cumulative = np.cumsum(1.0 / (ranks + 2.7) ** 1.05)
    cumulative /= cumulative[-1]
    written, number = 0, 0
    temporary = path.with_suffix(".making")
    with open(temporary, "w", encoding="utf-8") as out:
        while written < megabytes * 1e6:
            count = int(rng.lognormal(6.0, 0.8)) + 20
            chosen = np.searchsorted(cumulative, rng.random(count))
            dice = rng.random(count)
            form = np.select([dice < 0.06, dice < 0.12, dice < 0.13], [1, 2, 3], 0)
            starts = np.concatenate([[True], form[:-1] >= 2])
            form[starts & (form == 0)] = 4
            text = "".join(forms[form, chosen].tolist())
            line = json.dumps({"id": number, "text": text}, ensure_ascii=number % 8 == 0)
            out.write(line + "\n")
            written += len(line.encode()) + 1
            number += 1
    os.replace(temporary, path)


def _lexicon(rng: object) -> list[str]:
    import random

    dice = random.Random(_SEED)
    onset = [
        "b",
        "c",
        "d",
        "f",
        "g",
        "h",
        "l",
        "m",
        "n",
        "p",
        "r",
        "s",
        "t",
        "v",
        "w",
        "st",
        "tr",
        "pl",
        "br",
        "sh",
        "th",
        "ch",
    ]
    vowel = ["a", "e", "i", "o", "u", "ea", "ou", "ai"]
    coda = ["", "", "", "n", "r", "s", "t", "l", "m", "nd", "ck", "ng"]
    words = ["the", "of", "and", "to", "in", "a", "is", "that", "it's", "for", "don't"]
    seen = set(words)
    while len(words) < LEXICON:
        kind = dice.random()
        if kind < 0.93:
            # Frequent words are short, as in any language.
            longest = 1 + min(3, len(words) // 400)
            word = "".join(
                dice.choice(onset) + dice.choice(vowel) + dice.choice(coda)
                for _ in range(dice.randint(1, longest))
            )
        elif kind < 0.96:
            word = str(dice.randint(0, 20_000))
        elif kind < 0.98:
            word = "".join(chr(0x4E00 + dice.randrange(2_000)) for _ in range(dice.randint(2, 8)))
        else:
            word = dice.choice(
                ["caf\u00e9", "na\u00efve", "\u00fcber", "\U0001f600", "x_i", "f(x)"]
            )
            word += str(len(words) % 997)
        if word not in seen:
            seen.add(word)
            words.append(word)
    return words


def make_tokenizers(cache: Path, corpus: Path) -> None:
    """Train a byte-level BPE for transformers and a SentencePiece BPE on the corpus' start."""
    texts = []
    with open(corpus, encoding="utf-8") as stream:
        for line in stream:
            texts.append(json.loads(line)["text"])
            if len(texts) == 3_000:
                break
    if not (cache / "hf" / "tokenizer.json").is_file():
        _train_hf(cache / "hf", texts)
    if not (cache / "sp.model").is_file():
        import sentencepiece

        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(p for text in texts for p in text.split("\n") if p),
            model_prefix=str(cache / "sp_making"),
            vocab_size=VOCABULARY,
            model_type="bpe",
            byte_fallback=True,
            minloglevel=2,
        )
        os.replace(cache / "sp_making.model", cache / "sp.model")


def _train_hf(folder: Path, texts: Sequence[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(exist_ok=True)
    config = {"tokenizer_class": "TokenizersBackend", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))


# --------------------------------------------------------------------- bodies of timed processes

_native: object = None


def _start(kind: str, path: str) -> None:
    """Load the tokenizer in a worker of the pool."""
    global _native
    if kind == "hf":
        from transformers import AutoTokenizer

        _native = AutoTokenizer.from_pretrained(path)
    else:
        import sentencepiece

        _native = sentencepiece.SentencePieceProcessor(model_file=path)


def _encode(line: str) -> list[int]:
    text = json.loads(line)["text"]
    native: object = _native
    if hasattr(native, "encode_as_ids"):
        return list(native.encode_as_ids(text))
    tokens = native.tokenize(text)  # type: ignore[attr-defined]
    return list(native.convert_tokens_to_ids(tokens))  # type: ignore[attr-defined]


def body_make(cache: str, corpus: str, megabytes: str) -> None:
    """Make what is missing of the corpus and the tokenizers."""
    if not Path(corpus).is_file():
        make_corpus(Path(corpus), float(megabytes))
    make_tokenizers(Path(cache), Path(corpus))


def body_loop(kind: str, path: str, corpus: str, out: str) -> None:
    """Run the loop of Megatron-LM's tool, without its imports and index."""
    import multiprocessing

    pool = multiprocessing.get_context("fork").Pool(2, _start, (kind, path))
    import numpy as np

    with open(corpus, encoding="utf-8") as lines, open(out, "wb") as stream:
        for ids in pool.imap(_encode, lines, _LOOP_CHUNK):
            stream.write(np.asarray([*ids, 0], np.uint16).tobytes())
    pool.close()
    pool.join()


def body_read(corpus: str) -> None:
    """Read and parse."""
    import orjson

    with open(corpus, "rb") as stream:
        for line in stream:
            orjson.loads(line)


def body_write(size: str, out: str) -> None:
    """Write and flush to the disk."""
    piece = os.urandom(1 << 20)
    with open(out, "wb") as stream:
        for _ in range(int(size) >> 20):
            stream.write(piece)
        stream.flush()
        os.fsync(stream.fileno())


# ------------------------------------------------------------------------------------ measuring


def timed(name: str, command: Sequence[str], rounds: int) -> Run:
    """Return the best of several rounds by wall time; the peak is the largest of all rounds."""
    runs = []
    for _ in range(rounds):
        start = time.perf_counter()
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        if status != 0:
            raise SystemExit(f"{name} failed:\n{said.decode()}")
        runs.append(Run(name, wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024))
    best = min(runs, key=lambda run: run.wall)
    return Run(name, best.wall, best.cpu, max(run.peak for run in runs))


def body(name: str, *arguments: str) -> list[str]:
    return [sys.executable, __file__, f"--body={name}", *arguments]


def tool(cache: Path, kind: str, corpus: Path, workers: int) -> list[str]:
    flags = {
        "hf": ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(cache / "hf")],
        "sp": [
            "--tokenizer-type",
            "SentencePieceTokenizer",
            "--tokenizer-model",
            str(cache / "sp.model"),
        ],
    }
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--append-eod"]
    command += ["--input", str(corpus), "--output-prefix", str(cache / f"ours_{kind}")]
    return [*command, "--workers", str(workers), *flags[kind]]


def measure(cache: Path, corpus: Path, rounds: int, *, loops: bool) -> list[tuple[Run, str]]:
    """Return all runs, each with the tokenizer it used (`hf`, `sp` or none)."""
    models = {"hf": cache / "hf", "sp": cache / "sp.model"}
    names = {"hf": "transformers", "sp": "SentencePiece"}
    runs: list[tuple[Run, str]] = []
    for kind in ("hf", "sp"):
        for workers in (1, 2):
            label = f"ours, {names[kind]} BPE, workers {workers}"
            runs.append((timed(label, tool(cache, kind, corpus, workers), rounds), kind))
        if loops:
            arguments = (kind, str(models[kind]), str(corpus), str(cache / "loop.bin"))
            label = f"loop over {names[kind]}, 2 processes"
            runs.append((timed(label, body("loop", *arguments), 1), kind))
    size = (cache / "ours_hf_text_document.bin").stat().st_size
    runs.append((timed("floor: read and parse", body("read", str(corpus)), rounds), ""))
    write = body("write", str(size), str(cache / "loop.bin"))
    runs.append((timed("floor: write and fsync", write, rounds), ""))
    (cache / "loop.bin").unlink()
    return runs


def table(cache: Path, corpus: Path, runs: Sequence[tuple[Run, str]]) -> str:
    """Return the runs as a table with rates, and ratios over the loop of the same tokenizer."""
    megabytes = corpus.stat().st_size / 1e6
    tokens = {
        kind: (cache / f"ours_{kind}_text_document.bin").stat().st_size / 2 / 1e6
        for kind in ("hf", "sp")
    }
    slow = {kind: run.wall for run, kind in runs if run.name.startswith("loop")}
    lines = [
        f"{megabytes:.0f} MB of jsonl, {tokens['hf']:.1f} M tokens (byte-level BPE), "
        f"{tokens['sp']:.1f} M (SentencePiece), {os.cpu_count()} cores; whole processes",
        "",
        "| run | wall s | CPU s | MB/s | M tokens/s | x the loop | peak MB of one process |",
        "|---|---|---|---|---|---|---|",
    ]
    for run, kind in runs:
        rate = f"{tokens[kind] / run.wall:.2f}" if kind else ""
        ratio = f"{slow[kind] / run.wall:.1f}" if kind in slow else ""
        lines.append(
            f"| {run.name} | {run.wall:.2f} | {run.cpu:.2f} | {megabytes / run.wall:.1f} | {rate} "
            f"| {ratio} | {run.peak / 1e6:.0f} |"
        )
    return "\n".join(lines)


def repeat(corpus: Path, target: Path, times: int) -> None:
    if not target.is_file():
        temporary = target.with_suffix(".making")
        with open(temporary, "wb") as out:
            for _ in range(times):
                with open(corpus, "rb") as stream:
                    while piece := stream.read(1 << 24):
                        out.write(piece)
        os.replace(temporary, target)


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1].startswith("--body="):
        bodies = {"make": body_make, "loop": body_loop, "read": body_read, "write": body_write}
        bodies[sys.argv[1].partition("=")[2]](*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mb", type=float, default=210, help="size of the corpus (210)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the fast runs (3)")
    parser.add_argument("--big", action="store_true", help="ten times the corpus, ours alone")
    parser.add_argument("--cache", type=Path, default=ROOT / "out" / "benchmark_preprocess")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    corpus = args.cache / f"corpus_{args.size_mb:g}.jsonl"
    # In a process of its own: a process that is forked starts with its parent's peak memory.
    subprocess.run(body("make", str(args.cache), str(corpus), str(args.size_mb)), check=True)
    if args.big:
        big = args.cache / f"corpus_{args.size_mb:g}_x10.jsonl"
        repeat(corpus, big, 10)
        corpus = big
    runs = measure(args.cache, corpus, 1 if args.big else args.rounds, loops=not args.big)
    result = table(args.cache, corpus, runs)
    print(result)
    if args.save:
        folder = ROOT / "benchmarks" / "results"
        folder.mkdir(exist_ok=True)
        name = f"preprocess{'_big' if args.big else ''}_{date.today().isoformat()}.md"
        (folder / name).write_text(f"# benchmarks/preprocess.py, {date.today()}\n\n{result}\n")


if __name__ == "__main__":
    main()
