"""Writes the corpus of the recorded runs: words of Zipf's law joined by a bigram walk.

    python tests/reference/make_corpus.py corpus.jsonl

2,400 documents with the keys ``id``, ``title`` and ``text``. Half of the lines escape what is not
ASCII, and some hold Han characters and emoji. The same bytes on every machine: `SHA256` is their
hash.
"""

import json
import random
import sys
from itertools import accumulate
from pathlib import Path

SHA256 = "50acf7f6c699d335e608ccf17687583808d0d78d8c31714f04b1b25ccb9b4bc2"
CONSONANTS = "bcdfghjklmnprstvwz"
VOWELS = "aeiou"


def _word(rng: random.Random) -> str:
    return "".join(
        rng.choice(CONSONANTS)
        + rng.choice(VOWELS)
        + (rng.choice("nrs") if rng.random() < 0.3 else "")
        for _ in range(rng.randint(1, 4))
    )


class _Writer:
    """Draws sentences; the order of its draws decides the bytes of the corpus."""

    def __init__(self) -> None:
        rng = self.rng = random.Random(20261120)
        self.words = sorted({_word(rng) for _ in range(4000)})
        rng.shuffle(self.words)
        self.han = [chr(0x4E00 + rng.randrange(0, 3000)) for _ in range(300)]
        # Sums, which `choices` would add up anew at every draw.
        self.sums = list(accumulate(1 / (rank + 3) for rank in range(len(self.words))))
        self.successors = {word: self.draw(6) for word in self.words}

    def draw(self, count: int = 1) -> list[str]:
        return self.rng.choices(self.words, cum_weights=self.sums, k=count)

    def sentence(self) -> str:
        rng = self.rng
        word = self.draw()[0]
        sentence = [word.capitalize()]
        for _ in range(rng.randint(4, 18)):
            word = rng.choice(self.successors[word]) if rng.random() < 0.8 else self.draw()[0]
            sentence.append(word if rng.random() > 0.04 else str(rng.randint(0, 2030)))
        return " ".join(sentence) + rng.choice([".", ".", ".", "?", "!"])

    def text(self, number: int) -> str:
        rng = self.rng
        text = "\n\n".join(
            " ".join(self.sentence() for _ in range(rng.randint(1, 6)))
            for _ in range(rng.randint(1, 5))
        )
        if number % 17 == 0:
            text += " " + "".join(rng.choices(self.han, k=rng.randint(5, 40))) + "\u3002"
        if number % 101 == 0:
            text += " \U0001f600 \u00e9 \u00f1 \u2014 \u00bd"
        return text


def write_corpus(path: Path) -> None:
    """Write the 2,400 documents as lines of JSON."""
    writer = _Writer()
    with path.open("w", encoding="utf-8") as file:
        for number in range(2400):
            text = writer.text(number)
            document = {"id": number, "title": writer.sentence(), "text": text}
            file.write(json.dumps(document, ensure_ascii=number % 2 == 0) + "\n")


if __name__ == "__main__":
    write_corpus(Path(sys.argv[1]))
