"""The optimizer: its construction, one update, and the moving average of the weights."""
