"""Streaming long-tuning: a generator, a critic and a frozen teacher in one run."""
