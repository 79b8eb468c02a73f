"""Proof that layouts train alike: runs them, and compares losses, norms and every gradient.

layouts.py (names to flags) -> run.py (train and record) -> compare.py (differences, table)
"""
