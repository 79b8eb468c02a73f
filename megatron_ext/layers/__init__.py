"""The layers of models: attention, linear layers, norms, experts and 8-bit products."""
