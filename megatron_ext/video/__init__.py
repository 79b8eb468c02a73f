"""Video models: flow matching, sampling, and streaming long-tuning."""
