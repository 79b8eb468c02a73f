"""Checkpoints that load in any layout: written aside, verified, then published by one rename."""
