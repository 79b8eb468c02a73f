"""Recordings of Megatron-LM itself: losses, norms, rates, and the bytes of its datasets."""

import functools
import hashlib
import os
import tempfile
from pathlib import Path

from tests.reference import make_corpus

REFERENCE = Path(os.environ.get("MEGATRON_REFERENCE", Path(__file__).parent))
"""The folder of the recordings; one that the variable names has its own ``corpus.jsonl``."""


@functools.cache
def corpus() -> Path:
    """Return the corpus of the recordings, which is made once in each process of tests."""
    recorded = REFERENCE / "corpus.jsonl"
    if recorded.is_file():
        return recorded
    path = Path(tempfile.mkdtemp(prefix="recorded_corpus_")) / "corpus.jsonl"
    make_corpus.write_corpus(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == make_corpus.SHA256
    return path
