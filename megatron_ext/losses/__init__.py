"""Losses, each returning ``(sum, count, report)``, and cross-entropy without the whole logits."""
