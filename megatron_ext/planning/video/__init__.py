"""Formulas of video models: the MMDiT, the video DiT, and the three networks of streaming."""
