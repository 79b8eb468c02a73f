"""Checkpoints that load in any layout, written to temporary folders, verified and then renamed."""
