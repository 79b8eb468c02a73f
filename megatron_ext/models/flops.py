"""Factors that every count of floating-point operations shares."""

from __future__ import annotations

MULTIPLY_AND_ADD = 2
"""Operations for each product of two numbers that is added to a sum."""

FORWARD_AND_BACKWARD = 3
"""Matrix products of a training step for each one forward: backward there are two, of the
gradients of the input and of the weight."""
