"""Training: a task is launched, set up, and run step by step; callbacks act in between."""
