"""Training: a task is launched, set up, and run step by step, with callbacks between steps."""
