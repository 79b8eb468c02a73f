"""Training of video models: what the loop needs beyond what all tasks share."""
