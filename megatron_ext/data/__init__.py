"""Data that every task shares: batches, loaders, samplers, and indexed datasets on disk."""
