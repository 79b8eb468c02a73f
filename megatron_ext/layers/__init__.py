"""Layers that models are made of: attention, linear layers, norms, experts, 8-bit products."""
