"""Looks at machines, layouts and batches without training anything."""
