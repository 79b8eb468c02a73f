"""Faults of a run: what ranks do is recorded, watched and told, without knowledge of the task."""
