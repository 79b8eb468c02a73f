"""Losses: the contract that each obeys, and cross-entropy that never stores whole logits."""
