"""Sequence mixers that take the place of attention in a layer: convolutions and recurrences."""
