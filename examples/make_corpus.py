"""Generates a corpus and a tokenizer for experiments, the same on every machine.

The documents are small stories and sums from a grammar of a few hundred words. A model with a
million weights learns the grammar in a few hundred steps, so its loss curve shows whether training
works.

    python examples/make_corpus.py --output out/corpus.jsonl --documents 4000
    python examples/make_corpus.py --output out/corpus.jsonl --tokenizer out/tokenizer.model
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

PEOPLE = "Ada Bela Chen Dora Emil Farah Goran Hana Ivo Jun Kofi Lena Mira Noor Otto Pia".split()
PLACES = "harbour market station library garden bridge bakery mountain river workshop".split()
THINGS = "lamp letter kite basket violin clock map kettle boat stone wheel ladder".split()
COLOURS = "red blue green yellow white black silver brown".split()
DEEDS = "found lost carried painted repaired sold hid drew borrowed measured".split()
WEATHER = "rain snow wind fog sunshine thunder".split()
TIMES = "In the morning|At noon|In the evening|After dinner|Before dawn|On Sunday".split("|")


def _sentence(dice: random.Random, person: str, thing: str) -> str:
    place, colour = dice.choice(PLACES), dice.choice(COLOURS)
    return dice.choice(
        (
            f"{dice.choice(TIMES)}, {person} {dice.choice(DEEDS)} a {colour} {thing}.",
            f"{person} went to the {place} with the {thing}.",
            f"There was {dice.choice(WEATHER)} over the {place}, so {person} stayed at home.",
            f"The {thing} of {person} was {colour}, and everybody at the {place} knew it.",
            f'"Where is my {thing}?" asked {person}. "It is at the {place}."',
        )
    )


def _sums(dice: random.Random, person: str, thing: str) -> str:
    first, second = dice.randint(2, 20), dice.randint(2, 20)
    return (
        f"{person} had {first} of them and got {second} more: "
        f"{first} + {second} = {first + second}. Each {thing} was counted twice."
    )


def document(dice: random.Random) -> str:
    """Return a story of two to nine sentences about one person and one thing."""
    person, thing = dice.choice(PEOPLE), dice.choice(THINGS)
    sentences = [_sentence(dice, person, thing) for _ in range(dice.randint(2, 8))]
    if dice.random() < 0.3:
        sentences.append(_sums(dice, person, thing))
    return " ".join(sentences)


def write_corpus(path: Path, documents: int, seed: int) -> None:
    """Write a jsonl file of ``documents`` lines, each with a story under the key ``text``."""
    dice = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(documents):
            file.write(json.dumps({"text": document(dice)}) + "\n")


def train_tokenizer(corpus: Path, model: Path, vocab_size: int) -> None:
    """Train a SentencePiece model on the texts of ``corpus``."""
    import sentencepiece

    with corpus.open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    with model.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=file,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            num_threads=1,
            minloglevel=2,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="jsonl file to write")
    parser.add_argument("--documents", type=int, default=4000, help="(4000)")
    parser.add_argument("--seed", type=int, default=1, help="(1)")
    parser.add_argument("--tokenizer", type=Path, help="SentencePiece model to train on the corpus")
    parser.add_argument(
        "--vocab-size", type=int, default=768, help="vocabulary size of the tokenizer (768)"
    )
    options = parser.parse_args()
    write_corpus(options.output, options.documents, options.seed)
    if options.tokenizer:
        train_tokenizer(options.output, options.tokenizer, options.vocab_size)


if __name__ == "__main__":
    main()
